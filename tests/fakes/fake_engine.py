"""A fake engine: the laws of docs/engine-protocol.md over lists of cell numbers, without HTTP.

Law: cells are counted by identity, so a share is the same cell in two places; nothing is reported that did not happen. Time passes
only at `await self.gate()`, which tests may hold. One object may live through several boots.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections import deque
from collections.abc import AsyncIterator

from tests.fakes.fake_hello import hello_of
from tests.fakes.fake_line import Line, common
from tests.fakes.fake_owners import BYTES_PER_CELL, held
from tests.fakes.fake_probs import Contents
from tests.fakes.fake_records import Ask, EngineFaultError, Facts, Seq, Slot, news
from tests.fakes.fake_room import make_room
from tests.fakes.toy_tokens import N_VOCAB, ToyTokenizer


class FakeEngine:
    """The engine. Without `unified` nothing is shared: each sequence has a stream of `n_ctx` cells.

    `gate` is awaited before each chunk of a prefill and each token; replace it to hold the engine.
    """

    def __init__(
        self,
        *,
        n_slots: int = 4,
        max_pools: int = 4,
        n_ctx: int = 4096,
        fingerprint: str = "00000000000000aa",
        unified: bool = True,
    ) -> None:
        self.key = secrets.token_hex(8)
        self.api_key: str | None = None
        self.has_verbs = True
        self.major = 1
        self.prefix_sharing = "any"
        self.n_slots, self.max_pools, self.n_ctx, self.fingerprint = n_slots, max_pools, n_ctx, fingerprint
        self.n_streams = 1 if unified else n_slots + max_pools
        self.tokenizer = ToyTokenizer()
        self.running = asyncio.Event()
        self.running.set()
        self.faults: dict[str, deque[EngineFaultError]] = {}
        self.computed = 0
        self.n_seqs_made = self.n_seqs_restored = 0
        self.kv = Contents()
        self.counters_s = 0.02
        self.gpu_share: dict[str, object] = {"enabled": False, "why": "a toy computes on no GPU"}
        self.boot()

    # -- boot, time, facts ------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """A new model context: everything is gone."""
        self.boot_id = secrets.token_hex(8)
        self.update, self.t_us = 0, 0
        self.seqs: dict[int, Seq] = {}
        self.gens: dict[int, int] = {}
        self.expendable: list[str] = []
        self.slots = [Slot(i) for i in range(self.n_slots)]
        self._cells = itertools.count(1)
        self._tasks = itertools.count(1)
        self.ring: deque[tuple[int, str, dict]] = deque(maxlen=4096)
        self._event = itertools.count(1)
        self._line = Line(self.slots)
        self.event_made = asyncio.Event()
        self.listeners_stop = False

    async def gate(self) -> None:
        """Time passes."""
        self.t_us += 1000
        await asyncio.sleep(0)
        await self.running.wait()

    def hold(self) -> None:
        """Stop the engine between two steps."""
        self.running.clear()

    def go(self) -> None:
        """Let it run on."""
        self.running.set()

    def fail_next(self, verb: str, fault: EngineFaultError) -> None:
        """The next call of this verb fails so: hello, seqs, free, session, state, dry, complete, save, restore, expendable."""
        self.faults.setdefault(verb, deque()).append(fault)

    def maybe_fail(self, verb: str) -> None:
        queue = self.faults.get(verb)
        if queue:
            raise queue.popleft()

    def publish(self) -> int:
        self.update += 1
        return self.update

    def hello(self) -> dict:
        return hello_of(self)

    def used_cells(self) -> int:
        return len({cell for holder in [*self.seqs.values(), *self.slots] for cell in holder.cells})

    def state(self) -> dict:
        return {**self._now(), **self._held(), "gpu_share": self.gpu_share}

    def _held(self) -> dict[str, list[dict]]:
        return held(list(self.seqs.values()), self.slots, self.n_ctx)

    def _now(self) -> dict:
        return {
            "boot_id": self.boot_id,
            "update": self.update,
            "phase": "ready",
            "t_us": self.t_us,
            "cells": {"used": self.used_cells(), "total": self.n_ctx * self.n_streams},
            "kv_bytes": {
                "used": self.used_cells() * BYTES_PER_CELL,
                "total": self.n_ctx * self.n_streams * BYTES_PER_CELL,
                "other": 0,
            },
        }

    # -- events -----------------------------------------------------------------------------------------------------------

    def emit(self, kind: str, ask: Ask, slot: int, facts: Facts | None = None, **more: object) -> None:
        data = {
            "type": kind,
            "t_us": self.t_us,
            "req": ask.req,
            "index": ask.index,
            "task": ask.task,
            "slot": slot,
            "session": ask.session,
            "fill": False,
            "seq": ask.seq,
            "n_prompt": len(ask.tokens),
            "n_cached": facts.n_cached if facts else 0,
            "n_shared": facts.n_shared if facts else 0,
            "miss": facts.miss if facts else None,
            "n_decoded": 0,
            "us_queued": ask.us_queued,
            "us_prompt": ask.us_prompt,
            "us_decode": 0,
            "reason": None,
            **more,
        }
        self.record(kind, data)

    def record(self, kind: str, data: dict) -> None:
        self.ring.append((next(self._event), kind, data))
        self._woken()

    async def listen(self, last_id: str | None, interval_s: float | None = None) -> AsyncIterator[tuple[str, str, dict]]:
        """The event stream as (id, event, data); counters have no id. `interval_s` 0: without counters."""
        every_s = self.counters_s if interval_s is None else interval_s
        seen: dict = {"boot_id": None}
        boot = self.boot_id
        last = self.ring[-1][0] if self.ring else 0
        yield f"{boot}-{last}", "hello", {"boot_id": boot}
        if last_id is not None:
            of_boot, _, number = last_id.rpartition("-")
            oldest = self.ring[0][0] if self.ring else last + 1
            if of_boot != boot or int(number) + 1 < oldest:
                yield f"{boot}-{last}", "resync", {"boot_id": boot, "update": self.update}
            else:
                last = int(number)
        while not self.listeners_stop:
            if self.boot_id != boot:
                boot, last = self.boot_id, 0
                yield f"{boot}-0", "resync", {"boot_id": boot, "update": self.update}
            for number, kind, data in [entry for entry in self.ring if entry[0] > last]:
                last = number
                yield f"{boot}-{number}", kind, data
            if every_s and self.boot_id == boot and (data := news(self._now(), self._held(), seen)) is not None:
                yield "", "counters", data
            if self.boot_id == boot and not self.listeners_stop and not (self.ring and self.ring[-1][0] > last):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.event_made.wait(), every_s or None)

    async def rouse(self) -> None:
        """Make listeners look again."""
        self._woken()

    def _woken(self) -> None:
        """No lock: one that is cancelled while it takes a lock back leaves it with nobody."""
        self.event_made.set()
        self.event_made = asyncio.Event()

    async def sleep_and_wake(self) -> None:
        """Idle sleep: same process, new context."""
        made = self.event_made
        self.boot()
        made.set()

    # -- sequences --------------------------------------------------------------------------------------------------------

    def seq(self, ref: str) -> Seq | None:
        number, _, _ = ref.partition(".")
        found = self.seqs.get(int(number)) if number.isdigit() else None
        return found if found is not None and found.ref == ref else None

    def new_ref(self) -> tuple[int, str]:
        first = self.n_slots
        number = next((i for i in range(first, first + self.max_pools) if i not in self.seqs), None)
        if number is None:
            raise EngineFaultError(429, "no_seq_ids", "all sequence ids are in use")
        self.gens[number] = self.gens.get(number, 0) + 1
        return number, f"{number}.{self.gens[number]}"

    def share_cells(self, cells: list[int]) -> list[int]:
        """The same cells, or copies of them."""
        return list(cells) if self.n_streams == 1 else self.kv.copied(cells, [next(self._cells) for _ in cells])

    def take_cells(self, n: int) -> list[int]:
        if not make_room(self, n):
            raise EngineFaultError(422, "too_long", "the cache is full")
        return [next(self._cells) for _ in range(n)]

    def check_make(self, body: dict) -> None:
        """Errors that are known at once."""
        self.maybe_fail("seqs")
        if self.max_pools == 0:
            raise EngineFaultError(501, "pools_off", "pools are off")
        if "session" in body:
            slot = next((s for s in self.slots if s.session == body["session"]), None)
            if slot is None:
                raise EngineFaultError(409, "session_not_resident", "no slot holds this session")
            if not 0 < body.get("n_tokens", len(slot.tokens)) <= len(slot.tokens):
                raise EngineFaultError(400, "invalid_request_error", "n_tokens is more than the session holds", "n_tokens")
        else:
            tokens = body.get("tokens")
            if not isinstance(tokens, list) or not tokens or not all(isinstance(t, int) and 0 <= t < N_VOCAB for t in tokens):
                raise EngineFaultError(400, "invalid_request_error", "tokens must be token ids", "tokens")
            if len(tokens) >= self.n_ctx:
                raise EngineFaultError(422, "too_long", "more tokens than a slot holds")
            parent = body.get("parent_seq")
            if parent is not None and self.seq(parent) is None:
                raise EngineFaultError(410, "stale_seq", "the parent is gone", "parent_seq")
            if not 0 <= body.get("branch_pos", 0) <= len(tokens):
                raise EngineFaultError(400, "invalid_request_error", "branch_pos is outside the tokens", "branch_pos")
        if len(self.seqs) >= self.max_pools:
            raise EngineFaultError(429, "no_seq_ids", "all sequence ids are in use")

    async def make(self, body: dict) -> AsyncIterator[tuple[str, dict]]:
        """Materialise or snapshot, as (event, data)."""
        if "session" in body:
            slot = next(s for s in self.slots if s.session == body["session"])
            n = body.get("n_tokens", len(slot.tokens))
            number, ref = self.new_ref()
            made = self.seqs[number] = Seq(ref, slot.tokens[:n], self.share_cells(slot.cells[:n]))
            base, shared = slot.seq, min(n, slot.n_shared)
            if n > slot.n_shared:
                slot.seq, slot.n_shared = ref, n
            self.n_seqs_made += 1
            yield "done", self._made(made, base, shared, tokens=made.tokens)
            return
        yield "queued", {}
        tokens = body["tokens"]
        parent = self.seq(body["parent_seq"]) if body.get("parent_seq") else None
        shared = min(common(parent.tokens, tokens), body.get("branch_pos", len(tokens))) if parent else 0
        cells = self.share_cells(parent.cells[:shared]) if parent else []
        boot = self.boot_id
        for start in range(shared, len(tokens), 64):
            yield "progress", {"total": len(tokens), "cached": shared, "processed": start - shared, "t_ms": 0}
            await self.gate()
            if self.boot_id != boot:
                yield "error", {"status": 503, "type": "unavailable_error", "message": "the engine sleeps", "param": None}
                return
        try:
            self.maybe_fail("prefill")
            number, ref = self.new_ref()
            self.computed += len(tokens) - shared
            made = self.seqs[number] = Seq(ref, list(tokens), cells + self.take_cells(len(tokens) - shared))
            self.kv.made(made.cells[shared:], tokens[shared:])
        except EngineFaultError as fault:
            yield "error", {"status": fault.status, "type": fault.type, "message": fault.message, "param": fault.param}
            return
        self.n_seqs_made += 1
        yield "done", self._made(made, body.get("parent_seq"), shared)

    def _made(self, seq: Seq, base: str | None, shared: int, **more: object) -> dict:
        shared = shared if self.n_streams == 1 else 0
        facts = {"seq": seq.ref, "n_tokens": len(seq.tokens), "base": base if shared else None, "n_shared": shared}
        return {**facts, "cells": len(seq.cells), "update": self.publish(), **more}

    def free(self, ref: str) -> dict:
        self.maybe_fail("free")
        found = self.seq(ref)
        if found is not None:
            del self.seqs[int(ref.partition(".")[0])]
        return {"freed": found is not None, "update": self.publish()}

    async def end_session(self, number: int) -> dict:
        self.maybe_fail("session")
        before, cancelled = self.used_cells(), 0
        for slot in self.slots:
            if slot.session != number or not number:
                continue
            if slot.state != "idle":
                slot.cancel.set()
                cancelled += 1
            slot.clear()
        return {"cancelled": cancelled, "cells_freed": before - self.used_cells(), "update": self.publish()}

    # -- requests ---------------------------------------------------------------------------------------------------------

    def _start(self, slot: Slot, ask: Ask) -> Facts:
        limit = len(ask.tokens) - 1
        own = min(common(slot.tokens, ask.tokens), limit) if ask.cache_prompt else 0
        seq = self.seq(ask.seq) if ask.seq else None
        gain = min(common(seq.tokens, ask.tokens), ask.max_shared, limit) if seq and ask.cache_prompt else 0
        shared, miss = (gain, None) if gain > own else (0, ask.miss(seq, gain, own))
        if shared:
            assert seq is not None
            slot.cells, slot.seq, slot.n_shared = self.share_cells(seq.cells[:shared]), seq.ref, shared
        else:
            slot.cells = slot.cells[:own]
            slot.n_shared = min(slot.n_shared, own)
            slot.seq = slot.seq if slot.n_shared else None
            shared = slot.n_shared if ask.seq in {None, slot.seq} else 0  # what another sequence left is the slot's own
            miss = None if shared else miss
        cached = max(shared, own)
        slot.tokens = ask.tokens[:cached]
        self.computed += len(ask.tokens) - cached
        slot.cells += self.take_cells(len(ask.tokens) - cached)
        self.kv.write(slot.cells[cached:], ask.tokens[cached:])
        slot.tokens = list(ask.tokens)
        slot.totals["n_prompt"] += len(ask.tokens) - cached
        slot.totals["n_cached"] += cached
        return Facts(slot.slot, len(ask.tokens), cached, shared, miss, self.kv.candidates(slot.cells, ask.n_probs))

    async def run(self, ask: Ask) -> AsyncIterator[Facts | int | str]:
        """One task: its facts, then its tokens, then the reason of its end. Closing it cancels."""
        slot: Slot | None = None
        facts: Facts | None = None
        reason, posted_us = "cancelled", self.t_us
        try:
            slot = await self._line.slot_for(ask)
            slot.state, slot.req, slot.session, slot.task = "prefill", ask.req, ask.session, next(self._tasks)
            ask.task, ask.us_queued, launched_us = slot.task, self.t_us - posted_us, self.t_us
            slot.cancel = asyncio.Event()
            slot.totals["n_launched"] += 1
            facts = self._start(slot, ask)
            self.emit("launched", ask, slot.slot)
            yield facts
            await self.gate()
            for number in range(ask.n_predict):
                token = self.tokenizer.encode(f" w{number}", bos=False)[0]
                slot.state = "generating"
                slot.tokens.append(token)
                slot.cells += self.take_cells(1)
                self.kv.write(slot.cells[-1:], [token])
                slot.decoded(self.t_us)
                self.publish()
                if number == 0:
                    ask.us_prompt = max(1, self.t_us - launched_us)
                    self.emit("first_token", ask, slot.slot, facts, n_decoded=1, us_decode=slot.us_decode)
                yield token
                await self.gate()
                if slot.cancel.is_set():
                    break
            else:
                reason = "limit"
            yield reason
        finally:
            if slot is None or facts is None:
                self.emit("dropped", ask, -1)
                if slot is not None:
                    slot.rest()
            else:
                if not slot.cancel.is_set():
                    slot.used_at = self.publish()
                made = {"n_decoded": slot.n_decoded, "us_decode": slot.us_decode, "reason": reason}
                slot.rest()
                self.emit("finished", ask, slot.slot, facts, **made)
                self.emit("released", ask, slot.slot, facts, **made)
            self._line.serve()
