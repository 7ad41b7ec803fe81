"""Mirrors api/scan.py: a miss is always right."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.api.scan import names_something
from polykv_proxy.api.wishes import read_wish
from polykv_proxy.core.attach import PoolSource
from polykv_proxy.ports import names_of

KEYS = ["pool_id", "session_id", "shared_pool_slot", "shared_prefix_n_tokens"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("colon", [":", " : ", "\n:\t"])
def test_each_key_is_seen_however_it_is_spaced(key: str, colon: str) -> None:
    """White space around the colon hides nothing."""
    assert names_something(frozenset(), f'{{"a":1,"{key}"{colon}1}}'.encode())


@given(st.sampled_from(KEYS), st.data())
def test_escapes_hide_no_key(key: str, data: st.DataObject) -> None:
    """A key with any of its characters escaped is a hit, in either case of hex digits."""
    escaped = data.draw(st.sets(st.integers(0, len(key) - 1)))
    upper = data.draw(st.booleans())
    spelt = "".join((f"\\u{ord(c):04X}" if upper else f"\\u{ord(c):04x}") if i in escaped else c for i, c in enumerate(key))
    body = f'{{"{spelt}": 7}}'.encode()
    assert json.loads(body) == {key: 7}
    assert names_something(frozenset(), body)


@pytest.mark.parametrize("model", ["m@p", "m\\u0040p", "\\u006d@p", "mod\\u00e8le@p", 'a \\"b\\" \\\\@p', "a@b\\n@p"])
@pytest.mark.parametrize("key", ["model", "mod\\u0065l"])
def test_a_model_with_a_pool_is_seen(model: str, key: str) -> None:
    """The `@` in a model value is seen, also escaped."""
    assert names_something(frozenset(), f'{{"{key}": "{model}"}}'.encode())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"prompt": "say \\"pool_id\\": 1"}',
        b'{"model": "plain", "user": "a@b.example"}',
        b'{"model": "pl\\"ain\\\\", "user": "a@b.example"}',
        json.dumps({"prompt": "caf\u00e9 \u2603 \U0001f600"}).encode(),
        b'{"prompt": "\\u0031 \\u00e9"}',
    ],
)
def test_ordinary_bodies_are_no_hit(body: bytes) -> None:
    """Our words inside text, mail addresses and ordinary escapes cost no parse."""
    assert not names_something({b"content-type"}, body)


@pytest.mark.parametrize("name", [b"X-Pool-Id", b"x-session-id"])
def test_headers_are_seen_in_any_case(name: bytes) -> None:
    """Header names have no case."""
    assert names_something(names_of([(name, b"1")]), b"{}")


values = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.text(max_size=6), st.lists(st.integers(), max_size=2))


@given(st.dictionaries(st.sampled_from([*KEYS, "model", "prompt", "n"]), values), st.booleans())
def test_what_is_not_seen_wishes_nothing(fields: dict, ascii_only: bool) -> None:
    """For every body that the scan passes over, parsing would have found no wish either."""
    body = json.dumps(fields, ensure_ascii=ascii_only).encode()
    if not names_something(frozenset(), body):
        wish = read_wish([], body, None, lambda _key: True)
        assert (wish.pool, wish.session_id, wish.explicit_p) == (None, None, None)


def test_the_last_duplicate_key_wins() -> None:
    """As in the engine's own parser."""
    wish = read_wish([], b'{"pool_id": 1, "pool_id": "two"}', None, lambda _key: False)
    assert (wish.pool, wish.source) == ("two", PoolSource.BODY)


@pytest.mark.parametrize(
    ("fields", "n"),
    [
        ({}, 1),
        ({"prompt": "x"}, 1),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [1, "mixed", 3]}, 1),
        ({"prompt": ["a", "b"]}, 2),
        ({"prompt": [[1], [2], "c"], "n": 2}, 6),
        ({"n": 3}, 3),
        ({"n": 3, "n_cmpl": 2}, 2),
        ({"n": 0}, 1),
        ({"n": True}, 1),
    ],
)
def test_tasks_are_prompts_times_copies(fields: dict, n: int) -> None:
    """How many tasks the engine makes of a body."""
    assert read_wish([], json.dumps(fields).encode(), None, lambda _key: False).n_tasks == n
