"""Mirrors ui/top/app.py: the live view, driven by keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Static

from polykv_proxy.ui.top.app import TopApp
from polykv_proxy.ui.top.snapshot import Snapshot
from tests.unit.ui.top.snapshots import pool, session, snapshot

FEW = snapshot(pool(1, sessions=("a",)), pool(2, 1, sessions=("b",)), sessions=(session("b", 9.0, pool_id=2),))


class Desk:
    """Snapshots that the test hands over, one look each."""

    def __init__(self, *first: Snapshot) -> None:
        self._given: asyncio.Queue[Snapshot] = asyncio.Queue()
        for one in first:
            self._given.put_nowait(one)
        self.app = TopApp(self._given.get, "http://proxy", interval_s=0)

    async def show(self, pilot: Pilot[None], found: Snapshot) -> None:
        self._given.put_nowait(found)
        await until(pilot, self._given.empty)

    @property
    def names(self) -> list[str]:
        table = self.app.query_one(DataTable)
        return [str(table.get_row_at(n)[0]) for n in range(table.row_count)]

    @property
    def head(self) -> str:
        return str(self.app.query_one("#head", Static).render())

    @property
    def at(self) -> str:
        return self.names[self.app.query_one(DataTable).cursor_row]


async def until(pilot: Pilot[None], holds: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await pilot.pause()
        await pilot.pause()


async def test_rows_and_head_follow_the_snapshots() -> None:
    """Names, speeds and totals of the last look are on the screen."""
    desk = Desk(FEW)
    async with desk.app.run_test(size=(130, 30)) as pilot:
        await until(pilot, lambda: len(desk.names) == 4)
        assert desk.names == ["▾ p1", "├── a", "└─▾ p2", "   └── b"]
        assert "12.5 tok/s" in desk.head
        assert "2 pools, ids 2/16" in desk.head
        assert "saved 1,234 tokens, about 2 min" in desk.head
        await desk.show(pilot, snapshot(pool(1)))
        assert desk.names == ["  p1"]


async def test_the_cursor_goes_with_its_row() -> None:
    """Rows that come above it do not move it; when its row goes the cursor stays at that place."""
    desk = Desk(FEW)
    async with desk.app.run_test(size=(130, 30)) as pilot:
        await until(pilot, lambda: len(desk.names) == 4)
        await pilot.press("down", "down")
        assert desk.at == "└─▾ p2"
        await desk.show(pilot, snapshot(pool(1, sessions=("a", "aa")), pool(2, 1, sessions=("b",))))
        assert desk.at == "└─▾ p2"
        await desk.show(pilot, snapshot(pool(1)))
        assert desk.at == "  p1"


async def test_paused_nothing_moves_until_it_goes_on() -> None:
    """The head says so; the next look after that is shown."""
    desk = Desk(FEW)
    async with desk.app.run_test(size=(130, 30)) as pilot:
        await until(pilot, lambda: len(desk.names) == 4)
        await pilot.press("p")
        assert "paused" in desk.head
        await desk.show(pilot, snapshot(pool(1)))
        assert len(desk.names) == 4
        await pilot.press("p")
        await desk.show(pilot, snapshot(pool(1)))
        assert "paused" not in desk.head
        assert desk.names == ["  p1"]


async def test_sorting_and_folding() -> None:
    """S goes through the orders and back to the tree; space folds the row under the cursor and unfolds it."""
    desk = Desk(FEW)
    async with desk.app.run_test(size=(130, 30)) as pilot:
        await until(pilot, lambda: len(desk.names) == 4)
        await pilot.press("s")
        assert desk.names[0] == "  b"
        assert "by tokens per second" in desk.head
        await pilot.press("s", "s", "s", "s", "space")
        assert desk.names == ["▸ p1"]
        await pilot.press("space")
        assert len(desk.names) == 4


async def test_the_filter_follows_what_is_typed() -> None:
    """Slash asks for words; Enter keeps them, Escape shows all again."""
    desk = Desk(FEW)
    async with desk.app.run_test(size=(130, 30)) as pilot:
        await until(pilot, lambda: len(desk.names) == 4)
        await pilot.press("slash", "b")
        await until(pilot, lambda: desk.names == ["▾ p1", "└─▾ p2", "   └── b"])
        await pilot.press("enter", "s")
        assert "by tokens per second" in desk.head
        await pilot.press("escape")
        await until(pilot, lambda: len(desk.names) == 4)
        assert not desk.app.query_one("#words", Input).has_class("open")


async def test_trouble_is_shown_over_what_was_known() -> None:
    """The words of the trouble stand in the head; the rows stay."""
    desk = Desk(FEW, replace(FEW, trouble="nothing answers at http://proxy"))
    async with desk.app.run_test(size=(130, 30)) as pilot:
        await until(pilot, lambda: "nothing answers at http://proxy" in desk.head)
        assert len(desk.names) == 4


async def test_names_are_text_and_never_markup() -> None:
    """Brackets in a session id are brackets on the screen."""
    desk = Desk(snapshot(pool(1, sessions=("[red]x[/]", "[@click=app.quit]y"))))
    async with desk.app.run_test(size=(130, 30)) as pilot:
        await until(pilot, lambda: len(desk.names) == 3)
        assert desk.names[1:] == ["├── [red]x[/]", "└── [@click=app.quit]y"]
        assert "[red]x[/]" in "".join(segment.text for line in desk.app.screen._compositor.render_strips() for segment in line)


async def test_a_narrow_terminal_is_enough() -> None:
    """Sixty columns show what fits, and q leaves."""
    desk = Desk(FEW)
    async with desk.app.run_test(size=(60, 12)) as pilot:
        await until(pilot, lambda: len(desk.names) == 4)
        await pilot.press("q")
    assert desk.app.return_code == 0
