"""Copies of KV that failed a check, over the fake engine: none is believed, whenever it was made."""

import asyncio
from pathlib import Path

from polykv_proxy.core.quarantine import Condemned, Quarantine
from tests.integration.rig import Rig
from tests.integration.vault_rig import BASE, CHILD, chain, files, residencies, shown, until_saving, use, vault, verb


async def copies(proxy: Rig) -> None:
    """One of each pool; 3 has no other KV."""
    await chain(proxy)
    for pool in (1, 2, 3):
        assert await proxy.runtime.vault.keep(pool)
    await verb(proxy, 3, "evict")
    assert (await residencies(proxy))[3] == "saved"


def condemn(proxy: Rig, pool: int) -> Condemned:
    seq = proxy.runtime.pools.find(pool).seq
    assert seq is not None
    return Quarantine(proxy.runtime.hub.ledger).condemn(seq, "test")


async def test_copies_go_with_the_kv_they_were_made_of(tmp_path: Path) -> None:
    """Also that of a pool below which has no other: all are computed from tokens."""
    async with vault(tmp_path) as proxy:
        await copies(proxy)
        seq = proxy.engine.seq(str(proxy.runtime.pools.find(1).seq))
        assert seq is not None
        proxy.engine.kv.corrupt(seq.cells[20])
        reply = (await proxy.api.post("/polykv/pools/2/verify", json={"positions": [21, 30, 43]})).json()
        assert (reply["verdict"], reply["quarantined"]) == ("mismatch", [1, 2])
        assert files(tmp_path) == {}
        assert await residencies(proxy) == {1: "resident", 2: "resident", 3: "evicted"}
        assert (await use(proxy, 3, [*CHILD, 7, 8, 1]))["computed"] == 2 + 1
        assert proxy.engine.n_seqs_restored == 0
        assert (await proxy.api.post("/polykv/pools/3/verify")).json()["verdict"] == "ok"


async def test_a_copy_that_was_being_written_is_not_kept(tmp_path: Path) -> None:
    """Its writing ends after the check: the record never says that it is there."""
    async with vault(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        proxy.engine.hold()
        saving = asyncio.ensure_future(proxy.runtime.vault.keep(1))
        await until_saving(proxy, 1)
        proxy.runtime.hub.post(condemn(proxy, 1).commands[1:])
        proxy.engine.go()
        assert (await saving, files(tmp_path), (await shown(proxy, 1))["saved_bytes"]) == (False, {}, 0)
        assert (await residencies(proxy))[1] == "quarantined"


async def test_a_copy_that_was_being_read_is_not_used(tmp_path: Path) -> None:
    """Who waits for it gets what is computed instead."""
    async with vault(tmp_path) as proxy:
        await copies(proxy)
        proxy.engine.hold()
        asked = asyncio.ensure_future(proxy.call("/completion", {"prompt": [*CHILD, 7, 8, 1], "pool_id": 3, "n_predict": 1}))
        async with asyncio.timeout(20):
            while ("POST", "/_polykv/v1/seqs/restore") not in proxy.server.calls:
                await asyncio.sleep(0.005)
        await proxy.runtime.hub.run(condemn(proxy, 2).commands)
        proxy.engine.go()
        reply = (await asked).json()["opencoti"]
        assert (reply["cached_prefix_tokens"], reply["rebuilt"]) == (44, True)
        assert files(tmp_path).keys() == {"1.kv"}
        await proxy.settle()
        assert {str(pool.seq) for pool in proxy.runtime.hub.ledger.tree} == {seq.ref for seq in proxy.engine.seqs.values()}
        assert (await proxy.api.post("/polykv/pools/3/verify")).json()["verdict"] == "ok"
