"""The proxy as a process with `--pools`: it is ready when they are there, and a bad file ends it before anything starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.fakes.async_proxy import free_port, process, up
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_server import FakeEngineServer
from tests.integration.rig import served


def with_pools(server: FakeEngineServer, folder: Path, pools: Path, port: int) -> list[str]:
    """Options of a proxy in front of the fake engine."""
    options = ["--engine-url", f"unix:{server.path}", "--engine-key", server.engine.key]
    return [*options, "--port", str(port), "--state-dir", str(folder / "state"), "--pools", str(pools)]


async def until(client: httpx.AsyncClient, reason: str) -> dict:
    """Until the health page gives this reason."""
    async with asyncio.timeout(60):
        while True:
            try:
                health = (await client.get("/polykv/health")).json()
            except httpx.TransportError:
                health = {}
            if reason in str(health.get("reason")):
                return health
            await asyncio.sleep(0.02)


async def test_it_is_ready_when_its_pools_are_there(tmp_path: Path) -> None:
    """Until then the health page says what is done and requests get 503; afterwards a request by name shares at once."""
    pools = tmp_path / "pools.yaml"
    pools.write_text("pools:\n  sys: {tokens: [5, 6, 7], pin: true}\n  far: {tokens: [99999]}\n")
    engine, port = FakeEngine(), free_port()
    engine.hold()
    async with (
        served(engine, tmp_path) as server,
        process(with_pools(server, tmp_path, pools, port)) as proxy,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as client,
    ):
        health = await until(client, "making declared pools: 0 of 2 (sys, 0 of 3 tokens)")
        assert (health["state"], health["declared"]["settled"]) == ("starting", False)
        ask = {"prompt": [5, 6, 7, 8], "pool_id": "sys", "n_predict": 1}
        early = await client.post("/completion", json=ask)
        assert (early.status_code, early.json()["error"]["code"], early.headers["retry-after"]) == (503, "engine_starting", "2")
        engine.go()
        async with up(proxy, port) as (_, said):
            assert "declared: 1 of 2 are there" in said
            assert "note   declared pool far could not be made: tokens[0] is 99999" in said
        health = (await client.get("/polykv/health")).json()
        assert (health["state"], health["reason"], health["declared"]["settled"]) == ("ready", None, True)
        assert (await client.post("/completion", json=ask)).headers["x-cached-prefix-tokens"] == "3"


@pytest.mark.parametrize("text", ["", "# later\n", "pools: {}\n"])
async def test_a_file_that_declares_nothing_is_named(tmp_path: Path, text: str) -> None:
    """It starts: files are made by programs too. But an empty one is most often a mistake."""
    pools = tmp_path / "pools.yaml"
    pools.write_text(text)
    port = free_port()
    async with (
        served(FakeEngine(), tmp_path) as server,
        process(with_pools(server, tmp_path, pools, port)) as proxy,
        up(proxy, port) as (_, said),
    ):
        assert f"note   --pools {pools} declares nothing" in said


async def test_it_can_be_stopped_while_they_are_made(tmp_path: Path) -> None:
    """A signal ends it with 0, whatever is being made."""
    pools = tmp_path / "pools.yaml"
    pools.write_text("pools: {sys: {tokens: [5, 6, 7]}}")
    engine, port = FakeEngine(), free_port()
    engine.hold()
    async with (
        served(engine, tmp_path) as server,
        process(with_pools(server, tmp_path, pools, port)) as proxy,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as client,
    ):
        await until(client, "making declared pools")
        proxy.terminate()
        _, said = await proxy.communicate()
        assert proxy.returncode == 0, said
        assert b"Traceback" not in said, said


async def test_a_bad_file_ends_it_before_it_listens(tmp_path: Path) -> None:
    """Exit code 2 and a line for each mistake."""
    pools = tmp_path / "pools.yaml"
    pools.write_text("pools:\n  A: {prompt: x}\n  b: {}\n")
    async with served(FakeEngine(), tmp_path) as server, process(with_pools(server, tmp_path, pools, free_port())) as proxy:
        _, said = await proxy.communicate()
        assert proxy.returncode == 2
        *_, first, second = said.decode().splitlines()  # after the note that --engine-key can be read by all
        assert first == f"error: {pools}:2: pool A: a name must match [a-z_][a-z0-9_.-]{{0,63}}"
        assert second.startswith(f"error: {pools}:3: pool b: give exactly one of ")
