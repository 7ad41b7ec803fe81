"""The run as a picture: the mean speed before the floor, what settled when, and who came in how.

Law: draws what the journal says; one file without scripts or links.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.courier.journal import Journal

MARKS = {
    "spawn": ("^", "tab:green", "started"),
    "delivered": ("v", "tab:gray", "delivered"),
    "guarantee": ("*", "tab:purple", "guaranteed"),
    "overcommit": ("X", "tab:red", "overcommitted"),
    "refused": ("x", "tab:orange", "refused"),
    "failed": ("X", "black", "failed"),
}
"""Marker, colour and word of each kind of event; what the courier did lies below, what the proxy decided above it."""


def draw(journal: Journal, path: Path) -> None:
    """As SVG, text as text."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    speed, sessions = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    _speed(speed, journal)
    _sessions(sessions, journal)
    figures = journal.figures()
    under = figures["under_floor_s"] or 0.0
    figure.suptitle(f"{figures['delivered']:.0f} packages in {figures['wall_s']:.1f} s, {under:.1f} s of it under the floor")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "courier"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _speed(axes: Axes, journal: Journal) -> None:
    for number, (begin, end) in enumerate(journal.settle_bands()):
        axes.axvspan(begin, end, color="tab:blue", alpha=0.12, lw=0, label="settling" if number == 0 else None, gid="settle")
    times = [journal.since(said.ts) for said in journal.reports]
    for what, style in (("mean_active_tps", "-"), ("projected_mean_tps_if_admitted", ":")):
        values = [getattr(said, what) for said in journal.reports]
        shown = [float("nan") if value is None else value for value in values]
        axes.plot(times, shown, style, color="tab:blue", label="mean" if style == "-" else "mean with one more", gid=what)
    axes.axhline(journal.floor, color="tab:red", lw=1, label="floor", gid="floor")
    axes.set_ylabel("tokens/s of a session")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right")


def _sessions(axes: Axes, journal: Journal) -> None:
    axes.step([journal.since(said.ts) for said in journal.reports], [s.n_pool_sessions for s in journal.reports], where="post")
    holds = [(event.t, event.value) for event in journal.events if event.kind == "hold" and event.value is not None]
    for number, (t, seconds) in enumerate(holds):
        axes.plot([t, t + seconds], [-0.5, -0.5], color="tab:orange", lw=3, label="held" if number == 0 else None, gid="hold")
    for kind, (marker, color, word) in MARKS.items():
        at = [event.t for event in journal.events if event.kind == kind]
        if at:
            axes.scatter(at, [0.0] * len(at), marker=marker, color=color, label=word, gid=kind, zorder=3)
    axes.set_ylabel("sessions")
    axes.set_xlabel("seconds")
    axes.legend(loc="upper right", ncols=4)
