"""Mirrors cli_admission.py, against a real application."""

from __future__ import annotations

import asyncio
from pathlib import Path

from typer.testing import CliRunner

from polykv_proxy.cli import app
from tests.integration.rig import Rig, relayed, rig
from tests.integration.test_admission import FLOOR, POOL, at_rest, policy, settled, start, until, waiting


async def say(url: str, *words: str) -> str:
    """What a command prints; it must not fail."""
    done = await asyncio.to_thread(CliRunner().invoke, app, [*words, "--url", url])
    assert done.exit_code == 0, done.stderr
    return done.stdout


async def test_a_policy_is_set_shown_and_removed(tmp_path: Path) -> None:
    """Of a pool and of requests without one; what is left out stays; a wrong word is the proxy's to refuse."""
    async with rig(tmp_path) as proxy, relayed(proxy) as (_, client):
        await proxy.pool(tokens=POOL, name="base")
        url = str(client.base_url)
        assert "no policies and no bounds" in await say(url, "admission")
        assert "no policy: nobody is held or refused" in await say(url, "admission", "base")
        assert "floor 15.0 tok/s, advisory: would reject" in await say(url, "admission", "base", "--floor", "15")
        changed = await say(url, "admission", "base", "--mode", "enforced", "--on-saturation", "queue")
        assert "floor 15.0 tok/s, enforced: queue" in changed
        assert "guarantee_min_sessions 2" in await say(url, "admission", "--floor", "4", "--guarantee", "2")
        listed = await say(url, "admission")
        assert "requests without a pool  floor 4.0 tok/s" in listed
        assert "base  floor 15.0 tok/s, enforced: queue" in listed
        assert '"mode": "enforced"' in await say(url, "admission", "--json")
        wrong = await asyncio.to_thread(CliRunner().invoke, app, ["admission", "base", "--mode", "strict", "--url", url])
        assert (wrong.exit_code, "it must be one of advisory, enforced (--mode)\n" in wrong.stderr) == (1, True)
        both = await asyncio.to_thread(CliRunner().invoke, app, ["admission", "base", "--floor", "1", "--remove", "--url", url])
        assert (both.exit_code, "--remove goes with no other" in both.stderr) == (1, True)
        assert "base: removed" in await say(url, "admission", "base", "--remove")
        assert "there was no policy to remove" in await say(url, "admission", "base", "--remove")
        assert "removed" in await say(url, "admission", "--remove")
        assert proxy.runtime.admission.off


async def test_the_first_policy_of_a_pool_wants_a_floor(tmp_path: Path) -> None:
    """What is missing or wrong is named by its option too, not by its field alone."""
    async with rig(tmp_path) as proxy, relayed(proxy) as (_, client):
        await proxy.pool(tokens=POOL, name="base")
        for options, said in (
            (["--mode", "advisory"], "target_tps_per_session is missing; it must be a number from 0.001 to 1e+06 (--floor)\n"),
            (["--floor", "0"], "it must be a number from 0.001 to 1e+06 (--floor)\n"),
            (["--floor", "1", "--guarantee", "-1"], "it must be a whole number from 0 to 4096 (--guarantee)\n"),
        ):
            command = ["admission", "base", *options, "--url", str(client.base_url)]
            wrong = await asyncio.to_thread(CliRunner().invoke, app, command)
            assert (wrong.exit_code, wrong.stderr.endswith(said)) == (1, True), wrong.stderr


async def test_capacity_says_whether_and_why(tmp_path: Path) -> None:
    """Yes or no, the ground with its figures, the room; who waits and what was decided in the other command."""
    async with rig(tmp_path) as proxy, relayed(proxy) as (_, client):
        await proxy.pool(tokens=POOL, name="base")
        url = str(client.base_url)
        assert (await say(url, "capacity")).startswith("yes: ok; room: 4\n")
        await policy(proxy, **FLOOR, on_saturation="queue", queue_timeout_ms=600_000)
        first = await settled(proxy, "a")
        second = start(proxy, "[b]", 3)
        await until(proxy, lambda: waiting(proxy) == 1)
        shown = await say(url, "capacity", "base")
        assert shown.startswith("no: projected mean tps below floor (")
        assert "against 5,000); room: 0" in shown
        assert "floor 5,000 tok/s, enforced: queue; with one more" in shown
        assert '"can_admit": false' in await say(url, "capacity", "base", "--json")
        listed = await say(url, "admission")
        assert "1 waiting (longest" in listed
        assert [line.split()[:3] for line in listed.splitlines() if "[b]" in line] == [["1", "[b]", "1"]]
        assert [line.split()[2:4] for line in listed.splitlines() if line.strip().startswith("a ")] == [["admitted", "guaranteed"]]
        await _leave(proxy, second)
        proxy.engine.go()
        await first
        await at_rest(proxy)


async def _leave(proxy: Rig, task: asyncio.Task) -> None:
    task.cancel()
    await until(proxy, lambda: waiting(proxy) == 0)
