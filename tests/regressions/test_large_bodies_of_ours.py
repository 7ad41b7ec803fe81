"""One large or wrong body does not hold up the loop: the first fault ends the reading, the number of values is bounded."""

from __future__ import annotations

import pytest

from polykv_proxy.api import wire
from polykv_proxy.api.wire import CreatePool, PinPool, parse
from polykv_proxy.api.wishes import read_wish
from polykv_proxy.errors import ApiError


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"tokens":[' + b'"a",' * 100_000 + b"1]}", "tokens[0]"),
        (b'{"messages":[' + b"1," * 100_000 + b"{}]}", "messages[0]"),
        (b"{" + b",".join(b'"a%d":1' % n for n in range(100_000)) + b"}", "a0"),
    ],
)
def test_the_first_fault_is_the_only_one_looked_for(body: bytes, param: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand faults are not collected to report one."""
    collected: list[int] = []
    first = wire._first

    def counted(error: wire.ValidationError) -> ApiError:
        collected.append(error.error_count())
        return first(error)

    monkeypatch.setattr(wire, "_first", counted)
    with pytest.raises(ApiError) as caught:
        parse(CreatePool, body)
    assert caught.value.param == param
    assert sum(collected) <= 1


@pytest.mark.parametrize("key", ["pool_id", "session_id", "model"])
def test_a_body_too_deep_to_be_read_is_refused_where_it_names_something(key: str) -> None:
    """It was served as if it named nothing. Without such a key it is the engine's, whatever headers and defaults say."""
    deep = b"[" * 100_000 + b"]" * 100_000
    with pytest.raises(ApiError, match="nested too deeply") as caught:
        read_wish([], b'{"%b": "a@b", "x": %b}' % (key.encode(), deep), None, lambda _: True)
    assert caught.value.status == 400
    wish = read_wish([(b"x-pool-id", b"p"), (b"x-session-id", b"s")], b'{"x": %b}' % deep, None, lambda _: True)
    assert (wish.pool, wish.session_id) == ("p", "s")
    assert read_wish([], b'{"x": %b}' % deep, "q", lambda _: True).pool == "q"


def test_more_values_than_any_prefix_needs_are_refused_unread() -> None:
    """413 before the JSON is parsed."""
    with pytest.raises(ApiError) as caught:
        parse(CreatePool, b'{"tokens":[' + b"1," * (wire.MAX_VALUES + 1) + b"no JSON")
    assert (caught.value.status, caught.value.code) == (413, "body_too_large")


def test_a_request_that_names_a_pool_is_bounded_too() -> None:
    """What names none is never parsed, and has no such bound."""
    with pytest.raises(ApiError) as caught:
        read_wish([], b'{"pool_id":1,"prompt":[' + b"1," * (wire.MAX_VALUES + 1) + b"1]}", None, lambda _: False)
    assert caught.value.code == "body_too_large"


def test_a_field_of_several_kinds_is_named_as_the_caller_wrote_it() -> None:
    """The names of kinds inside the checker are nobody's business."""
    with pytest.raises(ApiError) as caught:
        parse(PinPool, b'{"lease": -1}')
    assert caught.value.param == "lease"


def test_a_number_beyond_any_engine_names_its_field() -> None:
    """`n_tokens` is bounded here, not by what the engine says about its own integers."""
    with pytest.raises(ApiError) as caught:
        parse(CreatePool, b'{"from_session":"s","n_tokens":99999999999999999999}')
    assert caught.value.param == "n_tokens"
