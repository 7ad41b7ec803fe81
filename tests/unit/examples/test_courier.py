"""Mirrors examples/courier: when a worker starts, what a refusal means, and what a journal comes to."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.courier.chart import draw
from examples.courier.courier import AllAtOnce, ByCapacity, Courier
from examples.courier.journal import Event, Journal, Turn
from examples.courier.proxy import Capacity, Proxy, SaturatedError
from examples.courier.work import packages

ROOM = Capacity(0.0, True, "ok", 1, False, 0, 1, 1, 0, 20.0, 16.0)


@pytest.mark.parametrize(
    ("report", "all_begun", "may"),
    [
        (ROOM, True, True),
        (ROOM, False, False),
        (replace(ROOM, can_admit=False), True, False),
        (replace(ROOM, settling=True), True, False),
        (replace(ROOM, n_warming=1), True, False),
        (replace(ROOM, mean_active_tps=None, projected_mean_tps_if_admitted=None), True, True),
    ],
)
def test_one_more_starts_when_there_is_room_and_nothing_is_on_its_way(report: Capacity, all_begun: bool, may: bool) -> None:
    """Also on a cold pool."""
    assert ByCapacity().may(report, all_begun=all_begun) is may


class Busy(Proxy):
    """A proxy that refuses the first so many turns."""

    def __init__(self, refusals: list[Exception]) -> None:
        super().__init__(httpx.AsyncClient(), 1)
        self.refusals = refusals
        self.ended: list[str] = []
        self.asked: list[list[dict[str, str]]] = []
        self._ts = itertools.count()

    async def capacity(self) -> Capacity:
        return replace(ROOM, ts=float(next(self._ts)))

    async def decisions(self) -> list[dict[str, Any]]:
        return []

    async def end_session(self, session: str) -> None:
        self.ended.append(session)

    async def turn(self, session: str, messages: Any, max_tokens: int, **more: object) -> AsyncIterator[dict[str, Any]]:
        self.asked.append(list(messages))
        if self.refusals:
            raise self.refusals.pop(0)
        yield {"choices": [{"delta": {"content": "yes"}}]}
        yield {"choices": [], "timings": {"prompt_n": 5, "predicted_n": 1}}


async def run(proxy: Proxy, n_packages: int = 1, n_steps: int = 2) -> Journal:
    journal = Journal(15.0)
    courier = Courier(proxy, journal, [{"role": "system", "content": "s"}], AllAtOnce(), look_s=0.01)
    await courier.deliver(packages(n_packages, n_steps, tools_s=0.0))
    return journal


async def test_a_refusal_is_waited_out_and_asked_again_with_the_same_words() -> None:
    """As often as it takes; the conversation then has every message once."""
    proxy = Busy([SaturatedError("no", 0.0), SaturatedError("no", 0.0)])
    figures = (await run(proxy)).figures()
    assert (figures["delivered"], figures["refused"], figures["failed"]) == (1, 2, 0)
    assert [len(messages) for messages in proxy.asked] == [2, 2, 2, 4]
    assert [message["role"] for message in proxy.asked[-1]] == ["system", "user", "assistant", "user"]


async def test_a_refusal_for_good_fails_its_package_and_no_other() -> None:
    """Its session ends all the same."""
    proxy = Busy([SaturatedError("no", None)])
    figures = (await run(proxy, n_packages=3)).figures()
    assert (figures["delivered"], figures["failed"]) == (2, 1)
    assert len(proxy.ended) == 3


def told() -> Journal:
    """Six reports a second apart: a first session, a second that settles for two seconds, and a mean that falls below the floor."""
    journal = Journal(15.0)
    means = (None, 40.0, 40.0, 30.0, 14.0, 7.0)
    for second, mean in enumerate(means):
        journal.report(replace(ROOM, ts=100.0 + second, mean_active_tps=mean, settling=second in {2, 3}))
    journal.events = [Event(0.0, "spawn", "a"), Event(1.5, "spawn", "b"), Event(5.0, "delivered", "a")]
    journal.turns = [Turn("a", 0.0, 0.1, 2.0, 10, 61), Turn("b", 2.0, 0.1, 2.0, 10, 11)]
    journal.decided(
        [
            {"ts": 100.1, "session_id": "a", "outcome": "admitted", "arm": "guarantee", "value": 0, "waited_ms": 0},
            {"ts": 101.9, "session_id": "b", "outcome": "admitted", "arm": "none", "value": 21.0, "waited_ms": 400},
            {"ts": 102.0, "session_id": "stranger", "outcome": "admitted", "arm": "none", "value": 9.0, "waited_ms": 0},
        ]
    )
    return journal


def test_figures_are_what_was_noted() -> None:
    """Times under the floor between reports, forecasts against the first settled mean after them, parts of turns and sessions."""
    journal = told()
    figures = journal.figures()
    assert (figures["under_floor_s"], figures["deep_under_floor_s"], figures["wall_s"]) == (1.0, 0.0, 5.0)
    assert journal.settle_bands() == [(2.0, 4.0)]
    assert journal.forecasts() == [(21.0, 14.0)]
    assert figures["forecast_error"] == pytest.approx(0.5)
    assert (figures["guaranteed"], figures["held"], figures["delivery_p50_s"]) == (1, 1, 5.0)
    assert (figures["turns_at_floor"], figures["sessions_at_floor"], figures["tokens_per_s"]) == (0.5, 0.5, 72 / 5)


def test_the_picture_shows_floor_bands_and_events(tmp_path: Path) -> None:
    """One file, nothing to fetch, nothing that runs."""
    draw(told(), tmp_path / "report.svg")
    drawn = (tmp_path / "report.svg").read_text()
    assert all(f'id="{what}"' in drawn for what in ("floor", "settle", "hold", "spawn", "guarantee", "mean_active_tps"))
    assert "<script" not in drawn
    assert 'href="http' not in drawn
