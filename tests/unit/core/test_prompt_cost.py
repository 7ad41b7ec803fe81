"""Mirrors core/prompt_cost.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.events import SlotEvent, SlotEventKind
from polykv_proxy.core.prompt_cost import MEASURABLE, PromptCost

US = 10_000
"""What a token costs here, in microseconds."""


def launched(task: int, t_us: int) -> SlotEvent:
    return SlotEvent(SlotEventKind.LAUNCHED, task, 0, 0, None, task=task, t_us=t_us)


def first_token(task: int, t_us: int, n_tokens: int, us_prompt: int) -> SlotEvent:
    counts = {"n_prompt": n_tokens + 5, "n_cached": 5, "t_us": t_us, "us_prompt": us_prompt}
    return SlotEvent(SlotEventKind.FIRST_TOKEN, task, 0, 0, None, task=task, **counts)  # type: ignore[arg-type]


def in_turns(lengths: list[int], cost: PromptCost, us_each: int = US, began_us: int = 0) -> None:
    """All are launched at once, and computed one after the other."""
    for task in range(len(lengths)):
        cost.saw(launched(task, began_us))
    now = began_us
    for task, n_tokens in enumerate(lengths):
        now += n_tokens * us_each
        cost.saw(first_token(task, now, n_tokens, now - began_us))


def test_a_prompt_alone_tells_the_cost() -> None:
    """Its time by its computed tokens; cached ones cost nothing."""
    cost = PromptCost()
    assert cost.s_per_token is None
    in_turns([100], cost)
    assert cost.s_per_token == pytest.approx(0.01)


def test_short_prompts_tell_nothing() -> None:
    """A step costs much the same for one token as for a few."""
    cost = PromptCost()
    in_turns([MEASURABLE - 1], cost)
    assert cost.s_per_token is None


@given(st.lists(st.integers(1, 400), min_size=1, max_size=20), st.integers(1, 50))
def test_prompts_that_wait_for_each_other_cost_what_they_cost(lengths: list[int], each: int) -> None:
    """However many wait for how many others: time that was spent on others' prompts is not in it."""
    cost = PromptCost()
    in_turns([MEASURABLE, *lengths], cost, each)
    assert cost.s_per_token == pytest.approx(each / 1e6)


@given(
    st.integers(MEASURABLE, 4000),
    st.lists(st.tuples(st.integers(0, 4000), st.floats(1, 1e6)), max_size=50),
    st.lists(st.tuples(st.integers(0, 4000), st.floats(1, 1e6)), max_size=50),
)
def test_load_does_not_raise_what_was_measured_in_quiet(
    quiet: int, before: list[tuple[int, float]], after: list[tuple[int, float]]
) -> None:
    """Whatever else prompts took before and after, up to a million times as long."""
    cost = PromptCost()
    for n_tokens, factor in [*before, (quiet, 1.0), *after]:
        cost.saw(first_token(1, 0, n_tokens, int(n_tokens * US * factor)))
    assert cost.s_per_token is not None
    assert cost.s_per_token <= 1.0001 * US / 1e6


@given(st.lists(st.tuples(st.integers(MEASURABLE, 500), st.floats(1, 100)), min_size=1, max_size=30), st.data())
def test_no_measure_is_below_the_cost(tasks: list[tuple[int, float]], data: st.DataObject) -> None:
    """Tasks come, wait, are computed, leave and are missed in any order: never too low, and so never nothing."""
    cost, now, running = PromptCost(), 0, dict[int, tuple[int, int]]()
    waiting = list(enumerate(tasks))
    while waiting or running:
        if waiting and (not running or data.draw(st.booleans())):
            task, (n_tokens, _) = waiting.pop(0)
            running[task] = n_tokens, now
            if data.draw(st.integers(0, 5)):
                cost.saw(launched(task, now))
        else:
            task = data.draw(st.sampled_from(sorted(running)))
            n_tokens, began_us = running.pop(task)
            now += int(n_tokens * US * tasks[task][1])
            gone = data.draw(st.integers(0, 5)) == 0
            done = first_token(task, now, n_tokens, 0 if gone else now - began_us)
            cost.saw(replace(done, kind=SlotEventKind.RELEASED) if gone else done)
            if data.draw(st.integers(0, 9)) == 0:
                cost.missed()
    assert cost.s_per_token is None or cost.s_per_token >= 0.999 * US / 1e6


def test_variants_of_a_prompt_are_computed_once() -> None:
    """Each says the tokens of all; time by them counted again would be too short."""
    cost = PromptCost()
    for index in range(4):
        cost.saw(replace(launched(index, 0), index=index))
    for index in range(4):
        cost.saw(replace(first_token(index, 100 * US, 100, 100 * US), index=index))
    assert cost.s_per_token == pytest.approx(0.01)


def test_what_was_measured_holds_until_a_new_engine_is_measured() -> None:
    """A slower engine is believed at its first prompt; the same one, followed anew, is not."""
    cost = PromptCost()
    cost.boot("a")
    in_turns([100], cost)
    cost.boot("a")
    in_turns([100], cost, 3 * US)
    assert cost.s_per_token == pytest.approx(0.01)
    cost.boot("b")
    assert cost.s_per_token == pytest.approx(0.01)
    in_turns([100], cost, 3 * US)
    assert cost.s_per_token == pytest.approx(0.03)
