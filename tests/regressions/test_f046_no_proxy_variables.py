"""F046: proxy variables of the environment never touch the way to the engine, and `localhost` is looked up once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from polykv_proxy.engine import probe
from polykv_proxy.engine.address import from_url
from polykv_proxy.engine.facts import ask_facts
from tests.fakes.product import product
from tests.fakes.relay_rig import RelayRig, request
from tests.fakes.stub_engine import Stub, reply
from tests.models import tiny_model

NAMES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@pytest.fixture
def proxy_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """All proxy variables point here, without exclusions. Nobody answers; who comes waits in the backlog."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        for name in NAMES:
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield server
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.usefixtures("proxy_port")
async def test_everything_works_with_proxy_variables_pointing_nowhere() -> None:
    """Relay, readiness probe and start-up facts reach an engine named as localhost directly, not by the variables' port."""
    with Stub(lambda _: reply(b'{"total_slots": 3, "model_path": "/m/a.gguf"}')) as stub:
        address, prefix = from_url(f"http://localhost:{stub.port}")
        assert (address.host, prefix) == ("127.0.0.1", "")
        with RelayRig(address) as rig:
            assert rig.send(request()).status == 200
        assert await probe.health(address) == 200
        facts = await ask_facts(address, None)
        assert (facts.n_slots, facts.model) == (3, "a.gguf")


@pytest.mark.engine
@pytest.mark.usefixtures("proxy_port")
def test_the_whole_product_ignores_them(engine_path: Path, tmp_path: Path) -> None:
    """Supervision, event stream, dry runs, pools and relayed requests work, and nothing goes to the variables' port."""
    with product(engine_path, tiny_model("one-layer"), tmp_path, args=["-c", 512, "-np", 2]) as proxy:
        pool = proxy.pool(prompt="One two three four five.", name="p")
        body = {
            "prompt": "One two three four five. Six",
            "n_predict": 2,
            "pool_id": "p",
            "shared_prefix_n_tokens": pool["prefix_len"],
        }
        reply = proxy.http.post("/completion", json=body)
        assert (reply.status_code, reply.headers["x-cached-prefix-tokens"]) == (200, str(pool["prefix_len"]))
        proxy.settled()
        assert proxy.get("/polykv/pools/p")["n_hits"] == 1
        assert proxy.http.get("/metrics").status_code == 200
