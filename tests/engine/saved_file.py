"""A saved sequence, taken apart and put together again: to bring wrong KV under a pool that the engine has no reason to refuse.

Law: knows the layout of the file (patches/src/tools/server/server-polykv-file.cpp) and of llama.cpp's state of one sequence. What
is changed here is hashed anew, so that only what it says can give it away.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

MAGIC = b"PKVSEQ1\n"
_STATE_HEAD = 8
"""Magic and sequence id before the state of one sequence."""
Rows = NDArray[np.uint8]


@dataclass
class Part:
    """The state of tokens `[start, end)`; `tgt` of the model, `dft` of a draft model."""

    start: int
    end: int
    tgt: bytearray
    dft: bytearray


@dataclass
class Checkpoint:
    """A kept state after `n_tokens`."""

    n_tokens: int
    pos_min: int
    pos_max: int
    tgt: bytearray
    dft: bytearray
    spec: bytearray


@dataclass
class Cache:
    """One attention cache in a part: `pos[i]` is the position of cell i, `keys[layer][i]` and `values[layer][i]` its rows.

    All are views: writing into them changes the part.
    """

    pos: NDArray[np.int32]
    keys: list[Rows] = field(default_factory=list)
    values: list[Rows] = field(default_factory=list)

    def cell(self, position: int) -> int:
        """The cell that holds a position."""
        return int(np.flatnonzero(self.pos == position)[0])


@dataclass
class SavedFile:
    """The whole file."""

    fingerprint: bytes
    tokens: list[int]
    start: int
    parts: list[Part]
    checkpoints: list[Checkpoint]

    @classmethod
    def read(cls, path: Path) -> Self:
        read = _Reader(path.read_bytes(), len(MAGIC) + 8)
        fingerprint, tokens, start = read.bytes(), read.bytes(), read.num("<i")
        parts = [Part(read.num("<i"), read.num("<i"), read.bytes(), read.bytes()) for _ in range(read.num("<I"))]
        checkpoints = [
            Checkpoint(read.num("<q"), read.num("<i"), read.num("<i"), read.bytes(), read.bytes(), read.bytes())
            for _ in range(read.num("<I"))
        ]
        return cls(bytes(fingerprint), list(np.frombuffer(tokens, "<i4")), start, parts, checkpoints)

    def write(self, path: Path) -> Path:
        """The file with right length and hash."""
        out = bytearray(MAGIC + bytes(8))
        for block in (self.fingerprint, np.array(self.tokens, "<i4").tobytes()):
            out += struct.pack("<Q", len(block)) + block
        out += struct.pack("<iI", self.start, len(self.parts))
        for part in self.parts:
            out += struct.pack("<ii", part.start, part.end)
            for block in (part.tgt, part.dft):
                out += struct.pack("<Q", len(block)) + block
        out += struct.pack("<I", len(self.checkpoints))
        for kept in self.checkpoints:
            out += struct.pack("<qii", kept.n_tokens, kept.pos_min, kept.pos_max)
            for block in (kept.tgt, kept.dft, kept.spec):
                out += struct.pack("<Q", len(block)) + block
        out[len(MAGIC) : len(MAGIC) + 8] = struct.pack("<Q", len(out) + 8)
        path.write_bytes(out + struct.pack("<Q", hash_of(bytes(out))))
        return path

    def cache(self, part: int = 0) -> Cache:
        """The first attention cache of a part (of two, the one over the whole context)."""
        return _cache(self.parts[part].tgt)


def hash_of(data: bytes) -> int:
    """FNV-1a over words of 8 bytes, the tail padded with zeros, as in the engine."""
    state, mask = 0xCBF29CE484222325, (1 << 64) - 1
    for word in np.frombuffer(data + bytes(-len(data) % 8), "<u8").tolist():
        state = ((state ^ word) * 0x100000001B3) & mask
        state ^= state >> 29
    return state


class _Reader:
    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at

    def num(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def bytes(self) -> bytearray:
        n = self.num("<Q")
        self.at += n
        return bytearray(self.data[self.at - n : self.at])


def _cache(state: bytearray) -> Cache:
    """Takes the state of one unified stream without transposed values: what the engine writes with flash attention."""
    n_stream, n_cells = struct.unpack_from("<II", state, _STATE_HEAD)
    assert n_stream == 1
    at = _STATE_HEAD + 8
    metas = np.frombuffer(state, "<i4", 3 * n_cells, at).reshape(n_cells, 3)
    assert (metas[:, 1] == 1).all(), "each cell names one sequence"
    at += 12 * n_cells
    v_trans, n_layer = struct.unpack_from("<II", state, at)
    assert not v_trans
    at += 8
    cache = Cache(metas[:, 0])
    for rows in [cache.keys] * n_layer + [cache.values] * n_layer:
        _, n_row = struct.unpack_from("<iQ", state, at)
        at += 12
        rows.append(np.frombuffer(state, np.uint8, n_cells * n_row, at).reshape(n_cells, n_row))
        at += n_cells * n_row
    return cache
