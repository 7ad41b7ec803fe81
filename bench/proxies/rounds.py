"""Loads in turns: every side meets the same load in each palindrome.

Law: measures and keeps figures; which sides, loads and goals there are is the bench's business.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.kit.rig import ROOT
from bench.kit.stats import palindrome
from bench.proxies.sides import Side

_BODY = (
    b'{"model":"stub","messages":[{"role":"system","content":"You are a careful clerk."},'
    b'{"role":"user","content":"When does my parcel arrive?"}],"max_tokens":%d%b}'
)
_FIELDS = (
    b"Host: 127.0.0.1\r\nUser-Agent: bench/1\r\nAccept: */*\r\nAuthorization: Bearer none\r\nContent-Type: application/json\r\n"
)
SDK_FIELDS = _FIELDS + (
    b"Accept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\n"
    b"X-Stainless-Lang: python\r\nX-Stainless-Package-Version: 2.8.0\r\n"
    b"X-Stainless-OS: Linux\r\nX-Stainless-Arch: x64\r\nX-Stainless-Runtime: CPython\r\nX-Stainless-Runtime-Version: 3.11.7\r\n"
    b"X-Stainless-Async: false\r\nx-stainless-retry-count: 0\r\nx-stainless-read-timeout: 600\r\n"
)
"""What the OpenAI client for Python sends."""


def chat(*, n: int = 32, more: bytes = b"", fields: bytes = _FIELDS) -> bytes:
    """A small chat request; `more` is added to its JSON."""
    body = _BODY % (n, more)
    return b"POST /v1/chat/completions HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (fields, len(body), body)


def stream(rate: int, seconds: float) -> bytes:
    """A chat whose answer is a stream of events at this rate."""
    return chat(n=int(rate * seconds), more=b',"stream":true,"user":"%d"' % rate)


@dataclass(frozen=True, slots=True)
class Seen:
    """One load on one side. Times of requests, or delays of events and the gaps between those of a stream.

    `cpu_us`: of the side's processes, for each request or event; `rss_mib`: theirs, when it was over.
    """

    n: int
    seconds: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    cpu_us: float
    rss_mib: float
    gap_p50_ms: float
    gap_p99_ms: float

    @property
    def rate(self) -> float:
        return self.n / self.seconds


class Rounds:
    """What was seen, by load and side."""

    def __init__(self) -> None:
        self.seen: dict[tuple[object, str], list[Seen]] = defaultdict(list)

    def median(self, load: object, side: str, what: str) -> float:
        return median(getattr(one, what) for one in self.seen[load, side])

    def best(self, load: object, side: str) -> Seen:
        """The trial with the lowest p50: what other work on the machine adds, it only adds."""
        return min(self.seen[load, side], key=lambda one: one.p50_ms)

    def best_rate(self, load: object, side: str) -> float:
        return max(one.rate for one in self.seen[load, side])

    def best_share(self, load: object, side: str, other: str) -> float:
        """A side's best rate over that of another."""
        return self.best_rate(load, side) / self.best_rate(load, other)

    def best_added(self, load: object, side: str, what: str) -> float:
        """What a side's best trial adds to the best one without anything between."""
        return float(getattr(self.best(load, side), what) - getattr(self.best(load, "direct"), what))


def requests(rounds: Rounds, load: object, sides: Sequence[Side], request: bytes, n: int, seconds: float, n_blocks: int) -> None:
    """Palindromes of n connections that ask for so many seconds."""
    _in_turns(rounds, load, sides, ["bench.proxies.load", str(n), str(seconds)], request, n_blocks)


def streams(rounds: Rounds, load: object, sides: Sequence[Side], request: bytes, n: int, n_blocks: int) -> None:
    """Palindromes of n event streams."""
    _in_turns(rounds, load, sides, ["bench.proxies.streams", str(n)], request, n_blocks)


def _in_turns(rounds: Rounds, load: object, sides: Sequence[Side], command: Sequence[str], request: bytes, n_blocks: int) -> None:
    by_name = {side.name: side for side in sides}
    for _ in range(n_blocks):
        for name in palindrome(list(by_name)):
            rounds.seen[load, name].append(_one(by_name[name], command, request))


def _one(side: Side, command: Sequence[str], request: bytes) -> Seen:
    begun = side.cpu_s()
    asked = [sys.executable, "-m", command[0], str(side.port), *command[1:]]
    done = subprocess.run(asked, input=request, capture_output=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"{side.name}: {done.stderr.decode(errors='replace')[-600:]}")
    said = json.loads(done.stdout)
    cpu_us = (side.cpu_s() - begun) / said.get("n_all", said["n"]) * 1e6
    times = (said.get(name, 0.0) for name in ("gap_p50_ms", "gap_p99_ms"))
    return Seen(int(said["n"]), said["s"], said["p50_ms"], said["p99_ms"], said["max_ms"], cpu_us, side.rss_mib(), *times)
