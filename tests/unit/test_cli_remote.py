"""Mirrors cli_remote.py: the tree in text, and where the proxy is looked for."""

import asyncio
import json
import re
from operator import itemgetter
from pathlib import Path

import httpx
import pytest
import typer
from typer.testing import CliRunner

from polykv_proxy import cli_http
from polykv_proxy.cli import app
from polykv_proxy.cli_http import fail, table
from polykv_proxy.cli_remote import draw_tree, pools, top
from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import relayed, rig

CLIENT = httpx.Client
BASE = list(range(100, 140))


def test_no_pools_are_said_in_words() -> None:
    """An empty tree is not an empty page."""
    assert draw_tree([]) == ["no pools"]


async def test_a_tree_is_drawn_with_every_child_under_its_parent(tmp_path: Path) -> None:
    """Branches are drawn in the order of ids, with what is unusual about a pool at the end of its line."""
    async with rig(tmp_path, FakeEngine(max_pools=8)) as proxy:
        await proxy.pool(tokens=BASE, name="root")
        for parent, tokens in ((1, [*BASE, 5]), (1, [*BASE, 6, 7]), (2, [*BASE, 5, 8]), (4, [*BASE, 5, 8, 9])):
            await proxy.api.post(f"/polykv/pools/{parent}/fork", json={"tokens": tokens})
        await proxy.pool(tokens=[1, 2, 3])
        await proxy.api.post("/polykv/pools/3/evict")
        await proxy.api.post("/polykv/pools/5/pin", json={"owner": "ann"})
        lines = draw_tree((await proxy.api.get("/polykv/pools")).json()["pools"])
    shown = [re.sub(r"  (hits|used) (?:\d+/\d+|\d+ \w+ ago)", "", re.sub(r"  \d\.\d MiB", "", line)) for line in lines]
    assert shown == [
        "1 root  resident  40 tokens",
        "├─ 2  resident  41 tokens (+1 from 40)",
        "│  └─ 4  resident  42 tokens (+1 from 41)",
        "│     └─ 5  resident  43 tokens (+1 from 42)  pinned by ann, unused",
        "└─ 3  evicted  42 tokens (+2 from 40)  evicted on request",
        "6  resident  3 tokens",
    ]


async def test_what_others_wrote_commands_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters of an owner, or of an answer, are shown as what they are not: one line of text."""
    async with rig(tmp_path, FakeEngine(max_pools=8)) as proxy:
        await proxy.pool(tokens=BASE)
        pinned = await proxy.api.post("/polykv/pools/1/pin", json={"owner": "\x1b[2Jann\nbob \u202eé"})
        assert pinned.status_code == 200
        (line,) = draw_tree((await proxy.api.get("/polykv/pools")).json()["pools"])
    assert "pinned by \ufffd[2Jann\ufffdbob \ufffdé, unused" in line
    table({"session": itemgetter("session")}, [{"session": "a\x1b[31mb\u0085"}])
    assert "a\ufffd[31mb\ufffd" in capsys.readouterr().out
    with pytest.raises(typer.Exit):
        fail("no \x1b]0;title\x07\nat all")
    assert capsys.readouterr().err == "error: no \ufffd]0;title\ufffd\ufffdat all\n"


def test_a_url_without_a_scheme_is_http(capsys: pytest.CaptureFixture[str]) -> None:
    """HOST:PORT is enough for --url; the failure is about the connection, not about the spelling."""
    with pytest.raises(typer.Exit):
        pools(url="127.0.0.1:1")
    assert "nothing answers at http://127.0.0.1:1 (" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["127.0.0.1:1/v1", "http://127.0.0.1:1/v1/", "http://127.0.0.1:1/"])
def test_the_base_url_of_clients_is_the_proxys(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Who pastes what the OpenAI client was given is asked about no path that the engine would have to know."""
    with pytest.raises(typer.Exit):
        pools(url=given)
    assert "nothing answers at http://127.0.0.1:1 (" in capsys.readouterr().err


async def test_top_prints_once_for_people_and_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--once` draws head and tree; `--json` gives the routes' own figures in one object."""
    async with rig(tmp_path) as proxy, relayed(proxy) as (_, client):
        await proxy.pool(tokens=BASE, name="root")
        await proxy.call("/completion", {"prompt": [*BASE, 9], "pool_id": "root", "session_id": "agent-1"})
        await proxy.settle()
        url = str(client.base_url)
        await asyncio.to_thread(top, url=url, once=True)
        text = capsys.readouterr().out
        await asyncio.to_thread(top, url=url, as_json=True)
        facts = json.loads(capsys.readouterr().out)
    assert [line.split()[1] for line in text.splitlines() if "root" in line or "agent-1" in line] == ["root", "agent-1"]
    assert [pool["name"] for pool in facts["pools"]] == ["root"]
    assert facts["tps"]["cells_total"] == 4096


def test_top_of_nothing_is_one_line_and_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    """A proxy that is not there is not a live view of nothing."""
    with pytest.raises(typer.Exit):
        top(url="127.0.0.1:1")
    assert capsys.readouterr().err.startswith("error: nothing answers at http://127.0.0.1:1 (")


@pytest.mark.parametrize("command", ["pools", "sessions", "tps", "doctor"])
@pytest.mark.parametrize(
    ("options", "env", "where"),
    [
        ([], {}, "http://127.0.0.1:8080/"),
        (["--port", "2"], {"POLYKV_PORT": "3"}, "http://127.0.0.1:2/"),
        ([], {"POLYKV_PORT": "3"}, "http://127.0.0.1:3/"),
        (["--url", "https://far:4"], {"POLYKV_PORT": "3"}, "https://far:4/"),
        ([], {"POLYKV_PORT": "3", "POLYKV_URL": "near:5", "POLYKV_API_KEY": "a, b"}, "http://near:5/"),
    ],
)
def test_every_command_finds_its_proxy(
    command: str, options: list[str], env: dict[str, str], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A URL wins over a port, a flag over a variable; of several keys the first is sent."""
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(500)

    monkeypatch.setattr(cli_http.httpx, "Client", lambda **more: CLIENT(**{**more, "transport": httpx.MockTransport(answer)}))
    assert CliRunner().invoke(app, [command, *options], env={"POLYKV_URL": "", "POLYKV_PORT": "", **env}).exit_code == 1
    assert str(asked[0].url).startswith(where)
    assert asked[0].headers.get("authorization") == ("Bearer a" if "POLYKV_API_KEY" in env else None)


def test_options_of_the_server_before_a_command_are_not_lost_in_silence() -> None:
    """They would say nothing to it."""
    done = CliRunner().invoke(app, ["--port", "99", "pools"])
    assert done.exit_code == 2
    assert "--port before pools is for the server" in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize(("key", "hint"), [("", "; give --api-key\n"), ("other", " is none of the proxy's\n")])
def test_a_wrong_key_is_not_told_to_be_given(key: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was."""
    refusal = httpx.MockTransport(lambda _: httpx.Response(401, json={"error": {"message": "Invalid API Key"}}))
    monkeypatch.setattr(cli_http.httpx, "Client", lambda **more: CLIENT(**{**more, "transport": refusal}))
    done = CliRunner().invoke(app, ["pools"], env={"POLYKV_URL": "", "POLYKV_PORT": "", "POLYKV_API_KEY": key})
    assert done.exit_code == 1
    assert done.stderr.endswith(f"answered 401: Invalid API Key{hint}" if not key else hint)


@pytest.mark.parametrize(("argument", "hint"), [("-c", True), ("--ctx-size", True), ("--prot", False)])
def test_an_option_of_the_engine_before_the_dashes_is_told_its_place(argument: str, hint: bool) -> None:
    """What is spelt nearly as one of ours is asked about instead."""
    done = CliRunner().invoke(app, ["-m", "model.gguf", argument, "4096"])
    said = " ".join(done.output.replace("│", " ").split())
    assert done.exit_code == 2
    assert ("goes behind a bare --, as in: polykv-proxy -m MODEL.gguf -- -c 8192" in said) is hint
    assert ("--port" in said) is not hint


async def test_speeds_are_a_table_for_people_and_json_for_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the proxy says of itself and of each session, figures that are not known left empty; `--json` as it came."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        for session in ("a", "b"):
            body = {"prompt": [*BASE, 1], "pool_id": 1, "session_id": session, "n_predict": 30 if session == "a" else 1}
            await proxy.call("/completion", body)
        await proxy.settle()
        proxy.clock.now += 1
        facts = (await proxy.api.get("/polykv/tps?once=1")).content

    def answer(request: httpx.Request) -> httpx.Response:
        assert str(request.url).endswith("/polykv/tps?once=1")
        return httpx.Response(200, content=facts)

    monkeypatch.setattr(cli_http.httpx, "Client", lambda **more: CLIENT(**{**more, "transport": httpx.MockTransport(answer)}))
    shown = CliRunner().invoke(app, ["tps"]).output.splitlines()
    assert shown[0].endswith("0 decode, 0 warm up")
    assert "80 spared" in shown[1]
    assert re.split(r"\s{2,}", shown[2].strip())[3:] == ["tokens/s", "last turn", "first token", "each", "prompt/s", "context"]
    assert shown[3].split()[:4] == ["a", "1", "idle", "1000.0"]
    assert shown[4].split()[:3] == ["b", "1", "idle"]
    assert json.loads(CliRunner().invoke(app, ["tps", "--json"]).output) == json.loads(facts)
