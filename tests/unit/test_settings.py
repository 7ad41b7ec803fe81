"""Settings: precedence, one-line errors, and the page that documents them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polykv_proxy.cli import app
from polykv_proxy.errors import SettingsError
from polykv_proxy.settings import Settings, default_text, flag, load_settings, reference

DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_a_flag_wins_over_a_variable_over_the_file(tmp_path: Path) -> None:
    """Flag, then variable, then file, then default."""
    file = tmp_path / "c.toml"
    file.write_text('port = 1\nhost = "h"\nmax_pools = 3\nengine_args = ["-c", "1 2"]\n')
    got = load_settings({"port": 3}, file, {"POLYKV_PORT": "2", "POLYKV_HOST": "v", "POLYKV_OFF": "true"})
    assert (got.port, got.host, got.max_pools, got.off, got.session_ttl_s) == (3, "v", 3, True, 600.0)
    assert got.engine_args == ("-c", "1 2")


@pytest.mark.parametrize(
    ("flags", "env", "file", "message"),
    [
        ({"gpu_share_weight": 0}, {}, "", "--gpu-share-weight 0: input should be greater than or equal to 0.001"),
        ({}, {"POLYKV_GPU_SHARE_KEY": "a/b"}, "", "POLYKV_GPU_SHARE_KEY a/b: string should match pattern"),
        ({"gpu_share": "maybe"}, {}, "", "--gpu-share maybe: input should be 'on' or 'off'"),
        (
            {"engine_url": "http://h:1", "gpu_share_weight": 2.0},
            {},
            "",
            "--gpu-share-weight goes to an engine that is started, --engine-url uses a running one: "
            "start that with LLAMA_ARG_GPU_SHARE_WEIGHT",
        ),
        ({"port": 70000}, {}, "", "--port 70000: input should be less than or equal to 65535"),
        ({}, {"POLYKV_PORT": "x"}, "", "POLYKV_PORT x: input should be a valid integer"),
        ({"max_pools": "many"}, {}, "", "--max-pools many: write auto, or a number from 0 to 255"),
        ({}, {}, "max_pools = 256", "max_pools 256: write auto, or a number from 0 to 255"),
        ({}, {}, "port = true", "port True: give a value, not true or false"),
        ({}, {}, "keep_alive_s = false", "keep_alive_s False: give a value, not true or false"),
        ({}, {}, "prot = 1", "unknown setting 'prot'"),
        ({}, {}, "port =", "not valid TOML"),
        ({"kv_disk_bytes": "lots"}, {}, "", "--kv-disk-bytes lots: write a size above 0, such as 20GiB"),
        ({}, {}, "kv_disk_bytes = 0", "kv_disk_bytes 0: write a size above 0"),
        ({"off": True, "kv_disk_bytes": "1GiB"}, {}, "", "--off switches pools off, --kv-disk-bytes needs them"),
        ({"off": True, "default_pool": "a"}, {}, "", "--off switches pools off"),
        ({"engine_url": "http://x", "model": Path("m")}, {}, "", "--model starts an engine"),
        ({"host": ""}, {}, "", "--host : string should have at least 1 character"),
        ({"api_key": ""}, {}, "", "--api-key: a key is one or more printable ASCII characters"),
        ({}, {"POLYKV_API_KEY": " , "}, "", "POLYKV_API_KEY: a key is one or more"),
        ({"api_key": "a, b c"}, {}, "", "--api-key: a key is one or more"),
        ({"admin_key": "k\u00e9"}, {}, "", "--admin-key: a key is one or more"),
        ({"default_pool": "A B"}, {}, "", "--default-pool A B: write the id of a pool or a name"),
        ({"keep_alive_s": float("inf")}, {}, "", "--keep-alive-s inf: input should be a finite number"),
    ],
)
def test_a_bad_setting_is_one_line_that_names_it(
    flags: dict[str, Any], env: dict[str, str], file: str, message: str, tmp_path: Path
) -> None:
    """The message says which setting, where it stood and what would be right."""
    path = tmp_path / "c.toml"
    path.write_text(file)
    with pytest.raises(SettingsError) as caught:
        load_settings(flags, path, env)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_sizes_have_units() -> None:
    """Bytes, or what people write."""
    assert [load_settings({"kv_disk_bytes": size}, env={}).kv_disk_bytes for size in ("2GiB", "1.5 MB", 7)] == [2**31, 1_500_000, 7]
    assert load_settings({}, env={}).kv_disk_bytes is None


def test_a_bad_key_is_never_printed() -> None:
    """Secrets stay out of messages and of the printed object."""
    got = load_settings({"api_key": "s3cret, other"}, env={})
    assert "s3cret" not in repr(got)
    assert got.api_keys == ("s3cret", "other")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """--config with no file behind it says so."""
    with pytest.raises(SettingsError, match="No such file"):
        load_settings({}, tmp_path / "none.toml", {})


def test_the_page_lists_every_setting() -> None:
    """The table of docs/configuration.md is the one that the code makes."""
    text = DOCS.read_text("utf-8")
    assert reference() in text, f"replace the table in {DOCS.name} by:\n{reference()}"


def test_every_setting_has_a_flag() -> None:
    """--help offers each field, and nothing is a field without a flag."""
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    for name in Settings.model_fields:
        if name != "engine_args":
            assert flag(name) in text


def test_help_says_the_defaults() -> None:
    """Each default is named once, in the words of the reference."""
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "300", "TERM": "dumb"}).output
    for name in Settings.model_fields:
        default = default_text(name)
        line = next((line for line in text.splitlines() if f" {flag(name)} " in line), "")
        if default is not None and default != "false":
            assert line.count("Default:") == 1, line
            assert f"Default: {default}." in line


def test_what_follows_two_dashes_is_the_engine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments after -- reach the settings untouched, and zero is a value."""
    seen: list[Settings] = []
    monkeypatch.setattr("polykv_proxy.bootstrap.run", lambda settings: seen.append(settings) or 0)
    done = CliRunner().invoke(app, ["--port", "0", "-m", "m.gguf", "--", "-c", "1024", "--port", "x"])
    assert done.exit_code == 0, done.output
    assert seen[0].engine_args == ("-c", "1024", "--port", "x")
    assert (seen[0].port, seen[0].model) == (0, Path("m.gguf"))
