"""Mirrors core/attach.py."""

import pytest

from polykv_proxy.core.attach import Course, Miss, PoolSource, Wish, check_explicit_prefix, decide_attach
from polykv_proxy.core.pools import Pool, PoolTree, Residency, SeqRef
from polykv_proxy.core.prefix import as_tokens, hash_prefix
from polykv_proxy.errors import ApiError


def tree_with(residency: Residency) -> PoolTree:
    tree = PoolTree()
    tokens = as_tokens([1, 2, 3, 4])
    pool = Pool(1, tokens, hash_prefix(tokens), Residency.MATERIALIZING, "m", 0, 0, name="p")
    placed = pool.placed(SeqRef(4, 1), 4)
    tree.put(placed if residency is Residency.RESIDENT else pool.displaced(residency, "test"))
    return tree


@pytest.mark.parametrize(
    ("residency", "course"),
    [
        (Residency.RESIDENT, Course.ATTACH),
        (Residency.MATERIALIZING, Course.WAIT),
        (Residency.SAVED, Course.REBUILD),
        (Residency.EVICTED, Course.REBUILD),
        (Residency.LOST, Course.REBUILD),
        (Residency.QUARANTINED, Course.REBUILD),
        (Residency.FAILED, Course.UNSHARED),
    ],
)
def test_each_residency_has_one_course(residency: Residency, course: Course) -> None:
    """What happens to a request follows from where its pool's KV is."""
    assert decide_attach(tree_with(residency), Wish(pool="p")).course is course


def test_a_request_without_a_pool_is_plain() -> None:
    """Naming nothing changes nothing."""
    assert decide_attach(PoolTree(), Wish()).course is Course.PLAIN


@pytest.mark.parametrize("source", [PoolSource.BODY, PoolSource.HEADER])
@pytest.mark.parametrize(("tree", "code"), [(PoolTree(), "pool_not_found"), (tree_with(Residency.RELEASING), "pool_releasing")])
def test_who_insists_on_a_pool_that_is_not_there_is_refused(source: PoolSource, tree: PoolTree, code: str) -> None:
    """`pool_id` and `x-pool-id` are answered 404 or 409, with the field's name."""
    with pytest.raises(ApiError) as refused:
        decide_attach(tree, Wish(pool=1, source=source))
    assert (refused.value.code, refused.value.param) == (code, source.value)


def test_others_are_served_without_it() -> None:
    """The legacy field gets a reason; model suffix and default pool are plain requests."""
    legacy = decide_attach(PoolTree(), Wish(pool=7, source=PoolSource.LEGACY))
    assert (legacy.course, legacy.miss) == (Course.UNSHARED, Miss.STALE_SEQ)
    assert decide_attach(PoolTree(), Wish(pool="x", source=PoolSource.MODEL)).course is Course.PLAIN
    assert decide_attach(tree_with(Residency.RELEASING), Wish(pool="p", source=PoolSource.DEFAULT)).course is Course.PLAIN


def test_an_explicit_p_bounds_what_is_shared() -> None:
    """The pool's length is the most that is asked for, an explicit P may be less, never more."""
    tree = tree_with(Residency.RESIDENT)
    assert [decide_attach(tree, Wish(pool=1, explicit_p=p)).max_shared for p in (None, 2, 9)] == [4, 2, 4]


@pytest.mark.parametrize(("wanted", "prompt", "position"), [(3, [1, 2, 9, 4], 2), (5, [1, 2, 3, 4, 5], 4), (4, [1, 2], 2)])
def test_an_explicit_p_that_does_not_hold_names_the_position(wanted: int, prompt: list[int], position: int) -> None:
    """409 with the first position at which prompt and pool part, or one of them ends."""
    pool = tree_with(Residency.RESIDENT).get(1)
    assert pool is not None
    check_explicit_prefix(pool, position, as_tokens(prompt))
    with pytest.raises(ApiError) as refused:
        check_explicit_prefix(pool, wanted, as_tokens(prompt))
    assert refused.value.status == 409
    assert refused.value.extra["first_differing_position"] == position
