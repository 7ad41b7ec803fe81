"""Slow readers and writers hold up nobody: each of their bytes takes as long as a whole request of somebody else."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.fakes.proxy_process import Served
from tests.fakes.relay_rig import Client, request

pytestmark = pytest.mark.engine

ASK = {"prompt": "the river carries", "n_predict": 24, "temperature": 0, "stream": True}


def port(served: Served) -> int:
    return int(served.url.rsplit(":", 1)[1])


def test_a_reader_of_single_bytes(served: Served, direct: httpx.Client) -> None:
    """Gets the whole stream, byte for byte, while others are answered between its bytes."""
    whole = direct.post("/completion", json={**ASK, "stream": False}).json()["content"]
    with Client(port(served), rcvbuf=1024) as slow, httpx.Client(base_url=served.url, trust_env=False) as other:
        slow.send(request(b"POST", b"/completion", json.dumps(ASK).encode(), b"Content-Type: application/json\r\n"))
        for n in range(300):
            slow.data += slow.sock.recv(1)
            if n % 10 == 0:
                assert other.post("/completion", json={"prompt": "x", "n_predict": 1}).status_code == 200
        reply = slow.reply()
    assert reply.complete
    events = [json.loads(part.removeprefix("data: ")) for part in reply.body.decode().split("\n\n") if part.startswith("data: {")]
    assert "".join(event["content"] for event in events) == whole


def test_a_writer_of_single_bytes(served: Served, direct: httpx.Client) -> None:
    """Its request is answered when it is whole; the engine has heard nothing of it before, and others are served meanwhile."""
    body = json.dumps({**ASK, "stream": False, "cache_prompt": False, "id_slot": 1}).encode()
    data = request(b"POST", b"/completion", body, b"Content-Type: application/json\r\n")
    with Client(port(served)) as slow, httpx.Client(base_url=served.url, trust_env=False) as other:
        for n in range(len(data)):
            slow.send(data[n : n + 1])
            if n % 10 == 0:
                assert other.get("/health").status_code == 200
        got = json.loads(slow.reply().body)
    assert got["content"] == direct.post("/completion", content=body).json()["content"]


def test_a_row_on_an_old_connection(served: Served) -> None:
    """Pipelined requests are answered in order; one in HTTP/1.0 is answered and ends the connection."""
    with Client(port(served)) as client:
        ask = {"prompt": "x", "n_predict": 1}
        bodies = [json.dumps({**ask, "n_predict": n, "stream": bool(n % 2)}).encode() for n in (1, 2, 3)]
        client.send(b"".join(request(b"POST", b"/completion", body) for body in bodies))
        client.send(b"GET /health HTTP/1.0\r\n\r\nGET /health HTTP/1.1\r\nHost: t\r\n\r\n")
        replies = [client.reply() for _ in range(4)]
        assert [reply.status for reply in replies] == [200] * 4
        assert replies[3].body == b'{"status":"ok"}'
        assert client.rest() == b""
