"""Peers without an engine, in processes of their own: `tests/cpp/gpu_share_driver.cpp`."""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polykv_proxy.gpu_share import layout
from tests import native

SHM = Path("/dev/shm")
_numbers = itertools.count()


def driver(sanitizer: str = "none") -> Path:
    sources = [*sorted(native.OURS.glob("gpu-share-[!p]*.cpp")), native.CPP / "gpu_share_driver.cpp"]
    return native.program("gpu_share_driver", sources, sanitizer)


@contextmanager
def new_key() -> Iterator[str]:
    """A key that nobody else uses; its segment is removed in the end."""
    key = f"test-{os.getpid()}-{next(_numbers)}"
    try:
        yield key
    finally:
        segment(key).unlink(missing_ok=True)


def segment(key: str) -> Path:
    return SHM / f"opencoti-gpu-{key}"


@contextmanager
def busy_neighbour(key: str, weight: float = 1000.0) -> Iterator[None]:
    """An entry in the last slot of a segment that is there: of a peer that always computes, as long as this lasts."""
    at = 64 + 15 * 128
    begun, ended = threading.Event(), threading.Event()

    def beat() -> None:
        with segment(key).open("r+b") as file, mmap.mmap(file.fileno(), layout.SIZE) as memory:
            while not ended.is_set():
                now = time.time_ns() // 1000
                entry = layout.Entry(15, os.getpid(), 1, now, weight, True, now, 0, "neighbour")
                memory[at : at + 128] = layout.build([entry])[at : at + 128]
                begun.set()
                ended.wait(0.1)
            memory[at : at + 8] = struct.pack("<Q", 0)

    thread = threading.Thread(target=beat)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Peer:
    """One process of the driver."""

    def __init__(self, program: Path, verb: str, key: str, *words: str) -> None:
        self.process = subprocess.Popen([program, verb, key, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def ask(self, line: str) -> str:
        self.say(line)
        return self.heard()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.kill()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@contextmanager
def company(program: Path) -> Iterator[Company]:
    """Peers that are killed in the end, whatever happened."""
    made = Company(program)
    try:
        yield made
    finally:
        for peer in made.peers:
            peer.close()


class Company:
    """Makes peers and remembers them."""

    def __init__(self, program: Path) -> None:
        self.program, self.peers = program, list[Peer]()

    def start(self, verb: str, key: str, *words: str) -> Peer:
        self.peers.append(Peer(self.program, verb, key, *words))
        return self.peers[-1]

    def join(self, key: str, *words: str) -> Peer:
        """One that has joined."""
        peer = self.start("join", key, *words)
        said = peer.heard()
        assert said.startswith("joined "), said
        return peer
