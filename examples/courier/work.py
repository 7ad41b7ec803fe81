"""What is to be done: packages of steps. A step is one turn of a conversation, and a tool that works afterwards.

Law: values only. All packages begin with the same messages: those of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Step:
    """What the agent is told, how many tokens it may answer with, and how long its tools take before the next step."""

    prompt: str
    max_tokens: int = 200
    tools_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Package:
    """One worker's conversation. An `urgent` one starts at once, whatever the floor says, and says so."""

    name: str
    steps: Sequence[Step]
    urgent: bool = False


RULES: list[Message] = [
    {
        "role": "system",
        "content": "You are one of many reviewers of a C library. " + "Read before you judge. Cite the line. Be brief. " * 20,
    }
]
"""The messages that all packages of the demonstration share."""

PARTS = ("the allocator", "the parser", "the scheduler", "the tests", "the build", "error handling", "the docs", "the public API")


def packages(n_packages: int, n_steps: int, *, n_urgent: int = 0, max_tokens: int = 120, tools_s: float = 1.0) -> list[Package]:
    """Some work, the last `n_urgent` packages of it urgent."""
    return [
        Package(
            f"package-{number}",
            [
                Step(f"Step {step + 1}: what would you change in {PARTS[(number + step) % len(PARTS)]}?", max_tokens, tools_s)
                for step in range(n_steps)
            ],
            urgent=number >= n_packages - n_urgent,
        )
        for number in range(n_packages)
    ]
