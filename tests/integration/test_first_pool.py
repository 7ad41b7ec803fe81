"""One pool from creation to a shared prefix, over the fake engine."""

from pathlib import Path

from tests.integration.rig import rig

SYSTEM = "You are a careful agent with many tools and a long memory"


async def test_a_pool_from_tokens_is_shared_by_the_next_request(tmp_path: Path) -> None:
    """A request that names a pool computes only what comes after the pool's tokens, and says how many were shared."""
    async with rig(tmp_path) as proxy:
        tokens = proxy.engine.tokenizer.encode(SYSTEM)
        pool = await proxy.pool(tokens=tokens, name="agents")
        assert (pool["pool_id"], pool["residency"], pool["prefix_len"]) == (1, "resident", len(tokens))
        before = proxy.engine.computed
        reply = await proxy.call(
            "/completion", {"prompt": SYSTEM + " and a question", "n_predict": 2, "pool_id": 1, "session_id": "a"}
        )
        assert reply.status_code == 200
        assert reply.headers["x-pool-id"] == "1"
        assert reply.headers["x-session-id"] == "a"
        assert reply.headers["x-cached-prefix-tokens"] == str(len(tokens))
        assert reply.json()["opencoti"]["cached_prefix_tokens"] == len(tokens)
        assert reply.json()["opencoti"]["pool_id"] == 1
        assert proxy.engine.computed - before == 3
        await proxy.settle()
        shown = (await proxy.api.get("/polykv/pools/agents")).json()
        assert (shown["n_queries"], shown["n_hits"], shown["n_running"]) == (1, 1, 0)
        assert [session["session_id"] for session in shown["sessions"]] == ["a"]
