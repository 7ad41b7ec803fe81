"""The pools file: what it may say, parents first, and all mistakes at once with their places."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polykv_proxy.core.admission.policy import Mode, OnSaturation, Policy
from polykv_proxy.errors import SettingsError
from polykv_proxy.pools_file import read_pools_file
from polykv_proxy.runtime.orders import Declared, Lease


def read(folder: Path, text: str) -> list[Declared]:
    file = folder / "pools.yaml"
    file.write_text(text)
    return list(read_pools_file(file).pools)


def mistakes(folder: Path, text: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        read(folder, text)
    return [line.removeprefix(str(folder / "pools.yaml")) for line in str(caught.value).splitlines()]


def test_every_field_reaches_the_order(tmp_path: Path) -> None:
    """Sources, terms and the place in the tree."""
    text = """
pools:
  a: {tokens: [1, 2], ttl_s: 60, pin: true}
  b: {prompt: no, parent: a, branch_pos: 1, pin: {owner: me, lease_s: 5}}
  c: {messages: [{role: system, content: 2024-01-01}], tools: [{x: 1}], chat_template_kwargs: {k: true}, pin: false}
  d: {prompt: p, pin: {lease_s: none}, ttl_s: ~}
"""
    a, b, c, d = read(tmp_path, text)
    assert a.spec.tokens is not None
    assert (a.name, a.spec.name, a.spec.tokens.tolist(), a.spec.ttl_s, a.pin, a.parent) == (
        "a",
        "a",
        [1, 2],
        60.0,
        Lease(None, None),
        None,
    )
    assert (b.spec.prompt, b.parent, b.spec.branch_pos, b.pin) == ("no", "a", 1, Lease("me", 5.0))
    assert c.spec.conversation is not None
    assert list(c.spec.conversation.messages) == [{"role": "system", "content": "2024-01-01"}]
    assert c.spec.conversation.extra == {"tools": [{"x": 1}], "chat_template_kwargs": {"k": True}}
    assert (c.pin, d.pin, d.spec.ttl_s) == (False, Lease(None, None), None)


def test_parents_come_first_and_else_the_order_is_kept(tmp_path: Path) -> None:
    """A tree may be written in any order."""
    parents = {"e": "~", "c": "b", "a": "~", "b": "a", "d": "a"}
    text = "pools:\n" + "".join(f"  {name}: {{prompt: x, parent: {parent}}}\n" for name, parent in parents.items())
    assert [one.name for one in read(tmp_path, text)] == ["e", "a", "b", "c", "d"]


def test_what_is_long_stands_in_files_beside_the_file(tmp_path: Path) -> None:
    """Names are relative to the pools file; a text is taken as it is, but for a byte order mark."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "p.txt").write_bytes(b"\xef\xbb\xbfOne \xc3\xa9\r\nlast\n")
    for name, value in (("m", [{"role": "system", "content": "s"}]), ("t", [{"f": 1}]), ("n", [3, 4])):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    text = "pools:\n  p: {prompt_file: sub/p.txt}\n  m: {messages_file: m.json, tools_file: t.json}\n  n: {tokens_file: n.json}\n"
    p, m, n = read(tmp_path, text)
    assert p.spec.prompt == "One \u00e9\r\nlast\n"
    assert m.spec.conversation is not None
    assert (m.spec.conversation.messages, m.spec.conversation.extra) == (
        [{"role": "system", "content": "s"}],
        {"tools": [{"f": 1}]},
    )
    assert n.spec.tokens is not None
    assert n.spec.tokens.tolist() == [3, 4]


def test_a_file_without_pools_declares_none(tmp_path: Path) -> None:
    """Empty, or with an empty mapping."""
    assert read(tmp_path, "") == read(tmp_path, "pools:\n") == read(tmp_path, "pools: {}") == []


def test_all_mistakes_are_said_at_once(tmp_path: Path) -> None:
    """One line each, in the order of the file."""
    (tmp_path / "m.json").write_text('[{"role": "user"}, 5]')
    (tmp_path / "s.json").write_text('[{"role": "\\ud800"}]')
    (tmp_path / "x.json").write_text("[")
    text = """pools:
  agents:
    promt: x
    pin: maybe
  Agents: {prompt: a}
  b:
    prompt: a
    messages_file: m.json
  c: {parent: d, prompt: a}
  d: {parent: c, prompt: a, branch_pos: 0}
  e: {prompt_file: nope.txt, parent: zzz}
  f: {prompt: x, ttl_s: -1, admission: {}}
  g: {messages_file: s.json, tools: [], tools_file: m.json}
  h: hello
  i:
  j: {tokens: [1, 2, true], pin: {owner: "", lease_s: -3}}
  k: {tokens: !!binary aGk=}
  l: {prompt: a, branch_pos: 3, tools: []}
  m: {prompt_file: [1], pin: {lease: 3}}
  n: {tokens_file: x.json}
  o: {tokens: [1], pin: {lease_s: -3}}
other: 1
"""
    known = "known are tokens, prompt, messages, tools, chat_template_kwargs, parent, branch_pos, pin, ttl_s, "
    sources = "tokens, prompt, messages, tokens_file, prompt_file, messages_file"
    assert mistakes(tmp_path, text) == [
        f":2: pool agents: give exactly one of {sources}; none came",
        f":3: pool agents: unknown key 'promt'; {known}admission, tokens_file, prompt_file, messages_file, tools_file",
        ":4: pool agents: pin must be true, false, or a mapping with owner and lease_s",
        ":5: pool Agents: a name must match [a-z_][a-z0-9_.-]{0,63}",
        f":8: pool b: give exactly one of {sources}; prompt and messages_file came together",
        ":8: pool b: messages_file m.json: messages[1]: Input should be a valid dictionary",
        ":9: pool c: its parents form a ring: c -> d -> c",
        ":10: pool d: branch_pos: Input should be greater than or equal to 1",
        ":11: pool e: its parent 'zzz' is not in this file",
        ":11: pool e: prompt_file nope.txt: No such file or directory",
        ":12: pool f: admission: target_tps_per_session is missing; it must be a number from 0.001 to 1e+06",
        ":12: pool f: ttl_s: Input should be greater than 0",
        ":13: pool g: messages holds '\\ud800', an unpaired surrogate, which is no character",
        ":13: pool g: tools and tools_file came together; give one of them",
        ":13: pool g: tools_file m.json: tools[1]: Input should be a valid dictionary",
        f":14: pool h: say what it holds: one of {sources}",
        f":15: pool i: say what it holds: one of {sources}",
        ":16: pool j: pin.owner: String should have at least 1 character",
        ":16: pool j: tokens[2]: Input should be a valid integer",
        ":17: pool k: tokens holds what JSON cannot carry: Object of type bytes is not JSON serializable",
        ":17: pool k: tokens: Input should be a valid list",
        ":18: pool l: branch_pos says where it leaves its parent, but no parent is given",
        ":18: pool l: tools goes with messages, not with prompt",
        ":19: pool m: prompt_file must be the name of a file",
        ":19: pool m: unknown key 'lease'; known are owner, lease_s",
        ":20: pool n: tokens_file x.json: not valid JSON: Expecting value: line 1 column 2 (char 1)",
        ":21: pool o: pin.lease_s: Input should be greater than 0",
        ":22: unknown key 'other'; known are pools, admission",
    ]


def test_policies_of_pools_and_the_default_one(tmp_path: Path) -> None:
    """Fields as they are posted; `~` is left out."""
    file = tmp_path / "pools.yaml"
    file.write_text("""admission: {target_tps_per_session: 4, protect_floors: true}
pools:
  a: {prompt: x, admission: {target_tps_per_session: 12.5, mode: enforced, on_saturation: queue, max_queue: ~}}
  b: {prompt: x, admission: ~}
""")
    found = read_pools_file(file)
    assert found.admission == Policy(4, protect_floors=True)
    assert [one.admission for one in found.pools] == [Policy(12.5, Mode.ENFORCED, OnSaturation.QUEUE), None]
    file.write_text("pools: {a: {prompt: x}}\n")
    assert read_pools_file(file).admission is None


def test_every_mistake_of_a_policy_stands_on_its_line(tmp_path: Path) -> None:
    """All fields, of pools and of the default one; what goes with one of the two alone is said."""
    text = """admission:
  mode: strict
  settle_tokens: 1.5
pools:
  a:
    prompt: x
    admission:
      target_tps_per_session: 0
      fail_fast: 1
      color: red
      protect_floors: true
  b: {prompt: x, admission: 15}
"""
    one_of = "mode, on_saturation, guarantee_min_sessions, settle_tokens, settle_max_ms, max_queue, queue_timeout_ms, while_held, "
    known = f"an admission policy has the fields target_tps_per_session, {one_of}fail_fast, protect_floors"
    number = "it must be a number from 0.001 to 1e+06"
    assert mistakes(tmp_path, text) == [
        f":1: admission: target_tps_per_session is missing; {number}",
        ":2: admission: mode is 'strict'; it must be one of advisory, enforced",
        ":3: admission: settle_tokens is 1.5; it must be a whole number from 1 to 65536",
        f":8: pool a: admission: target_tps_per_session is 0; {number}",
        ":9: pool a: admission: fail_fast is 1; it must be true or false",
        f":10: pool a: admission: color is 'red'; it must be left out; {known}",
        ":11: pool a: admission: protect_floors is True; it must be left out: only the default policy has it",
        ":12: pool b: admission: Input should be a valid dictionary",
    ]
    assert mistakes(tmp_path, "admission: 5\n") == [":1: admission: Input should be a valid dictionary"]


@pytest.mark.parametrize("text", ["- a\n", "pools: [a]\n", "hello\n", "pools: 5\n"])
def test_another_form_is_one_mistake(tmp_path: Path, text: str) -> None:
    """The file is a mapping of mappings."""
    assert mistakes(tmp_path, text) == [
        ":1: the file must be a mapping with the key pools: the names of the pools and what each holds"
    ]


def test_a_ring_is_said_once_and_hides_nothing(tmp_path: Path) -> None:
    """Pools that lead into a ring are not blamed for it; a pool can be its own parent only by mistake."""
    parents = {"x": "a", "a": "b", "b": "a", "s": "s"}
    text = "pools:\n" + "".join(f"  {name}: {{prompt: x, parent: {parent}}}\n" for name, parent in parents.items())
    assert mistakes(tmp_path, text) == [
        ":3: pool a: its parents form a ring: a -> b -> a",
        ":5: pool s: its parents form a ring: s -> s",
    ]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Not there, a folder, or no text."""
    with pytest.raises(SettingsError, match=r"--pools .*none: No such file"):
        read_pools_file(tmp_path / "none")
    with pytest.raises(SettingsError, match="Is a directory"):
        read_pools_file(tmp_path)
    (tmp_path / "latin").write_bytes(b"pools: \xff")
    with pytest.raises(SettingsError, match="not UTF-8 text"):
        read_pools_file(tmp_path / "latin")
