"""What a proxy's health says about sharing prefixes: abilities, price, obstacles, remedies.

Law: pure. Each finding is a fact that the engine or the proxy reported, with what to change where something can be changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from polykv_proxy.engine.command import option_value

BUILD = (
    "build the engine with `polykv-proxy build-engine` (scripts/build_engine.sh in a checkout) and start with"
    " `polykv-proxy --engine ./llamafile -m MODEL.gguf`"
)


class Level(StrEnum):
    """How much a finding matters: it works, know this, it costs something, it does not work."""

    GOOD = "ok"
    NOTE = "note"
    WARN = "warn"
    BAD = "off"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact and what to do about it."""

    level: Level
    text: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """JSON-ready."""
        return {"level": self.level.value, "text": self.text, "remedy": self.remedy}


def diagnose(health: Mapping[str, Any]) -> list[Finding]:
    """Findings from the answer of `/polykv/health`, the most important first."""
    pools: Mapping[str, Any] = health.get("pools") or {}
    engine: Mapping[str, Any] = pools.get("engine") or {}
    findings = [
        *_engine_state(health),
        *_pools_state(pools),
        *_declared(health.get("declared") or {}),
        *_disk(health.get("kv_disk") or {}),
        *_admission(health.get("admission") or {}),
        *_gpu_share(health.get("gpu_share") or {}),
    ]
    if engine:
        findings += [
            *_model(engine),
            *_sharing(engine),
            *_price(engine),
            *_layout(engine),
            *option_findings(engine, health.get("command") or []),
        ]
    return findings


def _engine_state(health: Mapping[str, Any]) -> Iterator[Finding]:
    state = health.get("state")
    if state is not None and state != "ready":
        yield Finding(
            Level.BAD, f"the engine is {state}: {health.get('reason') or 'no reason given'}", "see last_lines in /polykv/health"
        )
    if health.get("restarts"):
        text = f"the engine was restarted {health['restarts']} times; its pools were lost each time"
        yield Finding(Level.WARN, text, "see last_lines in /polykv/health and --engine-log")


def _pools_state(pools: Mapping[str, Any]) -> Iterator[Finding]:
    if "engine" in pools:
        return
    reason = pools.get("reason") or "unknown"
    if pools.get("state") == "off":
        yield Finding(Level.BAD, f"pools are off: {reason}", pools.get("remedy") or BUILD)
    else:
        yield Finding(Level.WARN, f"not known yet whether the engine has pools: {reason}", "wait until it is ready and ask again")


def _declared(declared: Mapping[str, Any]) -> Iterator[Finding]:
    n_failed = declared.get("n_failed") or 0
    if not n_failed:
        return
    failed = [pool for pool in declared.get("pools") or () if pool["outcome"] == "failed"]
    for pool in failed:
        text = f"declared pool {pool['name']} could not be made: {pool['reason']}"
        yield Finding(Level.WARN, text, "correct the file of --pools and start again")
    if not failed:
        yield Finding(
            Level.WARN, f"{n_failed} of {declared.get('n_declared')} declared pools could not be made", "ask again with the key"
        )


def _disk(disk: Mapping[str, Any]) -> Iterator[Finding]:
    if disk.get("paused"):
        why = disk["paused"] if isinstance(disk["paused"], str) else "ask again with the key"
        yield Finding(Level.WARN, f"pools are not copied to disk at the moment: {why}", "see to the folder kv in --state-dir")
    elif disk.get("on"):
        used, most = disk["bytes_used"] / 2**20, disk["bytes_max"] / 2**20
        yield Finding(Level.GOOD, f"KV on disk: {disk['n_copies']} copies, {used:.0f} of {most:.0f} MiB")


def _gpu_share(share: Mapping[str, Any]) -> Iterator[Finding]:
    if share.get("enabled") and share.get("share_pct") is not None:
        n_peers = share["n_peers"]
        beside = f"{n_peers} other engine{'' if n_peers == 1 else 's'} on the device"
        yield Finding(Level.GOOD, f"GPU share: {beside}, weight {share['weight']:g} is {share['share_pct']:g} % of it now")
    elif share.get("gpu_key") is not None:
        why = share.get("why") or "the engine has no place in the registry"
        yield Finding(Level.WARN, f"GPU share: the device is not shared: {why}", "see docs/gpu-share.md")


def _admission(admission: Mapping[str, Any]) -> Iterator[Finding]:
    """Nothing is said where there is neither a policy nor a bound."""
    n_policies, n_enforced = admission.get("n_policies") or 0, admission.get("n_enforced") or 0
    bound = admission.get("max_running")
    parts = [f"{n_policies} policies, {n_enforced} enforced"] if n_policies else []
    parts += [f"{admission['n_running']} of at most {bound} requests running"] if bound else []
    if not parts:
        return
    counts = f"{admission['n_queued']} wait, {admission['n_refused']} were refused"
    yield Finding(Level.GOOD, f"admission: {'; '.join([*parts, counts])}")
    if n_policies and not n_enforced:
        text = f"all policies are advisory: nobody is held or refused; enforced, {admission['n_advised']} would have been"
        yield Finding(Level.NOTE, text, "set mode: enforced when the floor suits (polykv-proxy admission)")


def _model(engine: Mapping[str, Any]) -> Iterator[Finding]:
    model = engine.get("model") or {}
    name = model.get("name") or "unnamed"
    where = f"{engine.get('n_slots')} slots of {engine.get('n_ctx_slot')} tokens"
    yield Finding(Level.GOOD, f"model {name} ({model.get('arch') or 'unknown'}), fingerprint {model.get('fingerprint')}, {where}")


def _sharing(engine: Mapping[str, Any]) -> Iterator[Finding]:
    sharing, why = engine.get("prefix_sharing"), engine.get("prefix_sharing_why") or "no reason given"
    if engine.get("max_pools") == 0:
        yield Finding(Level.BAD, "the engine was started without pool ids", "start with --max-pools auto, or a number")
    if sharing == "none":
        yield Finding(Level.BAD, f"this model's memory cannot share prefixes: {why}", "use another model")
    elif sharing == "checkpoint":
        text = f"prefixes are shared at the pool's exact length only: {why}"
        yield Finding(Level.WARN, text, "make pools that end exactly where requests begin to differ")
    else:
        yield Finding(Level.GOOD, f"prefixes are shared at any length: {why}")


def _price(engine: Mapping[str, Any]) -> Iterator[Finding]:
    n, price = engine.get("max_pools") or 0, engine.get("pools_price_bytes") or 0
    if not n:
        return
    if price:
        text = f"{n} pool ids cost {price / 2**20:.1f} MiB of memory, used or not"
        yield Finding(Level.NOTE, text, "lower --max-pools if that is too much")
    else:
        yield Finding(Level.GOOD, f"{n} pool ids cost no memory until they are used")
    kv = engine.get("kv") or {}
    if kv.get("bytes_per_token") and kv.get("unified", True):
        each = kv["bytes_per_token"] / 1024
        yield Finding(
            Level.GOOD, f"a pool costs {each:.1f} KiB per token, once for all its sessions; {kv.get('cells')} cells in all"
        )


def _layout(engine: Mapping[str, Any]) -> Iterator[Finding]:
    if not (engine.get("kv") or {}).get("unified", True):
        text = "the cache is split: each pool takes as much of it as a slot, and each attach copies all of that"
        yield Finding(Level.WARN, text, "leave out --no-kv-unified")
    if engine.get("n_slots") == 1:
        text = "there is one slot: making a pool waits for it and takes its cache"
        yield Finding(Level.NOTE, text, "start with -np 2 or more, or make pools with from_session")


_DEFEATS: Sequence[tuple[tuple[str, ...], str, str]] = (
    (("--no-cache-prompt",), "--no-cache-prompt: requests reuse nothing, pools included", "leave it out"),
    (
        ("--embedding", "--embeddings", "--rerank", "--reranking"),
        "the engine runs for embeddings",
        "run another engine for generation",
    ),
    (("--sleep-idle-seconds",), "the engine sleeps when idle: pools are lost and made again", "leave out --sleep-idle-seconds"),
    (
        ("--lora", "--lora-scaled"),
        "adapters: a pool is shared only with requests of the same adapter set",
        "make a pool per adapter set",
    ),
    (("--mmproj",), "media: only the text before the first image can be shared", "put images after the shared text"),
)


def option_findings(engine: Mapping[str, Any], command: Sequence[str]) -> Iterator[Finding]:
    """Engine options that defeat or limit sharing: for `doctor`, and said once when the proxy starts."""
    if engine.get("context_shift"):
        text = "context shift is on: slots that hold shared cells are never shifted, they stop at the limit (others still shift)"
        yield Finding(Level.WARN, text, "leave out --context-shift")
    if engine.get("cache_reuse") or option_value(command, ("--cache-reuse",)) not in {None, "0"}:
        text = (
            "chunk reuse is on: shared cells are never moved, and a session whose cells were moved cannot become a pool; "
            "over a unified cache some engines drop requests under it"
        )
        yield Finding(Level.WARN, text, "leave out --cache-reuse")
    given = {argument.partition("=")[0] for argument in command}
    for flags, text, remedy in _DEFEATS:
        if given.intersection(flags):
            yield Finding(Level.WARN, text, remedy)
