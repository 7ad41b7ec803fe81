"""One look, printed.

Law: the same head and cells as the live view, on any output; without a terminal there is no colour and nothing is cut.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from polykv_proxy.ui.paper import endless, paper
from polykv_proxy.ui.top.paint import COLUMNS, RIGHT, cells, head
from polykv_proxy.ui.top.rows import fastest, rows_of
from polykv_proxy.ui.top.snapshot import Snapshot


def show(snapshot: Snapshot, where: str, console: Console | None = None) -> None:
    """Print the snapshot."""
    console = endless(console) if console is not None else paper(soft_wrap=False)
    for line in head(snapshot, where):
        console.print(line, soft_wrap=True)
    rows = rows_of(snapshot)
    whole = fastest(rows)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in RIGHT else "left", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row, whole))
    console.print(table if rows else "no pools and no sessions")
