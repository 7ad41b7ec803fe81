"""The page's pure modules, run in the browser that will run them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page

from tests.browser.visit import live, visit

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    async with live(tmp_path_factory.mktemp("rig")) as proxy, visit(browser, proxy) as opened:
        yield opened


async def run(page: Page, module: str, script: str) -> Any:
    """The value of an expression in which `m` is the module."""
    return await page.evaluate(f"import('/polykv/ui/{module}.js').then((m) => {{ {script} }})")


async def test_events_are_the_same_wherever_the_stream_is_cut(page: Page) -> None:
    """Line ends of all kinds, comments, ids that stay, data of several lines; cut at every place and into single characters."""
    text = r": hi\r\n\r\nid: 7\r\nevent: tps\r\ndata: {\"a\":\r\ndata: 1}\r\n\r\n"
    text += r"data:x\n\nid\nevent: y\n\nretry: 5\ndata: z\r\rdata: half"
    expected = [
        {"id": "7", "event": "tps", "data": '{"a":\n1}'},
        {"id": "7", "event": "message", "data": "x"},
        {"id": "", "event": "message", "data": "z"},
    ]
    cut = """const text = "%s", found = [];
        for (let at = 0; at <= text.length; at++) {
          const parser = new m.SseParser();
          found.push([...parser.feed(text.slice(0, at)), ...parser.feed(text.slice(at))]);
        }
        const parser = new m.SseParser();
        found.push([...text].flatMap((one) => parser.feed(one)));
        return [...new Set(found.map((one) => JSON.stringify(one)))].map((one) => JSON.parse(one));"""
    assert await run(page, "sse", cut % text) == [expected]


POOLS = """const pool = (pool_id, parent, more) => ({pool_id, parent, name: "p" + pool_id, branch_pos: parent ? 10 : 0,
    prefix_len: 30, residency: "resident", pinned: false, sessions: [], ...more});
    const session = (name, pool_id, more) => ({key: "session " + name, session_id: name, pool_id, state: "idle", ...more});
    const pools = [pool(1, null), pool(2, 1), pool(3, 2, {pinned: true}), pool(4, null)];
    const sessions = [session("a", 2, {n_shared: 30, ctx_used: 44}), session("b", 9)];"""


async def test_the_tree_has_rows_in_order_with_their_place(page: Page) -> None:
    """Children below parents, sessions before pools, the poolless in a group; levels and places as a screen reader is told."""
    script = f"{POOLS} return m.rowsOf(pools, sessions).map((r) => [r.key, r.level, r.position, r.setSize, r.from, r.to, r.open]);"
    assert await run(page, "tree", script) == [
        ["pool 1", 1, 1, 3, 0, 30, True],
        ["pool 2", 2, 1, 1, 10, 30, True],
        ["session a", 3, 1, 2, 30, 44, None],
        ["pool 3", 3, 2, 2, 10, 30, None],
        ["pool 4", 1, 2, 3, 0, 30, None],
        ["group none", 1, 3, 3, 0, 0, True],
        ["session b", 2, 1, 1, 0, 0, None],
    ]


async def test_folds_and_filters_hide_rows(page: Page) -> None:
    """What is folded is not listed; a filter shows what is above and below a hit, folded or not."""
    keys = f"{POOLS} const keys = (options) => m.rowsOf(pools, sessions, options).map((row) => row.key);"
    folded = await run(page, "tree", f"{keys} return keys({{closed: new Set(['pool 2'])}});")
    assert folded == ["pool 1", "pool 2", "pool 4", "group none", "session b"]
    filtered = await run(page, "tree", f"{keys} return keys({{closed: new Set(['pool 2']), filter: ' PINNED'}});")
    assert filtered == ["pool 1", "pool 2", "pool 3"]
    assert await run(page, "tree", f"{keys} return keys({{filter: 'p2'}});") == ["pool 1", "pool 2", "session a", "pool 3"]
    assert await run(page, "tree", f"{keys} return keys({{filter: 'nothing'}});") == []


async def test_a_deep_and_wide_tree_takes_one_row_each(page: Page) -> None:
    """Twenty thousand pools in one chain, filtered and not: a tree that grew with the square of it would not end in time."""
    script = f"""{POOLS} const chain = Array.from({{length: 20000}}, (_, n) => pool(n + 1, n || null));
        return [m.rowsOf(chain, []).length, m.rowsOf(chain, [], {{filter: "p20000"}}).length];"""
    assert await run(page, "tree", script) == [20000, 20000]


async def test_ticks_are_round_and_reach_over_the_map(page: Page) -> None:
    """Two to nine of them, whatever the width, in steps of 1, 2 or 5."""
    widths = [1, 2, 7, 10, 130, 999, 4096, 131072]
    found = await run(page, "tree", f"return {widths}.map((width) => m.ticks(width));")
    for width, ticks in zip(widths, found, strict=True):
        assert 2 <= len(ticks) <= 9, (width, ticks)
        assert ticks[-1] <= width
        assert str(ticks[1]).rstrip("0") in {"1", "2", "5"}


async def test_history_keeps_a_column_for_each_and_frees_it(page: Page) -> None:
    """Columns have one length; seconds that were missed are a gap; a lane whose session is out of sight is given to the next."""
    script = """const history = new m.History(5), sizes = [];
        const add = (ts, ...names) => history.add({ts, aggregate_tps: ts, mean_active_tps: null},
            names.map((key) => ({key, title: key, tps: 1})));
        add(100.2, "a"); add(100.7, "a", "b"); add(101.1, "a"); add(120.5, "c"); add(121.5, "d");
        for (const lane of history.lanes) sizes.push(lane.values.length);
        const lanes = history.lanes.map((lane) => lane.key);
        const before = {times: [...history.times], aggregate: [...history.aggregate], sizes, lanes};
        add(50, "e");
        return {...before, after: history.times, begun: add(50.9, "e")};"""
    found = await run(page, "history", script)
    assert found["times"] == [120, 121]
    assert found["aggregate"] == [120.5, 121.5]
    assert set(found["sizes"]) == {2}
    assert found["lanes"] == ["c", "d"]
    assert found["after"] == [50]
    assert found["begun"] is False


async def test_figures_are_never_nan(page: Page) -> None:
    """What is missing, infinite or no number at all is a dash."""
    script = """const bad = [null, undefined, NaN, Infinity, "7"];
        const names = ["count", "rate", "bytes", "percent", "duration"];
        return [...new Set(names.flatMap((name) => bad.map((value) => m[name](value))))].join() === m.UNKNOWN;"""
    assert await run(page, "words", script)
    script = (
        "return [m.rate(99.94), m.rate(1234), m.bytes(1500), m.bytes(2 ** 40), m.duration(0.12), m.duration(71), m.duration(1e6)];"
    )
    assert await run(page, "words", script) == ["99.9", "1,234", "1.5 KiB", "1024 GiB", "120 ms", "1 min", "11 d"]


async def test_events_are_told_in_words(page: Page) -> None:
    """Known topics as sentences, unknown ones by their fields; each choice shows its part."""
    script = """const base = {ts: 1, seq: 1, session_id: "a", pool_id: 3, slot: 0, n_prompt: 1200, n_shared: 1100, n_decoded: 31,
            miss: null, reason: null, ttft_ms: 120, tps: 12.34, name: "clerk", parent: 1, prefix_len: 40};
        const tell = (topic, type, more) => m.eventWords({...base, topic, type, ...more});
        return [tell("pool", "created"), tell("pool", "evicted", {name: null, reason: "evicted on request"}),
            tell("session", "opened"),
            tell("request", "first_token"), tell("request", "finished", {reason: "limit"}),
            tell("engine", "lost", {reason: "exit 1"}),
            tell("peer", "joined", {weight: 2.5, ours: false}), tell("peer", "weight", {weight: 3, ours: true}),
            tell("policy", "set", {policy: {target_tps_per_session: 15, mode: "enforced"}}),
            tell("policy", "removed", {pool_id: null}),
            m.eventWords({topic: "weather", type: "left", ts: 1, seq: 2, pid: 77, extra: {a: 1}})];"""
    assert await run(page, "event_words", script) == [
        "clerk (3) created, 40 tokens below pool 1",
        "pool 3 evicted on request",
        "session a opened, pool 3",
        "a first token, pool 3, slot 0: 1,100 of 1,200 from the pool, after 120 ms",
        "a finished, pool 3, slot 0: 31 tokens at 12.3 tok/s, limit",
        "engine lost: exit 1",
        "clerk joined the device, weight 2.5",
        "our engine has weight 3 on the device",
        "policy of clerk (3): 15.0 tok/s a session, enforced",
        "default policy removed",
        'left, pid 77, extra {"a":1}',
    ]
    shown = """const all = [["pool", "created"], ["session", "active"], ["request", "finished"], ["request", "released"],
            ["x", "left"]];
        const chosen = (choose) => all.filter(([topic, type]) => choose({topic, type})).map(([, type]) => type);
        return Object.entries(m.CHOICES).map(([name, choose]) => [name, chosen(choose)]);"""
    assert dict(await run(page, "event_words", shown)) == {
        "Changes": ["created", "left"],
        "Requests": ["finished"],
        "Everything": ["created", "active", "finished", "released", "left"],
    }


async def test_a_stream_comes_back_and_asks_for_what_it_missed(page: Page) -> None:
    """After an end and after a refusal it connects again with the last id."""
    script = """const asked = [], heard = [], lost = [];
        return new Promise((resolve) => {
          const stream = new m.LiveStream(async (lastId) => {
            asked.push(lastId);
            if (asked.length === 2) throw new Error("refused");
            const text = asked.length === 1 ? "id: 4\\ndata: one\\n\\n" : "id: 5\\ndata: two\\n\\n";
            return new Blob([text]).stream();
          }, {onLost: (fault) => lost.push(fault.status), onEvent: (event) => {
            heard.push(event.data);
            if (event.data === "two") { stream.stop(); resolve({asked, heard, lost}); }
          }});
          stream.start();
        });"""
    assert await run(page, "stream", script) == {"asked": ["", "4", "4"], "heard": ["one", "two"], "lost": [0, 0]}


async def test_a_decision_in_words_has_its_ground(page: Page) -> None:
    """Who, where, how long, why by which figures; advice is told as such."""
    script = """const base = {topic: "decision", ts: 0, seq: 1, req: 7, session_id: "ann", pool_id: 2, waited_ms: 0, would: null,
        reason: "projected mean tps below floor", value: 13.92, threshold: 15};
        const nobody = {session_id: null, pool_id: null, waited_ms: 2500, would: "held"};
        return [{...base, type: "queue_full"}, {...base, type: "admitted", ...nobody},
            {...base, type: "admitted", reason: "ok", value: null}].map(m.eventWords);"""
    assert await run(page, "event_words", script) == [
        "ann queue full, pool 2: projected mean tps below floor (13.9 against 15.0)",
        "request 7 admitted after 2.5 s: projected mean tps below floor (13.9 against 15.0); enforced, it would be held",
        "ann admitted, pool 2: ok",
    ]


async def test_a_floor_is_a_lane_as_long_as_it_is_set(page: Page) -> None:
    """Columns stay of one length; a floor that is gone leaves its lane to the next, once none of it is in sight."""
    script = """const history = new m.History(3), tps = {aggregate_tps: 1, mean_active_tps: 1};
        const at = (ts, ...floors) => history.add({ts, ...tps}, [], floors.map(([key, tps]) => ({key, title: key, tps})));
        at(1, ["a", 5]); at(2, ["a", 6], ["b", 7]); at(3); at(4); at(5); at(6, ["c", 8]);
        return [history.times, history.floors.map(({key, values}) => [key, values])];"""
    assert await run(page, "history", script) == [[4, 5, 6], [["c", [None, None, 8]], ["b", [None, None, None]]]]


async def test_engines_of_the_device_have_ours_first(page: Page) -> None:
    """By slot; one without a name is a process; what is not known is a dash."""
    peer = (
        "const peer = (slot, more) => ({slot, pid: 7, name: 'm', weight: 2, share_pct: 66.7, busy_pct: 3, active: true, ...more});"
    )
    script = (
        "return m.peersOf({self: peer(2), peers: [peer(9, {name: ''}), peer(0, {active: false, busy_pct: null})]}).map(m.cells);"
    )
    assert await run(page, "peers_view", f"{peer} {script}") == [
        ["m (this one)", "2", "67 %", "3 %", "active"],
        ["m", "2", "67 %", "\N{EN DASH}", "idle"],
        ["process 7", "2", "67 %", "3 %", "active"],
    ]


async def test_a_chart_shows_a_minute_at_least(page: Page) -> None:
    """Also when the first second is all there is, and nothing yet."""
    script = "return [[], [100], [100, 101], [10, 60, 200]].map(m.span);"
    assert await run(page, "line_chart", script) == [[-60, 0], [40, 100], [41, 101], [10, 200]]
