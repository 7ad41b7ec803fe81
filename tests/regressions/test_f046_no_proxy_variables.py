"""F046: proxy variables of the environment never touch the way to the engine, and `localhost` is looked up once."""

from __future__ import annotations

import pytest

from polykv_proxy.engine import probe
from polykv_proxy.engine.address import from_url
from polykv_proxy.engine.facts import ask_facts
from tests.fakes.relay_rig import RelayRig, request
from tests.fakes.stub_engine import Stub, reply


async def test_everything_works_with_proxy_variables_pointing_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relay, readiness probe and start-up facts reach an engine named as localhost directly."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with Stub(lambda _: reply(b'{"total_slots": 3, "model_path": "/m/a.gguf"}')) as stub:
        address, prefix = from_url(f"http://localhost:{stub.port}")
        assert (address.host, prefix) == ("127.0.0.1", "")
        with RelayRig(address) as rig:
            assert rig.send(request()).status == 200
        assert await probe.health(address) == 200
        facts = await ask_facts(address, None)
        assert (facts.n_slots, facts.model) == (3, "a.gguf")
