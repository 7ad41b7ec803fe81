"""The engine's command line, its binary, its model and its address."""

from __future__ import annotations

import struct
import tempfile
import zipfile
from pathlib import Path

import pytest

from polykv_proxy.engine.address import RunFolder, from_url
from polykv_proxy.engine.binary import EngineBinary, find_binary, inspect_binary
from polykv_proxy.engine.command import EngineOptions, asks_for_split_cache, check_args, check_model, command, option_value
from polykv_proxy.engine.gguf_header import auto_pools, read_header
from polykv_proxy.engine.output import OutputLog
from polykv_proxy.errors import SettingsError
from polykv_proxy.ports import EngineAddress

BINARY = EngineBinary(Path("/e/llamafile"), unix_socket=True, llamafile_cli=False, has_model=False)


def test_keys_travel_in_the_environment_only() -> None:
    """Neither the API key nor our own key is on the command line; our variables do not leak through."""
    options = EngineOptions(BINARY, EngineAddress(uds="/r/engine.sock"), "k3y", 7, Path("m.gguf"), "s3cret", ["-c", "1"])
    argv, env = command(options, {"LLAMA_ARG_PORT": "1", "POLYKV_API_KEY": "s3cret", "HOME": "/h"})
    assert argv == ["/e/llamafile", "-m", "m.gguf", "--host", "/r/engine.sock", "-c", "1"]
    assert env == {
        "HOME": "/h",
        "LLAMA_ARG_ENDPOINT_METRICS": "1",
        "LLAMA_ARG_POLYKV_KEY": "k3y",
        "LLAMA_ARG_POLYKV_MAX_POOLS": "7",
        "LLAMA_API_KEY": "s3cret",
    }


def test_gpu_share_travels_in_the_environment_where_it_is_given() -> None:
    """What is not given is left to the engine, and to what stands in the environment."""
    given = EngineOptions(BINARY, EngineAddress(uds="/r/engine.sock"), "", 0, gpu_share_weight=2.5, gpu_share_key="a")
    _, env = command(given, {"LLAMA_ARG_GPU_SHARE": "on", "LLAMA_ARG_GPU_SHARE_KEY": "b"})
    found = {name: value for name, value in env.items() if "GPU_SHARE" in name}
    assert found == {"LLAMA_ARG_GPU_SHARE": "on", "LLAMA_ARG_GPU_SHARE_WEIGHT": "2.5", "LLAMA_ARG_GPU_SHARE_KEY": "a"}


def test_a_llamafile_is_told_to_serve() -> None:
    """A binary that knows --nobrowser gets its two flags, and TCP where it knows no unix sockets."""
    binary = EngineBinary(Path("x"), unix_socket=False, llamafile_cli=True, has_model=True)
    argv, env = command(EngineOptions(binary, EngineAddress(port=5), "", 0), {})
    assert argv == ["x", "--server", "--nobrowser", "--host", "127.0.0.1", "--port", "5"]
    assert "LLAMA_ARG_POLYKV_KEY" not in env


@pytest.mark.parametrize("arg", ["--host", "--port=1", "--api-key", "--ssl-key-file"])
def test_the_proxy_s_own_business_is_refused(arg: str) -> None:
    """The message names the argument and what to do instead."""
    with pytest.raises(SettingsError, match=f"engine argument {arg.split('=', maxsplit=1)[0]}: "):
        check_args([arg, "x"])


def test_a_model_must_come_from_somewhere(tmp_path: Path) -> None:
    """Refused with the line to write; arguments, environment or an embedded model will do."""
    with pytest.raises(SettingsError, match=r"add -m MODEL.gguf, as in: polykv-proxy --engine /e/llamafile -m MODEL.gguf"):
        check_model(None, BINARY, ["-c", "1"], {})
    check_model(None, BINARY, ["-hf", "a/b"], {})
    check_model(None, BINARY, ["--gpt-oss-20b-default"], {})
    check_model(None, BINARY, [], {"LLAMA_ARG_MODEL": "m"})
    with pytest.raises(SettingsError, match="no such file"):
        check_model(tmp_path / "none.gguf", BINARY, [], {})


def test_the_last_value_of_an_option_counts() -> None:
    """Both spellings are understood."""
    assert option_value(["--api-prefix", "/a", "--api-prefix=/b"], ["--api-prefix"]) == "/b"
    assert option_value(["-c", "1"], ["--api-prefix"]) is None


def test_a_binary_is_asked_what_it_is(tmp_path: Path) -> None:
    """Its own help tells sockets and flags; its archive tells whether it carries a model."""
    engine = tmp_path / "engine"
    engine.write_text("#!/bin/sh\necho '--host HOST or a path ending in .sock'\necho --nobrowser\n")
    engine.chmod(0o755)
    assert inspect_binary(engine) == EngineBinary(engine, unix_socket=True, llamafile_cli=True, has_model=False)
    with zipfile.ZipFile(engine, "a") as archive:
        archive.writestr("weights.gguf", "x")
    assert inspect_binary(engine).has_model


def test_a_missing_or_unrunnable_engine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each says what to do."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingsError, match=r"no engine: .*polykv-proxy build-engine.*--engine FILE"):
        find_binary(None)
    with pytest.raises(SettingsError, match="no such file"):
        find_binary(tmp_path / "none")
    (tmp_path / "plain").write_text("x")
    with pytest.raises(SettingsError, match="chmod"):
        find_binary(tmp_path / "plain")


def _gguf(path: Path, *pairs: tuple[str, int, bytes]) -> Path:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    body = b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in pairs)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, len(pairs)) + body)
    return path


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def test_auto_pools_follow_the_architecture(tmp_path: Path) -> None:
    """16 on plain attention; 4 with a window, with recurrent state, or where the architecture is not known."""
    words = struct.pack("<IQ", 8, 2) + _text("a") + _text("bc")
    plain = _gguf(tmp_path / "a", ("general.architecture", 8, _text("llama")), ("general.tags", 9, words), ("llama.x", 4, bytes(4)))
    window = _gguf(
        tmp_path / "b", ("general.architecture", 8, _text("llama")), ("llama.attention.sliding_window", 4, struct.pack("<I", 9))
    )
    state = _gguf(tmp_path / "c", ("general.architecture", 8, _text("llama")), ("llama.ssm.inner_size", 4, struct.pack("<I", 9)))
    assert read_header(plain).arch == "llama"
    assert [auto_pools(path) for path in (plain, window, state, None)] == [16, 4, 4, 4]
    assert auto_pools(_gguf(tmp_path / "d", ("general.architecture", 8, _text("newthing")))) == 4
    assert auto_pools(plain, split=True) == 4


def test_who_asks_for_a_split_cache() -> None:
    """The last argument decides, then the environment as the engine reads it."""
    on, off = {"LLAMA_ARG_KV_UNIFIED": "1"}, {"LLAMA_ARG_KV_UNIFIED": "off"}
    assert not asks_for_split_cache([], {})
    assert not asks_for_split_cache([], on)
    assert asks_for_split_cache([], off)
    assert asks_for_split_cache([], {"LLAMA_ARG_NO_KV_UNIFIED": "1"})
    assert asks_for_split_cache(["-kvu", "--no-kv-unified"], on)
    assert not asks_for_split_cache(["-no-kvu", "--kv-unified"], off)


@pytest.mark.parametrize("data", [b"", b"PK\3\4" + bytes(40), struct.pack("<4sIQQ", b"GGUF", 3, 0, 9) + b"\xff" * 40])
def test_what_is_no_gguf_is_refused(data: bytes, tmp_path: Path) -> None:
    """A foreign, empty or cut file is named before the engine is started."""
    (tmp_path / "m").write_bytes(data)
    with pytest.raises(SettingsError, match="GGUF"):
        read_header(tmp_path / "m")


def test_engine_urls() -> None:
    """Host and port, a prefix, or a unix socket; anything else is refused."""
    assert from_url("http://127.0.0.1:81/p/") == (EngineAddress(host="127.0.0.1", port=81), "/p")
    assert from_url("unix:/a/b.sock") == (EngineAddress(uds="/a/b.sock"), "")
    for bad in ("https://x", "127.0.0.1:80", "http://h:x"):
        with pytest.raises(SettingsError, match="--engine-url"):
            from_url(bad)


def test_a_run_folder_is_private_and_sweeps_dead_ones() -> None:
    """0700, gone at close; folders of processes that are no more are removed."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base:  # short: a socket's path has at most 107 bytes
        _check_run_folder(Path(base))


def _check_run_folder(base: Path) -> None:
    dead = base / "polykv-999999999-abc"
    dead.mkdir()
    folder = RunFolder({"XDG_RUNTIME_DIR": str(base)})
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert not dead.exists()
    folder.close()
    assert not folder.path.exists()


def test_output_is_bounded(tmp_path: Path) -> None:
    """The ring keeps the last lines, long ones are cut, and the file has everything."""
    log = OutputLog(n_lines=3, file=tmp_path / "log")
    for n in range(10):
        log.feed(b"line %d\nhal" % n)
    log.feed(b"x" * 100_000)
    assert log.tail(3)[:2] == ["halline 8", "halline 9"]
    assert len(log.tail(1)[0]) == 1000
    assert log.n_bytes == (tmp_path / "log").stat().st_size
    log.close()


_ERROR = 'W srv: got exception: {"error":{"code":500,"message":"'


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (_ERROR + r"""last read: '\"secret\"} \"type\":'","type":"x"}}""", _ERROR + '(as told to the client)","type":"x"}}'),
        (_ERROR + "secret that is cut", _ERROR + "(as told to the client)"),
        ("slot 0 is free", "slot 0 is free"),
    ],
)
def test_what_an_error_quotes_of_a_request_is_not_shown(line: str, shown: str, tmp_path: Path) -> None:
    """The last lines are shown and logged, the file has everything."""
    output = OutputLog(file=tmp_path / "log")
    for part in (line[:40], line[40:], "\n"):  # however it comes
        output.feed(part.encode())
        assert "secret" not in output.tail(1)[0]
    output.feed(line.encode() + b"s" * 5000)
    output.feed(b"secret\n")
    output.close()
    assert [text[: len(shown)] for text in output.tail(2)] == [shown, shown]
    assert "secret" not in "".join(output.tail(2))
    assert (tmp_path / "log").read_text().startswith(line + "\n")
