"""A program that prints for ever, or an engine that stops answering, holds up nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import psutil
import pytest

from polykv_proxy.engine import binary
from polykv_proxy.runtime import hub
from tests.integration.rig import rig


async def test_lists_are_shown_while_the_engine_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools and sessions from the records, capacity as 503: none of them waits for an engine that hangs."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt="a shared beginning", name="p")
        monkeypatch.setattr(hub, "STATE_S", 0.01)
        monkeypatch.setattr(proxy.runtime.hub.client, "state", asyncio.Event().wait)
        assert (await proxy.api.get("/polykv/pools")).json()["pools"][0]["name"] == "p"
        assert (await proxy.api.get("/polykv/sessions")).json()["sessions"] == []
        capacity = await proxy.api.get("/polykv/capacity")
        assert (capacity.status_code, capacity.json()["error"]["code"]) == (503, "engine_unavailable")


def test_help_without_end_is_read_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not an engine may print gigabytes: only a bounded part of it is kept."""
    program = _program(tmp_path, "while :; do echo 'ends in .sock'; done")
    monkeypatch.setattr(binary, "_HELP_BYTES", 100_000)
    assert binary.inspect_binary(program).unix_socket


def test_a_help_that_hangs_leaves_nothing_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program and its children end with the question."""
    program = _program(tmp_path, f"sleep 1000 & echo $! > {tmp_path}/pid; echo .sock; wait")
    monkeypatch.setattr(binary, "_HELP_S", 1.0)
    assert binary.inspect_binary(program).unix_socket
    sleeper = int((tmp_path / "pid").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        while (process := psutil.Process(sleeper)).status() != psutil.STATUS_ZOMBIE:
            process.wait(20)


def _program(folder: Path, script: str) -> Path:
    program = folder / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    os.chmod(program, 0o755)
    return program
