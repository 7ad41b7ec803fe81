"""Heads as bytes."""

from __future__ import annotations

import pytest

from polykv_proxy.api.relay.heads import BadHeadError, Framing, answer, framing_of, plain_head, reply_head, request_head


def test_a_request_keeps_everything_but_hop_fields_and_ours() -> None:
    """Names, values and order stay; framing is made anew; extra fields come last."""
    fields = [(b"Host", b"h"), (b"X-PolyKV-Key", b"k"), (b"Accept", b"*/*"), (b"content-length", b"9"), (b"TE", b"trailers")]
    got = request_head(b"POST", b"/a?b", fields, Framing(length=3), [(b"x-polykv-seq", b"5.1")])
    assert got == b"POST /a?b HTTP/1.1\r\nHost: h\r\nAccept: */*\r\nContent-Length: 3\r\nx-polykv-seq: 5.1\r\n\r\n"


def test_a_named_field_cannot_take_our_own_away() -> None:
    """A client that names our header in Connection does not remove what we add."""
    got = request_head(b"GET", b"/", [(b"Host", b"h"), (b"Connection", b"x-polykv-seq")], Framing(), [(b"x-polykv-seq", b"5.1")])
    assert b"x-polykv-seq: 5.1\r\n" in got


def test_a_line_break_in_a_value_is_refused() -> None:
    """Folded or smuggled lines never cross."""
    with pytest.raises(BadHeadError, match="line break"):
        request_head(b"GET", b"/", [(b"A", b"1\r\n2")], Framing())


@pytest.mark.parametrize(
    "fields",
    [[(b"Content-Length", b"1"), (b"Transfer-Encoding", b"chunked")], [(b"Transfer-Encoding", b"gzip")]],
)
def test_odd_framing_is_refused(fields: list[tuple[bytes, bytes]]) -> None:
    """Two framings, or one that we do not understand, are no framing."""
    with pytest.raises(BadHeadError):
        framing_of(fields)


def test_a_reply_has_one_framing() -> None:
    """A length is kept in its place, or dropped for chunks."""
    fields = [(b"A", b"1"), (b"Content-Length", b"5"), (b"B", b"2")]
    assert reply_head(200, b"Fine", fields, keep_length=True, chunked=False, close=False).split(b"\r\n")[:4] == [
        b"HTTP/1.1 200 Fine",
        b"A: 1",
        b"Content-Length: 5",
        b"B: 2",
    ]
    assert b"Content-Length" not in reply_head(200, b"", fields, keep_length=False, chunked=True, close=True)


def test_an_answer_to_head_has_a_length_and_no_body() -> None:
    """The length is that of the body which GET would have had."""
    assert (
        answer(404, [], b"abc", head_only=True, close=True)
        == b"HTTP/1.1 404 Not Found\r\nContent-Length: 3\r\nConnection: close\r\n\r\n"
    )


def test_a_declined_offer_leaves_a_plain_head() -> None:
    """Only the offer goes; other tokens of Connection stay."""
    head = plain_head(b"POST", b"/a", b"1.1", [(b"Connection", b"Upgrade, X-A"), (b"Upgrade", b"h2c"), (b"Content-Length", b"2")])
    assert head == b"POST /a HTTP/1.1\r\nConnection: X-A\r\nContent-Length: 2\r\n\r\n"
