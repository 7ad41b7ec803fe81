"""Token arrays, their hashes, and the longest common prefix.

Law: tokens are int32 arrays that nobody writes to. A hash only finds candidates; a length is always the result of comparing tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

Tokens: TypeAlias = npt.NDArray[np.int32]
"""Token ids of a prefix, read-only."""

BLOCK = 64
"""Tokens per hashed block."""

INT32_MAX = 2**31 - 1


def as_tokens(values: Iterable[int] | Tokens) -> Tokens:
    """A read-only int32 copy of token ids. OverflowError for an id outside int32."""
    if isinstance(values, np.ndarray):
        array = values.astype(np.int32, copy=True)
    else:
        listed = list(values)
        if any(value > INT32_MAX or value < -INT32_MAX - 1 for value in listed):
            raise OverflowError("token id outside int32")
        array = np.array(listed, dtype=np.int32)
    array.setflags(write=False)
    return array


NO_TOKENS = as_tokens(())


def from_bytes(raw: bytes) -> Tokens:
    """Tokens from int32 little-endian bytes. ValueError when the length is not a multiple of four."""
    return as_tokens(np.frombuffer(raw, dtype="<i4"))


def to_bytes(tokens: Tokens) -> bytes:
    """Tokens as int32 little-endian bytes."""
    return tokens.astype("<i4", copy=False).tobytes()


def common_prefix(left: Tokens, right: Tokens) -> int:
    """Length of the longest common prefix, token by token."""
    shorter = min(left.size, right.size)
    start, step = 0, 256
    while start < shorter:
        end = min(start + step, shorter)
        differs = left[start:end] != right[start:end]
        if differs.any():
            return start + int(differs.argmax())
        start, step = end, step * 4
    return int(shorter)


def common_prefix_of(arrays: Sequence[Tokens]) -> int:
    """Longest prefix common to all arrays; 0 for none."""
    if not arrays:
        return 0
    return min((common_prefix(arrays[0], other) for other in arrays[1:]), default=int(arrays[0].size))


@dataclass(frozen=True, slots=True)
class PrefixHash:
    """Cumulative xxhash64 values of a prefix: `chain[i]` covers the first `(i + 1) * BLOCK` tokens, `whole` all of them."""

    chain: tuple[int, ...]
    whole: int

    @property
    def hex(self) -> str:
        """`whole` as 16 hex digits: the identity of a prefix in replies."""
        return f"{self.whole:016x}"


def hash_prefix(tokens: Tokens) -> PrefixHash:
    """Hash a prefix once, block by block."""
    state = xxhash.xxh64()
    chain = []
    full = tokens.size - tokens.size % BLOCK
    for start in range(0, full, BLOCK):
        state.update(to_bytes(tokens[start : start + BLOCK]))
        chain.append(state.intdigest())
    state.update(to_bytes(tokens[full:]))
    return PrefixHash(tuple(chain), state.intdigest())


@dataclass(frozen=True, slots=True)
class Match:
    """The entry that shares most leading tokens with a query, and how many."""

    key: int
    length: int


class PrefixIndex:
    """Longest match of a token array over many prefixes, in O(blocks) plus one block of comparing per candidate.

    Entries are keyed by integers (pool ids). Among equal matches the smallest key wins.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Tokens, PrefixHash]] = {}
        self._by_block: dict[tuple[int, int], set[int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: int, tokens: Tokens, hashed: PrefixHash) -> None:
        """Enter a prefix. A key that is in use is replaced."""
        self.discard(key)
        self._entries[key] = (tokens, hashed)
        for level, digest in enumerate(hashed.chain):
            self._by_block.setdefault((level, digest), set()).add(key)

    def discard(self, key: int) -> None:
        """Remove an entry; unknown keys are fine."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        for level, digest in enumerate(entry[1].chain):
            keys = self._by_block[(level, digest)]
            keys.discard(key)
            if not keys:
                del self._by_block[(level, digest)]

    def match(self, query: Tokens) -> Match | None:
        """The entry with the longest token-exact common prefix, or None when no entry shares a token."""
        best: Match | None = None
        for keys in self._levels(query):
            best = self._best(query, keys)
            if best is not None:
                return best
        return best

    def _levels(self, query: Tokens) -> list[Iterable[int]]:
        """Candidate sets, the deepest common block first; the last set is every entry."""
        found: list[Iterable[int]] = [self._entries.keys()]
        for level, digest in enumerate(hash_prefix(query).chain):
            keys = self._by_block.get((level, digest))
            if keys is None:
                break
            found.append(keys)
        found.reverse()
        return found

    def _best(self, query: Tokens, keys: Iterable[int]) -> Match | None:
        best: Match | None = None
        for key in sorted(keys):
            length = common_prefix(self._entries[key][0], query)
            if length > (best.length if best else 0):
                best = Match(key, length)
        return best
