"""The engine protocol's messages (docs/engine-protocol.md), parsed strictly enough to trust and loosely enough to age.

Law: unknown fields are ignored, missing ones have the page's defaults, wrong types are an EngineError at this edge.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from polykv_proxy.core import events
from polykv_proxy.core.events import EngineFacts, EngineSnapshot, SlotEvent, SlotEventKind, SlotReading
from polykv_proxy.core.pools import SeqRef
from polykv_proxy.core.sessions import is_own
from polykv_proxy.core.vault import KvPrices

PROTOCOL_MAJOR = 1
_WHOLE_BITS = 15.5


class Wire(BaseModel):
    """A message."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class Protocol(Wire):
    """Version of the protocol."""

    major: int
    minor: int = 0


class ModelFacts(Wire):
    """The loaded model."""

    fingerprint: str
    name: str = ""
    arch: str = ""
    size_bytes: int = 0
    n_params: int = 0
    n_vocab: int = 0
    n_ctx_train: int = 0
    n_swa: int = 0
    recurrent: bool = False
    hybrid: bool = False
    multimodal: bool = False

    @property
    def quantised(self) -> bool:
        """Less than 16 bits a weight. What does not tell its size is taken for whole."""
        return 0 < 8 * self.size_bytes < _WHOLE_BITS * self.n_params


class KvFacts(Wire):
    """The cache's layout and prices. Of a split cache each sequence has a stream, a part of its own; `cells` are those of all."""

    unified: bool = True
    streams: int = 1
    cells: int = 0
    cells_swa: int = 0
    bytes_per_token: float = 0
    bytes_per_token_swa: float = 0
    bytes_recurrent_per_seq: int = 0


class Hello(Wire):
    """`GET hello`."""

    protocol: Protocol
    boot_id: str
    phase: str = "ready"
    model: ModelFacts
    n_slots: int
    n_ctx: int
    n_ctx_slot: int
    max_pools: int
    n_seq_max: int
    pools_price_bytes: int = 0
    kv: KvFacts = KvFacts()
    prefix_sharing: str
    prefix_sharing_why: str = ""
    context_shift: bool = False
    cache_reuse: int = 0
    speculative: bool = False

    @property
    def cuts_files(self) -> bool:
        """Can a file hold a part of a sequence, to be restored onto a parent?"""
        return self.prefix_sharing == "any" and self.kv.unified

    def kv_prices(self) -> KvPrices:
        """What KV costs."""
        kv = self.kv
        return KvPrices(kv.bytes_per_token, kv.bytes_per_token_swa, self.model.n_swa, kv.bytes_recurrent_per_seq)

    def facts(self) -> EngineFacts:
        """What decisions depend on."""
        return EngineFacts(
            boot_id=self.boot_id,
            fingerprint=self.model.fingerprint,
            n_vocab=self.model.n_vocab,
            n_ctx_slot=self.n_ctx_slot,
            max_pools=self.max_pools,
            prefix_sharing=self.prefix_sharing,
            prefix_sharing_why=self.prefix_sharing_why,
        )


class SeqState(Wire):
    """One sequence in `state`. What it owns of what is in use, and the host memory of its checkpoints, are no other sequence's."""

    seq: str
    n_tokens: int
    cells: int = 0
    own_cells: int = 0
    own_bytes: int = 0
    checkpoint_bytes: int = 0


class SlotTotals(Wire):
    """Monotonic counters of a slot."""

    n_decoded: int = 0
    us_decode: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    n_launched: int = 0
    t_last_token_us: int = 0

    def value(self) -> events.SlotTotals:
        """As the core takes it."""
        return events.SlotTotals(self.n_decoded, self.n_prompt, self.n_cached)


class SlotState(Wire):
    """One slot in `state`."""

    slot: int
    state: str
    req: int = 0
    task: int = -1
    session: int = 0
    fill: bool = False
    seq: str | None = None
    n_shared: int = 0
    n_tokens: int = 0
    n_ctx: int = 0
    own_cells: int = 0
    own_bytes: int = 0
    checkpoint_bytes: int = 0
    n_decoded: int = 0
    us_decode: int = 0
    totals: SlotTotals = SlotTotals()

    @property
    def ours(self) -> bool:
        """Does it generate nothing for anybody?"""
        return self.fill or is_own(self.session)

    def reading(self) -> SlotReading:
        """As the core takes it."""
        task = -1 if self.state == "idle" else self.task
        return SlotReading(self.slot, task, self.req, self.session, self.ours, self.n_decoded, self.us_decode, self.totals.value())


class Cells(Wire):
    """Cells of the cache."""

    used: int = 0
    total: int = 0


class KvBytes(Wire):
    """Bytes of the caches: in use, of those what no sequence and no slot in the lists owns, and in all."""

    used: int = 0
    other: int = 0
    total: int = 0


class GpuShare(Wire):
    """What the engine shares its device by; `why` it does not. `slot` is -1 while it has no place in the registry."""

    enabled: bool = False
    why: str | None = None
    gpu_key: str | None = None
    slot: int = -1
    weight: float = 1.0


class State(Wire):
    """`GET state`."""

    boot_id: str
    update: int
    phase: str = "ready"
    t_us: int = 0
    seqs: list[SeqState] = []
    slots: list[SlotState] = []
    cells: Cells = Cells()
    cells_swa: Cells = Cells()
    kv_bytes: KvBytes = KvBytes()
    gpu_share: GpuShare = GpuShare()

    def work(self) -> object:
        """What is another value whenever the engine has done something. `update` counts only while a slot works: of an idle engine
        it moves with every question that somebody asks."""
        busy = any(slot.state != "idle" for slot in self.slots)
        slots = tuple((slot.state, slot.task, slot.n_tokens, slot.totals) for slot in self.slots)
        return self.boot_id, self.update if busy else None, self.cells.used, slots

    def snapshot(self) -> EngineSnapshot:
        """What decisions depend on."""
        return EngineSnapshot(
            boot_id=self.boot_id,
            seqs=tuple(SeqRef.parse(seq.seq) for seq in self.seqs),
            reqs=frozenset(slot.req for slot in self.slots if slot.req and slot.state != "idle"),
            sessions=frozenset(slot.session for slot in self.slots if slot.session),
        )


class Counters(Wire):
    """Data of one `counters` event: the slots that changed, and all sequences when one of them did."""

    boot_id: str
    update: int = 0
    phase: str = "ready"
    t_us: int = 0
    slots: list[SlotState] = []
    seqs: list[SeqState] | None = None
    cells: Cells = Cells()
    kv_bytes: KvBytes = KvBytes()

    def value(self) -> events.Counters:
        """As the core takes it."""
        return events.Counters(self.boot_id, self.t_us, tuple(slot.reading() for slot in self.slots))


class Progress(Wire):
    """`progress` of a materialisation."""

    total: int = 0
    cached: int = 0
    processed: int = 0
    t_ms: float = 0


class Made(Wire):
    """`done` of a materialisation."""

    seq: str
    n_tokens: int
    base: str | None = None
    n_shared: int = 0
    cells: int = 0
    tokens: list[int] | None = None
    update: int = 0

    @property
    def ref(self) -> SeqRef:
        """The sequence as a value."""
        return SeqRef.parse(self.seq)

    @property
    def base_ref(self) -> SeqRef | None:
        """Whose cells its first `n_shared` tokens are."""
        return SeqRef.parse(self.base) if self.base is not None else None


class SlotEventWire(Wire):
    """Data of one slot event."""

    type: SlotEventKind
    t_us: int = 0
    req: int = 0
    index: int = 0
    task: int = -1
    slot: int = -1
    session: int = 0
    fill: bool = False
    seq: str | None = None
    n_prompt: int = 0
    n_cached: int = 0
    n_shared: int = 0
    miss: str | None = None
    n_decoded: int = 0
    us_queued: int = 0
    us_prompt: int = 0
    us_decode: int = 0
    reason: str | None = None

    def value(self) -> SlotEvent:
        """As the core takes it."""
        return SlotEvent(
            kind=self.type,
            req=self.req,
            index=self.index,
            session=self.session,
            seq=SeqRef.parse(self.seq) if self.seq else None,
            task=self.task,
            slot=self.slot,
            fill=self.fill or is_own(self.session),
            n_prompt=self.n_prompt,
            n_cached=self.n_cached,
            n_shared=self.n_shared,
            n_decoded=self.n_decoded,
            miss=self.miss,
            reason=self.reason,
            t_us=self.t_us,
            us_queued=self.us_queued,
            us_prompt=self.us_prompt,
            us_decode=self.us_decode,
        )


class Freed(Wire):
    """`DELETE seqs/{seq}`."""

    freed: bool
    update: int = 0


class SessionEnded(Wire):
    """`DELETE sessions/{n}`."""

    cancelled: int = 0
    cells_freed: int = 0
    update: int = 0


class EvictedNotice(Wire):
    """Data of `evicted` events."""

    seq: str


class BootNotice(Wire):
    """Data of `hello` and `resync` events."""

    boot_id: str
    update: int = 0
