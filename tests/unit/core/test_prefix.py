"""Mirrors core/prefix.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.prefix import (
    BLOCK,
    Match,
    PrefixIndex,
    as_tokens,
    common_prefix,
    common_prefix_of,
    from_bytes,
    hash_prefix,
    to_bytes,
)

ids = st.integers(0, 3)
arrays = st.lists(ids, max_size=3 * BLOCK).map(as_tokens)
shared = st.lists(ids, min_size=1, max_size=2 * BLOCK)
entries = st.dictionaries(st.integers(1, 6), st.tuples(st.integers(0, 2 * BLOCK), st.lists(ids, max_size=BLOCK)), max_size=6)


def naive(left: list[int], right: list[int]) -> int:
    n = 0
    while n < min(len(left), len(right)) and left[n] == right[n]:
        n += 1
    return n


@given(st.lists(ids, max_size=700), st.lists(ids, max_size=700), st.integers(0, 700))
def test_common_prefix_is_what_a_loop_finds(left: list[int], right: list[int], keep: int) -> None:
    """The length never exceeds either array and equals the naive answer, also far into the arrays."""
    right = left[:keep] + right
    assert common_prefix(as_tokens(left), as_tokens(right)) == naive(left, right)


@given(st.lists(arrays, max_size=4))
def test_common_prefix_of_many_is_the_least_of_all_pairs(many: list) -> None:
    """The common prefix of several arrays is the shortest of their common prefixes with the first."""
    expected = min((naive(many[0].tolist(), other.tolist()) for other in many), default=0) if many else 0
    assert common_prefix_of(many) == expected


@given(arrays)
def test_bytes_carry_tokens_both_ways(tokens: object) -> None:
    """Tokens written as bytes read back the same."""
    assert from_bytes(to_bytes(tokens)).tolist() == tokens.tolist()  # type: ignore[arg-type, attr-defined]


def test_tokens_are_read_only_and_bounded() -> None:
    """Nobody can write to a token array, and an id outside int32 is an error."""
    tokens = as_tokens([1, 2])
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 5
    with pytest.raises(OverflowError):
        as_tokens([2**31])


@given(shared, st.lists(ids, max_size=BLOCK))
def test_a_hash_chain_is_a_prefix_of_its_extension_s_chain(head: list[int], tail: list[int]) -> None:
    """Extending a prefix keeps the hashes of its full blocks."""
    short, long = hash_prefix(as_tokens(head)), hash_prefix(as_tokens(head + tail))
    assert long.chain[: len(short.chain)] == short.chain


@given(
    st.dictionaries(st.integers(1, 6), st.tuples(st.integers(0, 2 * BLOCK), st.lists(ids, max_size=BLOCK)), max_size=6),
    shared,
    arrays,
)
def test_the_index_finds_the_longest_match(entries: dict, base: list[int], query: object) -> None:
    """A match is the longest token-exact common prefix over all entries; among equals the smallest key."""
    index = PrefixIndex()
    prefixes = {key: base[:cut] + tail for key, (cut, tail) in entries.items()}
    for key, prefix in prefixes.items():
        index.add(key, as_tokens(prefix), hash_prefix(as_tokens(prefix)))
    for asked in (base, query.tolist(), [*base, 1, 2, 3]):  # type: ignore[attr-defined]
        lengths = {key: naive(prefix, asked) for key, prefix in prefixes.items()}
        longest = max(lengths.values(), default=0)
        winner = min((key for key, length in lengths.items() if length == longest), default=0)
        assert index.match(as_tokens(asked)) == (Match(winner, longest) if longest else None)


@given(st.lists(arrays, min_size=1, max_size=5))
def test_an_emptied_index_matches_nothing(many: list) -> None:
    """After discarding every entry nothing is found and nothing is left."""
    index = PrefixIndex()
    for key, tokens in enumerate(many):
        index.add(key, tokens, hash_prefix(tokens))
    for key in range(len(many)):
        index.discard(key)
        index.discard(key)
    assert len(index) == 0
    assert all(index.match(tokens) is None for tokens in many)
