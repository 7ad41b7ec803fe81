"""F022: the bound holds where requests wait, over all generating routes together."""

from __future__ import annotations

import asyncio
from pathlib import Path

from polykv_proxy.core.admission.gate import Limits
from tests.integration.rig import relayed, rig

CALLS = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one"}], "max_tokens": 2}),
    ("/completion", {"prompt": "one", "n_predict": 2}),
    ("/v1/embeddings", {"input": "one"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "one"}], "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "two"}], "max_tokens": 2, "session_id": "s"}),
    ("/v1/completions", {"prompt": "two", "max_tokens": 2}),
]


async def test_one_runs_one_waits_the_others_are_told_when_to_come_again(tmp_path: Path) -> None:
    """Six over five routes, one may run and one wait; GET routes never wait; afterwards all is given back."""
    limits = Limits(max_running=1, max_queued=1)
    async with rig(tmp_path, admission=limits) as proxy, relayed(proxy) as (_, client):
        gate = proxy.runtime.admission.gate
        proxy.engine.hold()
        tasks = [asyncio.ensure_future(client.post(path, json=body)) for path, body in CALLS]
        async with asyncio.timeout(20):
            while sum(task.done() for task in tasks) < 4:
                await asyncio.sleep(0.005)
        assert (await client.get("/slots")).status_code != 429
        refused = [task.result() for task in tasks if task.done()]
        for reply in refused:
            error = reply.json()["error"]
            assert (reply.status_code, error["code"], error["arm"]) == (429, "saturated", "max_running")
            assert (error["value"], error["threshold"]) == (1, 1)
            assert int(reply.headers["retry-after"]) >= 1
        assert (len(gate.outlook.reservations), len(gate.lines)) == (1, 1)
        proxy.engine.go()
        served = [reply for reply in await asyncio.gather(*tasks) if reply.status_code != 429]
        assert len(served) == 2
        async with asyncio.timeout(20):
            while len(gate.outlook.reservations) or len(gate.lines):
                await asyncio.sleep(0.005)
        assert (await client.post("/v1/embeddings", json={"input": "one"})).status_code != 429
