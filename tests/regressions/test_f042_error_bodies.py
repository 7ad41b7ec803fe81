"""F042: an error of the engine reaches the client as it came: status, body, content type and Retry-After, whatever the body is."""

from __future__ import annotations

import gzip
from collections.abc import Sequence

import pytest

from polykv_proxy.ports import EngineAddress, Header, Plan, Refusal, RelayRequest, StreamStart
from tests.fakes.relay_rig import Client, RelayRig, request
from tests.fakes.stub_engine import Script, Seen, Stub, reply

STATUSES = (400, 401, 404, 405, 413, 422, 429, 500, 501, 503)
JSON = b'{"error":{"code":400,"message":"the request exceeds the available context size","type":"exceed_context_size_error"}}'
BODIES = {
    "json": (b"application/json; charset=utf-8", b"", JSON),
    "html": (b"text/html", b"", b"<html><h1>Bad Gateway</h1>"),
    "empty": (b"application/json", b"", b""),
    "gzip": (b"application/json", b"Content-Encoding: gzip\r\n", gzip.compress(JSON, mtime=0)),
    "not utf-8": (b"text/plain; charset=latin1", b"", "défaut".encode("latin1")),
}


class Gate:
    """Plans every request, as for one that names a pool."""

    def __init__(self) -> None:
        self.n_done = 0

    def concerns(self, request: RelayRequest) -> bool:
        return True

    counts = False

    async def count(self) -> Plan:
        raise AssertionError

    def objection(self, headers: Sequence[Header]) -> Refusal | None:
        return None

    async def plan(self, request: RelayRequest, waiting: StreamStart) -> Plan:
        return Plan((), self._added, self._done)

    def _added(self, _status: int, _headers: Sequence[Header]) -> Sequence[Header]:
        return [(b"x-cached-prefix-tokens", b"0")]

    def _done(self) -> None:
        self.n_done += 1


def script(seen: Seen) -> Script:
    status, kind = int(seen.header(b"x-status")[0]), seen.header(b"x-kind")[0].decode()
    content_type, extra, body = BODIES[kind]
    extra += b"Retry-After: 7\r\n" if status in (429, 503) else b""
    return reply(body, status=b"%d Said So" % status, kind=content_type, extra=extra)


def ask(client: Client, status: int, kind: str, stream: bool) -> tuple[bytes, list[list[bytes]], bytes]:
    """Status line, the fields that matter, and the body."""
    extra = b"X-Status: %d\r\nX-Kind: %b\r\n" % (status, kind.encode())
    client.send(request(b"POST", b"/v1/chat/completions", b'{"stream":%b}' % (b"true" if stream else b"false"), extra))
    got = client.reply()
    assert got.complete
    names = (b"content-type", b"content-encoding", b"retry-after", b"content-length", b"transfer-encoding")
    return got.head.split(b"\r\n")[0], [got.header(name) for name in names], got.body


@pytest.mark.parametrize("planned", [False, True], ids=["plain", "with a pool"])
def test_all_hundred_combinations_equal_the_direct_ones(planned: bool) -> None:
    """Ten statuses, five bodies, streaming or not, on one connection; plans end with their requests."""
    gate = Gate() if planned else None
    with Stub(script) as stub, RelayRig(EngineAddress(port=stub.port), gate=gate) as rig:
        with Client(stub.port) as direct, Client(rig.port) as through:
            n = 0
            for status in STATUSES:
                for kind in BODIES:
                    for stream in (False, True):
                        assert ask(through, status, kind, stream) == ask(direct, status, kind, stream)
                        n += 1
        assert n == 100
        if gate is not None:
            assert rig.on_loop(lambda: gate.n_done) == 100
