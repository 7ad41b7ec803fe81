"""The proxy as a process of its own, for tests that run its engine in their own loop."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@asynccontextmanager
async def process(options: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """The proxy with these options, stopped in the end."""
    command = [sys.executable, "-m", "polykv_proxy.cli", *options]
    made = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        yield made
    finally:
        if made.returncode is None:
            made.terminate()
            await made.communicate()


@asynccontextmanager
async def up(proxy: asyncio.subprocess.Process, port: int) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """A client of a proxy that has said that it is ready, and what it said."""
    assert proxy.stderr is not None
    said = b""
    async with asyncio.timeout(60):
        while b"  try " not in said:
            line = await proxy.stderr.readline()
            assert line, said.decode()
            said += line
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=False, timeout=30) as client:
        yield client, said.decode()
