"""The tree on every kind of engine: each node answers what an unpatched one without cache does, whatever happened.

Law: pairs of choices, and after the first situation a third of the nodes in each; `POLYKV_FULL_MATRIX=1` (`scripts/e2e
matrix`) takes triples, all nodes, and real models.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engine.columns import LONG_ROOT, REAL, Column, full, pairwise
from tests.engine.driver import Engine, Reply
from tests.engine.judge import Source, assert_equal, distance, end_first, noise_floor, text
from tests.engine.tree import CHAIN, TAILS, Node, Tree, shape, tokens

pytestmark = pytest.mark.engine

FULL = bool(os.environ.get("POLYKV_FULL_MATRIX"))
MAX_POOLS = 24
COLUMNS = full() if FULL else pairwise()


class References:
    """Answers of unpatched engines without any cache, asked once each.

    Of `real` models each is also asked from a cache that grew in pieces, and from one whose end lies before its beginning, as in a
    tree: they round coarsely, and not each prompt shows it. Of q8_0 cells only the second does, by 0.28 at most in 30 prompts.
    """

    def __init__(self, engine: Engine, source: Source, *, real: bool) -> None:
        self.engine, self.source, self.real, self.floor = engine, source, real, noise_floor(engine, 5, source)
        self.known: dict[tuple[int, ...], Reply] = {}

    def __call__(self, prompt: list[int], n: int) -> Reply:
        key = (n, *prompt)
        if key not in self.known:
            self.known[key] = self.engine.fresh(prompt, n, ignore_eos=True)
            if self.real:
                for part in (0.3, 0.32, 0.4, 0.7):
                    self.engine.completion(prompt[: int(len(prompt) * part)], 1)
                for reply in (self.engine.completion(prompt, n, ignore_eos=True), end_first(self.engine, prompt, n)):
                    self.floor = max(self.floor, distance(reply, self.known[key]))
        return self.known[key]


@pytest.fixture(scope="module")
def references(twin_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Column], References]]:
    """For a column: its references. Columns whose answers must be the same share them."""
    with ExitStack() as running:
        known: dict[tuple[object, ...], References] = {}

        def of(column: Column) -> References:
            args = [*column.model_args(tmp_path_factory.getbasetemp()), "-c", 2048, "-np", 2, "-kvu", "--cache-ram", 0]
            key = (column.path, *args)
            if key not in known:
                engine = running.enter_context(Engine(twin_path, column.path, args))
                real = column.kind in REAL
                known[key] = References(engine, text(engine) if real else tokens, real=real)
            return known[key]

        yield of


@dataclass
class Case:
    """One column at work. A situation is over when its nodes have answered."""

    column: Column
    tree: Tree
    right: References
    number: int
    n_situations: int = 0

    @property
    def engine(self) -> Engine:
        return self.tree.engine

    def check(self, situation: str) -> None:
        """Nodes that have KV answer as references do: all of them, or the third whose turn it is."""
        everyone = self.n_situations == 0 or (FULL and self.column.kind not in REAL)
        self.n_situations += 1
        for i, node in enumerate(self.tree.nodes):
            if node.seq and (everyone or (i + self.number + self.n_situations) % 3 == 0):
                try:
                    self.check_node(i, node)
                except AssertionError as error:
                    error.add_note(f"{situation}: node {i} of {len(node.tokens)} tokens")
                    raise

    def check_node(self, i: int, node: Node) -> None:
        n_tail = TAILS[(i + self.number) % len(TAILS)]
        # an odd token first: pieces of text can begin alike, and what a slot still holds of a deeper node would be the longer match
        tail = [*tokens(1, 9000 + i), *self.right.source(n_tail - 1, 9000 + i)]
        n = 24 if self.column.speculation == "ngram" else 5
        reply = self.tree.ask(node, tail, n)
        assert (reply.status, reply.n_shared, reply.miss) == (200, len(node.tokens), None), reply.body
        self.compare(reply, [*node.tokens, *tail], n)

    def compare(self, reply: Reply, prompt: list[int], n: int) -> None:
        """The reply is what an unpatched engine says to the prompt."""
        assert_equal(reply, self.right(prompt, n), self.right.floor, self.column.least)


def grown(case: Case) -> None:
    case.tree.plant()
    case.check("grown")


def in_company(case: Case) -> None:
    """Three other sessions decode on nodes of the tree all the time."""
    stop = threading.Event()

    def decode(session: int) -> None:
        while not stop.is_set():
            node = case.tree.nodes[session]
            case.engine.attached([*node.tokens, session], node.seq, 80, session=session, ignore_eos=True, n_probs=0)

    with ThreadPoolExecutor(3) as threads:
        jobs = [threads.submit(decode, session) for session in (7, 12, 19)]
        try:
            while sum(slot["state"] == "generating" for slot in case.engine.state()["slots"]) < 3:
                assert not any(job.done() for job in jobs)
            case.check("while three others decode")
        finally:
            stop.set()
        for job in jobs:
            job.result()
    for session in (7, 12, 19):
        case.engine.end_session(session)


def beside_a_shift(case: Case) -> None:
    """A plain request runs past its slot's context, and the engine shifts that slot; where a window has few cells it cannot."""
    case.engine.completion(tokens(60, 8), 800, ignore_eos=True, n_probs=0)
    assert "slot context shift" in case.engine.log() or case.column.model in {"swa", "hybrid-swa"}
    case.check("after a shift beside it")


def thinned(case: Case) -> None:
    """Some siblings and an inner node are gone, others wrote over their cells, plain requests went through the slots."""
    case.tree.drop([case.tree.nodes[i] for i in (4, 8, 11, 16)])
    for i, node in enumerate(case.tree.nodes[1:4]):
        prompt = [*node.tokens, *case.right.source(40, 700 + i)]
        for _ in range(2):
            case.compare(case.engine.completion(prompt, 5, ignore_eos=True), prompt, 5)
    stranger = case.engine.materialise(tokens(150, 5))  # also empties the slot where there is one only
    case.check("after siblings went")
    case.engine.free(stranger)


def rebuilt(case: Case) -> None:
    """All KV is dropped, leaves first, written over, and computed again."""
    case.tree.drop([node for node in reversed(case.tree.nodes) if node.seq])
    stranger = case.engine.materialise(tokens(300, 6))
    case.tree.plant()
    case.engine.free(stranger)
    case.check("evicted and rebuilt")


def restored(case: Case, folder: Path) -> None:
    """Saved, dropped, written over and restored: the same cells are in use again. Under adapters nothing is saved."""
    said = [case.tree.save(folder, node) for node in case.tree.nodes]
    if case.column.adapter:
        assert {answer["error"]["type"] for answer in said} == {"lora"}
        return
    assert all("kv_bytes" in answer for answer in said), said
    before = held(case.engine)
    case.tree.drop()
    case.engine.free(case.engine.materialise(tokens(350, 7)))
    case.tree.restore(folder)
    assert held(case.engine) == before
    case.check("saved and restored")


def held(engine: Engine) -> list[tuple[int, int]]:
    """Tokens and cells of each sequence."""
    return sorted((entry["n_tokens"], entry["cells"]) for entry in engine.state()["seqs"])


def after_a_crash(case: Case, folder: Path) -> None:
    """In a new process every other node comes back from its file, the rest from its tokens."""
    case.tree.lost()
    for i, node in enumerate(case.tree.nodes):
        if i % 2 and case.tree.path(folder, node).exists():
            case.tree.restore(folder, [node])
        else:
            case.tree.plant([node])
    case.check("after a crash")


def after_sleep(case: Case) -> None:
    """The engine sleeps, an attach wakes it and is served in full, and the tree is made again."""
    node = case.tree.nodes[-1]
    case.engine.until_asleep()
    prompt = [*node.tokens, 5]
    reply = case.engine.attached(prompt, node.seq, 5, ignore_eos=True)
    assert (reply.n_shared, reply.miss) == (0, "stale_seq")
    case.compare(reply, prompt, 5)

    def again() -> None:
        case.tree.lost()
        case.tree.plant()
        case.check("after sleep")

    while_awake(case.engine, again)


def while_awake(engine: Engine, act: Callable[[], None]) -> None:
    """Do it again when the engine fell asleep meanwhile: on a busy machine an idle second can come between two calls."""
    while True:
        boot = engine.hello()["boot_id"]
        try:
            act()
        except AssertionError:
            if slept(engine, boot):
                continue
            raise
        if not slept(engine, boot):
            return


def slept(engine: Engine, boot: str) -> bool:
    return engine.state()["phase"] != "ready" or engine.hello()["boot_id"] != boot


@contextmanager
def killed(engine: Engine) -> Iterator[Engine]:
    """Ends as a crash ends it."""
    engine.expect_exit = -9
    with engine:
        yield engine
        engine.process.kill()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("number", "column"), list(enumerate(COLUMNS)), ids=list(map(str, COLUMNS)))
def test_every_node_answers_as_an_unpatched_engine_without_cache(
    number: int, column: Column, engine_path: Path, tmp_path: Path, references: Callable[[Column], References]
) -> None:
    """Grown, in company, beside a shift, thinned out, rebuilt, saved and restored, after a crash, after sleep."""
    args = column.args(tmp_path)
    right, nodes = references(column), shape(number, LONG_ROOT.get(column.model, CHAIN[0]), references(column).source)
    with killed(Engine(engine_path, column.path, args, MAX_POOLS)) as engine:
        assert engine.hello()["speculative"] is (column.speculation != "none")
        case = Case(column, Tree(engine, nodes), right, number)
        grown(case)
        if column.slots == "four":
            in_company(case)
        else:
            beside_a_shift(case)
        thinned(case)
        rebuilt(case)
        restored(case, tmp_path)
        assert ("draft acceptance" in engine.log()) is (column.speculation != "none")
    more = ["--sleep-idle-seconds", 1] if column.sleeps else []
    with Engine(engine_path, column.path, [*args, *more], MAX_POOLS) as engine:
        case.tree.engine = engine
        while_awake(engine, lambda: after_a_crash(case, tmp_path))
        if column.sleeps:
            after_sleep(case)
        case.tree.drop()
        assert engine.state()["seqs"] == []
