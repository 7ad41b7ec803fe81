"""What is measured through a soak: memory and open files of a process, and how long the proxy takes to say how it is.

Law: measures; a Gauge raises BrokenError where something has grown, a Pulse judges nothing.
"""

from __future__ import annotations

import http.client
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from tests.e2e.soak_watchers import BrokenError

GROWTH = 1.05
GROWTH_BYTES = 16 << 20
GROWTH_FILES = 8
PULSE_S = 0.1
GOAL_S = 0.2
"""Of an answer to /health."""


@dataclass
class Gauge:
    """Memory and open files of one process over time."""

    name: str
    process: psutil.Process
    memory: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def sample(self) -> str:
        self.memory.append(self.process.memory_info().rss)
        self.files.append(self.process.num_fds())
        return f"{self.name} {self.memory[-1] >> 20} MiB, {self.files[-1]} files, {self.process.num_threads()} threads"

    def check(self) -> None:
        """The last third is not above the second one."""
        third = len(self.memory) // 3
        before, after = (statistics.median(self.memory[i * third : (i + 1) * third]) for i in (1, 2))
        if after > before * GROWTH + GROWTH_BYTES:
            raise BrokenError(f"{self.name} grew from {before / 2**20:.0f} to {after / 2**20:.0f} MiB")
        before, after = (statistics.median(self.files[i * third : (i + 1) * third]) for i in (1, 2))
        if after > before + GROWTH_FILES:
            raise BrokenError(f"{self.name} went from {before} to {after} open files")


@dataclass
class Pulse:
    """Seconds: of answers of the proxy itself, the same without the time in which it waited for a processor, and of answers of the
    engine through it.
    """

    proxy_s: list[float] = field(default_factory=list)
    net_s: list[float] = field(default_factory=list)
    engine_s: list[float] = field(default_factory=list)

    def told(self) -> str:
        """In one line."""
        each = [("/polykv/health", self.proxy_s), ("without waiting for a processor", self.net_s), ("/health", self.engine_s)]
        return "; ".join(
            f"{name} p50 {quantile(took, 50) * 1e3:.1f}, p99 {quantile(took, 99) * 1e3:.1f}, longest {max(took) * 1e3:.0f} ms"
            for name, took in each
        )


def quantile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


def pulse(url: str, pid: int, seconds: float) -> Pulse:
    """Ask for both pages ten times a second, on one connection, in a process that does nothing else. `pid`: of the proxy."""
    found, at = Pulse(), urlsplit(url)
    client = http.client.HTTPConnection(at.hostname or "", at.port, timeout=60)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(PULSE_S)
        waited_s = waited_for_a_processor(pid)
        found.proxy_s.append(asked(client, "/polykv/health"))
        found.net_s.append(max(0.0, found.proxy_s[-1] - (waited_for_a_processor(pid) - waited_s)))
        found.engine_s.append(asked(client, "/health"))
    return found


def asked(client: http.client.HTTPConnection, path: str) -> float:
    began = time.monotonic()
    client.request("GET", path)
    reply = client.getresponse()
    reply.read()
    if reply.status != 200:
        raise BrokenError(f"{path}: status {reply.status}")
    return time.monotonic() - began


def waited_for_a_processor(pid: int) -> float:
    """Seconds in which the first thread of a process could run and others did; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0
