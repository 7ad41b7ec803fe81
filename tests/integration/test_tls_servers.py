"""TLS servers in front, set up as docs/security.md shows them: what crosses, what is live, and who is seen to leave."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from polykv_proxy.api.context import Keys
from tests.integration.rig import Rig, relayed, rig, steps

SECURITY = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
NAME = "polykv.example.org"
KEY = "user"
HANG_GUARD_S = 30


def example(mark: str) -> str:
    """The block of the document that begins with this."""
    (block,) = re.findall(rf"^    {mark}.*\n(?:^    .*\n)+?^    }}\n", SECURITY, re.MULTILINE)
    return str(block)


def nginx(folder: Path, block: str, certificate: Path, key: Path) -> list[str]:
    """Its command."""
    block = block.replace("ssl_certificate …", f"ssl_certificate {certificate}").replace(
        "ssl_certificate_key …", f"ssl_certificate_key {key}"
    )
    places = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    main = f"daemon off; master_process off; pid {folder}/pid; error_log stderr; events {{}}"
    (folder / "nginx.conf").write_text(f"{main} http {{ access_log off; {places} {block} }}")
    return ["nginx", "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]


def caddy(folder: Path, block: str, certificate: Path, key: Path) -> list[str]:
    """Its command."""
    block = block.replace("{", f"{{\ntls {certificate} {key}\n", 1)
    (folder / "Caddyfile").write_text(f"{{\nadmin off\nauto_https disable_redirects\n}}\n{block}")
    return ["caddy", "run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")]


@asynccontextmanager
async def fronted(folder: Path, server: str) -> AsyncIterator[tuple[Rig, httpx.AsyncClient]]:
    """A proxy over a fake engine, and a client of the TLS server before it."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    ask = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    ask += [
        "-subj",
        f"/CN={NAME}",
        "-addext",
        f"subjectAltName=DNS:{NAME},IP:127.0.0.1",
        "-out",
        str(certificate),
        "-keyout",
        str(key),
    ]
    subprocess.run(ask, check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with rig(folder, keys=Keys(frozenset({KEY}), None)) as proxy, relayed(proxy) as (_, direct):
        block = example(SERVERS[server][0]).replace("127.0.0.1:8080", f"127.0.0.1:{direct.base_url.port}")
        block = block.replace("listen 443", f"listen 127.0.0.1:{port}").replace(f"{NAME} {{", f"{NAME}:{port} {{")
        command = SERVERS[server][1](folder, block, certificate, key)
        log = (folder / "log").open("w")
        with (
            log,
            subprocess.Popen(
                command, stdout=log, stderr=log, env={"PATH": "/usr/sbin:/usr/bin:/bin", "HOME": str(folder)}
            ) as process,
        ):
            try:
                await until(lambda: listens(port) or process.poll() is not None)
                assert process.poll() is None, (folder / "log").read_text()
                trusted = ssl.create_default_context(cafile=str(certificate))
                headers = {"authorization": f"Bearer {KEY}", "host": f"{NAME}:{port}"}
                async with httpx.AsyncClient(
                    base_url=f"https://127.0.0.1:{port}", verify=trusted, headers=headers, timeout=HANG_GUARD_S, trust_env=False
                ) as client:
                    yield proxy, client
            finally:
                process.kill()


SERVERS = {"nginx": ("server {", nginx), "caddy": (re.escape(NAME), caddy)}


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    for program in (name, "openssl"):
        if shutil.which(program, path="/usr/sbin:/usr/bin:/bin") is None:
            pytest.skip(f"there is no {program} here")
    return name


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_GUARD_S):
        while not true():
            await asyncio.sleep(0.01)


def data(response: httpx.Response) -> AsyncIterator[dict]:
    """The data of a stream's events, as they come."""
    lines = response.aiter_lines()
    return (json.loads(line.removeprefix("data:")) async for line in lines if line.startswith("data:"))


async def test_requests_and_large_bodies_cross(tmp_path: Path, server: str) -> None:
    """What a page sends too, by the name and port that it was loaded from; 50 MiB, to the byte."""
    async with fronted(tmp_path, server) as (proxy, client):
        page = {"origin": f"https://{client.headers['host']}"}
        made = await client.post("/polykv/pools", json={"prompt": "one two three four", "name": "a"}, headers=page)
        assert made.status_code == 201, made.text
        assert made.headers["location"] == "/polykv/pools/1"
        body = b'{"prompt":"one two three four five","pool_id":"a","x":"%b"}' % (b"x" * (50 << 20))
        answer = await client.post("/completion", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-cached-prefix-tokens"] == "5"
        assert proxy.server.seen_bodies[-1] == body
        assert (await client.get("/polykv/pools", headers={"authorization": ""})).status_code == 401


async def test_streams_are_live_and_who_leaves_is_noticed(tmp_path: Path, server: str) -> None:
    """Each event comes before the engine computes the next; so do speeds; a client that leaves ends the generation."""
    async with fronted(tmp_path, server) as (proxy, client):
        proxy.engine.hold()
        ask = {"prompt": "one two", "n_predict": 100, "stream": True}
        async with client.stream("POST", "/completion", json=ask) as response:
            events = data(response)
            for n in (1, 2, 3):
                while max(slot.n_decoded for slot in proxy.engine.slots) < n:
                    await steps(proxy.engine, 1)
                assert (await anext(events))["content"] == f" w{n - 1}"
            async with client.stream("GET", "/polykv/tps?interval_ms=100") as watched:
                speeds = data(watched)
                assert [(await anext(speeds))["slots_busy"] for _ in range(3)] == [1, 1, 1]
            assert any(slot.state == "generating" for slot in proxy.engine.slots)
        await until(lambda: all(slot.state == "idle" for slot in proxy.engine.slots))
        assert max(slot.totals["n_decoded"] for slot in proxy.engine.slots) < 100
