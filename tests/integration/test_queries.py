"""Queries of our own verbs: what a route does not know is refused, as it is in a body."""

from __future__ import annotations

from pathlib import Path

import pytest

from polykv_proxy.api.document import OPERATIONS
from polykv_proxy.ui.page import add_page
from tests.integration.rig import rig

VERBS = {place: operation for place, operation in OPERATIONS.items() if operation.pooled}


async def test_every_verb_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    """By name, with the names that it knows, and before it does anything."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt="a b", name="p")
        await proxy.call("/completion", {"prompt": "a b c", "pool_id": "p", "session_id": "s"})
        for (method, path), operation in VERBS.items():
            url = path.format(key="p", session_id="s") + "?nonsense=1"
            got = await proxy.api.request(method, url, json={"prompt": "a b c", "weight": 1})
            error = got.json()["error"]
            assert (got.status_code, error["code"], error["param"]) == (400, "invalid_request", "nonsense"), url
            known = f"known are {', '.join(operation.query)}" if operation.query else "this route takes none"
            assert error["message"] == f"unknown query parameter nonsense; {known}"
        shown = (await proxy.api.get("/polykv/pools")).json()["pools"]
        assert [(pool["name"], pool["residency"], len(pool["sessions"])) for pool in shown] == [("p", "resident", 1)]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("pools?pool=a&pool=b", "pool"),
        ("pools?depth=1&depth=2", "depth"),
        ("pools?depth=1&Depth=2", "Depth"),
        ("tps?once=1&once=1", "once"),
        ("capacity?session_id=a&session_id=b", "session_id"),
        ("decisions?%CC%81%00=1", "\\u0301\\x00"),
        ("savings?=1", ""),
    ],
)
async def test_a_name_that_is_unknown_or_comes_twice_is_said(path: str, param: str, tmp_path: Path) -> None:
    """Of two values of one name neither is taken for the other."""
    async with rig(tmp_path) as proxy:
        got = await proxy.api.get(f"/polykv/{path}")
        assert (got.status_code, got.json()["error"]["param"]) == (400, param), got.text


async def test_lists_may_come_in_pieces(tmp_path: Path) -> None:
    """`topics` is a list: twice is both."""
    async with rig(tmp_path) as proxy, proxy.api.stream("HEAD", "/polykv/events?topics=pool&topics=engine") as got:
        assert got.status_code == 200


@pytest.mark.parametrize("path", ["/polykv/health", "/polykv/openapi.json", "/polykv/ui"])
async def test_pages_and_probes_may_say_what_they_like(path: str, tmp_path: Path) -> None:
    """Who looks whether we are there, past whatever cache, is not to hear that we are not."""
    async with rig(tmp_path) as proxy:
        add_page(proxy.app)
        assert (await proxy.api.get(f"{path}?_=1700000000&_=1")).status_code == 200
