"""Random requests on every route of a real engine, through the proxy and to a twin in the same state: the answers are equal.

The twin is the same engine, started as the proxy starts its own and asked the same in the same order, so that what is in its slots,
and with it every count of cached tokens, is the same too. Pools are on, and nobody uses them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.engine.driver import Engine
from tests.fakes.proxy_process import Served
from tests.fuzz.asks import CUTS, HEADERS, SIZES, Ask, Framed, asks, bodies, encoded, spoiled, targets
from tests.fuzz.equality import Face, difference, face, length_is_true
from tests.fuzz.wire import Wire
from tests.lengths import examples, length
from tests.models import tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore:Generating overly large repr")]

N = examples(60)
ARGS = ("-c", "1024", "-np", "2", "-t", "1", "--seed", "1", "--temp", "0", "--jinja", "-n", "12")
METHODS = (b"GET", b"POST", b"PUT", b"PATCH", b"DELETE", b"HEAD", b"OPTIONS", b"PURGE")
PLAIN = [
    b"/health",
    b"/v1/health",
    b"/models",
    b"/v1/models",
    b"/api/tags",
    b"/lora-adapters",
    b"/nothing",
    b"/",
    b"/index.html",
    b"//health",
]
PLAIN += [b"/health?a=%00", b"/%68ealth", b"/v1/models/", b"/health/../health", b"/loading.html", b"/v1/chat/completions/control"]
REFUSALS = {b"400", b"405", b"426", b"431"}
"""Ours, of what is no HTTP."""
WORDS = [
    "the",
    "river",
    "carries",
    "old",
    "letters",
    "from",
    "a",
    "town",
    "that",
    "nobody",
    "remembers",
    "and",
    "the",
    "boats",
    "are",
    "slow",
]


@dataclass
class Twins:
    """A proxy before its engine, and the twin."""

    port: int
    twin: Path
    pids: Sequence[int]

    def alone(self, ask: Ask) -> Face:
        """From the twin, on a connection of its own."""
        return self._heard(self.twin, ask)[0]

    def differ(self, ask: Ask) -> str:
        """How the two replies differ, and whether a connection ends that goes on directly and was not asked to end."""
        want, lives = self._heard(self.twin, ask)
        got, goes_on = self._heard(self.port, ask)
        ended = lives and not goes_on and not ask.wants_end
        return difference(want, got) or ("the connection ends" if ended else "")

    def _heard(self, address: int | Path, ask: Ask) -> tuple[Face, bool]:
        with Wire(address) as wire:
            heard = wire.ask(ask)
            goes_on = wire.goes_on(Ask())
        self.settled()
        assert length_is_true(heard.reply)
        return face(heard.reply, drawn=True), goes_on

    def settled(self) -> None:
        """Until no slot of either works: a reply leaves before its slot is free, and the next choice of a slot depends on that."""
        for address in (self.twin, self.port):
            while True:
                with Wire(address) as wire:
                    if b'"is_processing":true' not in wire.ask(Ask(target=b"/slots")).reply.body:
                        break


@pytest.fixture(scope="module")
def twins(engine_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    model = tiny_model("full")
    with Served(engine_path, model, tmp_path_factory.mktemp("proxy"), args=ARGS) as served:
        n_pools = served.health["pools"]["max_pools"]
        assert n_pools > 0
        with Engine(engine_path, model, ARGS, max_pools=n_pools, env={"LLAMA_ARG_ENDPOINT_METRICS": "1"}) as twin:
            both = Twins(int(served.url.rsplit(":", 1)[1]), twin.socket, [served.health["pid"], twin.process.pid])
            yield both
            assert all(psutil.pid_exists(pid) for pid in both.pids)
        assert served.stop() == 0
        assert "Traceback" not in served.said, served.said


ODD_HEADERS = st.sampled_from(
    [
        (b"Range", b"bytes=0-3"),
        (b"Range", b"bytes=-5,2-"),
        (b"Range", b"bytes=9999-"),
        (b"Accept-Encoding", b"gzip, br"),
        (b"Content-Encoding", b"gzip"),
        (b"Content-Encoding", b"identity"),
        (b"If-None-Match", b"*"),
        (b"Origin", b"http://app.example"),
        (b"Authorization", b"Bearer none"),
        (b"Cookie", b"a=b; c=d"),
        (b"X-Forwarded-For", b"192.0.2.1"),
        (b"X-Long", b"a" * 7000),
        (b"X-Too-Long", b"a" * 9000),
        (b"Accept", b"text/event-stream"),
        (b"Content-Type", b"multipart/form-data; boundary=x"),
        (b"Content-Type", b"application/x-www-form-urlencoded"),
        (b"", b""),
    ]
).map(lambda one: [one] if one[0] else [(b"X-%d" % n, b"") for n in range(120)])
SOME_HEADERS = st.builds(lambda free, odd: [*free, *(odd or [])], HEADERS, st.none() | ODD_HEADERS)

TEXT = st.lists(st.sampled_from(WORDS), max_size=40).map(" ".join) | st.text(max_size=60)
CHAT = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool", "x"]), "content": TEXT | st.none()}),
    max_size=4,
)
SAMPLING = st.fixed_dictionaries(
    {"temperature": st.just(0)},
    optional={
        "stream": st.booleans(),
        "seed": st.integers(-1, 2**33),
        "top_k": st.integers(-1, 60),
        "min_p": st.floats(0, 1),
        "logit_bias": st.just([[5, -1.5], [17, False]]),
        "stop": st.lists(st.sampled_from(WORDS), max_size=2),
        "cache_prompt": st.booleans(),
        "n": st.integers(1, 2),
        "id_slot": st.integers(-1, 2),
        "logprobs": st.booleans(),
        "n_probs": st.integers(0, 3),
        "timings_per_token": st.booleans(),
        "stream_options": st.just({"include_usage": True}),
        "return_progress": st.booleans(),
        "response_fields": st.just(["content", "generation_settings/n_predict"]),
        "grammar": st.just('root ::= "a" | "b"'),
        "unknown": st.integers() | st.text(max_size=5),
    },
)
PROMPT = TEXT | st.lists(st.integers(0, 49151), max_size=30) | st.lists(TEXT, max_size=2)


def _with(sampling: dict, **more: object) -> bytes:
    """Without variants of an empty prompt: for those the engine lets its client wait for ever, with or without the proxy."""
    asked = {**more, **sampling}
    prompt = asked.get("prompt", asked.get("input", asked.get("messages")))
    if not prompt or (isinstance(prompt, list) and "" in prompt):
        asked.pop("n", None)
    return encoded(asked)


LIMIT = st.integers(0, 6)
ROUTES: list[tuple[bytes, st.SearchStrategy[bytes]]] = [
    (b"/completion", st.builds(lambda s, p, n: _with(s, prompt=p, n_predict=n), SAMPLING, PROMPT, LIMIT)),
    (b"/v1/completions", st.builds(lambda s, p, n: _with(s, prompt=p, max_tokens=n), SAMPLING, PROMPT, LIMIT)),
    (b"/v1/chat/completions", st.builds(lambda s, m, n: _with(s, messages=m, max_tokens=n), SAMPLING, CHAT, LIMIT)),
    (b"/v1/responses", st.builds(lambda s, p, n: _with(s, input=p, max_output_tokens=n), SAMPLING, TEXT | CHAT, LIMIT)),
    (b"/v1/messages", st.builds(lambda s, m, n: _with(s, messages=m, max_tokens=n), SAMPLING, CHAT, LIMIT)),
    (b"/v1/messages/count_tokens", st.builds(lambda m: encoded({"messages": m}), CHAT)),
    (b"/infill", st.builds(lambda s, p, n: _with(s, input_prefix=p, input_suffix="x", n_predict=n), SAMPLING, TEXT, LIMIT)),
    (b"/tokenize", st.builds(lambda p, w: encoded({"content": p, "with_pieces": w}), TEXT, st.booleans())),
    (b"/detokenize", st.builds(lambda t: encoded({"tokens": t}), st.lists(st.integers(0, 49151), max_size=20))),
    (b"/apply-template", st.builds(lambda m: encoded({"messages": m}), CHAT)),
    (b"/v1/embeddings", st.builds(lambda p: encoded({"input": p}), PROMPT)),
    (b"/rerank", st.builds(lambda p: encoded({"query": p, "documents": [p]}), TEXT)),
    (b"/lora-adapters", st.just(b"[]")),
    (b"/slots/0?action=erase", st.just(b"")),
    (b"/props", st.just(b"{}")),
]


@st.composite
def computing(draw: st.DrawFn) -> Ask:
    """A request that makes the engine work, or be angry."""
    path, body = draw(st.sampled_from(ROUTES))
    framed = draw(st.sampled_from([Framed.LENGTH, Framed.CHUNKED]))
    return Ask(
        method=b"POST",
        target=path,
        headers=[(b"Content-Type", b"application/json"), *draw(SOME_HEADERS)],
        body=draw(spoiled(draw(body))),
        framed=framed,
        chunks=draw(SIZES),
        cuts=draw(CUTS),
        expects=draw(st.sampled_from([False, False, True])),
    )


@st.composite
def in_slot_0(draw: st.DrawFn) -> Ask:
    """A completion that waits for one slot, so that in a row the choice of a slot does not depend on when the last one was free."""
    body = _with({**draw(SAMPLING), "id_slot": 0, "n": 1}, prompt=draw(TEXT), n_predict=draw(LIMIT))
    headers = [*draw(HEADERS), (b"Content-Type", b"application/json")]
    return Ask(
        b"POST",
        b"/completion",
        headers,
        draw(spoiled(body)),
        draw(st.sampled_from([Framed.LENGTH, Framed.CHUNKED])),
        draw(SIZES),
        draw(CUTS),
    )


SLOW = settings(phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
"""Not shrunk: what an engine answers depends on what it was asked before."""


@settings(SLOW, max_examples=N)
@given(computing())
def test_what_is_computed_is_equal(twins: Twins, ask: Ask) -> None:
    """Every generating, text and odd route, with bodies whole and spoilt, streamed and not."""
    assert twins.differ(ask) == ""


@settings(SLOW, max_examples=N)
@given(asks(st.sampled_from(PLAIN) | targets(), bodies(), METHODS, SOME_HEADERS))
def test_everything_else_is_equal(twins: Twins, ask: Ask) -> None:
    """Any method on any path, with any body."""
    assert twins.differ(ask) == ""


@settings(SLOW, max_examples=max(10, N // 4))
@given(st.lists(in_slot_0(), min_size=2, max_size=4))
def test_a_row_is_answered_as_one_by_one(twins: Twins, row: list[Ask]) -> None:
    """Pipelined through the proxy, one by one to the twin."""
    want = [twins.alone(ask) for ask in row]
    with Wire(twins.port) as wire, contextlib.suppress(BrokenPipeError):
        got = [face(reply, drawn=True) for reply in wire.row(row)]
    twins.settled()
    assert [difference(*pair) for pair in zip(want, got, strict=True)] == [""] * len(row)


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 1 << 20, length(4 << 20, 63 << 20)])
@pytest.mark.parametrize("framed", [Framed.LENGTH, Framed.CHUNKED])
@pytest.mark.parametrize("target", [b"/completion", b"/v1/embeddings", b"/nothing"])
def test_bodies_of_all_sizes(twins: Twins, size: int, framed: Framed, target: bytes) -> None:
    """Up to the bound for bodies that we read, on routes that we read and on those that we do not."""
    body = b'{"n_predict":2,"temperature":0,"prompt":"the river","pad":"' + b"x" * size + b'"}'
    headers = [(b"Content-Type", b"application/json")]
    assert twins.differ(Ask(b"POST", target, headers, body, framed, chunks=(1 << 20, 3, 70000))) == ""


@st.composite
def broken(draw: st.DrawFn) -> bytes:
    """A request with some of its bytes left out, doubled or replaced."""
    data = bytearray(
        draw(
            st.sampled_from([Ask(target=b"/v1/models"), Ask(b"POST", b"/tokenize", (), b'{"content":"x"}', Framed.CHUNKED, (3,))])
        ).whole
    )
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data) - 1))
        data[at : at + draw(st.integers(0, 2))] = draw(
            st.binary(max_size=2) | st.sampled_from([b"\r\n", b" ", b"\0", b"\n\r", b":", data[:at]])
        )
    return bytes(data)


@settings(SLOW, max_examples=N)
@given(broken())
def test_what_is_no_http_is_refused_or_equal(twins: Twins, data: bytes) -> None:
    """A broken request gets the engine's answer, or a clear refusal of ours and an end; nothing hangs, and others are served."""
    with Wire(twins.twin) as direct, Wire(twins.port) as through:
        direct.send(data)
        through.send(data)
        want, got = direct.soon(), through.soon()
    refused = got[9:12] in REFUSALS and b'"error"' in got
    lenient = data.startswith((b"\r", b"\n"))  # empty lines before a request are to be ignored (RFC 9112, 2.2)
    assert refused or lenient or not got or got[:12] == want[:12], (want, got)
    with Wire(twins.port) as wire:
        assert wire.ask(Ask()).reply.body == b'{"status":"ok"}'
