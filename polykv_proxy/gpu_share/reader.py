"""The registry of a device as its engines have written it, read from shared memory.

Law: opens, copies, closes; nothing is kept open and nothing is written. What cannot be read is a SegmentError that says why.
"""

from __future__ import annotations

import mmap
import os

import posix_ipc

from polykv_proxy.gpu_share.layout import SIZE, Entry, LayoutError, parse


class SegmentError(Exception):
    """There is no registry to read."""


def segment_name(key: str) -> str:
    """The name in shared memory of the registry with this key."""
    return f"/opencoti-gpu-{key}"


def read_registry(key: str) -> tuple[Entry, ...]:
    """The claimed slots in their order."""
    name = segment_name(key)
    try:
        return parse(_copy(name))
    except posix_ipc.ExistentialError:
        raise SegmentError(f"{name}: there is none") from None
    except (OSError, posix_ipc.Error, LayoutError) as error:
        raise SegmentError(f"{name}: {error}") from error


def _copy(name: str) -> bytes:
    memory = posix_ipc.SharedMemory(name, read_only=True)
    try:
        found = os.fstat(memory.fd)
        if found.st_uid != os.geteuid():
            raise SegmentError(f"{name}: it belongs to user {found.st_uid} and this process runs as user {os.geteuid()}")
        if found.st_size < SIZE:
            raise SegmentError(f"{name}: it has {found.st_size} bytes instead of {SIZE}")
        with mmap.mmap(memory.fd, SIZE, prot=mmap.PROT_READ) as mapped:
            return mapped[:]
    finally:
        memory.close_fd()
