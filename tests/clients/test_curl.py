"""curl, in all the ways in which it sends a body: the reply is what the engine gives to the same command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fakes.proxy_process import Served
from tests.fuzz.equality import normal

pytestmark = [pytest.mark.engine, pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")]

BODY = '{"prompt":"the river carries ä€😀","n_predict":6,"temperature":0,"cache_prompt":false,"id_slot":0%s}'
JSON = ("-H", "Content-Type: application/json")
WAYS = {
    "plain": (*JSON, "--data-binary", "@-"),
    "http1.0": (*JSON, "--http1.0", "--data-binary", "@-"),
    "chunked": (*JSON, "-H", "Transfer-Encoding: chunked", "--data-binary", "@-"),
    "upload": (*JSON, "-X", "POST", "-T", "-"),
    "expect": (*JSON, "-H", "Expect: 100-continue", "--expect100-timeout", "60", "--data-binary", "@-"),
    "h2c": (*JSON, "--http2", "--data-binary", "@-"),
    "form": ("--data-binary", "@-"),
    "close": (*JSON, "-H", "Connection: close", "--data-binary", "@-"),
    "compressed": (*JSON, "--compressed", "--data-binary", "@-"),
}


def curl(url: str, *options: str, body: str = "", socket: str = "") -> bytes:
    """What it prints; it must end well."""
    at = ["--unix-socket", socket] if socket else []
    command = ["curl", "-sS", "-N", "--noproxy", "*", "--max-time", "60", *at, *options, url]
    done = subprocess.run(command, input=body.encode(), capture_output=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


@pytest.mark.parametrize("stream", ["", ',"stream":true'], ids=["whole", "stream"])
@pytest.mark.parametrize("way", WAYS)
def test_a_completion_is_the_engine_s(served: Served, way: str, stream: str) -> None:
    """Whole or streamed."""
    body = BODY % stream
    want = curl("http://engine/completion", *WAYS[way], body=body, socket=served.socket)
    got = curl(f"{served.url}/completion", *WAYS[way], body=body)
    assert normal(got) == normal(want)
    assert b'"content"' in got


def test_a_connection_is_used_again(served: Served, tmp_path: Path) -> None:
    """Two pages in one command take one connection, also after a stream."""
    out = tmp_path / "out"
    ask = ("--data", '{"prompt":"x","n_predict":2,"stream":true}', *JSON)
    said = curl(
        f"{served.url}/completion",
        *ask,
        "-o",
        str(out),
        "-w",
        "%{num_connects}",
        "--next",
        "-sS",
        "-o",
        str(out),
        "-w",
        "%{num_connects}",
        f"{served.url}/health",
    )
    assert said == b"10"  # connections made for the first, for the second


def test_a_head_request_has_the_engine_s_fields(served: Served) -> None:
    """`curl -I`: the same length, and no body to wait for."""
    want, got = curl("http://engine/health", "-I", socket=served.socket), curl(f"{served.url}/health", "-I")
    kept = [
        [line for line in one.lower().splitlines() if not line.startswith((b"keep-alive", b"connection"))] for one in (want, got)
    ]
    assert kept[0] == kept[1]
