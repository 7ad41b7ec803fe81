"""A load of event streams: all begin together, and each event is read at once.

Law: as in load.py. The delay of an event is the time from when the engine wrote it (it carries that clock) until it was read.
"""

from __future__ import annotations

import json
import re
import select
import socket
import sys
import time

from bench.proxies.load import spread

_STAMP = re.compile(rb"@(\d{20})")
_END = b"0\r\n\r\n"


def streams(port: int, request: bytes, n: int) -> dict[str, float]:
    """Read n streams to their ends. RuntimeError when one breaks off or is no 200."""
    poll = select.epoll()
    open_: dict[int, socket.socket] = {}
    tails: dict[int, bytes] = {}
    for _ in range(n):
        sock = socket.create_connection(("127.0.0.1", port), 60)
        sock.sendall(request)
        open_[sock.fileno()], tails[sock.fileno()] = sock, b""
        poll.register(sock.fileno(), select.EPOLLIN)
    delays: list[int] = []
    gaps: list[int] = []
    last: dict[int, int] = {}
    first = now = 0
    n_reads = 0
    while open_:
        for fd, _ in poll.poll(60) or _silent():
            data = open_[fd].recv(1 << 18)
            now = time.monotonic_ns()
            n_reads += 1
            if not data:
                raise RuntimeError(f"a stream broke off behind {tails[fd][-200:]!r}")
            data = tails[fd] + data
            if fd not in last and not data.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"no stream but {data[:300]!r}")
            end = 0
            for stamp in _STAMP.finditer(data):
                delays.append(now - int(stamp[1]))
                if fd in last:
                    gaps.append(now - last[fd])
                first = first or now
                last[fd] = now
                end = stamp.end()
            tails[fd] = data[max(end, len(data) - 40) :] if fd in last else data
            if data.endswith(_END):
                poll.unregister(fd)
                open_.pop(fd).close()
    seconds = (now - first) / 1e9
    gap = {f"gap_{name}": value for name, value in spread(gaps).items()}
    return {"n": len(delays), "s": seconds, "reads": n_reads, "cpu_s": time.process_time(), **spread(delays), **gap}


def _silent() -> list[tuple[int, int]]:
    raise RuntimeError("no event for a minute")


if __name__ == "__main__":
    _, _port, _n = sys.argv
    print(json.dumps(streams(int(_port), sys.stdin.buffer.read(), int(_n))))
