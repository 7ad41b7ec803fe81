"""Mirrors cli_remote.py: the tree in text, and where the proxy is looked for."""

import asyncio
import json
import re
from pathlib import Path

import pytest
import typer

from polykv_proxy.cli_remote import draw_tree, pools, top
from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import relayed, rig

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


def test_a_url_without_a_scheme_is_http(capsys: pytest.CaptureFixture[str]) -> None:
    """HOST:PORT is enough for --url; the failure is about the connection, not about the spelling."""
    with pytest.raises(typer.Exit):
        pools(url="127.0.0.1:1")
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
    assert facts["capacity"]["cells_total"] == 4096


def test_top_of_nothing_is_one_line_and_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    """A proxy that is not there is not a live view of nothing."""
    with pytest.raises(typer.Exit):
        top(url="127.0.0.1:1")
    assert capsys.readouterr().err.startswith("error: nothing answers at http://127.0.0.1:1 (")
