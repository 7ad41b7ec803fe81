"""Keys: where they come from, in which forms they are taken, what each opens, and where they never appear."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import httpx
import psutil
import pytest

from polykv_proxy.api.context import Keys
from polykv_proxy.engine.command import quoted
from polykv_proxy.errors import SettingsError
from polykv_proxy.exposure import command_line_notes, key_file_notes, listening_notes
from polykv_proxy.key_file import read_key, read_keys
from polykv_proxy.prepared import prepare
from polykv_proxy.settings import load_settings
from tests.fakes.fake_engine_program import WithFakeEngine
from tests.integration.rig import rig

API, OTHER, ADMIN = "sk-first-7c1f", "sk-second-90ab", "sk-admin-55e0"
FORMS = [
    {"authorization": "Bearer {}"},
    {"authorization": "bearer {}"},
    {"authorization": "{}"},
    {"x-api-key": "{}"},
    {"x-api-key": "Bearer {}"},
    {"authorization": "", "x-api-key": "{}"},
]
ADMIN_ONLY = [
    ("POST", "/polykv/pools/p/admission", {"target_tps_per_session": 1.0}),
    ("DELETE", "/polykv/pools/p/admission", None),
    ("POST", "/polykv/pools/p/pin", {"owner": "me", "lease": "none"}),
    ("DELETE", "/polykv/pools/p?recursive=1&over_pins=1", None),
    ("POST", "/polykv/pools/p/verify", {}),
    ("POST", "/gpu/weight", {"weight": 1.0}),
]


def _file(folder: Path, text: str, mode: int = 0o600) -> Path:
    made = folder / "keys"
    made.write_text(text)
    made.chmod(mode)
    return made


def test_a_file_of_keys_is_read_as_the_engine_reads_one(tmp_path: Path) -> None:
    """One a line; empty lines and comments do not count; nor do line ends of another system."""
    assert read_keys(_file(tmp_path, "# ours\nalpha\r\n\n  beta \n#gamma\n"), "--api-key-file") == ("alpha", "beta")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no key in it"),
        ("# only this\n", "there is no key in it"),
        ("good\nse cret\n", "line 2: a key is one or more"),
        ("se,cret\n", "line 1: a key is one or more"),
        ("s\u00e9cret\n", "a key is one or more"),
    ],
)
def test_a_bad_file_is_named_and_its_keys_are_not(text: str, message: str, tmp_path: Path) -> None:
    """Which file and line, never what is in it."""
    file = _file(tmp_path, text)
    with pytest.raises(SettingsError, match=re.escape(f"--api-key-file {file}")) as caught:
        read_keys(file, "--api-key-file")
    assert message in str(caught.value)
    assert "cret" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A proxy that was told of keys never starts without them."""
    with pytest.raises(SettingsError, match=r"--admin-key-file .*none: No such file"):
        read_key(tmp_path / "none", "--admin-key-file")
    with pytest.raises(SettingsError, match="2 keys, one is wanted"):
        read_key(_file(tmp_path, "a\nb\n"), "--admin-key-file")


def test_keys_of_all_places_count(tmp_path: Path) -> None:
    """Those given and those in the file, the admin key of its own; the engine gets all of them, and no file of its own."""
    engine = tmp_path / "engine"
    engine.write_text("#!/bin/sh\necho .sock\n")
    engine.chmod(0o755)
    admin = tmp_path / "admin"
    admin.write_text("root\n")
    given = {"engine": engine, "port": 0, "engine_args": ("-hf", "x"), "api_key": "a", "admin_key_file": admin}
    file = _file(tmp_path, 'b\n"c\n')
    ready = prepare(
        load_settings({**given, "api_key_file": file}, env={}), {"TMPDIR": str(tmp_path), "LLAMA_ARG_API_KEY_FILE": "x"}
    )
    ready.close()
    assert ready.keys == Keys(frozenset({"a", "b", '"c'}), "root")
    assert ready.env["LLAMA_API_KEY"] == '"""c",a,b,root'
    assert "LLAMA_ARG_API_KEY_FILE" not in ready.env


def test_a_key_file_of_the_engine_guards_our_routes_too(tmp_path: Path) -> None:
    """What the engine would read in its environment is read here."""
    given = {"engine_url": "http://127.0.0.1:1", "port": 0}
    ready = prepare(load_settings(given, env={}), {"LLAMA_ARG_API_KEY_FILE": str(_file(tmp_path, "x\n"))})
    ready.close()
    assert (ready.keys.accepts(None), ready.keys.accepts("x")) == (False, True)


def test_a_key_of_a_list_is_quoted_as_the_engine_unquotes() -> None:
    """Only at its beginning a quotation mark means something."""
    assert [quoted(key) for key in ('a"b', '"ab', "ab")] == ['a"b', '"""ab"', "ab"]


def test_what_exposes_a_proxy_is_said(tmp_path: Path) -> None:
    """Listening beyond this machine, with and without keys; key files for all to read; keys on the command line."""
    assert listening_notes("127.0.0.1", has_keys=False) == listening_notes("::1", has_keys=False) == []
    assert "there is no API key" in listening_notes("0.0.0.0", has_keys=False)[0]
    assert "TLS" in listening_notes("fe80::1%lo", has_keys=True)[0]
    assert "chmod 600" in key_file_notes([None, _file(tmp_path, "a", 0o640)])[0]
    assert key_file_notes([_file(tmp_path, "a")]) == []
    (note,) = command_line_notes({"api_key": API, "port": 1})
    assert note.startswith(
        "--api-key on the command line can be read by every user of this machine; use POLYKV_API_KEY or --api-key-file"
    )
    assert API not in note


async def test_a_key_is_taken_in_the_engine_s_forms(tmp_path: Path) -> None:
    """Each of several, and the admin key; in Authorization, with and without Bearer, or in X-Api-Key."""
    async with rig(tmp_path, keys=Keys(frozenset({API, OTHER}), ADMIN)) as proxy:
        for form in FORMS:
            for key, status in ((API, 200), (OTHER, 200), (ADMIN, 200), ("wrong", 401), (API[:-1], 401), (API + "x", 401)):
                headers = {name: value.format(key) for name, value in form.items()}
                reply = await proxy.api.get("/polykv/pools", headers=headers)
                assert reply.status_code == status, headers
                assert key not in reply.text


async def test_what_is_everybody_s_wants_the_admin_key(tmp_path: Path) -> None:
    """Policies, pins for ever, the pins of others, checks and weights: 401 without a key, 403 with one, open with the admin key."""
    async with rig(tmp_path, keys=Keys(frozenset({API}), ADMIN)) as proxy:
        for method, path, body in ADMIN_ONLY:
            await proxy.api.post("/polykv/pools", json={"prompt": "a b", "name": "p"}, headers={"x-api-key": API})
            for key, statuses in (("", {401}), (API, {403}), (ADMIN, {200, 202, 501})):
                reply = await proxy.api.request(method, path, json=body, headers={"x-api-key": key})
                assert reply.status_code in statuses, (method, path, key, reply.text)


async def test_every_route_wants_a_key(tmp_path: Path) -> None:
    """But health, and the files of the page, which carry no data; a new route is closed before it is opened."""
    async with rig(tmp_path, keys=Keys(frozenset({API}), ADMIN)) as proxy:
        for path, methods in proxy.app.openapi()["paths"].items():
            for method in methods:
                reply = await proxy.api.request(method.upper(), path.replace("{", "").replace("}", ""))
                assert reply.status_code == (200 if path == "/polykv/health" else 401), (method, path)
        assert (await proxy.api.get("/polykv/ui")).status_code == 200


async def test_without_an_admin_key_the_api_key_suffices_and_the_other_way_round_it_does_not(tmp_path: Path) -> None:
    """An admin key alone leaves everything open but what wants it."""
    async with rig(tmp_path, keys=Keys(frozenset(), ADMIN)) as proxy:
        assert (await proxy.api.get("/polykv/pools")).status_code == 200
        assert (await proxy.api.post("/gpu/weight", json={"weight": 1.0})).status_code == 403


@pytest.mark.parametrize("sent", [API + "x", "", "wrong-sk-zz"])
async def test_errors_and_logs_do_not_repeat_keys(sent: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the one that was sent nor those that would have been right."""
    caplog.set_level(logging.DEBUG)
    async with rig(tmp_path, keys=Keys(frozenset({API}), ADMIN)) as proxy:
        for path in ("/polykv/pools", "/gpu/peers", "/polykv/health", "/polykv/nothing"):
            reply = await proxy.api.get(path, headers={"authorization": f"Bearer {sent}"})
            assert API not in reply.text
            assert ADMIN not in reply.text
            assert not sent or sent not in reply.text
    said = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("polykv"))
    assert API not in said
    assert not sent or sent not in said


def test_no_key_is_in_a_command_line_or_a_log(tmp_path: Path) -> None:
    """Of the proxy and the engine that it starts, at the highest log level; nor in the command that health tells."""
    admin = tmp_path / "admin"
    admin.write_text(ADMIN)
    admin.chmod(0o600)
    options = ("--admin-key-file", str(admin), "--api-key-file", str(_file(tmp_path, f"{API}\n")), "--log-level", "debug")
    with WithFakeEngine.running(tmp_path, *options, variables={"POLYKV_API_KEY": OTHER}, key=API) as served:
        with httpx.Client(base_url=served.url, trust_env=False) as http:
            for key in (API, OTHER, ADMIN, "wrong"):
                headers = {"authorization": f"Bearer {key}"}
                assert http.get("/polykv/pools", headers=headers).status_code == (401 if key == "wrong" else 200)
                assert http.get("/slots", headers=headers).status_code == (401 if key == "wrong" else 501)
        engine_key = psutil.Process(served.health["pid"]).environ()["LLAMA_ARG_POLYKV_KEY"]
        lines = [" ".join(psutil.Process(pid).cmdline()) for pid in (served.process.pid, served.health["pid"])]
        assert served.stop() == 0
    told = [*lines, served.said, str(served.health)]
    for key in (API, OTHER, ADMIN, engine_key):
        assert not [text for text in told if key in text]


def test_the_command_line_is_warned_about(tmp_path: Path) -> None:
    """A key that every user of the machine can read is said to be one."""
    with WithFakeEngine.running(tmp_path, "--api-key", API, "--host", "0.0.0.0", key=API) as served:
        assert served.stop() == 0
    assert "note: --api-key on the command line can be read" in served.said
    assert "cross the network" in served.said
    assert API not in served.said
