"""Mirrors ui/top/remote.py: looking at a real application, and at what is none."""

from __future__ import annotations

from pathlib import Path

import httpx

from polykv_proxy.api.context import Keys
from polykv_proxy.ui.top.remote import Remote
from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import rig


async def test_a_look_has_everything_that_the_routes_tell(tmp_path: Path) -> None:
    """Pools, speeds and health come together."""
    async with rig(tmp_path, health={"state": "ready"}) as proxy:
        await proxy.pool(tokens=[5, 6, 7], name="clerk")
        remote = Remote("proxy:1", transport=httpx.ASGITransport(proxy.app))
        found = await remote.look()
        await remote.close()
    assert (found.trouble, found.health["state"], [pool["name"] for pool in found.pools]) == (None, "ready", ["clerk"])
    assert found.savings["n_tokens"] == found.pools[0]["savings"]["n_tokens"] == found.tps["saved_tokens"] == 0
    assert (found.admission["policies"], found.decisions["decisions"]) == ([], [])
    assert found.kv_bytes()["pools"] == 300
    assert sum(found.kv_bytes().values()) == 100 * 4096


async def test_a_missing_key_is_said_with_its_remedy(tmp_path: Path) -> None:
    """Without the key there is a reason, with another one another; with it there are pools."""
    async with rig(tmp_path, keys=Keys(frozenset({"secret"}))) as proxy:
        transport = httpx.ASGITransport(proxy.app)
        assert (await Remote("proxy", transport=transport).look()).trouble == "Invalid API Key; give --api-key"
        trouble = (await Remote("proxy", "other", transport=transport).look()).trouble
        assert trouble == "Invalid API Key; the key that was given (--api-key, POLYKV_API_KEY) is none of the proxy's"
        assert (await Remote("proxy", "secret", transport=transport).look()).trouble is None


async def test_an_engine_without_pools_is_a_reason(tmp_path: Path) -> None:
    """The 501 of the routes in its words; health is there all the same."""
    plain = FakeEngine()
    plain.has_verbs = False
    async with rig(tmp_path, plain, health={"state": "ready"}) as proxy:
        found = await Remote("proxy", transport=httpx.ASGITransport(proxy.app)).look()
    assert found.trouble is not None
    assert "run an engine that has them" in found.trouble
    assert found.health["state"] == "ready"


async def test_the_last_answers_stay_while_nothing_answers() -> None:
    """A lost connection, another server's page, and a proxy that is back."""
    answers: list[httpx.Response | Exception] = []

    def answer(_request: httpx.Request) -> httpx.Response:
        if isinstance(answers[0], Exception):
            raise answers[0]
        return httpx.Response(answers[0].status_code, content=answers[0].content)

    remote = Remote("http://proxy", transport=httpx.MockTransport(answer))
    answers[:] = [httpx.Response(200, json={"pools": [], "seq_ids_max": 4})]
    assert (await remote.look()).tree["seq_ids_max"] == 4
    answers[:] = [httpx.ConnectError("refused")]
    lost = await remote.look()
    assert (lost.trouble, lost.tree["seq_ids_max"]) == ("nothing answers at http://proxy (refused)", 4)
    answers[:] = [httpx.Response(200, text="<html>")]
    assert (await remote.look()).trouble == "http://proxy answers without JSON; is it a polykv-proxy?"
    answers[:] = [httpx.Response(200, json={"pools": []})]
    assert (await remote.look()).trouble is None
