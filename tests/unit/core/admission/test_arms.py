"""Mirrors core/admission/arms.py and verdict.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.admission.arms import Scope, Taken, examine, fits_at_all, room_by_matter, running
from polykv_proxy.core.admission.forecast import Projection
from polykv_proxy.core.admission.load import Load
from polykv_proxy.core.admission.reservations import Need
from polykv_proxy.core.admission.verdict import Arm, Finding, Reason

LOAD = Load(20.0, 3, 0, slots_total=8, slots_busy=3, cells_total=1000, cells_free=300, cells_idle=100, n_ctx_slot=800)
SPLIT = replace(LOAD, streams_total=4, streams_free=1, cells_per_stream=250)
SCOPE = Scope(n_attached=3, guarantee=1, floor=10.0, settling_s=None, projection=Projection(15.0))
NEED = Need(1, 60, 40)


@pytest.mark.parametrize(
    ("load", "taken", "need", "scope", "finding"),
    [
        (LOAD, Taken(), NEED, SCOPE, Finding(True, Arm.NONE, Reason.OK, 15.0, 10.0)),
        (LOAD, Taken(cells=350), NEED, SCOPE, Finding(False, Arm.CONTEXT, "context headroom exhausted", 100, 50)),
        (SPLIT, Taken(slots=1), NEED, SCOPE, Finding(False, Arm.STREAMS, "no free stream (split cache)", 0, 1)),
        (LOAD, Taken(slots=5), NEED, SCOPE, Finding(False, Arm.SLOTS, "no free slot", 0, 1)),
        (LOAD, Taken(), NEED, replace(SCOPE, n_attached=0), Finding(True, Arm.GUARANTEE, "guaranteed minimum", 0, 1)),
        (LOAD, Taken(cells=251), NEED, SCOPE, Finding(False, Arm.KV, "kv headroom exhausted", 0.049, 0.05)),
        (LOAD, Taken(), NEED, replace(SCOPE, settling_s=2.5), Finding(False, Arm.SETTLING, "measurement settling", 2.5, 0.0)),
        (LOAD, Taken(), NEED, replace(SCOPE, floor=16), Finding(False, Arm.FLOOR, "projected mean tps below floor", 15.0, 16)),
        (
            LOAD,
            Taken(),
            NEED,
            replace(SCOPE, projection=Projection(15.0, 9.0, idle=True)),
            Finding(False, Arm.FLOOR, "projected mean tps below floor (idle estimate)", 9.0, 10.0),
        ),
        (
            LOAD,
            Taken(),
            NEED,
            replace(SCOPE, projection=Projection(unknown=True)),
            Finding(False, Arm.FLOOR, "mean tps unknown while sessions are warming", None, 10.0),
        ),
        (LOAD, Taken(), NEED, replace(SCOPE, projection=Projection()), Finding(True, Arm.NONE, "ok", None, 10.0)),
    ],
)
def test_each_arm_says_what_it_measured_and_against_what(
    load: Load, taken: Taken, need: Need, scope: Scope, finding: Finding
) -> None:
    """The reasons are the documents' own, to the letter."""
    assert examine(load, taken, need, scope, settled=False) == finding


def test_what_never_fits_is_told_from_what_does_not_fit_now() -> None:
    """A prompt and one token within the context, the stream and all cells: answers are cut there, prompts are not."""
    assert fits_at_all(LOAD, 700, Need(1, 99, 5000)).ok
    assert fits_at_all(LOAD, 700, Need(1, 100)) == Finding(False, Arm.NEVER_FITS, Reason.NEVER_FITS, 801, 800)
    assert fits_at_all(SPLIT, 200, Need(1, 50)) == Finding(False, Arm.NEVER_FITS, Reason.NEVER_FITS, 251, 250)
    assert fits_at_all(LOAD, 100, Need(9, 100)) == Finding(False, Arm.NEVER_FITS, Reason.NEVER_FITS, 1009, 1000)
    assert fits_at_all(Load(), 10**9, Need(1, 10**9)).ok


def test_where_nothing_runs_only_the_prompt_has_to_fit() -> None:
    """Waiting would bring no more cells than there are; a session that runs, or is on its way, may give some back."""
    first, idle = replace(SCOPE, n_attached=0), replace(LOAD, slots_busy=0)
    assert examine(idle, Taken(), Need(1, 60, 740), first, settled=False).arm is Arm.GUARANTEE
    assert room_by_matter(idle, Taken(), Need(1, 60, 740), reserve=False) == 1
    assert examine(idle, Taken(), Need(1, 400, 5), first, settled=False) == Finding(
        False, Arm.CONTEXT, "context headroom exhausted", 401, 400
    )
    for load, taken in ((LOAD, Taken()), (idle, Taken(1, 10))):
        assert examine(load, taken, Need(1, 60, 740), first, settled=False).arm is Arm.CONTEXT
        assert room_by_matter(load, taken, Need(1, 60, 740), reserve=False) == 0


def test_the_bound_of_the_server_counts_requests() -> None:
    """As many as it says, and no more; none without."""
    assert running(3, None).ok
    assert running(2, 3).ok
    assert running(3, 3) == Finding(False, Arm.RUNNING, "too many running requests", 3, 3)


def test_a_guarantee_waits_for_settling_and_bypasses_only_headroom_and_floor() -> None:
    """Never what is physical."""
    poor = replace(SCOPE, n_attached=0, projection=Projection(1.0))
    assert examine(LOAD, Taken(cells=299), NEED, poor, settled=False).arm is Arm.GUARANTEE
    assert examine(LOAD, Taken(), NEED, replace(poor, settling_s=1.0), settled=False).arm is Arm.SETTLING
    assert examine(LOAD, Taken(), NEED, replace(poor, settling_s=1.0), settled=True).ok
    assert examine(LOAD, Taken(cells=301), NEED, poor, settled=True).arm is Arm.CONTEXT
    assert examine(LOAD, Taken(slots=5), NEED, poor, settled=True).arm is Arm.SLOTS


SMALL = st.integers(0, 400)


@given(
    SMALL,
    SMALL,
    st.integers(0, 9),
    st.integers(0, 200),
    st.floats(0, 40),
    st.integers(0, 3),
    st.booleans(),
    SMALL,
    st.floats(0, 40),
)
def test_more_load_never_admits_more(
    free: int, taken: int, busy: int, n: int, mean: float, attached: int, settled: bool, more: int, less: float
) -> None:
    """Cells, slots, speed, need and sessions: each alone, and all together."""
    load = replace(LOAD, cells_free=free, slots_busy=busy)
    scope = replace(SCOPE, n_attached=attached, projection=Projection(mean))
    need = Need(1, n, 10)
    if examine(load, Taken(0, taken), need, scope, settled=settled).ok:
        return
    worse = replace(scope, n_attached=attached + more, projection=Projection(max(0.0, mean - less)))
    for heavier in (Need(1, n + more, 10), need):
        assert not examine(load, Taken(0, taken + more), heavier, worse, settled=settled).ok
        assert not examine(replace(load, slots_busy=busy + more), Taken(0, taken), heavier, worse, settled=settled).ok
