"""Heads that were read before: what counts as the same, what is learnt, what a made head looks like."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.api.relay import heads
from polykv_proxy.api.relay.heads import NO_BODY, Framing
from polykv_proxy.api.relay.known import Fields, Known, cut, is_plain

HEAD = b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: %b\r\nAccept: */*\r\n\r\n"
READ = [(b"Host", b"a"), (b"Content-Length", b"12"), (b"Accept", b"*/*")]
FIRST = b"POST /v1/x HTTP/1.1"


@given(st.integers(0, 10**14), st.integers(0, 10**14), st.binary(max_size=40))
def test_only_the_length_may_differ(one: int, other: int, body: bytes) -> None:
    """Two heads of the same bytes but for the digits have one shape, wherever the body begins."""
    first, second = cut(HEAD % b"%d" % one + body), cut(HEAD % b"%d" % other)
    assert first is not None
    assert second is not None
    assert first[0] == second[0]
    assert (int(first[1]), first[2]) == (one, len(HEAD % b"%d" % one))


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_a_shape_and_its_digits_say_all(one: bytes, other: bytes) -> None:
    """Heads that are not the same have another shape or other digits."""
    heads_ = [b"GET /%b HTTP/1.1\r\nContent-Length: 7\r\nX: %b\r\n\r\n" % pair for pair in ((one, other), (other, one))]
    first, second = map(cut, heads_)
    if first is not None and second is not None and first[:2] == second[:2]:
        assert heads_[0][: first[2]] == heads_[1][: second[2]]


@pytest.mark.parametrize("digits", [b"", b" 5", b"5 ", b"+5", b"-5", b"5, 5", b"0x5", b"\xb2", b"1" * 16])
def test_an_odd_length_is_left_to_the_parser(digits: bytes) -> None:
    assert cut(HEAD % digits) is None


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nA: " + b"a" * 5000 + b"\r\n\r\n"])
def test_a_head_that_is_not_whole_or_long_is_left_to_the_parser(data: bytes) -> None:
    assert cut(data) is None


def test_what_the_parser_read_as_it_stands_is_plain() -> None:
    data = HEAD % b"12" + b"body"
    came = cut(data)
    assert came is not None
    assert is_plain(data, came, FIRST, READ, Framing(12))
    assert not is_plain(data, came, FIRST, READ[:2], Framing(12)), "a field that is not there any more"
    assert not is_plain(data, came, FIRST.lower(), READ, Framing(12))
    assert not is_plain(data, came, FIRST, READ, NO_BODY)
    assert not is_plain(data, came, FIRST, READ, Framing(None, chunked=True))


@pytest.mark.parametrize("line", [b"Accept:*/*", b"Accept:  */*", b"Accept: */* ", b"Accept:\t*/*"])
def test_other_spacing_is_not_plain(line: bytes) -> None:
    """The parser reads the same there, and writing it again would not give these bytes."""
    data = (HEAD % b"12").replace(b"Accept: */*", line)
    came = cut(data)
    assert came is not None
    assert not is_plain(data, came, FIRST, READ, Framing(12))


def test_the_oldest_is_forgotten() -> None:
    known: Known[int] = Known(most=2)
    for n in range(3):
        known.learn(b"%d" % n, n)
    assert [known.get(b"%d" % n) for n in range(3)] == [None, 1, 2]


def test_fields_say_any_length_and_keep_their_own() -> None:
    fields = Fields(READ)
    assert fields.saying(b"99") == [(b"Host", b"a"), (b"Content-Length", b"99"), (b"Accept", b"*/*")]
    assert fields.saying(b"12") == READ
    assert Fields(READ[:1]).saying(b"") == READ[:1]


@pytest.mark.parametrize("length", [None, 0, 1, 12, 10**9])
def test_a_head_made_for_one_length_serves_any(length: int | None) -> None:
    framing = Framing(length)
    made = heads.request_head(b"POST", b"/", READ[:1], NO_BODY)
    assert heads.with_length(made, framing) == heads.request_head(b"POST", b"/", READ[:1], framing)
