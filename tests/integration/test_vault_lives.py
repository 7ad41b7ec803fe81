"""KV on disk through lives at random: whatever dies, fills or is damaged, no pool is lost and no byte is too many."""

import random
from collections import Counter
from pathlib import Path

import pytest

from polykv_proxy.core.ledger import LedgerLimits
from polykv_proxy.core.tally import Copied
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_records import EngineFaultError
from tests.integration.rig import ManualClock, Rig, rig, served
from tests.integration.test_vault_restarts import killed

LIMIT = 40_000
ROUNDS, STEPS = 10, 20
VERBS = {"create": 3, "fork": 3, "ask": 8, "evict": 3, "flush": 3, "release": 2, "keep": 6, "crash": 2, "damage": 3, "full": 0.5}


def files(folder: Path) -> dict[int, int]:
    kv = folder / "state" / "kv"
    return {int(path.stem): path.stat().st_size for path in kv.glob("*.kv")} if kv.exists() else {}


async def ask(proxy: Rig, pool_id: int, prefix: list[int], tail: int) -> None:
    """A request shares the whole pool, however its KV came back."""
    for slot in proxy.engine.slots:
        slot.clear()
    reply = await proxy.call("/completion", {"prompt": [*prefix, tail], "pool_id": pool_id, "n_predict": 1})
    assert reply.status_code == 200, reply.text
    assert (reply.headers["x-cached-prefix-tokens"], reply.json()["opencoti"]["miss"]) == (str(len(prefix)), None)
    await proxy.settle()


def damage(folder: Path, dice: random.Random) -> None:
    """Cut, change, swap or delete a file."""
    kv = folder / "state" / "kv"
    found = sorted(kv.glob("*.kv"))
    if not found:
        return
    path = dice.choice(found)
    kind = dice.choice(["cut", "change", "swap", "delete"])
    data = path.read_bytes()
    if kind == "cut":
        path.write_bytes(data[: dice.randrange(len(data))])
    elif kind == "change":
        at = dice.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    elif kind == "swap":
        path.write_bytes(dice.choice(found).read_bytes())
    else:
        path.unlink()


@pytest.mark.parametrize("seed", range(4))
async def test_lives_at_random_lose_no_pool_and_exceed_no_limit(tmp_path: Path, seed: int) -> None:
    """After each step the folder is under its limit; in the end of each round records, files and sequences agree."""
    dice = random.Random(seed)
    engine, clock = FakeEngine(max_pools=5), ManualClock()
    engine.prefix_sharing = "any" if seed % 2 else "checkpoint"
    known: dict[int, list[int]] = {}
    copies: Counter[Copied] = Counter()
    async with served(engine, tmp_path) as server:
        for _ in range(ROUNDS):
            options = {"clock": clock, "state_dir": tmp_path / "state", "limits": LedgerLimits(pool_grace_s=0.0)}
            async with rig(tmp_path, server=server, kv_disk_bytes=LIMIT, **options) as proxy:  # type: ignore[arg-type]
                for _ in range(STEPS):
                    clock.now += dice.choice([0.5, 3, 200])
                    await step(proxy, known, dice, tmp_path)
                    assert sum(files(tmp_path).values()) <= LIMIT
                await proxy.settle()
                await proxy.runtime.vault._tidy()
                await proxy.runtime.hub.settle()
                tree = proxy.runtime.hub.ledger.tree
                assert {pool.pool_id: pool.tokens.tolist() for pool in tree} == known
                assert {pool.pool_id: pool.copy.n_bytes for pool in tree if pool.copy} == files(tmp_path)
                assert {seq.ref for seq in engine.seqs.values()} == {str(pool.seq) for pool in tree if pool.seq}
                for pool in tree:
                    assert (pool.residency == "saved") == (pool.seq is None and pool.copy is not None)
                copies += proxy.runtime.hub.tally.copies
                if dice.random() < 0.5:
                    killed(proxy)
            if dice.random() < 0.5:
                await server.crash()
                await server.restart()
    assert set(copies) >= {Copied.WRITTEN, Copied.READ, Copied.REFUSED}, "all of it came to pass"


async def step(proxy: Rig, known: dict[int, list[int]], dice: random.Random, folder: Path) -> None:
    (what,) = dice.choices(list(VERBS), list(VERBS.values()))
    pool_id = dice.choice(sorted(known)) if known else 0
    if what == "create" and len(known) < 12:
        prefix = [dice.randrange(100, 9000) for _ in range(dice.randrange(20, 90))]
        known[(await proxy.pool(tokens=prefix))["pool_id"]] = prefix
    elif what == "fork" and known and len(known) < 12:
        at = dice.randrange(1, len(known[pool_id]) + 1)
        prefix = [*known[pool_id][:at], *(dice.randrange(9000, 9999) for _ in range(dice.randrange(1, 40)))]
        reply = await proxy.api.post(f"/polykv/pools/{pool_id}/fork", json={"tokens": prefix, "branch_pos": at})
        assert reply.status_code == 201, reply.text
        known[reply.json()["pool_id"]] = prefix
    elif what == "ask" and known:
        await ask(proxy, pool_id, known[pool_id], dice.randrange(20, 90))
    elif what in {"evict", "flush"} and known:
        await proxy.api.post(f"/polykv/pools/{pool_id}/{what}")
    elif what == "release" and known and (await proxy.api.delete(f"/polykv/pools/{pool_id}")).status_code == 200:
        del known[pool_id]
    elif what == "keep":
        await proxy.runtime.keeper.step()
        proxy.clock.now += 3
        await proxy.runtime.keeper.step()
    elif what == "crash":
        await proxy.server.crash()
        await proxy.server.restart()
        await proxy.until_linked(proxy.engine.boot_id)
    elif what == "damage":
        damage(folder, dice)
    elif what == "full":
        proxy.engine.fail_next("write", EngineFaultError(507, "save_failed", "No space left on device"))
