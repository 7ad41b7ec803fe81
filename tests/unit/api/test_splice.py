"""Mirrors api/splice.py."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.api.splice import into_each, into_object

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
OBJECTS = st.dictionaries(st.text(min_size=1).filter(lambda name: not name.startswith("ours")), JSON, max_size=4)


@given(OBJECTS, st.sampled_from([None, 2]), st.booleans(), st.sampled_from(["", " ", "\r\n\t"]))
def test_an_object_keeps_every_byte_and_gains_fields(theirs: dict, indent: int | None, ascii_only: bool, space: str) -> None:
    """What was there is there, byte for byte, around what was added."""
    raw = (space + json.dumps(theirs, indent=indent, ensure_ascii=ascii_only) + space).encode("utf-8", "surrogatepass")
    made = into_object(raw, {"ours": [1, "ü"]})
    if made is None:  # half a character: no JSON text
        assert b"\xed" in raw
        return
    assert json.loads(made) == {**theirs, "ours": [1, "ü"]}
    cut = made.rindex(b'"ours"')
    head = made[: cut - 1] if theirs else made[:cut]
    assert raw.startswith(head)
    assert raw.endswith(made[made.rindex(b"}") :])


@given(st.lists(OBJECTS, max_size=4), st.sampled_from([None, 1]), st.sampled_from(["", "\n "]))
def test_each_object_of_an_array_gains_its_own(theirs: list[dict], indent: int | None, space: str) -> None:
    """Their order and bytes stay; an empty array stays empty."""
    raw = (space + json.dumps(theirs, indent=indent) + space).encode()
    made = into_each(raw, lambda one: {"ours": len(one)})
    assert made is not None
    assert json.loads(made) == [{**one, "ours": len(one)} for one in theirs]
    assert into_each(raw, lambda _one: {}) == raw


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"1", b'"x"', b"{", b'{"a":1} x', b'{"a":1}{}', b"{'a':1}", b'{"a":"\xff"}', b"[" * 100_000, b"null"]
)
def test_what_is_no_object_stays_what_it_is(raw: bytes) -> None:
    """Anything but one object, in valid UTF-8, gives nothing."""
    assert into_object(raw, {"ours": 1}) is None


@pytest.mark.parametrize("raw", [b"", b"{}", b"[1]", b"[{}", b"[{} {}]", b"[{},]", b"[,{}]", b"[{}] x", b'[{"a":"\xff"}]', b"[[]]"])
def test_what_is_no_array_of_objects_stays_what_it_is(raw: bytes) -> None:
    """Anything but an array of objects gives nothing."""
    assert into_each(raw, lambda _one: {"ours": 1}) is None


def test_a_field_that_is_there_already_is_theirs() -> None:
    """It is neither replaced nor written twice."""
    assert into_object(b'{"ours": 7}', {"ours": 1}) == b'{"ours": 7}'
    assert (
        into_each(b'[{"ours":7},{}]', lambda _one: {"ours": 1, "more": None}) == b'[{"ours":7,"more":null},{"ours":1,"more":null}]'
    )
