"""One proxy with its engine for all clients of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.proxy_process import Served
from tests.models import tiny_model

ARGS = ("-c", "2048", "-np", "2", "-t", "1", "--seed", "1", "--temp", "0", "--jinja")


@pytest.fixture(scope="session")
def served(engine_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The proxy as a process."""
    with Served(engine_path, tiny_model("full"), tmp_path_factory.mktemp("proxy"), args=ARGS) as proxy:
        yield proxy
        assert proxy.stop() == 0
        assert "Traceback" not in proxy.said, proxy.said


@pytest.fixture(scope="session")
def direct(served: Served) -> Iterator[httpx.Client]:
    """A plain client of the engine behind it."""
    transport = httpx.HTTPTransport(uds=served.socket, limits=httpx.Limits(max_keepalive_connections=0))
    with httpx.Client(transport=transport, base_url="http://engine", timeout=120) as client:
        yield client


def said(direct: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    """What the engine itself answers."""
    return direct.post(path, json=body).raise_for_status().json()
