"""The live view.

Law: shows the last snapshot; decides nothing. Rows are followed by key: cursor, scroll and folds stay where they are when others
come and go. Paused, the picture holds still while looks go on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Input, Static

from polykv_proxy.ui.top.paint import BAR_WIDTH, COLUMNS, RIGHT, cells, head
from polykv_proxy.ui.top.rows import Order, Row, fastest, rows_of
from polykv_proxy.ui.top.snapshot import Snapshot

_HISTORY = 24
_KV_SHARE = 3
_OTHER_COLUMNS = 124
"""About what all columns but the bar take."""


class TopApp(App[None]):
    """`look` gives a snapshot each time it is awaited; `where` is shown as the proxy's address."""

    CSS = """
    #head { height: auto; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    DataTable { height: 1fr; }
    #words { display: none; border: none; height: 1; padding: 0 1; }
    #words.open { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p", "pause", "Pause"),
        Binding("s", "sort", "Sort"),
        Binding("slash", "filter", "Filter"),
        Binding("space", "fold", "Fold"),
        Binding("escape", "all", "All", show=False),
    ]
    ENABLE_COMMAND_PALETTE = False
    TITLE = "polykv-proxy top"

    def __init__(self, look: Callable[[], Awaitable[Snapshot]], where: str, interval_s: float = 1.0) -> None:
        super().__init__()
        self._look = look
        self._where = where
        self._interval_s = interval_s
        self._snapshot = Snapshot()
        self._history: deque[float | None] = deque(maxlen=_HISTORY)
        self._order = Order.TREE
        self._words = ""
        self._folded: set[str] = set()
        self._paused = False
        self._rows: list[Row] = []
        self._fastest = 0.0

    def compose(self) -> ComposeResult:
        """The head, the rows, the filter and the keys."""
        yield Static(id="head")
        yield DataTable(cursor_type="row", zebra_stripes=False)
        yield Input(id="words", placeholder="filter by name or state; Enter keeps it, Escape shows all")
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        for column in COLUMNS:
            self._table.add_column(Text(column, justify="right" if column in RIGHT else "left"), key=column)
        self._table.focus()
        self.run_worker(self._follow())

    def on_resize(self) -> None:
        """The head and the bars are as wide as the screen lets them."""
        self._fastest = -1.0
        self._draw()

    # keys

    def action_pause(self) -> None:
        """Hold the picture still, or go on."""
        self._paused = not self._paused
        self._draw()

    def action_sort(self) -> None:
        """The next order."""
        orders = list(Order)
        self._order = orders[(orders.index(self._order) + 1) % len(orders)]
        self._draw()

    def action_filter(self) -> None:
        """Ask for words."""
        words = self.query_one("#words", Input)
        words.add_class("open")
        words.focus()

    def action_all(self) -> None:
        """No filter."""
        self.query_one("#words", Input).value = ""
        self._leave_filter()

    def action_fold(self) -> None:
        """Fold what is below the row, or unfold it."""
        at = self._table.cursor_row
        if at < len(self._rows) and self._rows[at].folded is not None:
            self._folded ^= {self._rows[at].key}
            self._draw()

    def on_data_table_row_selected(self) -> None:
        """Enter folds, too."""
        self.action_fold()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Rows follow the words as they are typed."""
        self._words = event.value
        self._draw()

    def on_input_submitted(self) -> None:
        """Keep the words and go back to the rows."""
        self._leave_filter()

    def _leave_filter(self) -> None:
        words = self.query_one("#words", Input)
        words.set_class(bool(words.value), "open")
        self._table.focus()

    # drawing

    async def _follow(self) -> None:
        while True:
            snapshot = await self._look()
            if snapshot.trouble is None:
                self._history.append(snapshot.tps.get("aggregate_tps"))
            if not self._paused:
                self._snapshot = snapshot
                self._draw()
            await asyncio.sleep(self._interval_s)

    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one(DataTable)

    def _draw(self) -> None:
        self._draw_head()
        before, scale = self._rows, self._fastest
        self._rows = rows_of(self._snapshot, self._order, self._words, self._folded)
        self._fastest = fastest(self._rows)
        if [row.key for row in before] == [row.key for row in self._rows]:
            for old, row in zip(before, self._rows, strict=True):
                if old != row or scale != self._fastest:
                    self._update(row)
        else:
            self._replace(before)

    def _draw_head(self) -> None:
        marks = ["paused"] if self._paused else []
        marks += [f"by {self._order}"] if self._order is not Order.TREE else []
        width = max(10, self.size.width // _KV_SHARE)
        lines = head(self._snapshot, self._where, list(self._history), width)
        if marks:
            lines[0].append("  " + ", ".join(marks), "reverse")
        self.query_one("#head", Static).update(Text("\n").join(lines))

    def _update(self, row: Row) -> None:
        for column, cell in zip(COLUMNS, self._cells(row), strict=True):
            self._table.update_cell(row.key, column, cell, update_width=True)

    def _replace(self, before: list[Row]) -> None:
        """Other rows: the cursor goes on with its row, or stays at its place when that is gone."""
        table = self._table
        at, y = table.cursor_row, table.scroll_y
        key = before[at].key if at < len(before) else None
        table.clear()
        for row in self._rows:
            table.add_row(*self._cells(row), key=row.key)
        kept = next((n for n, row in enumerate(self._rows) if row.key == key), min(at, len(self._rows) - 1))
        table.move_cursor(row=max(0, kept), scroll=False)
        table.scroll_to(y=y, animate=False)

    def _cells(self, row: Row) -> list[Text]:
        found = cells(row, self._fastest, max(BAR_WIDTH, self.size.width - _OTHER_COLUMNS))
        for column, cell in zip(COLUMNS, found, strict=True):
            cell.justify = "right" if column in RIGHT else "left"
        return found
