"""Each byte of KV in use has one owner, on every memory class, layout and cache type, and with a draft model beside."""

from __future__ import annotations

import random
import threading
from itertools import count
from pathlib import Path

import pytest

from tests.engine.driver import Engine
from tests.models import tiny_model

pytestmark = pytest.mark.engine

QUANTISED = ("-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0")
DRAFT = ("--spec-type", "draft-simple", "--spec-draft-n-max", 4, "--spec-draft-model")
CASES: dict[str, tuple[str, tuple[str | int, ...]]] = {
    "full": ("full", ()),
    "full-q8_0": ("full", QUANTISED),
    "full-split": ("full", ("--no-kv-unified",)),
    "swa": ("swa", ()),
    "swa-full-size": ("swa", ("--swa-full",)),
    "swa-q8_0-split": ("swa", ("--no-kv-unified", *QUANTISED)),
    "recurrent": ("recurrent", ()),
    "hybrid": ("hybrid", ()),
    "hybrid-swa": ("hybrid-swa", ()),
    "hybrid-swa-split": ("hybrid-swa", ("--no-kv-unified",)),
}
SESSIONS = count(1)


def tokens(n: int, seed: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(300, 40000) for i in range(n)]


def start(engine_path: Path, kind: str, *more: str | int | Path) -> Engine:
    return Engine(engine_path, tiny_model(kind), ["-c", 6144, "-np", 3, "-t", 1, "--cache-ram", 0, *more], max_pools=6)


def owners(engine: Engine) -> dict[str, int]:
    """What each owns, after checking that it is what is in use."""
    state = engine.idle_state()
    owned = {one["seq"]: one["own_bytes"] for one in state["seqs"]}
    owned |= {f"slot {one['slot']}": one["own_bytes"] for one in state["slots"]}
    kv = state["kv_bytes"]
    assert (sum(owned.values()), kv["other"]) == (kv["used"], 0)
    assert all(0 <= own <= kv["used"] <= kv["total"] for own in owned.values())
    return owned


def live(engine: Engine) -> None:
    """A tree, sessions on it, snapshots of them; then all of it goes, the oldest first."""
    pool = tokens(200, 1)
    root = engine.materialise(pool)
    root_own = owners(engine)[root]
    assert root_own > 0
    child = engine.materialise([*pool, *tokens(40, 2)], parent_seq=root, branch_pos=200)
    early = engine.materialise([*pool[:100], *tokens(90, 3)], parent_seq=root, branch_pos=100)
    own = owners(engine)
    assert own[root] == root_own
    assert own[child] > 0
    assert own[early] > 0
    for seq, prefix in ((root, pool), (child, [*pool, *tokens(40, 2)]), (early, [*pool[:100], *tokens(90, 3)])):
        session = next(SESSIONS)
        reply = engine.attached([*prefix, 5, 6], seq, 100, session=session, ignore_eos=True, n_probs=0)
        assert reply.n_shared > 0
        before = owners(engine)
        shot = engine.snapshot(session)["seq"]
        after = owners(engine)
        assert after[root] == root_own
        if engine.hello()["kv"]["unified"]:
            assert after[shot] > 0, "what was the session's own is the snapshot's now"
            assert sum(after.values()) == sum(before.values())
        engine.free(shot) if seq == early else engine.end_session(session)
        owners(engine)
    for one in engine.state()["seqs"]:
        engine.free(one["seq"])
        owners(engine)
    for session in {slot["session"] for slot in engine.state()["slots"]} - {0}:
        engine.end_session(session)
    assert owners(engine) == {"slot 0": 0, "slot 1": 0, "slot 2": 0}


@pytest.mark.parametrize("case", CASES)
def test_every_byte_in_use_is_owned_once(engine_path: Path, case: str) -> None:
    """The sum over sequences and slots is what the caches have in use, through creation, use, snapshot and release."""
    kind, more = CASES[case]
    with start(engine_path, kind, *more) as engine:
        live(engine)


def test_a_draft_model_s_cache_counts_too(engine_path: Path) -> None:
    """With a draft model there are two caches: what is in use, and who owns it, is the sum of both."""
    with start(engine_path, "full-f32") as plain, start(engine_path, "full-f32", *DRAFT, tiny_model("draft")) as drafting:
        live(drafting)
        pool = tokens(200, 4)
        own = [owners(engine)[seq] for engine in (drafting, plain) for seq in [engine.materialise(pool)]]
        assert own[0] == 2 * own[1] > 0


def test_bytes_are_those_of_the_cells(engine_path: Path) -> None:
    """On plain attention a pool owns its own cells at the price of a token, for each cache type."""
    prices = []
    for more in ((), QUANTISED):
        with start(engine_path, "full", *more) as engine:
            price = engine.hello()["kv"]["bytes_per_token"]
            pool = tokens(150, 5)
            root = engine.materialise(pool)
            child = engine.materialise([*pool[:97], 5, 6, 7], parent_seq=root, branch_pos=97)
            assert owners(engine) | {"slot 0": 0} == {root: 150 * price, child: 3 * price, "slot 0": 0, "slot 1": 0, "slot 2": 0}
            prices.append(price)
    assert prices[1] * 64 == prices[0] * 34, "32 values of q8_0 are 34 bytes, of f16 64"


def test_a_window_is_owned_beside_the_rest(engine_path: Path) -> None:
    """With a window a child owns its tokens in one cache and its own part of the window in the other."""
    with start(engine_path, "swa") as engine:
        kv, pool = engine.hello()["kv"], tokens(150, 6)
        root = engine.materialise(pool)
        child = engine.materialise([*pool, 5, 6, 7], parent_seq=root, branch_pos=150)
        own, state = owners(engine), engine.state()
        window = state["cells_swa"]["used"]
        assert state["cells"]["used"] == 153
        assert 64 - 1 + 3 <= window < 153
        assert own[child] == 3 * (kv["bytes_per_token"] + kv["bytes_per_token_swa"])
        assert own[root] == 150 * kv["bytes_per_token"] + (window - 3) * kv["bytes_per_token_swa"]


def test_recurrent_state_is_a_row_each(engine_path: Path) -> None:
    """A pool of a recurrent model owns one state whatever its length; a request that only joined it owns nothing yet."""
    with start(engine_path, "recurrent") as engine:
        row = engine.hello()["kv"]["bytes_recurrent_per_seq"]
        root = engine.materialise(tokens(150, 7))
        child = engine.materialise([*tokens(150, 7), 5, 6], parent_seq=root, branch_pos=150)
        assert [owners(engine)[seq] for seq in (root, child)] == [row, row]


def test_checkpoints_count_for_the_oldest_that_keeps_them(engine_path: Path) -> None:
    """A child keeps those of its parent: their memory is the parent's while that is there, then the child's."""
    with start(engine_path, "swa") as engine:
        pool = tokens(300, 8)

        def kept() -> dict[str, int]:
            return {one["seq"]: one["checkpoint_bytes"] for one in engine.state()["seqs"]}

        root = engine.materialise(pool)
        before = kept()[root]
        child = engine.materialise([*pool, 5, 6], parent_seq=root, branch_pos=300)
        after = kept()
        assert before == after[root] > after[child] >= 0
        engine.free(root)
        assert kept()[child] >= before
        engine.attached([*pool, 5, 6, 7], child, session=next(SESSIONS))
        assert sum(slot["checkpoint_bytes"] for slot in engine.idle_state()["slots"]) >= 0


def test_counts_stay_true_while_slots_generate(engine_path: Path) -> None:
    """During a generation the count may be of a moment ago, and never more than is in use; a verb's reply brings it up to date."""
    with start(engine_path, "full") as engine:
        seq = engine.materialise(tokens(50, 9))
        price = engine.hello()["kv"]["bytes_per_token"]
        thread = threading.Thread(
            target=lambda: engine.attached([*tokens(50, 9), 5], seq, 800, session=next(SESSIONS), ignore_eos=True, n_probs=0)
        )
        thread.start()
        while not any(slot["state"] == "generating" for slot in engine.state()["slots"]):
            assert thread.is_alive()
        other = engine.materialise(tokens(30, 10))
        state = engine.state()
        owned = sum(one["own_bytes"] for one in (*state["seqs"], *state["slots"]))
        assert owned <= state["kv_bytes"]["used"]
        assert {one["seq"]: one["own_bytes"] for one in state["seqs"]} == {seq: 50 * price, other: 30 * price}
        thread.join()
        owners(engine)
