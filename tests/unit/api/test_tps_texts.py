"""Mirrors api/tps_texts.py."""

from __future__ import annotations

import json
from dataclasses import replace

from polykv_proxy.api.tps_texts import TpsTexts
from polykv_proxy.runtime.rows import StateView, as_json
from tests.fakes.state_view import EMPTY, FULL, session


def expected(view: StateView, *, running: bool = False) -> dict[str, object]:
    rows = [as_json(row) for row in view.sessions if not running or row.state != "idle"]
    return {"ts": view.ts, "seq": view.seq, "linked": view.linked, **as_json(view.whole), "sessions": rows}


def test_a_text_says_what_the_view_says() -> None:
    """Whole and rows, whatever was written before."""
    texts = TpsTexts()
    later = replace(FULL, seq=2, sessions=(FULL.sessions[2], session(1, 9.0), FULL.sessions[0]))
    for view in (FULL, later, EMPTY, FULL):
        for running in (True, False, True):
            assert json.loads(texts.text(view, running=running)) == expected(view, running=running)


def test_rows_that_are_the_same_are_written_once() -> None:
    """The very same string again; of those that are gone nothing is kept."""
    texts = TpsTexts()
    texts.text(FULL)
    first = [text for _, text in texts._kept.values()]
    texts.text(replace(FULL, seq=2), running=True)
    texts.text(replace(FULL, seq=3))
    assert all(now is before for (_, now), before in zip(texts._kept.values(), first, strict=True))
    texts.text(EMPTY)
    assert texts._kept == {}
