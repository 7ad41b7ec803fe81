"""Heads that were read before: what was made of one is made of every further one of the same bytes, without reading it again.

Law: pure. Two heads are the same when all their bytes are but the digits of their Content-Length. Learnt is only what the parser
read exactly as it stands: written again from its reading, it is the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from polykv_proxy.api.relay import heads
from polykv_proxy.api.relay.heads import NO_BODY, BadHeadError, Framing
from polykv_proxy.api.relay.reply import ReplyHead
from polykv_proxy.ports import Header, names_of

_LARGEST = 4096
_MOST_DIGITS = 15
_FIELDS = (b"\r\nContent-Length: ", b"\r\ncontent-length: ")
_N_FIELD = len(_FIELDS[0])
_LENGTH = b"content-length"
_MARK = b"\0"
"""In the place of the digits; no field has it."""

Made = TypeVar("Made")


Cut: TypeAlias = tuple[bytes, bytes, int]
"""The head at the beginning of some bytes: without the digits of its length, the digits (none without that field), and its end."""


def cut(data: bytes) -> Cut | None:
    """The head with which these bytes begin; None when it is not whole, is long, or says its length in an unusual way."""
    end = data.find(b"\r\n\r\n", 0, _LARGEST)
    if end < 0:
        return None
    at = data.find(_FIELDS[0], 0, end)
    if at < 0:
        at = data.find(_FIELDS[1], 0, end)
    if at < 0:
        return data[:end], b"", end + 4
    at += _N_FIELD
    stop = data.find(b"\r\n", at)
    digits = data[at:stop]
    if not digits.isdigit() or len(digits) > _MOST_DIGITS:
        return None
    return data[:at] + data[stop:end], digits, end + 4


class Known(Generic[Made]):
    """What was made of each head, for the last `most` that were learnt."""

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._made: dict[bytes, Made] = {}
        self.get = self._made.get

    def learn(self, shape: bytes, made: Made) -> None:
        """From now on, `get` gives this for the shape."""
        if len(self._made) >= self._most:
            del self._made[next(iter(self._made))]
        self._made[shape] = made


class Fields:
    """The fields of a head, with whatever length it says."""

    __slots__ = ("_headers", "_name", "_place", "names")

    def __init__(self, headers: Sequence[Header]) -> None:
        self.names = names_of(headers)
        self._headers = list(headers)
        self._place = next((place for place, (name, _) in enumerate(headers) if name.lower() == _LENGTH), -1)
        self._name = headers[self._place][0] if self._place >= 0 else b""

    def saying(self, digits: bytes) -> list[Header]:
        """With this length."""
        headers = self._headers.copy()
        if self._place >= 0:
            headers[self._place] = (self._name, digits)
        return headers


class KnownRequest(NamedTuple):
    """What was made of a request's head: `engine_head` is what the engine gets, but for the length."""

    method: bytes
    target: bytes
    fields: Fields
    generates: bool
    engine_head: bytes

    @classmethod
    def of(cls, method: bytes, target: bytes, headers: Sequence[Header], *, generates: bool) -> KnownRequest | None:
        """From the parser's reading of a plain head; None when it must be read each time."""
        try:
            head = heads.request_head(method, target, headers, NO_BODY)
        except BadHeadError:
            return None
        return cls(method, target, Fields(headers), generates, head)


class KnownReply(NamedTuple):
    """What was made of a reply's head. `before` the digits of its length and `after` them: what a client gets of it as it came."""

    status: int
    reason: bytes
    fields: Fields
    before: bytes
    after: bytes

    @classmethod
    def of(cls, status: int, reason: bytes, headers: Sequence[Header]) -> KnownReply | None:
        """From the parser's reading of a plain head with a length; None when it must be read each time."""
        fields = Fields(headers)
        try:
            head = heads.reply_head(status, reason, fields.saying(_MARK), keep_length=True, chunked=False, close=False)
        except BadHeadError:
            return None
        before, mark, after = head.partition(_MARK)
        return cls(status, reason, fields, before, after) if mark else None

    def relayed(self, digits: bytes) -> bytes:
        """What a client gets to which nothing is added."""
        return self.before + digits + self.after

    def head(self, digits: bytes) -> ReplyHead:
        """What the parser would have read."""
        return ReplyHead(self.status, self.reason, self.fields.saying(digits), Framing(int(digits)))


def is_plain(data: bytes, came: Cut, first: bytes, headers: Sequence[Header], framing: Framing) -> bool:
    """Do the bytes of this head say what was read, no more and in no other way, and no framing but the length that was cut out?"""
    _, digits, end = came
    if framing.chunked or (framing.length is not None) != bool(digits):
        return False
    return data[:end] == b"%b\r\n%b\r\n" % (first, b"".join([b"%b: %b\r\n" % field for field in headers]))
