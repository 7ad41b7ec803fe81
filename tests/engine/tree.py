"""A tree of sequences on an engine: a chain of eight, a dozen siblings that branch at odd places, two of them snapshots.

Law: plants, drops, saves and restores by the engine's verbs, parents first; what a node answers is for the tests to judge.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from tests.engine.driver import Engine, Reply
from tests.engine.judge import Source

CHAIN = (33, 1, 2, 31, 32, 33, 7, 64)
"""Own tokens of each node of the chain."""
N_SIBLINGS = 12
SIBLINGS_OF = 3
"""Where in the chain the siblings leave, each seven tokens before the one before."""
TAILS = (1, 2, 31, 32, 33, 255, 256, 257)
"""Tokens of a request past its pool."""
SNAPSHOTS = (2, 9)
"""Which siblings are made of a session that has generated something, not of tokens."""


def tokens(n: int, seed: int) -> list[int]:
    """Random ids; more of one seed begin with fewer of it."""
    dice = random.Random(seed)
    return [dice.randrange(300, 40000) for _ in range(n)]


@dataclass
class Node:
    """A prefix; `seq` names its KV while there is some."""

    tokens: list[int]
    parent: Node | None = None
    branch_pos: int = 0
    snapshot: bool = False
    seq: str = ""


def shape(seed: int, n_root: int = CHAIN[0], source: Source = tokens) -> list[Node]:
    """The whole tree, parents first."""
    nodes: list[Node] = []
    for depth, n in enumerate((n_root, *CHAIN[1:])):
        above = nodes[-1] if nodes else None
        prefix = above.tokens if above else []
        nodes.append(Node([*prefix, *source(n, 100 * seed + depth)], above, len(prefix)))
    top = nodes[SIBLINGS_OF]
    for n in range(N_SIBLINGS):
        at = max(1, len(top.tokens) - 7 * n)
        nodes.append(Node([*top.tokens[:at], *source(5 + n, 100 * seed + 50 + n)], top, at, n in SNAPSHOTS))
    return nodes


class Tree:
    """The nodes on one engine. `numbers` are sessions: each is used once."""

    def __init__(self, engine: Engine, nodes: list[Node]) -> None:
        self.engine, self.nodes, self.numbers = engine, nodes, count(10**6)

    def plant(self, nodes: Iterable[Node] | None = None) -> None:
        """Give KV to these nodes, whose parents have some or are among them."""
        for node in self.nodes if nodes is None else nodes:
            if node.snapshot:
                self._snapshot(node)
            else:
                node.seq = self.engine.materialise(node.tokens, **self._below(node))

    def _snapshot(self, node: Node) -> None:
        """A session on the parent that says the node's own tokens and generates; after that the node is made of its tokens."""
        session = next(self.numbers)
        parent = node.parent
        assert parent is not None
        self.engine.attached(node.tokens, parent.seq, 6, session=session, shared=node.branch_pos, ignore_eos=True, n_probs=0)
        made = self.engine.snapshot(session)
        node.seq, node.tokens, node.snapshot = made["seq"], made["tokens"], False
        self.engine.end_session(session)

    def _below(self, node: Node) -> dict[str, Any]:
        return {"parent_seq": node.parent.seq, "branch_pos": node.branch_pos} if node.parent and node.parent.seq else {}

    def drop(self, nodes: Iterable[Node] | None = None) -> None:
        """Free their sequences."""
        for node in self.nodes if nodes is None else nodes:
            assert self.engine.free(node.seq)["freed"] is True
            node.seq = ""

    def lost(self) -> None:
        """The engine has another boot: nothing is there any more."""
        for node in self.nodes:
            node.seq = ""

    def path(self, folder: Path, node: Node) -> Path:
        return folder / str(self.nodes.index(node))

    def in_parts(self) -> bool:
        """Can a node be saved without what its parent holds?"""
        hello = self.engine.hello()
        return hello["prefix_sharing"] == "any" and hello["kv"]["unified"]

    def save(self, folder: Path, node: Node) -> dict[str, Any]:
        """The node's own range where it can be, else all of it."""
        url, start = f"/_polykv/v1/seqs/{node.seq}/save", node.branch_pos if self.in_parts() else 0
        return self.engine.http.post(url, json={"path": str(self.path(folder, node)), "from": start}).json()

    def restore(self, folder: Path, nodes: Iterable[Node] | None = None) -> None:
        """From what `save` wrote, parents first."""
        for node in self.nodes if nodes is None else nodes:
            parent = {"parent_seq": node.parent.seq} if node.parent and self.in_parts() else {}
            body = {"path": str(self.path(folder, node)), **parent}
            done = self.engine.http.post("/_polykv/v1/seqs/restore", json=body).json()
            assert done.get("n_tokens") == len(node.tokens), done
            node.seq = done["seq"]

    def ask(self, node: Node, tail: list[int], n: int) -> Reply:
        """A request on the node from an empty slot, which is empty again when this returns."""
        session = next(self.numbers)
        reply = self.engine.attached([*node.tokens, *tail], node.seq, n, session=session, ignore_eos=True)
        self.engine.end_session(session)
        return reply
