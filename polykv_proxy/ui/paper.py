"""What the commands print on.

Law: on a terminal lines are as wide as it is; anywhere else (a pipe, a file, a log) a line ends where it ends.
"""

from __future__ import annotations

from rich.console import Console

ENDLESS = 100_000
"""Columns: wider than anything that is printed."""


def paper(*, markup: bool = True, soft_wrap: bool = True) -> Console:
    """Standard output. `soft_wrap` leaves long lines to the terminal; without it they are broken between words, and tables fit."""
    return endless(Console(highlight=False, markup=markup, soft_wrap=soft_wrap))


def endless(console: Console) -> Console:
    """This one, without an end of its lines where no terminal has one; COLUMNS and FORCE_COLOR make none."""
    if not console.file.isatty():
        console.width = ENDLESS
    return console
