"""Who has no key learns nothing, starts nothing and leaves nothing: the engine refuses, before pools are even looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from polykv_proxy.api.context import Keys, engine_keys_of
from polykv_proxy.prepared import prepare
from polykv_proxy.settings import load_settings
from tests.integration.rig import relay_request, rig

KEYS = Keys(api=frozenset({"k"}), admin="root")


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {"authorization": "Basic k"}])
async def test_a_wrong_key_plans_nothing(headers: dict[str, str], tmp_path: Path) -> None:
    """Known and unknown pools look the same, and no session is made."""
    async with rig(tmp_path, keys=KEYS) as proxy:
        sent = [(name.encode(), value.encode()) for name, value in headers.items()]
        for body in (b'{"pool_id": 99}', b'{"session_id": "s"}', b'{"pool_id": [], "id_slot": 1}'):
            plan = await proxy.gate.plan(relay_request(body, sent), lambda _: None)
            assert getattr(plan, "engine_headers", None) == ()
        assert not list(proxy.runtime.hub.ledger.sessions)


@pytest.mark.parametrize("headers", [{"authorization": "Bearer k"}, {"authorization": "k"}, {"x-api-key": "root"}])
async def test_a_key_that_the_engine_takes_counts_here(headers: dict[str, str], tmp_path: Path) -> None:
    """Each form that the engine accepts, the admin key included."""
    async with rig(tmp_path, keys=KEYS) as proxy:
        sent = [(name.encode(), value.encode()) for name, value in headers.items()]
        refused = await proxy.gate.plan(relay_request(b'{"pool_id": 99}', sent), lambda _: None)
        assert getattr(refused, "status", None) == 404


def test_a_field_with_several_keys_holds_all_of_them() -> None:
    """Which of them the engine takes is not guessed; an empty Authorization hides no X-Api-Key."""
    assert engine_keys_of([(b"Authorization", b"Bearer a"), (b"authorization", b"b")]) == {"a", "b"}
    assert engine_keys_of([(b"Authorization", b""), (b"X-Api-Key", b"b")]) == {"b"}
    assert engine_keys_of([]) == {""}


@pytest.mark.parametrize("values", [(b"Bearer k", b"Bearer wrong"), (b"wrong", b"k")])
async def test_several_keys_are_no_way_around_pools_and_bounds(values: tuple[bytes, bytes], tmp_path: Path) -> None:
    """The engine serves the request if it is the right one that it looks at: so it is looked at here, too."""
    async with rig(tmp_path, keys=KEYS) as proxy:
        sent = [(b"Authorization", value) for value in values]
        refused = await proxy.gate.plan(relay_request(b'{"pool_id": 99}', sent), lambda _: None)
        assert getattr(refused, "status", None) == 404
        wrong = [(b"X-Api-Key", b"a"), (b"X-Api-Key", b"b")]
        none = await proxy.gate.plan(relay_request(b'{"pool_id": 99}', wrong), lambda _: None)
        assert getattr(none, "engine_headers", None) == ()


def test_the_engine_takes_every_key_of_ours(tmp_path: Path) -> None:
    """The admin key opens relayed routes as well; a key in the engine's environment guards our routes too."""
    engine = tmp_path / "engine"
    engine.write_text("#!/bin/sh\necho .sock\n")
    engine.chmod(0o755)
    given: dict[str, object] = {"engine": engine, "port": 0, "engine_args": ("-hf", "x")}
    ready = prepare(load_settings({**given, "api_key": "a, b", "admin_key": "root"}, env={}), {"TMPDIR": str(tmp_path)})
    ready.close()
    assert ready.env["LLAMA_API_KEY"] == "a,b,root"
    ready = prepare(load_settings(given, env={}), {"LLAMA_API_KEY": "x,y", "TMPDIR": str(tmp_path)})
    ready.close()
    assert (ready.keys.accepts(None), ready.keys.accepts("y"), ready.engine_key) == (False, True, "x")
