"""Stopping the proxy as a process: drain, grace, second signal. The engine here is a scripted one that runs already."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.fakes.relay_rig import Client, request
from tests.fakes.stub_engine import END, SSE_HEAD, Do, Script, Seen, Stub, chunk, reply

CHAT = request(b"POST", b"/v1/chat/completions", b"{}")


def _script(seen: Seen) -> Script:
    if b"_polykv" in seen.target:
        return reply(b'{"error":{"message":"File Not Found","type":"not_found_error","code":404}}', status=b"404 Not Found")
    if seen.method == b"GET":
        return reply(b'{"total_slots":1}')
    if seen.header(b"x-long"):
        return [SSE_HEAD, chunk(b"data: 1\n\n"), Do.HANG]
    return [SSE_HEAD, chunk(b"data: 1\n\n"), 1.0, chunk(b"data: 2\n\n"), END]


class Proxy:
    def __init__(
        self, stub: Stub, folder: Path, grace_s: float, *more: str, program: Sequence[str] = ("-m", "polykv_proxy.cli")
    ) -> None:
        command = [*program, "--engine-url", f"http://127.0.0.1:{stub.port}", "--port", "0"]
        command = [sys.executable, *command, "--drain-grace-s", str(grace_s), "--state-dir", str(folder), *more]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"ready at http://127.0.0.1:(\d+)", line):
                self.port = int(found[1])
            if line.startswith("  try "):
                break

    def signal(self, signum: int = signal.SIGTERM) -> None:
        self.process.send_signal(signum)

    def code(self) -> int:
        assert self.process.stderr is not None
        self.process.stderr.close()
        return self.process.wait(60)


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub(_script) as made:
        yield made


def _refused(port: int) -> bool:
    """Is new work refused, while the port is still open?"""
    with Client(port) as client:
        client.send(request(b"GET", b"/slots"))
        return client.reply().status == 503


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_short_work_finishes_and_long_work_gets_an_error_event(stub: Stub, tmp_path: Path, signum: int) -> None:
    """New work is refused at once, a stream within the grace completes, one beyond it ends with an error event; exit code 0."""
    proxy = Proxy(stub, tmp_path, 4.0)
    with Client(proxy.port) as short, Client(proxy.port) as long:
        short.send(CHAT)
        long.send(request(b"POST", b"/v1/chat/completions", b"{}", b"X-Long: 1\r\n"))
        short.until(b"data: 1\n\n")
        long.until(b"data: 1\n\n")
        proxy.signal(signum)
        end = time.monotonic() + 3
        while not _refused(proxy.port):
            assert time.monotonic() < end
        assert b"data: 2\n\n" in short.until(b"0\r\n\r\n")
        assert b'"code":"draining"' in long.until(b"0\r\n\r\n")
    assert proxy.code() == 0


def test_a_second_signal_ends_everything_at_once(stub: Stub, tmp_path: Path) -> None:
    """It does not wait for the grace time."""
    proxy = Proxy(stub, tmp_path, 600.0)
    with Client(proxy.port) as client:
        client.send(request(b"POST", b"/v1/chat/completions", b"{}", b"X-Long: 1\r\n"))
        client.until(b"data: 1\n\n")
        proxy.signal()
        while not _refused(proxy.port):
            pass
        proxy.signal()
        assert b'"code":"draining"' in client.rest()
    assert proxy.code() == 130


def test_a_terminal_that_closes_is_no_second_signal(stub: Stub, tmp_path: Path) -> None:
    """Shell and kernel both tell of it; what runs has its grace all the same."""
    proxy = Proxy(stub, tmp_path, 600.0)
    with Client(proxy.port) as client:
        client.send(CHAT)
        client.until(b"data: 1\n\n")
        proxy.signal(signal.SIGHUP)
        while not _refused(proxy.port):
            pass
        proxy.signal(signal.SIGHUP)
        assert b"data: 2\n\n" in client.until(b"0\r\n\r\n")
    assert proxy.code() == 0


def test_who_was_told_to_outlive_the_terminal_does(stub: Stub, tmp_path: Path) -> None:
    """`nohup` has the hang-up ignored: it stays so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        proxy = Proxy(stub, tmp_path, 1.0)
    finally:
        signal.signal(signal.SIGHUP, before)
    proxy.signal(signal.SIGHUP)
    assert not any(_refused(proxy.port) for _ in range(20))
    proxy.signal()
    assert proxy.code() == 0


@pytest.mark.parametrize("gone", [True, False])
def test_a_log_that_nobody_reads_delays_no_stop(gone: bool, stub: Stub, tmp_path: Path) -> None:
    """Whoever read standard error has left, or holds still and the pipe is full: what runs has its grace all the same."""
    proxy = Proxy(stub, tmp_path, 600.0, "--access-log")
    assert proxy.process.stderr is not None
    with Client(proxy.port) as client:
        if gone:
            proxy.process.stderr.close()
        for _ in range(1000):
            client.send(request(b"GET", b"/slots?" + b"x" * 200))
            assert client.reply().status == 200
        client.send(CHAT)
        client.until(b"data: 1\n\n")
        proxy.signal()
        assert b"data: 2\n\n" in client.until(b"0\r\n\r\n")
    assert proxy.process.wait(60) == 0
    proxy.process.stderr.close()


def test_what_the_start_has_made_is_never_looked_at_by_the_garbage_collector_again(stub: Stub, tmp_path: Path) -> None:
    """Modules and routes, 83,000 objects: a collection of them all took 50 ms, in which no byte moved."""
    tells = "import atexit, gc, sys; atexit.register(lambda: print(gc.get_freeze_count(), file=sys.stderr))"
    proxy = Proxy(stub, tmp_path, 1.0, program=["-c", f"{tells}; from polykv_proxy.cli import main; main()"])
    proxy.signal()
    assert proxy.process.stderr is not None
    assert int(proxy.process.stderr.read().split()[-1]) > 50_000
    assert proxy.code() == 0
