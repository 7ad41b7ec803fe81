"""Snapshot and rows as coloured text: the head, and the cells of a row. For the live view and for plain output alike.

Law: pure; colour repeats what a word or a shape says already. What callers named is text, never markup.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from polykv_proxy.ui.top.doors import admission_lines
from polykv_proxy.ui.top.figures import bar, parts, rate, seconds, size, spark
from polykv_proxy.ui.top.rows import Kind, Row
from polykv_proxy.ui.top.snapshot import Facts, Snapshot

COLUMNS = ("pool / session", "state", "tokens", "KV", "tok/s", "", "TTFT", "context", "saved", "about", "missed")
RIGHT = frozenset({"tokens", "KV", "tok/s", "TTFT", "context", "saved", "about", "missed"})
BAR_WIDTH = 16
_GREY, _BLUE, _GREEN, _YELLOW, _RED, _CYAN, _VIOLET = "#808896", "#5f9bea", "#57b871", "#d9a02f", "#ec7a66", "#3cb9c5", "#b48af0"
_COLOURS = {
    "resident": _BLUE,
    "materializing": _CYAN,
    "releasing": _CYAN,
    "evicted": _GREY,
    "lost": _RED,
    "failed": _RED,
    "quarantined": _RED,
    "saved": _VIOLET,
    "active": _GREEN,
    "warming": _YELLOW,
    "idle": _GREY,
}
_KV_COLOURS = {"pools": _BLUE, "private": _GREEN, "other": "", "free": _GREY}


def cells(row: Row, fastest: float, bar_width: int = BAR_WIDTH) -> list[Text]:
    """The cells of a row, in the order of COLUMNS. `fastest`: the tokens per second of a whole bar."""
    colour = _YELLOW if row.pinned else _COLOURS.get(row.state, "")
    name = Text.assemble((row.lead + _fold(row), _GREY), (row.name, "bold" if row.kind is Kind.POOL else ""))
    context = "" if row.ctx_used is None or not row.ctx_total else f"{row.ctx_used:,}/{row.ctx_total:,}"
    return [
        name,
        Text(f"{row.state}, pinned" if row.pinned else row.state, colour),
        Text("" if row.n_tokens is None else f"{row.n_tokens:,}"),
        Text(size(row.kv_bytes) if row.kv_bytes else ""),
        Text("" if row.tps is None else rate(row.tps)),
        Text(bar(row.speed, fastest, bar_width), colour),
        Text(seconds(row.ttft_s)),
        Text(context),
        Text(f"{row.saved_n_tokens:,}" if row.saved_n_tokens else ""),
        Text(seconds(row.saved_s) if row.saved_s else ""),
        Text(f"{row.n_missed:,}" if row.n_missed else "", _YELLOW),
    ]


def _fold(row: Row) -> str:
    if row.folded is not None:
        return "▸ " if row.folded else "▾ "
    return "─ " if row.lead else "  "


def head(snapshot: Snapshot, where: str, history: Sequence[float | None] = (), width: int = 40) -> list[Text]:
    """Lines above the rows: where, how fast, the KV cache as a bar of `width` characters, what was saved, and who may begin."""
    state = snapshot.health.get("state", "")
    engine = (f"engine {state}", _GREEN if state == "ready" else _RED) if state else ("", "")
    lines = [Text.assemble(("polykv-proxy ", "bold"), where, "  ", engine), _speed(snapshot, history), _kv(snapshot, width)]
    lines += [_saved(snapshot), *admission_lines(snapshot)]
    if snapshot.gpu.get("enabled"):
        lines.append(_device(snapshot.gpu))
    if snapshot.trouble:
        lines.append(Text(snapshot.trouble, f"bold {_RED}"))
    return lines


def _speed(snapshot: Snapshot, history: Sequence[float | None]) -> Text:
    tps, tree = snapshot.tps, snapshot.tree
    return Text.assemble(
        (rate(tps.get("aggregate_tps")), "bold"),
        " tok/s ",
        (spark(history), _BLUE),
        f"  mean {rate(tps.get('mean_active_tps'))}  ",
        f"{tps.get('n_active', 0)} active, {tps.get('n_warming', 0)} warming, {len(snapshot.sessions())} sessions  ",
        f"{len(snapshot.pools)} pools, ids {tree.get('seq_ids_used', 0)}/{tree.get('seq_ids_max', 0)}",
    )


def _saved(snapshot: Snapshot) -> Text:
    """What pools spared in all and today, and what they did not today, by reason."""
    tps, today = snapshot.tps, snapshot.savings
    text = Text(f"saved {_spared(tps.get('saved_tokens', 0), tps.get('saved_s', 0.0))}")
    if today:
        text.append(f"; today {_spared(today['n_tokens'], today['seconds'])} in {today['n_requests']:,} requests")
        misses = sorted(today["misses"].items(), key=lambda one: -one[1]["n_requests"])
        words = ", ".join(f"{reason.replace('_', ' ')} {miss['n_requests']:,}" for reason, miss in misses)
        text.append(f"; missed {words}" if words else "", _YELLOW)
    return text


def _device(gpu: Facts) -> Text:
    """Who shares the device, ours first."""
    text = Text("GPU ")
    peers = [(peer, "") for peer in gpu["peers"]]
    for peer, mark in [*([(gpu["self"], "this one, ")] if gpu["self"] else []), *peers]:
        name = peer["name"] or f"process {peer['pid']}"
        figures = f"{mark}weight {peer['weight']:g}, {peer['share_pct']:.0f} %, busy {peer['busy_pct']:.0f} %"
        text.append(f" {name} ({figures})", _GREEN if peer["active"] else _GREY)
    return text


def _spared(n_tokens: int, spared_s: float) -> str:
    return f"{n_tokens:,} tokens, about {seconds(spared_s)}" if n_tokens else "no tokens"


def _kv(snapshot: Snapshot, width: int) -> Text:
    kv = snapshot.kv_bytes()
    text = Text("KV ")
    for (part, _), n in zip(kv.items(), parts(list(kv.values()), width), strict=True):
        text.append(("░" if part == "free" else "█") * n, _KV_COLOURS[part])
    for part, n_bytes in kv.items():
        text.append(f"  {part} {size(n_bytes)}", _KV_COLOURS[part])
    pressure = snapshot.tps.get("compaction_pressure")
    if pressure:
        text.append(f"  pressure {pressure:.0%}", _YELLOW)
    return text
