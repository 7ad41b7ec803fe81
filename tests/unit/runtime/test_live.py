"""Mirrors runtime/live.py."""

from polykv_proxy.engine.wire import Cells, Counters, KvBytes, SeqState, SlotState, State
from polykv_proxy.runtime.live import Live


def slot(number: int, n_tokens: int) -> SlotState:
    return SlotState(slot=number, state="idle", n_tokens=n_tokens)


def live() -> Live:
    made = Live()
    made.saw(State(boot_id="b", update=1, slots=[slot(0, 1), slot(1, 2)], cells=Cells(used=3, total=9)))
    return made


def shown(made: Live) -> list[tuple[int, int]]:
    assert made.state is not None
    return [(found.slot, found.n_tokens) for found in made.state.slots]


def test_slots_that_are_told_take_the_place_of_what_they_were() -> None:
    """Others stay; numbers and cells are the newest."""
    made = live()
    made.counted(Counters(boot_id="b", update=5, t_us=7, slots=[slot(1, 20)], cells=Cells(used=21, total=9)))
    assert shown(made) == [(0, 1), (1, 20)]
    assert made.state is not None
    assert (made.state.update, made.state.t_us, made.state.cells.used) == (5, 7, 21)


def test_sequences_are_those_that_were_told_last() -> None:
    """They stay while counters do not tell of them; bytes are the newest."""
    made = live()
    seqs = [SeqState(seq="5.1", n_tokens=9, own_bytes=90)]
    made.counted(Counters(boot_id="b", update=5, seqs=seqs, kv_bytes=KvBytes(used=90, total=900)))
    made.counted(Counters(boot_id="b", update=6, kv_bytes=KvBytes(used=120, total=900)))
    assert made.state is not None
    assert (made.state.seqs, made.state.kv_bytes.used) == (seqs, 120)


def test_a_sleeping_engine_has_no_slots() -> None:
    """What it held is gone."""
    made = live()
    made.counted(Counters(boot_id="b", update=5, phase="sleeping"))
    assert shown(made) == []


def test_news_of_another_boot_wait_for_its_state() -> None:
    """Counters are added to the state of their own boot only, and to none while nobody answers."""
    made = live()
    made.counted(Counters(boot_id="c", update=5, slots=[slot(0, 99)]))
    assert shown(made) == [(0, 1), (1, 2)]
    made.lost()
    made.counted(Counters(boot_id="b", update=6, slots=[slot(0, 99)]))
    assert made.state is None
