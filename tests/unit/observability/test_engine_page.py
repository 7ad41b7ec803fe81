"""The engine's own page."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from polykv_proxy.observability.engine_page import MAX_BYTES, BadPageError, read_page

PAGE = b"""# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed, excluding cached tokens
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 12
# HELP llamacpp:n_tokens_max Largest observed sequence length (prompt + generation)
# TYPE llamacpp:n_tokens_max counter
llamacpp:n_tokens_max 3
# HELP llamacpp:requests_deferred Number of requests deferred
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 1.5e+06
"""


def test_a_sound_page_stays_as_it_came() -> None:
    """Bytes are kept, a counter without the usual suffix among them, and values can be asked for."""
    page = read_page(PAGE)
    assert page.text == PAGE
    assert page.value("llamacpp:requests_deferred") == 1.5e6
    assert page.value("llamacpp:nothing") is None


def test_not_a_number_is_spelt_as_all_readers_know_it() -> None:
    """What C++ prints for a division of zeros becomes NaN (F013)."""
    for spelling in (b"-nan", b"nan", b"-nan(ind)", b"NAN"):
        assert read_page(b"llamacpp:x " + spelling + b"\n").text == b"llamacpp:x NaN\n"


def test_families_under_our_prefixes_are_left_out() -> None:
    """An engine that is itself behind a proxy like this brings no name a second time."""
    theirs = b'# TYPE vllm:x gauge\nvllm:x{a="1"} 1\n# TYPE polykv_y_total counter\npolykv_y_total 2\nopencoti_polykv:z 3\n'
    assert read_page(theirs + PAGE).text == PAGE


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (json.dumps(PAGE.decode()).encode(), "line 1 is neither"),
        (b'{"error":{"code":501,"message":"This server does not support metrics endpoint."}}', "line 1 is neither"),
        (b"<html>\n</html>", "line 1 is neither"),
        (b"x 1_000\n", "line 1: '1_000' is no number"),
        (b"x 0x10\n", "no number"),
        (b"x\n", "line 1 is neither"),
        (b"x 1\n# TYPE y gauge\ny 1\n# TYPE x gauge\n", "metric x comes twice"),
        (b'x{a="1"} 1\nx{a="1"} 2\n', "comes twice"),
        (b'x{a="1} 1\n', "cannot be parsed"),
        (b"x 1\r\n", "line 1"),
        (b"\xff\xfe", "cannot be parsed"),
        (b"x 1\n" * (MAX_BYTES // 4 + 1), "longer than"),
    ],
)
def test_what_strict_readers_would_refuse_is_refused(raw: bytes, why: str) -> None:
    """A quoted page, another body, a bad number, a repeated name, no text: each is refused with the place."""
    with pytest.raises(BadPageError, match=why):
        read_page(raw)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_bytes_do_worse_than_being_refused(raw: bytes) -> None:
    """Whatever comes is refused, or is a page that the parser reads."""
    try:
        page = read_page(raw)
    except BadPageError:
        return
    list(text_string_to_metric_families(page.text.decode()))
