"""F044: HEAD, OPTIONS and methods that nobody has are answered as the engine answers them, with and without keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.proxy_process import Served
from tests.fakes.relay_rig import request
from tests.fuzz.equality import Face, face
from tests.fuzz.wire import Wire
from tests.models import tiny_model

pytestmark = pytest.mark.engine

PREFLIGHT = (
    b"Origin: http://app.example\r\nAccess-Control-Request-Method: POST\r\n"
    b"Access-Control-Request-Headers: authorization, content-type, x-pool-id\r\n"
)
ASKS = [
    (b"HEAD", b"/", b""),
    (b"HEAD", b"/v1/models", b""),
    (b"HEAD", b"/health", b""),
    (b"OPTIONS", b"/v1/chat/completions", PREFLIGHT),
    (b"OPTIONS", b"/nowhere", PREFLIGHT),
    (b"PUT", b"/nowhere", b""),
    (b"PATCH", b"/nowhere", b"Origin: http://app.example\r\n"),
    (b"DELETE", b"/nowhere", b""),
]


@pytest.fixture(scope="module", params=["", "secret"], ids=["without a key", "with a key"])
def served(request: pytest.FixtureRequest, engine_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    key = request.param
    options = ["--api-key", key] if key else []
    with Served(
        engine_path, tiny_model("full"), tmp_path_factory.mktemp("proxy"), *options, args=("-c", "512", "-t", "1"), key=key
    ) as proxy:
        yield proxy


def port(served: Served) -> int:
    return int(served.url.rsplit(":", 1)[1])


def asked(wire: Wire, method: bytes, target: bytes, extra: bytes) -> Face:
    wire.send(request(method, target, b"" if method in {b"PUT", b"PATCH"} else None, extra))
    return face(wire.reply(head_only=method == b"HEAD"))


def test_the_engine_s_routes_answer_as_the_engine_does(served: Served) -> None:
    """Status, fields (those for other origins too) and body; all on one connection, which serves a request after them."""
    want = []
    for ask in ASKS:
        with Wire(Path(served.socket)) as wire:
            want.append(asked(wire, *ask))
    with Wire(port(served)) as wire:
        assert [asked(wire, *ask) for ask in ASKS] == want
        wire.send(request(b"GET", b"/health"))
        assert wire.reply().body == b'{"status":"ok"}'
    preflight = want[3]
    assert preflight.line.startswith(b"HTTP/1.1 200")
    assert any(name.lower() == b"access-control-allow-origin" for name, _ in preflight.headers)


@pytest.mark.parametrize("target", [b"/polykv/health", b"/polykv/pools", b"/gpu/peers"])
def test_our_own_routes_answer_them_too(served: Served, target: bytes) -> None:
    """OPTIONS names the methods and wants no key; HEAD is GET without its body; the connection goes on."""
    key = b"X-Api-Key: secret\r\n"
    with Wire(port(served)) as wire:
        wire.send(request(b"OPTIONS", target, None, PREFLIGHT))
        options = wire.reply()
        assert (options.status, options.header(b"access-control-allow-origin")) == (204, [])
        assert b"GET" in options.header(b"allow")[0]
        wire.send(request(b"HEAD", target, None, key))
        assert wire.reply(head_only=True).status == 200
        wire.send(request(b"GET", target, None, key))
        assert json.loads(wire.reply().body)
        wire.send(request(b"PATCH", target, b"", key))
        assert wire.reply().status == 405
