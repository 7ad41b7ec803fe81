"""Mirrors core/unmade.py."""

from dataclasses import replace

import pytest

from polykv_proxy.core.attach import Course, Miss, Wish, decide_attach
from polykv_proxy.core.boots import MODEL_CHANGED, Boots
from polykv_proxy.core.ledger import Ledger, LedgerLimits, Placement
from polykv_proxy.core.pools import Residency, SeqRef
from polykv_proxy.core.prefix import as_tokens, hash_prefix
from polykv_proxy.core.unmade import UNMADE_S, Unmade
from polykv_proxy.errors import ApiError
from tests.unit.core.test_ledger import facts, pool, snapshot


def begun(*pool_ids: int, limit: int = 4) -> tuple[Ledger, Unmade]:
    ledger = Ledger(LedgerLimits(max_pool_objects=limit))
    Boots(ledger).ready(facts(), snapshot(), 0)
    for pool_id in pool_ids:
        ledger.begin_pool(pool(pool_id, name=f"p{pool_id}"))
    return ledger, Unmade(ledger)


def ids(ledger: Ledger) -> list[int]:
    return [found.pool_id for found in ledger.tree]


def test_a_reason_can_be_read_for_a_while() -> None:
    """With a reason the record stays as `failed` until its time is over, and no longer; without one nothing stays."""
    ledger, unmade = begun(1, 2)
    unmade.discard(1, 100, "no room")
    unmade.discard(2, 100)
    failed = ledger.tree.get(1)
    assert failed is not None
    assert (failed.residency, failed.reason, ids(ledger)) == (Residency.FAILED, "no room", [1])
    unmade.sweep(100 + UNMADE_S - 1)
    assert ids(ledger) == [1]
    unmade.sweep(100 + UNMADE_S)
    assert ids(ledger) == []


def test_a_pool_whose_tokens_nobody_knows_leaves_nothing() -> None:
    """A snapshot that was never taken has no prefix: not even its reason stays in the table."""
    ledger, unmade = begun(1)
    empty = as_tokens([])
    ledger.tree.put(replace(pool(2), tokens=empty, hashed=hash_prefix(empty)))
    unmade.discard(2, 0, "the session is gone")
    assert ids(ledger) == [1]


def test_requests_that_wait_keep_the_record_and_sessions_do_not() -> None:
    """What a request waits for stays until that is over, also without a reason; an attached session loses its pool."""
    ledger, unmade = begun(1)
    req = ledger.take_req()
    ledger.admit(req, Wish(pool=1, session_id="s"), 0)
    unmade.discard(1, 0)
    unmade.sweep(2 * UNMADE_S)
    assert ids(ledger) == [1]
    ledger.abandon(req, 0)
    unmade.sweep(2 * UNMADE_S)
    session = ledger.sessions.get("s")
    assert session is not None
    assert (ids(ledger), session.pool_id) == ([], None)


def test_failed_makings_are_the_first_to_go_when_there_is_no_room() -> None:
    """They never fill the table: as many go as room is needed for, the oldest first; 429 is for pools that are there."""
    ledger, unmade = begun(1, 2, 3, 4)
    for pool_id in (1, 2, 3):
        unmade.discard(pool_id, 0, "no room")
    unmade.make_room()
    assert ids(ledger) == [2, 3, 4]
    for pool_id in (5, 6, 7):
        unmade.make_room()
        ledger.begin_pool(pool(pool_id))
    with pytest.raises(ApiError) as full:
        unmade.make_room()
    assert (full.value.code, ids(ledger)) == ("too_many_pools", [4, 5, 6, 7])


def test_the_name_is_free_at_once() -> None:
    """Who wants the name of a pool that could not be made gets it, whether or not requests still run without that pool."""
    ledger, unmade = begun(1, 2)
    ledger.admit(ledger.take_req(), Wish(pool=2), 0)
    for pool_id in (1, 2):
        unmade.discard(pool_id, 0, "no room")
        unmade.make_way(ledger.tree.get(pool_id))  # type: ignore[arg-type]
    assert (ids(ledger), ledger.tree.named("p1"), ledger.tree.named("p2")) == ([2], None, None)


def test_a_passing_failure_is_tried_again_and_a_lasting_one_is_not() -> None:
    """The course of a request follows; when it was made at last nothing of the failure is left."""
    ledger, unmade = begun(1, 2)
    unmade.discard(1, 0, "no ids", lasting=False)
    unmade.discard(2, 0, "it is too long", lasting=True)
    assert decide_attach(ledger.tree, Wish(pool=1)).course is Course.REBUILD
    served = decide_attach(ledger.tree, Wish(pool=2))
    assert (served.course, served.miss) == (Course.UNSHARED, Miss.REBUILD_FAILED)
    ledger.begin_rebuild(1)
    ledger.rebuild_failed(1, "no ids either")
    assert ledger.tree.get(1).residency is Residency.FAILED  # type: ignore[union-attr]
    ledger.begin_rebuild(1)
    ledger.place(1, Placement("b1", SeqRef(4, 1), 3))
    made = ledger.tree.get(1)
    assert made is not None
    assert (made.residency, made.failure, made.reason) == (Residency.RESIDENT, None, None)
    unmade.sweep(UNMADE_S)
    assert ids(ledger) == [1]


def test_what_was_never_made_of_a_model_that_is_gone_is_not_tried_again() -> None:
    """It keeps that reason, also when the model is back: its time is short."""
    ledger, unmade = begun(1)
    unmade.discard(1, 0, "no ids", lasting=False)
    Boots(ledger).ready(facts("b2", model="other"), snapshot("b2"), 1)
    Boots(ledger).ready(facts("b3"), snapshot("b3"), 2)
    failed = ledger.tree.get(1)
    assert failed is not None
    assert (failed.residency, failed.reason, failed.rebuildable) == (Residency.FAILED, MODEL_CHANGED, False)
