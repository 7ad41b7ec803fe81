"""A load of small requests: so many connections, each of which sends the next request when it has read the answer to the last.

Law: one thread over epoll and bare sockets, so that it costs less than whatever it asks. What it says is one JSON line: counts, and
the times from sending a request to having read the whole answer.
"""

from __future__ import annotations

import json
import re
import select
import socket
import sys
import time
from collections.abc import Sequence

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
WARM_S = 0.3


class _Connection:
    """One connection, and when its request was sent."""

    def __init__(self, port: int, request: bytes) -> None:
        self._port, self._request = port, request
        self.connect()

    def connect(self) -> None:
        self.sock = socket.create_connection(("127.0.0.1", self._port), 60)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._came = b""

    def send(self) -> None:
        self.sent = time.perf_counter_ns()
        self.sock.send(self._request)

    def answered(self) -> int | None:
        """Reads once: the status when the answer is whole; 0 when the server has closed."""
        data = self.sock.recv(65536)
        if not data:
            return 0
        came = self._came = self._came + data if self._came else data
        end = came.find(b"\r\n\r\n")
        length = _LENGTH.search(came, 0, end + 2) if end > 0 else None
        if end > 0 and length is None:
            raise RuntimeError(f"an answer has no length: {came[:end]!r}")
        if length is None or len(came) < end + 4 + int(length[1]):
            return None
        self._came = b""
        return int(came[9:12])


def load(port: int, request: bytes, n: int, seconds: float) -> dict[str, float]:
    """Ask for that long, then wait for what was asked. Seen is what was answered between `WARM_S` and the end, or the first answer.

    RuntimeError at an answer that is no 200.
    """
    poll = select.epoll()
    by_fd: dict[int, _Connection] = {}

    def ask(one: _Connection) -> None:
        by_fd[one.sock.fileno()] = one
        poll.register(one.sock.fileno(), select.EPOLLIN)
        one.send()

    for _ in range(n):
        ask(_Connection(port, request))
    times: list[int] = []
    n_all = n_closed = 0
    begin = time.perf_counter_ns() + int(WARM_S * 1e9)
    end = now = begin + int(seconds * 1e9)
    last = begin
    while by_fd:
        for fd, _ in poll.poll(60) or _silent():
            one = by_fd[fd]
            status = one.answered()
            if status is None:
                continue
            now = time.perf_counter_ns()
            over = now >= end and bool(times)
            if status == 0:
                n_closed += 1
            elif status != 200:
                raise RuntimeError(f"an answer was {status}")
            else:
                n_all += 1
                if now >= begin and not over:
                    times.append(now - one.sent)
                    last = now
            if over or status == 0:
                poll.unregister(fd)
                by_fd.pop(fd).sock.close()
            if over:
                continue
            if status == 0:
                one.connect()
                ask(one)
            else:
                one.send()
    return {
        "n": len(times),
        "n_all": n_all,
        "s": (last - begin) / 1e9,
        "closed": n_closed,
        "cpu_s": time.process_time(),
        **spread(times),
    }


def spread(times: Sequence[int]) -> dict[str, float]:
    """Percentiles of nanoseconds, as milliseconds."""
    ordered = sorted(times)
    at = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}
    return {f"{name}_ms": ordered[min(len(ordered) - 1, int(len(ordered) * part))] / 1e6 for name, part in at.items()}


def _silent() -> list[tuple[int, int]]:
    raise RuntimeError("no answer for a minute")


if __name__ == "__main__":
    _, _port, _n, _seconds = sys.argv
    print(json.dumps(load(int(_port), sys.stdin.buffer.read(), int(_n), float(_seconds))))
