"""What a backend tells pickers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polykv_proxy.engine.wire import Cells, Hello, KvFacts, ModelFacts, Protocol, SlotState, State
from polykv_proxy.observability.contract import Tokens, by_page, by_protocol, usage
from polykv_proxy.observability.engine_page import read_page
from polykv_proxy.runtime.rows import StateView
from tests.fakes.state_view import FULL, pool

HELLO = Hello(
    protocol=Protocol(major=1), boot_id="b", model=ModelFacts(fingerprint="f"), n_slots=4, n_ctx=100, n_ctx_slot=100, max_pools=4,
    n_seq_max=8, kv=KvFacts(cells=100, bytes_per_token=10), prefix_sharing="any",
)  # fmt: skip
TOKENS = Tokens(10, 5, 3)


def slot(number: int, state: str = "generating", **facts: object) -> SlotState:
    return SlotState(slot=number, state=state, **facts)  # type: ignore[arg-type]


def state(*slots: SlotState, used: int = 0, total: int = 100) -> State:
    return State(boot_id="b", update=1, slots=list(slots), cells=Cells(used=used, total=total))


def pools(*rows: tuple[int, int | None, int, str | None]) -> StateView:
    """Resident pools: id, parent, own tokens, what keeps them."""
    made = [pool(i, parent=parent, own_kv_bytes=own * 10, kept_by=kept) for i, parent, own, kept in rows]
    return replace(FULL, pools=tuple(made))


def test_running_are_the_slots_that_generate_and_waiting_is_who_has_none() -> None:
    """A materialisation is no request; the tasks of one request are one request that does not wait."""
    slots = [slot(0, req=7), slot(1, req=7), slot(2, "prefill"), slot(3, fill=True)]
    facts = by_protocol(pools(), HELLO, state(*slots), TOKENS, 5)
    assert (facts.n_running, facts.n_waiting) == (3, 3)


def test_without_an_engine_everyone_waits_and_nothing_is_said_of_its_cache() -> None:
    """Counts stay what they were."""
    facts = by_protocol(pools(), HELLO, None, TOKENS, 2)
    assert (facts.n_running, facts.n_waiting, facts.tokens, facts.usage, facts.n_cells) == (0, 2, TOKENS, None, None)


def test_what_can_be_evicted_is_free() -> None:
    """Cells of idle slots and of pools that nothing keeps do not count; shared cells count once (they are the pool's)."""
    at = state(slot(0, n_tokens=30, n_shared=20), slot(1, "idle", n_tokens=15, n_shared=10), used=50)
    assert usage(pools((1, None, 20, None)), HELLO, at) == pytest.approx(0.25)
    assert usage(pools((1, None, 20, "running")), HELLO, at) == pytest.approx(0.45)


@pytest.mark.parametrize(
    ("kept", "used"),
    [
        ((None, "pinned", "children"), 0.2),
        (("children", None, None), 0.0),
        (("in_use_below", "running", None), 0.2),
        ((None, None, None), 0.0),
    ],
)
def test_a_parent_can_go_only_after_its_children(kept: tuple[str | None, ...], used: float) -> None:
    """Ten cells each: a pool above one that stays is in use, whatever else it says of itself."""
    view = pools((1, None, 10, kept[0]), (2, 1, 10, kept[1]), (3, 1, 10, kept[2]))
    assert usage(view, HELLO, state(used=30)) == pytest.approx(used)


def test_usage_is_a_ratio_whatever_the_counts_say() -> None:
    """Between 0 and 1, also while counts of two moments disagree; without cells it is the slots at work."""
    idle = [slot(n, "idle", n_tokens=50) for n in range(4)]
    assert usage(pools(), HELLO, state(*idle, used=10)) == 0.0
    assert usage(pools(), HELLO, state(used=300)) == 1.0
    assert usage(pools(), HELLO, state(slot(0), slot(1, "idle"), used=0, total=0)) == 0.5


def test_an_engine_without_our_protocol_speaks_by_its_page() -> None:
    """Requests and tokens are llama.cpp's own counts; without a page only what is in flight is known."""
    page = read_page(
        b"llamacpp:requests_processing 2\nllamacpp:requests_deferred 3\nllamacpp:prompt_tokens_total 40\n"
        b"llamacpp:prompt_tokens_cached_total 10\nllamacpp:tokens_predicted_total nan\n"
    )
    facts = by_page(page, 9)
    assert (facts.n_running, facts.n_waiting, facts.tokens, facts.usage) == (2, 3, Tokens(50, 10, 0), None)
    assert by_page(None, 9).n_running == 9
    assert by_page(None, 9).tokens is None
