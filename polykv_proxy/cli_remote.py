"""Commands that talk to a running proxy: `pools`, `sessions`, `tps`, `top`, `doctor`; `admission` and `capacity` are next door.

Law: read over HTTP and print; every command works against a remote proxy. Failures are one line on standard error, exit code 1.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

from polykv_proxy import cli_admission
from polykv_proxy.cli_doctor import Level, diagnose
from polykv_proxy.cli_http import (
    DEFAULT_PORT,
    EXIT_FAILED,
    ApiKey,
    Json,
    Port,
    Url,
    fail,
    first_key,
    get,
    plain,
    print_json,
    table,
    where,
)
from polykv_proxy.ui.paper import paper
from polykv_proxy.ui.top.plain import show
from polykv_proxy.ui.top.remote import Remote

_WHO: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "session": lambda session: session["session_id"] or f"(request {session['req'] or '?'})",
    "pool": lambda session: session["pool_id"],
    "state": lambda session: session["state"],
}
_MARKS = {Level.GOOD: "[green]ok[/]", Level.NOTE: "[cyan]note[/]", Level.WARN: "[yellow]warn[/]", Level.BAD: "[red]off[/]"}


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("pools")(pools)
    app.command("sessions")(sessions)
    app.command("tps")(tps)
    app.command("top")(top)
    app.command("doctor")(doctor)
    cli_admission.register(app)


def pools(url: Url = None, port: Port = DEFAULT_PORT, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Draw the tree of pools of a running proxy."""
    facts = get(where(url, port), "/polykv/pools", api_key)
    if as_json:
        print_json(facts)
        return
    console = paper()
    for line in draw_tree(facts["pools"]):
        console.print(line, markup=False)
    console.print(f"sequence ids: {facts['seq_ids_used']} of {facts['seq_ids_max']} in use, KV: {_mib(facts['kv_bytes'])}")


def sessions(url: Url = None, port: Port = DEFAULT_PORT, api_key: ApiKey = None, as_json: Json = False) -> None:
    """List the sessions of a running proxy."""
    facts = get(where(url, port), "/polykv/sessions", api_key)
    if as_json:
        print_json(facts)
        return
    table(
        {
            **_WHO,
            "streams": lambda session: session["n_streams"],
            "slot": lambda session: session["slot"],
            "context": _context,
            "tokens/s": lambda session: _one(session.get("tps_ewma")),
            "last used": lambda session: _ago(session.get("last_used_ts")),
        },
        facts["sessions"],
    )


def tps(url: Url = None, port: Port = DEFAULT_PORT, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Say how fast a running proxy and each of its sessions are."""
    facts = get(where(url, port), "/polykv/tps?once=1", api_key)
    if as_json:
        print_json(facts)
        return
    mean = f" at {_one(facts['mean_active_tps'])} each" if facts["n_active"] else ""
    console = paper()
    console.print(f"{_one(facts['aggregate_tps'])} tokens/s: {facts['n_active']} decode{mean}, {facts['n_warming']} warm up")
    console.print(f"prompts {_one(facts['prompt_tps'])} tokens/s, {facts['saved_tokens']} spared (about {facts['saved_s']:.0f} s)")
    table(
        {
            **_WHO,
            "tokens/s": lambda session: _one(session["tps_ewma"]),
            "last turn": lambda session: _one(session["tps_last_turn"]),
            "first token": lambda session: _ms(session["ttft_ms"]),
            "each": lambda session: _ms(session["tpot_ms"]),
            "prompt/s": lambda session: _one(session["prompt_tps"]),
            "context": _context,
        },
        facts["sessions"],
    )


def top(  # noqa: PLR0917 - typer reads options from the signature and passes them by name
    url: Url = None,
    port: Port = DEFAULT_PORT,
    api_key: ApiKey = None,
    once: Annotated[bool, typer.Option("--once", help="Print once, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print once as JSON, and end.")] = False,
    interval_s: Annotated[float, typer.Option("--interval-s", min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Watch a running proxy: its pools and sessions, how fast they are, and the KV cache."""
    asyncio.run(_top(Remote(where(url, port), first_key(api_key)), once=once or as_json, as_json=as_json, interval_s=interval_s))


async def _top(remote: Remote, *, once: bool, as_json: bool, interval_s: float) -> None:
    try:
        snapshot = await remote.look()
        if snapshot.trouble:
            fail(snapshot.trouble)
        if as_json:
            print_json(snapshot.as_dict())
        elif once:
            show(snapshot, remote.url)
        else:
            from polykv_proxy.ui.top.app import TopApp  # noqa: PLC0415 - heavy; only the live view wants it

            await TopApp(remote.look, remote.url, interval_s).run_async()
    finally:
        await remote.close()


def doctor(url: Url = None, port: Port = DEFAULT_PORT, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Say what the engine of a running proxy can share, what it costs, what stands in the way, and what to change."""
    findings = diagnose(get(where(url, port), "/polykv/health", api_key))
    if as_json:
        print_json([finding.as_dict() for finding in findings])
    else:
        console = paper(soft_wrap=False)
        for finding in findings:
            console.print(f"{_MARKS[finding.level]} {escape(finding.text)}")
            if finding.remedy:
                console.print(f"     → {finding.remedy}", markup=False)
    if any(finding.level is Level.BAD for finding in findings):
        raise typer.Exit(EXIT_FAILED)


def draw_tree(pools: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a pool, children below their parents: id, name, tokens (own ones of a child), KV, use, and what is unusual."""
    below: dict[int | None, list[Mapping[str, Any]]] = {}
    for pool in pools:
        below.setdefault(pool["parent"], []).append(pool)
    lines: list[str] = []
    waiting = [(pool, "", "") for pool in reversed(below.get(None, []))]
    while waiting:
        pool, lead, stem = waiting.pop()
        lines.append(f"{lead}{_pool_line(pool)}")
        children = below.get(pool["pool_id"], [])
        last = len(children) - 1
        drawn = [
            (c, f"{stem}{'└─' if n == last else '├─'} ", f"{stem}{'   ' if n == last else '│  '}") for n, c in enumerate(children)
        ]
        waiting += reversed(drawn)
    return lines or ["no pools"]


def _pool_line(pool: Mapping[str, Any]) -> str:
    tokens = f"{pool['prefix_len']} tokens"
    if pool["parent"] is not None:
        tokens += f" (+{pool['prefix_len'] - pool['branch_pos']} from {pool['branch_pos']})"
    parts = [f"{pool['pool_id']}{' ' + pool['name'] if pool['name'] else ''}", str(pool["residency"]), tokens]
    parts += [_mib(pool["own_kv_bytes"])] if pool["own_kv_bytes"] else []
    parts.append(f"hits {pool['n_hits']}/{pool['n_queries']}")
    parts += [f"running {pool['n_running']}"] if pool["n_running"] else []
    parts += [f"sessions {len(pool['sessions'])}"] if pool["sessions"] else []
    if pool["pinned"]:
        parts.append(
            "pinned" + (f" by {pool['pin_owner']}" if pool["pin_owner"] else "") + (", unused" if pool["orphaned_pin"] else "")
        )
    parts.append(f"used {_ago(pool['last_access_ts'])}")
    parts += [str(pool["reason"])] if pool["reason"] else []
    return plain("  ".join(parts))


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f} MiB"


def _context(session: Mapping[str, Any]) -> str:
    total = session.get("ctx_total")
    return f"{session['ctx_used']}/{total}" if total else ""


def _one(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} ms"


def _ago(ts: float | None) -> str:
    if ts is None:
        return ""
    seconds = max(0, int(time.time() - ts))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"
