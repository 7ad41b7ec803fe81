"""The fake engine's files: sequences saved and restored, by the same laws as the real one's.

Law: a file is whole or not there, and believed only when length, hash and model are right. Its size is that of the cells in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_line import common
from tests.fakes.fake_records import EngineFaultError, Seq

MAGIC = b"FAKESEQ\n"
PART = 64


async def save(engine: FakeEngine, ref: str, body: dict) -> dict:
    """`POST seqs/{ref}/save`."""
    engine.maybe_fail("save")
    path, start = _path(body), body.get("from", 0)
    seq = _there(engine, ref)
    if start >= len(seq.tokens) or (start and (engine.prefix_sharing != "any" or engine.n_streams > 1)):
        message = "from must be below the length of the sequence, 0 on this model or cache"
        raise EngineFaultError(400, "invalid_request_error", message)
    for _ in range(start, len(seq.tokens), PART):
        await engine.gate()
        _there(engine, ref)
    engine.maybe_fail("write")
    part = path.with_name(path.name + ".part")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(_packed(engine, seq, start))
        part.rename(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise EngineFaultError(507, "save_failed", f"cannot create {part}: {error.strerror}") from error
    return {"n_tokens": len(seq.tokens), "from": start, "kv_bytes": _kv_bytes(engine, len(seq.tokens) - start)}


async def restore(engine: FakeEngine, body: dict) -> dict:
    """`POST seqs/restore`."""
    engine.maybe_fail("restore")
    tokens, start = _unpacked(engine, _path(body))
    parent = engine.seq(body["parent_seq"]) if body.get("parent_seq") else None
    if start and not body.get("parent_seq"):
        raise EngineFaultError(400, "invalid_request_error", "parent_seq must give the tokens before those in the file")
    boot = engine.boot_id
    with _reserved(engine) as held:
        for at in range(start, len(tokens), PART):
            await engine.gate()
            if engine.boot_id != boot:
                raise EngineFaultError(503, "unavailable_error", "the engine started anew")
            held.cells += _cells(engine, min(PART, len(tokens) - at))
        if start and (parent is None or engine.seq(parent.ref) is None or common(parent.tokens, tokens) < start):
            raise EngineFaultError(409, "file_refused", "parent_seq does not hold the tokens before the saved ones")
    engine.kv.write(held.cells, tokens[start:])
    held.tokens, held.cells = tokens, [*(parent.cells[:start] if parent else []), *held.cells]
    engine.n_seqs_restored += 1
    facts = {"seq": held.ref, "n_tokens": len(tokens), "n_shared": start, "cells": len(held.cells), "update": engine.publish()}
    return {**facts, "base": parent.ref if start and parent else None}


@contextmanager
def _reserved(engine: FakeEngine) -> Iterator[Seq]:
    """A sequence id that is being filled; free again when that fails."""
    number, ref = engine.new_ref()
    held = engine.seqs[number] = Seq(ref, [], [])
    try:
        yield held
    except BaseException:
        if engine.seqs.get(number) is held:
            del engine.seqs[number]
        raise


def _cells(engine: FakeEngine, n: int) -> list[int]:
    try:
        return engine.take_cells(n)
    except EngineFaultError:
        raise EngineFaultError(429, "no_cells", "the saved sequence does not fit into the cache now") from None


def _there(engine: FakeEngine, ref: str) -> Seq:
    seq = engine.seq(ref)
    if seq is None:
        raise EngineFaultError(410, "stale_seq", f"there is no sequence {ref} any more")
    return seq


def _path(body: dict) -> Path:
    path = body.get("path")
    if not isinstance(path, str) or not path.startswith("/"):
        raise EngineFaultError(400, "invalid_request_error", "path must be an absolute path")
    return Path(path)


def _kv_bytes(engine: FakeEngine, n: int) -> int:
    return n * engine.hello()["kv"]["bytes_per_token"]


def _identity(engine: FakeEngine) -> str:
    return f"{engine.fingerprint}/{engine.n_streams}"


def _packed(engine: FakeEngine, seq: Seq, start: int) -> bytes:
    head = json.dumps({"fingerprint": _identity(engine), "tokens": seq.tokens, "from": start}).encode()
    data = struct.pack("<I", len(head)) + head + bytes(_kv_bytes(engine, len(seq.tokens) - start))
    data = MAGIC + struct.pack("<Q", len(MAGIC) + 8 + len(data) + 32) + data
    return data + hashlib.sha256(data).digest()


def _unpacked(engine: FakeEngine, path: Path) -> tuple[list[int], int]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise EngineFaultError(409, "file_refused", f"cannot open {path}: {error.strerror}") from error
    if data[:8] != MAGIC or len(data) < 60 or struct.unpack("<Q", data[8:16]) != (len(data),):
        raise EngineFaultError(409, "file_refused", "the file has another length than it says")
    if hashlib.sha256(data[:-32]).digest() != data[-32:]:
        raise EngineFaultError(409, "file_refused", "the file is damaged: its hash is wrong")
    (size,) = struct.unpack("<I", data[16:20])
    head = json.loads(data[20 : 20 + size])
    if head["fingerprint"] != _identity(engine):
        raise EngineFaultError(409, "file_refused", "the file is of another model, build or cache type")
    return head["tokens"], head["from"]
