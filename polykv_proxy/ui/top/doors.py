"""Admission in the head of the terminal: who runs and waits, each floor with the room above it, the last decision.

Law: pure; nothing where there is neither a policy nor a bound. What callers named is text, never markup.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from polykv_proxy.ui.top.figures import rate, seconds
from polykv_proxy.ui.top.snapshot import Facts, Snapshot

SHOWN = 4
"""Policies; the rest is a number."""
_UNTOLD = frozenset({"continuation", "no_policy"})
_NO_LIMIT = 1_000_000
_GREEN, _YELLOW, _GREY = "#57b871", "#d9a02f", "#808896"


def admission_lines(snapshot: Snapshot) -> list[Text]:
    """The lines, none without anything to decide."""
    found = snapshot.admission
    policies = found.get("policies") or []
    if not policies and not found.get("max_running"):
        return []
    lines = [_running(found, snapshot.decisions), *(_policy(one) for one in policies[:SHOWN])]
    return lines + ([Text(f"  and {len(policies) - SHOWN} policies more", _GREY)] if len(policies) > SHOWN else [])


def ground(found: Facts) -> str:
    """Why, and by which figures."""
    value, threshold = found.get("value"), found.get("threshold")
    against = "" if value is None or threshold is None else f" ({rate(value)} against {rate(threshold)})"
    return f"{found['reason']}{against}"


def room(n_sessions: int) -> str:
    """How many more may begin."""
    return "no limit" if n_sessions >= _NO_LIMIT else f"{n_sessions:,}"


def title(policy: Facts) -> str:
    """Whose policy it is."""
    return "requests without a pool" if policy["pool_id"] is None else policy["name"] or f"pool {policy['pool_id']}"


def manner(policy: Facts) -> str:
    """What is done at the floor."""
    return f"{policy['mode']}: {'' if policy['mode'] == 'enforced' else 'would '}{policy['on_saturation']}"


def _running(found: Facts, decisions: Facts) -> Text:
    most = f" of {found['max_running']}" if found.get("max_running") else ""
    text = Text(f"admission: {found['n_running']}{most} running, ")
    longest = max((one["waited_ms"] for one in found["queue"]), default=0)
    waiting = f"{found['n_queued']} waiting" + (f" (longest {seconds(longest / 1000)})" if found["queue"] else "")
    text.append(waiting, _YELLOW if found["n_queued"] else "")
    last = next(_told(decisions), None)
    if last is not None:
        who = last["session_id"] or f"request {last['req']}"
        text.append(f"; last: {who} {last['outcome'].replace('_', ' ')}, {ground(last)}")
    return text


def _told(decisions: Facts) -> Iterator[Facts]:
    return (one for one in decisions.get("decisions") or () if one["arm"] not in _UNTOLD)


def _policy(policy: Facts) -> Text:
    settling = f"settling, {seconds(policy['settle_remaining_ms'] / 1000)} at most" if policy["settling"] else ground(policy)
    parts = f"{policy['n_pool_sessions']} sessions, {policy['n_queued']} waiting, room {room(policy['headroom_sessions'])}  "
    return Text.assemble(
        (f"  {title(policy)}", "bold"),
        f"  floor {rate(policy['floor_tps'])} tok/s, {manner(policy)}  {parts}",
        (settling, _GREEN if policy["can_admit"] else _YELLOW),
    )
