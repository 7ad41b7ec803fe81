"""Questions to a starting engine: does it answer, is it ours, does it move?

Law: every question has a short bound and never an opinion; the supervisor draws the conclusions.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass

import psutil

from polykv_proxy.engine.process import EngineProcess
from polykv_proxy.ports import EngineAddress

_ANSWER_S = 2.0
_CPU_SHARE = 0.02
_READ_BYTES = 64 * 1024
_RSS_BYTES = 1024 * 1024


async def health(address: EngineAddress, prefix: str = "", api_key: str | None = None) -> int | None:
    """Status of `GET /health`; None when nobody answers in time. An engine with a path prefix wants its key even here."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await _get_status(address, prefix, api_key)
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        return None


async def _get_status(address: EngineAddress, prefix: str, api_key: str | None) -> int:
    if address.uds is not None:
        reader, writer = await asyncio.open_unix_connection(address.uds)
    else:
        reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        writer.write(f"GET {prefix}/health HTTP/1.1\r\nHost: engine\r\n{key}Connection: close\r\n\r\n".encode())
        line = await reader.readline()
        return int(line.split(b" ", 2)[1]) if line else 0
    except IndexError as error:
        raise ValueError(line) from error
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def listener_is_ours(address: EngineAddress, process: EngineProcess) -> bool:
    """Does the engine process itself hold the listening socket? Blocks for microseconds (unix) or milliseconds (TCP)."""
    if address.uds is None:
        return any(process.owns(pid) for pid in _tcp_listeners(address, process))
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # the folder is ours alone and was empty: nobody else can listen there
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_ANSWER_S)
        try:
            sock.connect(address.uds)
        except OSError:
            return False
        pid, _uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return process.owns(pid)


def _tcp_listeners(address: EngineAddress, process: EngineProcess) -> list[int]:
    found = []
    with contextlib.suppress(psutil.Error):
        leader = psutil.Process(process.pid)
        for each in [leader, *leader.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                if any(c.status == psutil.CONN_LISTEN and c.laddr.port == address.port for c in each.net_connections("tcp")):
                    found.append(each.pid)
    return found


@dataclass(frozen=True, slots=True)
class Vitals:
    """Counters of a process at one moment."""

    t_s: float
    cpu_s: float
    read_bytes: int
    rss_bytes: int
    output_bytes: int

    def moved_since(self, before: Vitals) -> bool:
        """Did it do more than answer our polls: compute, read, grow, or print?"""
        return (
            self.cpu_s - before.cpu_s > _CPU_SHARE * (self.t_s - before.t_s)
            or self.read_bytes - before.read_bytes > _READ_BYTES
            or abs(self.rss_bytes - before.rss_bytes) > _RSS_BYTES
            or self.output_bytes > before.output_bytes
        )


def vitals(process: psutil.Process, output_bytes: int, now: float) -> Vitals | None:
    """Counters now; None when the process is gone. A child does the work of a starter script, so children count."""
    try:
        family = [process, *process.children(recursive=True)]
        cpu = sum(sum(each.cpu_times()[:2]) for each in family)
        rss = sum(each.memory_info().rss for each in family)
        return Vitals(now, cpu, sum(_read_bytes(each) for each in family), rss, output_bytes)
    except psutil.Error:
        return None


def _read_bytes(process: psutil.Process) -> int:
    try:
        counters = process.io_counters()
    except (psutil.Error, AttributeError, OSError):
        return 0
    return int(counters.read_bytes) + int(getattr(counters, "read_chars", 0))
