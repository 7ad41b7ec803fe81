"""How the fake engine makes room when its cells run out: idle slots first, then sequences that it was told it may give up.

Law: nothing that is in use goes; what goes is told as an event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fakes.fake_records import EngineFaultError

if TYPE_CHECKING:
    from tests.fakes.fake_engine import FakeEngine


def set_expendable(engine: FakeEngine, body: dict) -> dict:
    """`POST expendable`: the list takes the place of the one before."""
    engine.maybe_fail("expendable")
    refs = body.get("seqs")
    if not isinstance(refs, list) or not all(isinstance(ref, str) and ref.count(".") == 1 for ref in refs):
        raise EngineFaultError(400, "invalid_request_error", 'a sequence is written seq.gen, for example "5.3"')
    engine.expendable = refs
    return {"n": sum(engine.seq(ref) is not None for ref in refs)}


def make_room(engine: FakeEngine, n: int) -> bool:
    """Until `n` cells are free; False when that cannot be had."""
    total = engine.n_ctx * engine.n_streams
    for slot in sorted(engine.slots, key=lambda s: s.used_at):
        if engine.used_cells() + n > total and slot.state == "idle":
            slot.clear()
    while engine.used_cells() + n > total and engine.n_streams == 1 and engine.expendable:
        ref = engine.expendable.pop(0)
        if engine.seq(ref) is not None:
            del engine.seqs[int(ref.partition(".")[0])]
            engine.record("evicted", {"type": "evicted", "t_us": engine.t_us, "seq": ref})
    return engine.used_cells() + n <= total
