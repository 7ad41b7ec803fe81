"""Mirrors core/admission/unnamed.py."""

from __future__ import annotations

import pytest

from polykv_proxy.core.admission.unnamed import Prompt, Unnamed
from polykv_proxy.core.events import SlotEvent, SlotEventKind
from polykv_proxy.core.prefix import as_tokens


def prompt(*tokens: int, pool_id: int = 1, n_prefix: int = 2) -> Prompt:
    return Prompt(pool_id, n_prefix, as_tokens(tokens))


def event(kind: SlotEventKind, req: int, slot: int = 0) -> SlotEvent:
    return SlotEvent(kind, req, 0, 0, None, slot=slot)


@pytest.fixture
def known() -> Unnamed:
    """Slot 0 worked on 1 2 3, of which 1 2 are the pool's."""
    unnamed = Unnamed()
    unnamed.asked(1, prompt(1, 2, 3))
    unnamed.saw(event(SlotEventKind.LAUNCHED, 1))
    unnamed.saw(event(SlotEventKind.RELEASED, 1))
    unnamed.closed(1)
    return unnamed


@pytest.mark.parametrize(
    ("asked", "idle", "goes_on"),
    [
        (prompt(1, 2, 3, 4), {0}, True),
        (prompt(1, 2, 3, 4), {1}, False),
        (prompt(1, 2, 3), {0}, False),
        (prompt(1, 2, 4, 3), {0}, False),
        (prompt(1, 2, 3, 4, pool_id=2), {0}, False),
    ],
)
def test_the_next_turn_begins_with_the_last_prompt(known: Unnamed, asked: Prompt, idle: set[int], goes_on: bool) -> None:
    assert known.continues(asked, idle) is goes_on


def test_a_slot_that_works_for_another_has_forgotten(known: Unnamed) -> None:
    known.saw(event(SlotEventKind.LAUNCHED, 2))
    assert not known.continues(prompt(1, 2, 3, 4), {0})


def test_a_prompt_of_the_pool_alone_is_nobody() -> None:
    """All agents of a pool begin so."""
    unnamed = Unnamed()
    unnamed.asked(1, prompt(1, 2))
    unnamed.saw(event(SlotEventKind.RELEASED, 1))
    assert not unnamed.continues(prompt(1, 2, 3), {0})
