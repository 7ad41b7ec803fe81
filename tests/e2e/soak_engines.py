"""What a soak runs on: the proxy before the real engine with a tiny model, or before the fake one as a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_server import FakeEngineServer
from tests.fakes.product import Product, product, reached
from tests.fakes.proxy_process import Served
from tests.models import tiny_model

N_SLOTS = 8
N_CTX = 8192
BODY_LIMIT = 1 << 20
OPTIONS = ("--body-limit-bytes", str(BODY_LIMIT))
ARGS = ("-c", N_CTX, "-np", N_SLOTS, "-kvu", "--cache-ram", 16, "--jinja")


@contextmanager
def real(engine: Path, folder: Path) -> Iterator[tuple[Product, int]]:
    """The product, and the process number of its engine."""
    with product(engine, tiny_model("full"), folder, *OPTIONS, args=ARGS) as proxy:
        yield proxy, proxy.served.health["pid"]


@contextmanager
def fake(folder: Path) -> Iterator[tuple[Product, int]]:
    """The same before the fake engine: no time is spent in computing, so the proxy is what is slow."""
    path, key = folder / "engine.sock", "soak"
    with subprocess.Popen([sys.executable, "-m", __spec__.name, str(path), key], stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"listens\n"
        try:
            with Served.before(path, key, folder, *OPTIONS) as served:
                with reached(served, Path("fake"), Path("toy"), key) as proxy:
                    yield proxy, engine.pid
                assert served.stop() == 0
                assert "Traceback" not in served.said, served.said
        finally:
            engine.terminate()


async def serve(path: Path, key: str) -> None:
    """Until told to stop."""
    engine = FakeEngine(n_slots=N_SLOTS, max_pools=16, n_ctx=N_CTX)
    engine.key, over = key, asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    server = FakeEngineServer(engine, path)
    server.pages["/slots"] = (200, "application/json", b"[]")
    await server.start()
    os.write(1, b"listens\n")
    await over.wait()
    await server.stop()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2]))
