"""`admission`: floors, who waits, decisions, and how a policy is set or removed. `capacity`: may one more session begin?

Law: over HTTP only, like all commands that talk to a running proxy; what may be set is the proxy's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias
from urllib.parse import quote

import typer
from rich.text import Text

from polykv_proxy.cli_http import DEFAULT_PORT, ApiKey, Json, Port, Url, call, fail, get, print_json, table, where
from polykv_proxy.ui.paper import paper
from polykv_proxy.ui.top.doors import admission_lines, ground, manner, room, title
from polykv_proxy.ui.top.figures import rate, seconds
from polykv_proxy.ui.top.snapshot import Snapshot

SHOWN = 10
_OPTIONS = {
    "target_tps_per_session": "--floor",
    "mode": "--mode",
    "on_saturation": "--on-saturation",
    "guarantee_min_sessions": "--guarantee",
}
_Pool = Annotated[str | None, typer.Argument(help="A pool's name or id; without one, requests that name no pool.")]
_NO_SCOPE = Annotated[bool, typer.Option("--remove", help="Remove the policy that was set there.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("admission")(admission)
    app.command("capacity")(capacity)


def admission(  # noqa: PLR0917 - typer reads options from the signature and passes them by name
    pool: _Pool = None,
    floor: Annotated[
        float | None, typer.Option("--floor", help="Set a policy: tokens per second that the mean is to keep.")
    ] = None,
    mode: Annotated[str | None, typer.Option("--mode", help="advisory (only counts) or enforced.")] = None,
    on_saturation: Annotated[str | None, typer.Option("--on-saturation", help="reject, warn or queue.")] = None,
    guarantee: Annotated[int | None, typer.Option("--guarantee", help="So many sessions begin whatever the floor says.")] = None,
    remove: _NO_SCOPE = False,
    url: Url = None,
    port: Port = DEFAULT_PORT,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Show floors, who waits and the last decisions of a running proxy; with options, set or remove a policy (admin key)."""
    asked = {"target_tps_per_session": floor, "mode": mode, "on_saturation": on_saturation, "guarantee_min_sessions": guarantee}
    fields = {name: value for name, value in asked.items() if value is not None}
    if remove and fields:
        fail("--remove goes with no other option of a policy")
    if remove or fields:
        verb = "DELETE" if remove else "POST"
        facts = call(verb, where(url, port), _path(pool, "admission"), api_key, fields or None, options=_OPTIONS)
        _changed(facts, pool, as_json=as_json, removed=remove)
    elif pool is not None:
        _policy_of(get(where(url, port), _path(pool, "admission"), api_key), as_json=as_json)
    else:
        found = get(where(url, port), "/polykv/admission", api_key)
        decisions = get(where(url, port), f"/polykv/decisions?limit={SHOWN}", api_key)
        _all(found, decisions, as_json=as_json)


def capacity(pool: _Pool = None, url: Url = None, port: Port = DEFAULT_PORT, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Say whether one more session may begin on a pool of a running proxy, how many, and what stands in the way."""
    facts = get(where(url, port), _path(pool, "capacity"), api_key)
    if as_json:
        print_json(facts)
        return
    console = paper(markup=False)
    console.print(f"{'yes' if facts['can_admit'] else 'no'}: {ground(facts)}; room: {room(facts['headroom_sessions'])}")
    mean = "" if facts["mean_active_tps"] is None else f" at {rate(facts['mean_active_tps'])} tok/s each"
    console.print(f"{facts['n_active']} decode{mean}, {facts['n_warming']} on their way, {facts['n_queued']} wait")
    if facts["mode"] is not None:
        floor = f"floor {rate(facts['target_tps_per_session'])} tok/s, {manner(facts)}"
        projected = facts["projected_mean_tps_if_admitted"]
        console.print(floor + ("" if projected is None else f"; with one more {rate(projected)} tok/s each"))
    if facts["settling"]:
        console.print(f"settling: {seconds(facts['settle_remaining_ms'] / 1000)} at most")
    if facts["kv_headroom_pct"] is not None:
        console.print(f"KV: {facts['kv_headroom_pct']:.0f} % of {facts['kv_cells_total']:,} cells can be had")
    console.print(f"slots: {facts['slots_free']} of {facts['slots_total']} free")


def _path(pool: str | None, what: str) -> str:
    return f"/polykv/{what}" if pool is None else f"/polykv/pools/{quote(pool, safe='')}/{what}"


def _all(found: Mapping[str, Any], decisions: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json({**found, "decisions": decisions["decisions"], "counts": decisions["counts"]})
        return
    console = paper()
    for line in admission_lines(Snapshot(admission=found)) or [Text("no policies and no bounds: nobody is held or refused")]:
        console.print(line)
    if found["queue"]:
        table({"place": lambda one: one["position"], **_WHOSE, "for": lambda one: one["reason"], **_WAITED}, found["queue"])
    if decisions["decisions"]:
        table({**_WHOSE, "outcome": _outcome, "why": ground, **_WAITED}, decisions["decisions"])


def _who(one: Mapping[str, Any]) -> str:
    return one["session_id"] or f"(request {one['req']})"


def _outcome(one: Mapping[str, Any]) -> str:
    return str(one["outcome"]) + (f", would be {one['would']}" if one["would"] else "")


_Columns: TypeAlias = Mapping[str, Callable[[Mapping[str, Any]], object]]
_WHOSE: _Columns = {"session": _who, "pool": lambda one: one["pool_id"]}
_WAITED: _Columns = {"waited": lambda one: seconds(one["waited_ms"] / 1000)}


def _policy_of(facts: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(facts)
        return
    policy, above = facts["policy"], facts["inherited_from"]
    console = paper(markup=False)
    if policy is None:
        console.print("no policy: nobody is held or refused")
        return
    console.print(f"floor {rate(policy['target_tps_per_session'])} tok/s, {manner(policy)}{f', of pool {above}' if above else ''}")
    console.print(", ".join(f"{name} {value}" for name, value in policy.items() if name not in {"mode", "on_saturation"}))


def _changed(facts: Mapping[str, Any], pool: str | None, *, as_json: bool, removed: bool) -> None:
    if as_json:
        print_json(facts)
        return
    whose = title({"pool_id": None if pool is None else pool, "name": pool})
    if removed:
        paper(markup=False).print(f"{whose}: {'removed' if facts['removed'] else 'there was no policy to remove'}")
    else:
        paper(markup=False).print(f"{whose}:")
        _policy_of(facts, as_json=False)
