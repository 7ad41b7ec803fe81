"""Those who watch a proxy through a soak: followers of its streams, some that do not read, visitors of its page, and scrapers.

Law: looks only. Each is a loop that ends when the soak is over, and raises BrokenError at the first thing that is not right.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from prometheus_client.parser import text_string_to_metric_families

from tests.engine.driver import HANG_GUARD_S
from tests.fakes.product import Product

VISIT_S = 1.0
RECEIVE_BYTES = 4096


class BrokenError(AssertionError):
    """What was seen, and what was expected."""


class Watcher(Protocol):
    """`watch` returns when the soak is over."""

    n_seen: int

    def watch(self) -> None: ...


class Follower:
    """Follows one of our streams until it is over: numbers grow, figures are finite or null."""

    def __init__(self, proxy: Product, path: str, over: threading.Event) -> None:
        self.proxy, self.path, self.over = proxy, path, over
        self.n_seen, self.last = 0, 0

    def watch(self) -> None:
        with self.proxy.http.stream("GET", self.path, timeout=None) as stream:
            for line in stream.iter_lines():
                if self.over.is_set():
                    return
                self.take(line)
        raise BrokenError(f"{self.path} ended without a word")

    def take(self, line: str) -> None:
        if not line.startswith("data: {"):
            return
        event: dict[str, Any] = json.loads(line.removeprefix("data: "), parse_constant=self.no_figure)
        self.n_seen += 1
        if event.get("seq", self.last) < self.last:
            raise BrokenError(f"{self.path}: {event['seq']} after {self.last}")
        self.last = event.get("seq", self.last)

    def no_figure(self, text: str) -> None:
        raise BrokenError(f"{self.path} says {text}")


class Sleeper(Follower):
    """Opens a stream and reads nothing of it; in the end what is newest is there, and what lay between is skipped or few."""

    def watch(self) -> None:
        with self.opened() as lines:
            self.over.wait()
            newest = self.proxy.get("/polykv/capacity")["seq"]
            for line in lines:
                self.take(line)
                if self.last >= newest or line.startswith(":"):  # a comment: there is nothing more to tell
                    return
        raise BrokenError(f"{self.path} ended without a word")

    @contextmanager
    def opened(self) -> Iterator[Iterator[str]]:
        host, port = self.proxy.served.url.removeprefix("http://").split(":")
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
            sock.settimeout(HANG_GUARD_S)
            sock.connect((host, int(port)))
            sock.sendall(f"GET {self.path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            with sock.makefile("r", encoding="utf-8", newline="\n") as lines:
                yield (line.rstrip("\r\n") for line in lines)


class Visitor:
    """Loads the page with all its files, and asks what it asks, again and again."""

    PATHS = ("/polykv/health", "/polykv/pools", "/polykv/savings", "/polykv/tps?once=1")

    def __init__(self, proxy: Product, over: threading.Event) -> None:
        self.proxy, self.over, self.n_seen = proxy, over, 0

    def watch(self) -> None:
        while not self.over.wait(VISIT_S):
            page = self.text("/polykv/ui")
            for path in re.findall(r'(?:src|href)="(ui/[^"]+)"', page):
                self.text(f"/polykv/{path}")
            for path in self.PATHS:
                json.loads(self.text(path))

    def text(self, path: str) -> str:
        reply = self.proxy.http.get(path)
        if reply.status_code != 200:
            raise BrokenError(f"{path}: status {reply.status_code}")
        self.n_seen += 1
        return reply.text


class Scraper(Visitor):
    """Reads the metrics as a strict parser does."""

    def watch(self) -> None:
        while not self.over.wait(VISIT_S):
            list(text_string_to_metric_families(self.text("/metrics")))
