"""The view of everything: records, the engine's snapshot and its speeds, put together into rows.

Law: reads only, awaits nothing. KV is counted by ownership (accounts.py). A session is `active` when it decodes and its speed is
known, `warming` when it runs without, else `idle`. Rows of sessions that rest are made once (resting.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from polykv_proxy.core.admission.policy import Ruling
from polykv_proxy.core.ledger import Ledger
from polykv_proxy.core.lifetime import WITH_KV
from polykv_proxy.core.pools import Pool
from polykv_proxy.core.pressure import compaction_pressure
from polykv_proxy.core.sessions import Session
from polykv_proxy.core.throughput import Speed, Throughput, mean, owner_of
from polykv_proxy.engine.wire import Hello, SlotState, State
from polykv_proxy.ports import Clock
from polykv_proxy.runtime.accounts import Accounts
from polykv_proxy.runtime.admission_rows import policy_row
from polykv_proxy.runtime.resting import Resting
from polykv_proxy.runtime.rows import PoolRow, PoolSession, SessionRow, StateView, Whole, as_json
from polykv_proxy.runtime.savings import as_object
from polykv_proxy.runtime.telemetry import Telemetry, millis


class View:
    """Looks at one ledger and one engine. `ruling`: the admission policy of a pool."""

    def __init__(self, ledger: Ledger, telemetry: Telemetry, clock: Clock) -> None:
        self._ledger = ledger
        self._telemetry = telemetry
        self._clock = clock
        self.ruling: Callable[[int], Ruling | None] = lambda _: None
        self._resting = Resting[SessionRow]()
        self._resting_of_pool = Resting[PoolSession]()

    def look(self, hello: Hello | None, state: State | None) -> StateView:
        """Everything now. `hello` None: no engine is known yet; `state` None: it does not answer."""
        accounts = Accounts(self._ledger, state)
        speeds = _Speeds(self._telemetry.throughput, self._clock.monotonic())
        self._resting.begin()
        self._resting_of_pool.begin()
        sessions = self._sessions(accounts, speeds, hello)
        return StateView(
            seq=self._telemetry.news.number(),
            ts=self._clock.wall(),
            linked=state is not None,
            boot_id=state.boot_id if state else None,
            whole=self._whole(accounts, speeds, sessions, hello, state),
            pools=tuple(self._pool(pool, accounts, speeds) for pool in self._ledger.tree),
            sessions=sessions,
            gpu=self._telemetry.peers.look(),
        )

    def pool(self, pool: Pool, state: State | None) -> Mapping[str, object]:
        """One pool, JSON-ready."""
        speeds = _Speeds(self._telemetry.throughput, self._clock.monotonic())
        return as_json(self._pool(pool, Accounts(self._ledger, state), speeds))

    # -- pools --------------------------------------------------------------------------------------------------------

    def _pool(self, pool: Pool, accounts: Accounts, speeds: _Speeds) -> PoolRow:
        uses = accounts.uses
        children = self._ledger.tree.children(pool.pool_id)
        sessions = sorted(self._ledger.sessions.of_pool(pool.pool_id), key=lambda session: session.number)
        unused = not children and not sessions and not uses.running[pool.pool_id]
        return PoolRow(
            pool_id=pool.pool_id,
            name=pool.name,
            parent=pool.parent,
            branch_pos=pool.branch_pos,
            prefix_len=pool.prefix_len,
            prefix_hash=pool.hashed.hex,
            n_shared=pool.n_shared,
            residency=pool.residency.value,
            reason=pool.reason,
            source=pool.source,
            own_kv_bytes=accounts.own_bytes(pool.pool_id),
            subtree_kv_bytes=accounts.subtree_bytes(pool.pool_id),
            checkpoint_bytes=accounts.checkpoint_bytes(pool.pool_id),
            pinned=pool.pin is not None,
            pin_owner=pool.pin.owner if pool.pin else None,
            pin_until_ts=pool.pin.until_ts if pool.pin else None,
            orphaned_pin=pool.pin is not None and unused,
            kept_by=keep.value if (keep := uses.keep(pool)) and pool.residency in WITH_KV else None,
            n_running=uses.running[pool.pool_id],
            children=tuple(children),
            sessions=tuple(self._of_pool(session, accounts, speeds) for session in sessions),
            n_queries=pool.counts.n_queries,
            n_hits=pool.counts.n_hits,
            n_tokens_shared=pool.counts.n_tokens_shared,
            n_rebuilds=pool.counts.n_rebuilds,
            n_restores=pool.counts.n_restores,
            saved_bytes=pool.copy.n_bytes if pool.copy else 0,
            n_verifies=pool.checks.n_checks,
            n_mismatches=pool.checks.n_mismatches,
            verified_ts=pool.checks.last_ts,
            verify_verdict=pool.checks.last.value if pool.checks.last else None,
            savings=as_object(self._telemetry.savings.of_pool(pool.pool_id)),
            policy=policy_row(self.ruling(pool.pool_id), pool.pool_id),
            ttl_s=pool.ttl_s,
            expires_ts=pool.failure.until_ts if pool.failure is not None and pool.unmade else None,
            created_ts=pool.created_ts,
            last_access_ts=pool.last_used_ts,
        )

    def _of_pool(self, session: Session, accounts: Accounts, speeds: _Speeds) -> PoolSession:
        def make() -> PoolSession:
            return _pool_session(session, accounts, speeds)

        if not _rests(session, accounts, speeds):
            return make()
        return self._resting_of_pool.row(session, speeds.speed(session.number), None, make)

    # -- sessions -----------------------------------------------------------------------------------------------------

    def _sessions(self, accounts: Accounts, speeds: _Speeds, hello: Hello | None) -> tuple[SessionRow, ...]:
        """All named sessions by age, then the running requests that named none; what generates nothing is no session."""
        named = sorted(self._ledger.sessions, key=lambda session: session.number)
        unnamed = [slot for slot in accounts.by_session.get(0, []) if slot.state != "idle" and not slot.fill]
        n_ctx = hello.n_ctx_slot if hello is not None else None
        return (
            *(self._named(session, accounts, speeds, n_ctx) for session in named),
            *(self._ephemeral(slot, speeds) for slot in unnamed),
        )

    def _named(self, session: Session, accounts: Accounts, speeds: _Speeds, n_ctx: int | None) -> SessionRow:
        def make() -> SessionRow:
            return _named(session, accounts.by_session.get(session.number, []), speeds, n_ctx)

        if not _rests(session, accounts, speeds):
            return make()
        return self._resting.row(session, speeds.speed(session.number), n_ctx, make)

    def _ephemeral(self, slot: SlotState, speeds: _Speeds) -> SessionRow:
        book = self._ledger.books.get(slot.req)
        owner = owner_of(0, slot.task)
        return _row(
            slot,
            slot.n_ctx,
            speeds,
            owner,
            session_id=None,
            ephemeral=True,
            req=slot.req or None,
            pool_id=book.pool_id if book else None,
            state=speeds.state(owner, runs=True),
            n_streams=1,
            n_turns=1,
            n_slots=1,
            created_ts=None,
            last_used_ts=None,
        )

    # -- the whole ----------------------------------------------------------------------------------------------------

    def _whole(
        self,
        accounts: Accounts,
        speeds: _Speeds,
        sessions: Sequence[SessionRow],
        hello: Hello | None,
        state: State | None,
    ) -> Whole:
        slots = state.slots if state else []
        active = [row.tps_ewma for row in sessions if row.state == "active" and row.tps_ewma is not None]
        used, total = (state.cells.used, state.cells.total) if state else (0, 0)
        saved = self._telemetry.savings.of_all().hits
        contexts = [(row.ctx_used, row.ctx_total or 0) for row in sessions]
        return Whole(
            aggregate_tps=speeds.aggregate(),
            prompt_tps=speeds.prompt(),
            mean_active_tps=mean(active),
            n_active=len(active),
            n_warming=sum(row.state == "warming" for row in sessions),
            compaction_pressure=compaction_pressure(total - used + accounts.idle_cells, total, contexts),
            cells_used=used,
            cells_total=total,
            slots_busy=sum(slot.state != "idle" for slot in slots),
            slots_total=len(slots) or (hello.n_slots if hello else 0),
            seq_ids_used=len(state.seqs) if state else 0,
            seq_ids_max=hello.max_pools if hello else 0,
            **_streams(hello, state),
            kv_bytes_used=state.kv_bytes.used if state else 0,
            kv_bytes_total=state.kv_bytes.total if state else 0,
            kv_bytes=accounts.all_bytes(),
            other_kv_bytes=accounts.other_bytes(),
            saved_tokens=saved.n_tokens,
            saved_s=round(saved.seconds, 3),
        )


class _Speeds:
    """Figures of one moment."""

    def __init__(self, throughput: Throughput, now: float) -> None:
        self._throughput = throughput
        self._now = now
        self._running = throughput.owners()

    def runs(self, owner: int) -> bool:
        """Has it a task that is not over?"""
        return owner in self._running

    def speed(self, owner: int) -> Speed | None:
        """What is known of it."""
        return self._throughput.speed(owner)

    def tps(self, owner: int) -> float | None:
        return _rounded(self._throughput.tps(owner, self._now))

    def state(self, owner: int, *, runs: bool) -> str:
        """1. Idle; 2. decoding with a figure; 3. without one, in its prompt, or queued."""
        if not runs:
            return "idle"
        known = self._throughput.generating(owner) and self.tps(owner) is not None
        return "active" if known else "warming"

    def turn(self, owner: int) -> dict[str, float | None]:
        speed = self._throughput.speed(owner)
        turn = speed.turn if speed else None
        return {
            "tps_ewma": self.tps(owner),
            "tps_last_turn": _rounded(speed.last_tps) if speed else None,
            "ttft_ms": millis(turn.ttft_s) if turn else None,
            "tpot_ms": millis(turn.tpot_s) if turn else None,
            "queue_ms": millis(turn.queue_s) if turn else None,
            "prompt_tps": _rounded(turn.prompt_tps) if turn else None,
        }

    def aggregate(self) -> float:
        return round(self._throughput.aggregate_tps(self._now), 3)

    def prompt(self) -> float:
        return round(self._throughput.prompt_tps(self._now), 3)


def _streams(hello: Hello | None, state: State | None) -> dict[str, int | None]:
    """Of a split cache: how many sequences it has room for, how many of them hold nothing, and the room of each."""
    if hello is None or state is None or hello.kv.unified:
        return {"kv_streams_total": None, "kv_streams_free": None, "kv_cells_per_stream": None}
    taken = len(state.seqs) + sum(slot.n_tokens > 0 or slot.state != "idle" for slot in state.slots)
    return {
        "kv_streams_total": hello.kv.streams,
        "kv_streams_free": max(0, hello.kv.streams - taken),
        "kv_cells_per_stream": hello.kv.cells // hello.kv.streams,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _rests(session: Session, accounts: Accounts, speeds: _Speeds) -> bool:
    """Nothing runs for it, and no slot holds anything of it: its row depends on its record and its last figures alone."""
    return session.n_streams == 0 and not speeds.runs(session.number) and not accounts.holds(session.number)


def _pool_session(session: Session, accounts: Accounts, speeds: _Speeds) -> PoolSession:
    slots = accounts.by_session.get(session.number, [])
    figures = speeds.turn(session.number)
    return PoolSession(
        session_id=session.session_id,
        state=speeds.state(session.number, runs=session.n_streams > 0),
        suffix_n_tokens=sum(max(0, slot.n_tokens - slot.n_shared) for slot in slots),
        marginal_kv_bytes=accounts.session_bytes(session.number),
        tps_ewma=figures["tps_ewma"],
        ttft_ms=figures["ttft_ms"],
    )


def _named(session: Session, slots: Sequence[SlotState], speeds: _Speeds, n_ctx: int | None) -> SessionRow:
    return _row(
        _main(slots),
        n_ctx,
        speeds,
        session.number,
        session_id=session.session_id,
        ephemeral=False,
        req=None,
        pool_id=session.pool_id,
        state=speeds.state(session.number, runs=session.n_streams > 0),
        n_streams=session.n_streams,
        n_turns=session.n_turns,
        n_slots=len(slots),
        created_ts=session.created_ts,
        last_used_ts=session.last_used_ts,
    )


def _main(slots: Sequence[SlotState]) -> SlotState | None:
    """The slot to show of several: a working one first, then the one with the most tokens."""
    return max(slots, key=lambda slot: (slot.session != 0, slot.state != "idle", slot.n_tokens), default=None)


def _row(slot: SlotState | None, n_ctx: int | None, speeds: _Speeds, owner: int, **facts: object) -> SessionRow:
    used, total = slot.n_tokens if slot else 0, (slot.n_ctx if slot else n_ctx) or None
    return SessionRow(
        **facts,  # type: ignore[arg-type]
        **speeds.turn(owner),  # type: ignore[arg-type]
        resident=slot is not None,
        slot=slot.slot if slot else None,
        ctx_used=used,
        ctx_total=total,
        ctx_headroom_tokens=max(0, total - used) if total else None,
        n_shared=slot.n_shared if slot else 0,
    )
