"""`from_session` without KV: 409, and with `rebuild` the prompt of the session's last turn, for create and fork."""

from __future__ import annotations

from pathlib import Path

import pytest

from polykv_proxy.core.ledger import LedgerLimits
from polykv_proxy.runtime.turns import LastTurns, Turn
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_records import EngineFaultError
from tests.integration.rig import Rig, rig, served

SYS = list(range(100, 130))
PROMPT = [*SYS, *range(200, 220)]


async def turn(proxy: Rig, session: str = "a", prompt: list[int] | str | None = None, **more: object) -> None:
    body = {"prompt": PROMPT if prompt is None else prompt, "session_id": session, "n_predict": 3, **more}
    assert (await proxy.call("/completion", body)).status_code == 200
    await proxy.settle()


def drop_kv(proxy: Rig) -> None:
    """Others took the slots: the engine holds nothing of any session."""
    for slot in proxy.engine.slots:
        slot.clear()


async def order(proxy: Rig, path: str = "/polykv/pools", **body: object) -> tuple[int, dict]:
    reply = await proxy.api.post(path, json=body)
    return reply.status_code, reply.json()


async def held(proxy: Rig, pool: dict) -> list[int]:
    return (await proxy.api.get(f"/polykv/pools/{pool['pool_id']}/tokens")).json()["tokens"]


async def test_while_there_is_kv_nothing_is_rebuilt(tmp_path: Path) -> None:
    """The snapshot holds what was generated too, and costs nothing."""
    async with rig(tmp_path) as proxy:
        await turn(proxy)
        computed = proxy.engine.computed
        status, pool = await order(proxy, from_session="a", rebuild=True)
        assert (status, pool["source"], pool["prefix_len"]) == (201, "from_session", len(PROMPT) + 3)
        assert proxy.engine.computed == computed


async def test_gone_kv_is_409_and_rebuilt_when_asked_for(tmp_path: Path) -> None:
    """The message says what would help; the pool is the prompt of the last turn, named and shareable like any other."""
    async with rig(tmp_path) as proxy:
        await turn(proxy, prompt=[1, 2, 3])
        await turn(proxy)
        drop_kv(proxy)
        status, reply = await order(proxy, from_session="a", name="p")
        assert (status, reply["error"]["code"], reply["error"]["param"]) == (409, "session_not_resident", "from_session")
        assert '"rebuild": true would compute the prompt of its last turn' in reply["error"]["message"]
        status, pool = await order(proxy, from_session="a", name="p", rebuild=True)
        assert (status, pool["source"], pool["name"], pool["residency"]) == (201, "last_turn", "p", "resident")
        assert await held(proxy, pool) == PROMPT
        reply = await proxy.call("/completion", {"prompt": [*PROMPT, 7], "pool_id": "p", "n_predict": 1})
        assert reply.headers["x-cached-prefix-tokens"] == str(len(PROMPT))


async def test_the_first_tokens_alone_can_be_asked_for(tmp_path: Path) -> None:
    """`n_tokens` as for a snapshot; more than the prompt has is a 400."""
    async with rig(tmp_path) as proxy:
        await turn(proxy)
        drop_kv(proxy)
        _, pool = await order(proxy, from_session="a", rebuild=True, n_tokens=35)
        assert await held(proxy, pool) == PROMPT[:35]
        status, reply = await order(proxy, from_session="a", rebuild=True, n_tokens=51)
        assert (status, reply["error"]["param"]) == (400, "n_tokens")
        assert "has 50 tokens" in reply["error"]["message"]


async def test_what_a_pool_holds_already_is_not_computed(tmp_path: Path) -> None:
    """A root is computed on the pool that shares most with it, a fork on its parent; the tree is as ordered."""
    async with rig(tmp_path, FakeEngine(max_pools=6)) as proxy:
        await proxy.pool(tokens=SYS, name="sys")
        await turn(proxy, pool_id="sys")
        drop_kv(proxy)
        computed = proxy.engine.computed
        _, root = await order(proxy, from_session="a", rebuild=True)
        assert (root["parent"], root["n_shared"], proxy.engine.computed - computed) == (None, 30, 20)
        await proxy.api.delete(f"/polykv/pools/{root['pool_id']}")
        drop_kv(proxy)
        computed = proxy.engine.computed
        status, child = await order(proxy, "/polykv/pools/sys/fork", from_session="a", rebuild=True, branch_pos=12)
        assert (status, child["parent"], child["branch_pos"], child["source"]) == (201, 1, 12, "last_turn")
        assert proxy.engine.computed - computed == 20
        assert await held(proxy, child) == PROMPT


async def test_a_name_in_use_is_answered_as_ever(tmp_path: Path) -> None:
    """The same prefix again is 200 with the pool there is; another is 409; nothing is left behind."""
    async with rig(tmp_path) as proxy:
        await turn(proxy)
        drop_kv(proxy)
        _, first = await order(proxy, from_session="a", name="p", rebuild=True)
        status, again = await order(proxy, from_session="a", name="p", rebuild=True)
        assert (status, again["pool_id"]) == (200, first["pool_id"])
        await turn(proxy, prompt=[5, 6, 7])
        drop_kv(proxy)
        status, reply = await order(proxy, from_session="a", name="p", rebuild=True)
        assert (status, reply["error"]["code"]) == (409, "name_taken")
        assert [pool["pool_id"] for pool in (await proxy.api.get("/polykv/pools")).json()["pools"]] == [first["pool_id"]]
        assert proxy.engine.used_cells() == len(PROMPT)


async def test_sessions_that_a_restart_of_the_engine_ended_can_be_rebuilt(tmp_path: Path) -> None:
    """Their KV is gone with the boot; the last turn is known until the session would have expired."""
    async with rig(tmp_path, limits=LedgerLimits(session_ttl_s=100.0)) as proxy:
        await turn(proxy, prompt="one two three")
        await proxy.server.crash()
        await proxy.until_unlinked()
        await proxy.server.restart()
        await proxy.until_linked(proxy.engine.boot_id)
        assert (await proxy.api.get("/polykv/sessions")).json()["sessions"] == []
        assert (await order(proxy, from_session="a"))[0] == 409
        status, pool = await order(proxy, from_session="a", rebuild=True)
        assert (status, await held(proxy, pool)) == (201, proxy.engine.tokenizer.encode("one two three"))
        proxy.clock.now += 101
        await proxy.runtime.sweep()
        assert (await order(proxy, from_session="a", rebuild=True))[0] == 404


async def test_what_is_not_known_is_not_made_up(tmp_path: Path) -> None:
    """Ended sessions, sessions of nobody, and refused requests leave nothing to compute from."""
    async with rig(tmp_path) as proxy:
        await turn(proxy)
        await proxy.api.delete("/polykv/sessions/a")
        for name in ("a", "nobody"):
            status, reply = await order(proxy, from_session=name, rebuild=True)
            assert (status, reply["error"]["code"]) == (404, "session_not_found")
        await turn(proxy, "b")
        await proxy.call("/completion", {"prompt": [1] * 5000, "session_id": "b", "n_predict": 1})
        await proxy.settle()
        drop_kv(proxy)
        _, pool = await order(proxy, from_session="b", rebuild=True)
        assert await held(proxy, pool) == PROMPT


async def test_an_engine_that_refuses_the_request_is_a_409(tmp_path: Path) -> None:
    """Another template, another model: the reason is the engine's; the pool is not there."""
    async with rig(tmp_path) as proxy:
        await turn(proxy)
        drop_kv(proxy)
        proxy.engine.fail_next("dry", EngineFaultError(400, "invalid_request_error", "no such template"))
        status, reply = await order(proxy, from_session="a", rebuild=True)
        assert (status, reply["error"]["code"]) == (409, "session_not_resident")
        assert "this engine refuses its last request: no such template" in reply["error"]["message"]
        assert (await proxy.api.get("/polykv/pools")).json()["pools"] == []


async def test_only_what_names_a_session_is_kept(tmp_path: Path) -> None:
    """A pooled request without a session, and its key, are nowhere kept."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=SYS, name="sys")
        await proxy.call("/completion", {"prompt": PROMPT, "pool_id": "sys", "n_predict": 1})
        turns = proxy.runtime.pools.turns
        assert turns._turns == {}
        headers = {"authorization": "Bearer secret", "Content-Type": "application/json", "x-session-id": "s"}
        await proxy.call("/completion", {"prompt": PROMPT, "n_predict": 1}, headers)
        assert turns._turns["s"].headers == ((b"Content-Type", b"application/json"),)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tokens": [1], "rebuild": True}, "rebuild"),
        ({"from_session": "a", "rebuild": 1}, "rebuild"),
    ],
)
async def test_it_goes_with_a_session_alone(tmp_path: Path, body: dict, param: str) -> None:
    """400 names the field; compaction takes no session, so it has nothing to rebuild."""
    async with rig(tmp_path) as proxy:
        status, reply = await order(proxy, **body)
        assert (status, reply["error"]["param"]) == (400, param)


async def test_what_is_kept_is_bounded(tmp_path: Path) -> None:
    """The longest unused go first; one that is too large leaves not even its forerunner."""
    async with served(FakeEngine(), tmp_path) as server, rig(tmp_path, server=server) as proxy:
        turns = LastTurns(proxy.runtime.hub.client, limit_bytes=100)

        def keep(session: str, n: int) -> None:
            turns.keep(session, Turn("/completion", b"x" * n, (), 0.0))

        for session in "abc":
            keep(session, 40)
        assert list(turns._turns) == ["b", "c"]
        keep("b", 50)
        assert (list(turns._turns), turns._n_bytes) == (["c", "b"], 90)
        keep("d", 30)
        assert (list(turns._turns), turns._n_bytes) == (["b", "d"], 80)
        keep("b", 101)
        assert (list(turns._turns), turns._n_bytes) == (["d"], 30)
        turns.expire(0.0, lambda _: None)
        assert turns._n_bytes == 0
