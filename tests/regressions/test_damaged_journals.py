"""A journal that is cut, has wrong bits, or is some other file: the proxy starts with what is true of it, or says what to do."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from polykv_proxy.errors import SettingsError
from polykv_proxy.runtime.journal import Journal
from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import rig, served
from tests.lengths import length

N_FLIPS = length(50, 1000)
N_CUTS = length(40, 1000)
TREE = {"root": "a careful agent with a long memory", "left": "a careful agent with a long memory left", "other": "something else"}


async def written(folder: Path) -> tuple[Path, dict[tuple[int, ...], str], FakeEngine]:
    """A journal with three pools in it, a fork, a pin and an answer; the pools by their tokens; and their engine."""
    engine = FakeEngine()
    async with rig(folder, engine, state_dir=folder / "state") as proxy:
        await proxy.pool(prompt=TREE["root"], name="root", ttl_s=600)
        fork = await proxy.api.post("/polykv/pools/root/fork", json={"prompt": TREE["left"], "name": "left"})
        assert fork.status_code == 201
        kept = await proxy.api.post(
            "/polykv/pools", json={"prompt": TREE["other"], "name": "other"}, headers={"idempotency-key": "k"}
        )
        assert kept.status_code == 201
        assert (await proxy.api.post("/polykv/pools/other/pin", json={"owner": "me", "lease": 600})).status_code == 200
        await proxy.call("/completion", {"prompt": TREE["left"] + " now", "pool_id": "left", "n_predict": 2})
        await proxy.settle()
        tokens = {tuple(pool.tokens.tolist()): pool.name or "" for pool in proxy.runtime.hub.ledger.tree}
    return folder / "state" / "journal.sqlite", tokens, engine


async def opened(path: Path) -> bool:
    """Is it opened as it is? False where it was moved aside for a new one, or is refused in one line that says what to do."""
    journal = Journal(path)
    try:
        await journal.open(0)
    except SettingsError as error:
        return "--state-dir" not in str(error)
    else:
        return journal.moved_aside is None
    finally:
        await journal.close()


def content(path: Path) -> list[str]:
    """All that is in it but the number of the run."""
    with closing(sqlite3.connect(path)) as db:
        db.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
        return [line for line in db.iterdump() if "'run'" not in line]


def no_figure(text: str) -> None:
    raise AssertionError(f"{text} is no JSON")


async def starts(folder: Path, engine: FakeEngine, known: dict[tuple[int, ...], str]) -> bool:
    """Does a proxy start on what lies in the folder? Then every pool has tokens that some pool had, and what is shown is JSON."""
    try:
        async with served(engine, folder) as server, rig(folder, server=server, state_dir=folder / "state") as proxy:
            assert {tuple(pool.tokens.tolist()) for pool in proxy.runtime.hub.ledger.tree} <= set(known)
            for page in ("pools", "sessions", "capacity", "savings", "admission"):
                reply = await proxy.api.get(f"/polykv/{page}")
                assert reply.status_code == 200, (page, reply.text)
                json.loads(reply.text, parse_constant=no_figure)
            new = await proxy.api.post("/polykv/pools", json={"prompt": "a new one"})
            assert new.status_code in {201, 429}, new.text
    except SettingsError:
        return False
    return True


async def test_wrong_bits(tmp_path: Path) -> None:
    """One to eight of them anywhere: no start ends in another way than by serving or by one line that says what to do."""
    path, known, engine = await written(tmp_path)
    good, same, dice, n_refused = path.read_bytes(), content(path), random.Random(1), 0
    for _ in range(N_FLIPS):
        shutil.rmtree(tmp_path / "state")
        (tmp_path / "state").mkdir(mode=0o700)
        bad = bytearray(good)
        for _ in range(dice.choice((1, 1, 2, 8))):
            bad[dice.randrange(len(bad))] ^= 1 << dice.randrange(8)
        path.write_bytes(bad)
        if await opened(path) and content(path) != same:
            n_refused += not await starts(tmp_path, engine, known)
    assert n_refused == 0


async def test_cut_anywhere(tmp_path: Path) -> None:
    """The journal is moved aside, or what is left of it is whole; with nothing left it is a new one."""
    path, known, engine = await written(tmp_path)
    good = path.read_bytes()
    for n in range(N_CUTS):
        shutil.rmtree(tmp_path / "state")
        (tmp_path / "state").mkdir(mode=0o700)
        path.write_bytes(good[: len(good) * n // N_CUTS])
        if await opened(path):
            assert await starts(tmp_path, engine, known)


@pytest.mark.parametrize("kind", ["text", "other tables", "our tables and others' columns", "a newer schema", "no schema"])
async def test_some_other_file(tmp_path: Path, kind: str) -> None:
    """What is not ours is kept aside under another name; one of a newer version stays where it is, with the word to update."""
    path, known, engine = await written(tmp_path)
    if kind == "text":
        path.write_text("Dear diary,\n" * 1000)
    else:
        with sqlite3.connect(path) as db:
            if kind == "other tables":
                db.executescript("DROP TABLE pools; CREATE TABLE diary (day TEXT);")
            elif kind == "our tables and others' columns":
                db.executescript("DROP TABLE pools; CREATE TABLE pools (water REAL);")
            elif kind == "a newer schema":
                db.execute("PRAGMA user_version = 999")
            else:
                db.execute("PRAGMA user_version = 0")
        db.close()
    before = path.read_bytes()
    assert await starts(tmp_path, engine, known) is (kind != "a newer schema")
    aside = [file for file in path.parent.iterdir() if ".corrupt-" in file.name]
    assert [file.read_bytes() == before for file in aside] == ([] if kind == "a newer schema" else [True])


async def test_ids_are_never_below_those_in_use(tmp_path: Path) -> None:
    """A next id that has become too small: the pools that are there say more, and nothing is written over."""
    path, known, engine = await written(tmp_path)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = 1 WHERE key = 'next_pool_id'")
    db.close()
    async with served(engine, tmp_path) as server, rig(tmp_path, server=server, state_dir=tmp_path / "state") as proxy:
        assert (await proxy.pool(prompt="a new one"))["pool_id"] == len(known) + 1
        assert {pool.name for pool in proxy.runtime.hub.ledger.tree} == {*TREE, None}


async def test_text_that_is_none_is_damage(tmp_path: Path) -> None:
    """Also in tables that are read later."""
    path, known, engine = await written(tmp_path)
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO policies VALUES (1, CAST(x'ff00' AS TEXT))")
    db.close()
    assert not await opened(path)
    assert await starts(tmp_path, engine, known)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("created_ts", float("inf")),
        ("ttl_s", -1.0),
        ("pin_until_ts", float("inf")),
        ("cells", -5),
        ("copy_bytes", -9),
        ("n_shared", -1),
    ],
)
async def test_a_figure_that_cannot_be_is_damage(tmp_path: Path, column: str, value: float) -> None:
    """It is not carried into listings and sums: the journal is moved aside."""
    path, _, _ = await written(tmp_path)
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE pools SET {column} = ? WHERE name = 'other'", (value,))
    db.close()
    journal = Journal(path)
    assert (await journal.open(0)).pools == ()
    assert journal.moved_aside is not None
    await journal.close()
