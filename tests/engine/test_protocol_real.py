"""What only the real engine can show of the protocol: keys, dry runs, sleep, shutdown, adapters, abandoned requests."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.driver import Engine, Reply, ints, parse_events, request_body
from tests.engine.judge import assert_equal, noise_floor
from tests.models import tiny_model
from tests.models.adapter import write_adapter

pytestmark = pytest.mark.engine

SYSTEM = "You are a careful clerk. Answer in one short sentence."


@pytest.fixture(scope="module")
def engine(engine_path: Path) -> Iterator[Engine]:
    with Engine(engine_path, tiny_model("full"), ["-c", 4096, "-np", 4, "-t", 1, "-kvu"]) as engine:
        yield engine


def dry(engine: Engine, path: str, body: dict[str, Any]) -> list[list[int]]:
    reply = engine.http.post(path, json=body, headers={"x-polykv-dry": "tokens"}).raise_for_status()
    numbers = ints(reply.content)
    counts = [int(count) for count in reply.headers["x-polykv-counts"].split(",")]
    result, at = [], 0
    for count in counts:
        assert numbers[at] == count
        result.append(numbers[at + 1 : at + 1 + count])
        at += 1 + count
    assert at == len(numbers)
    return result


class TestKey:
    """Private stays private."""

    def test_wrong_key_is_the_stock_404(self, engine: Engine) -> None:
        """Without the key, or with another, a verb does not exist; also behind percent-encoding."""
        for headers in ({}, {"x-polykv-key": "other"}, {"x-polykv-key": "test-ke"}, {"x-polykv-key": "test-key2"}):
            with engine.client(headers) as client:
                unknown = client.get("/nothing")
                for path in ("/_polykv/v1/hello", "/_polykv/v1/state", "/%5fpolykv/v1/hello"):
                    reply = client.get(path)
                    assert (reply.status_code, reply.content) == (404, unknown.content)
                assert client.post("/_polykv/v1/seqs", json={"tokens": [1]}).status_code == 404

    def test_header_names_in_any_case(self, engine: Engine) -> None:
        """The key counts however its header name is written."""
        with engine.client({"X-POLYKV-Key": "test-key"}) as client:
            assert client.get("/_polykv/v1/hello").status_code == 200


class TestDryRun:
    """The dry run gives exactly what the route would prefill."""

    def test_equals_the_tokenizer_and_queues_nothing(self, engine: Engine) -> None:
        """Raw text, arrays and token ids, as the tokenizer route sees them; no slot moves."""
        before = engine.state()
        want = engine.http.post("/tokenize", json={"content": SYSTEM, "add_special": True}).json()["tokens"]
        assert dry(engine, "/completion", {"prompt": SYSTEM}) == [want]
        assert dry(engine, "/v1/completions", {"prompt": [SYSTEM, [5, 6, 7]]}) == [want, [5, 6, 7]]
        after = engine.state()
        assert before["slots"] == after["slots"]

    def test_equals_the_prompt_of_a_real_chat(self, engine: Engine) -> None:
        """A chat request with tools evaluates as many tokens as its dry run says, and shares them as a pool."""
        tool = {
            "type": "function",
            "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}},
        }
        body = {
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hi"}],
            "tools": [tool],
            "max_tokens": 4,
            "temperature": 0,
        }
        (tokens,) = dry(engine, "/v1/chat/completions", body)
        seq = engine.materialise(tokens[:-3])
        reply = engine.http.post("/v1/chat/completions", json=body, headers=engine.attach_headers(seq))
        assert reply.json()["usage"]["prompt_tokens"] == len(tokens)
        assert reply.json()["opencoti"]["cached_prefix_tokens"] == len(tokens) - 3
        engine.free(seq)


class TestReplies:
    """The facts of an attach are in headers and in the `opencoti` object, on every shape of answer."""

    CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("/completion", "prompt", {"n_predict": 4}),
        ("/v1/completions", "prompt", {"max_tokens": 4}),
        ("/v1/chat/completions", "messages", {"max_tokens": 4}),
        ("/v1/responses", "input", {"max_output_tokens": 4}),
        ("/v1/messages", "messages", {"max_tokens": 4}),
    )

    @pytest.mark.parametrize(("path", "field", "more"), CASES)
    @pytest.mark.parametrize("stream", [False, True])
    def test_object_and_headers(self, engine: Engine, path: str, field: str, more: dict[str, Any], stream: bool) -> None:
        """Once per reply, with the echo merged in and the engine's keys winning."""
        text = f"{path} {stream} {SYSTEM}"
        body = {field: [{"role": "user", "content": text}] if field == "messages" else text, **more}
        (tokens,) = dry(engine, path, body)
        seq = engine.materialise(tokens[:-1])
        headers = engine.attach_headers(seq, x_polykv_echo='{"pool_id": 7, "cached_prefix_tokens": 99}')
        reply = engine.http.post(path, json={**body, "stream": stream}, headers=headers)
        assert reply.headers["x-polykv-shared"] == str(len(tokens) - 1)
        assert reply.text.count('"opencoti"') == 1
        found = next(find(json.loads(line.removeprefix("data: "))) for line in reply.text.splitlines() if '"opencoti"' in line)
        assert found["pool_id"] == 7
        assert found["cached_prefix_tokens"] == len(tokens) - 1
        assert found["miss"] is None
        assert found["session_tps"] > 0
        engine.free(seq)

    def test_bad_echo_is_dropped_not_fatal(self, engine: Engine) -> None:
        """An echo that is no object, or too long, is left out; the request is served."""
        for echo in ("[1]", "{broken", '{"a":"' + "x" * 5000 + '"}'):
            reply = engine.completion([1, 2, 3], 2, engine.attach_headers(x_polykv_echo=echo))
            assert reply.status == 200
            assert set(reply.body["opencoti"]) == {"session_tps", "cached_prefix_tokens", "ctx_headroom_tokens", "miss"}

    def test_prompt_array_attaches_each_by_itself(self, engine: Engine) -> None:
        """Two prompts, one matching the pool: the object of each says what it got."""
        seq = engine.materialise(list(range(300, 340)))
        reply = engine.http.post(
            "/completion", json=request_body([list(range(300, 345)), [9, 8, 7]], 2), headers=engine.attach_headers(seq)
        ).json()
        assert [one["opencoti"]["cached_prefix_tokens"] for one in reply] == [40, 0]
        assert [one["opencoti"]["miss"] for one in reply] == [None, "token_mismatch"]
        engine.free(seq)


def find(data: Any) -> dict[str, Any]:
    """The `opencoti` object, at the top or one level down."""
    return data["opencoti"]  # type: ignore[no-any-return]


class TestBadInput:
    """Bad bodies get a 400 that names the field."""

    @pytest.mark.parametrize(
        ("body", "word"),
        [
            (b"{", "JSON"), (b"[]", "object"), (b"{}", "tokens"), (b'{"tokens":[]}', "tokens"), (b'{"tokens":[1.5]}', "tokens[0]"),
            (b'{"tokens":[1,-1]}', "tokens[1]"), (b'{"tokens":[99999999]}', "tokens[0]"), (b'{"tokens":[1],"session":1}', "either"),
            (b'{"session":0}', "session"), (b'{"session":"x"}', "session"), (b'{"session":1,"n_tokens":0}', "n_tokens"),
            (b'{"tokens":[1],"parent_seq":"x"}', "parent_seq"),
            (b'{"tokens":[1,2],"parent_seq":"4.1","branch_pos":3}', "branch_pos"),
        ],
    )  # fmt: skip
    def test_post_seqs(self, engine: Engine, body: bytes, word: str) -> None:
        """`POST seqs` names what is wrong; nothing is reserved."""
        reply = engine.http.post("/_polykv/v1/seqs", content=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["type"] == "invalid_request_error"
        if word != "JSON":
            assert word in reply.json()["error"]["message"]
        assert engine.state()["seqs"] == []

    def test_too_long_stale_and_unknown(self, engine: Engine) -> None:
        """Never-fits is 422, a vanished parent 410, an unknown session 409, malformed ids 400."""
        assert engine.post_seqs({"tokens": [5] * 4096})[1]["status"] == 422
        assert engine.post_seqs({"tokens": [5], "parent_seq": "4.99999"})[1]["status"] == 410
        assert engine.post_seqs({"session": 12345})[1]["status"] == 409
        assert engine.http.get("/_polykv/v1/seqs/4.77777/tokens").status_code == 410
        assert engine.http.delete("/_polykv/v1/seqs/abc").status_code == 400
        assert engine.http.delete("/_polykv/v1/sessions/0").status_code == 400
        assert engine.end_session(999999)["cancelled"] == 0


def test_fork_by_parent_shares_the_prefix(engine: Engine) -> None:
    """A sequence made on a parent computes only its own tokens, and cells are counted once."""
    parent = engine.materialise(list(range(500, 560)))
    used = engine.used_cells()
    name, child = engine.post_seqs({"tokens": list(range(500, 580)), "parent_seq": parent})
    assert (name, child["n_shared"]) == ("done", 60)
    assert engine.used_cells() == used + 20
    engine.free(parent)
    assert engine.used_cells() == used + 20
    assert engine.attached([*range(500, 580), 1], child["seq"]).n_shared == 80
    engine.free(child["seq"])


def test_delete_session_cancels_its_running_request(engine: Engine) -> None:
    """The request of a session that is deleted ends with an error at once, its cells are free, and the number is dead."""
    replies: list[Reply] = []
    headers = engine.attach_headers(session=77)
    thread = threading.Thread(
        target=lambda: replies.append(engine.completion([1, 2, 3], 3000, headers, ignore_eos=True, n_probs=0))
    )
    thread.start()
    while not any(slot["session"] == 77 and slot["state"] == "generating" for slot in engine.state()["slots"]):
        assert thread.is_alive()
    gone = engine.end_session(77)
    thread.join()
    assert gone["cancelled"] == 1
    assert gone["cells_freed"] > 0
    assert replies[0].status == 400
    assert "ended" in replies[0].body["error"]["message"]
    assert engine.completion([1, 2, 3], 2, engine.attach_headers(session=77)).status == 400


def test_abandoned_queued_requests_do_not_touch_the_running_one(engine_path: Path) -> None:
    """F011: one slot; five queued requests are dropped, by close and by reset; the running stream delivers all its tokens."""
    with Engine(engine_path, tiny_model("full"), ["-c", 2048, "-np", 1, "-t", 1]) as engine:
        chunks: list[str] = []

        def run() -> None:
            body = request_body([1, 2, 3], 900, stream=True, ignore_eos=True, n_probs=0)
            with engine.lines("POST", "/completion", body) as lines:
                chunks.extend(line for line in lines if line.startswith("data: "))

        thread = threading.Thread(target=run)
        thread.start()
        while not any(slot["state"] == "generating" for slot in engine.state()["slots"]):
            assert thread.is_alive()
        for reset in (True, False, True, False, True):
            queue_and_leave(engine, reset)
        assert thread.is_alive()
        thread.join()
        tokens = [token for chunk in chunks for token in json.loads(chunk[6:])["tokens"]]
        assert len(tokens) == 900
        assert json.loads(chunks[-1][6:])["stop_type"] == "limit"


def queue_and_leave(engine: Engine, reset: bool, headers: bytes = b"") -> None:
    body = json.dumps({"prompt": "x", "n_predict": 5}).encode()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(engine.socket))
        sock.sendall(b"POST /completion HTTP/1.1\r\nHost: e\r\n%sContent-Length: %d\r\n\r\n%s" % (headers, len(body), body))
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class TestEvents:
    """Events of real requests, in order, with the numbers that the reply had."""

    def collect(self, engine: Engine, n_released: int, act: Any) -> list[tuple[str, dict[str, Any]]]:
        text, released = "", 0
        with engine.lines("GET", "/_polykv/v1/events") as lines:
            assert next(lines) == "event: hello"
            worker = threading.Thread(target=act)
            worker.start()
            for line in lines:
                text += line + "\n"
                released += line.startswith(("event: released", "event: dropped"))
                if released == n_released and not line:
                    break
            worker.join()
        return [(name, data) for name, data in parse_events(text) if "type" in data]

    def test_order_and_numbers(self, engine: Engine) -> None:
        """launched, first_token, finished, released, with req, session, counts and reason."""
        headers = engine.attach_headers(session=88)
        events = self.collect(engine, 1, lambda: engine.completion([4, 5, 6], 3, headers, ignore_eos=True))
        assert [name for name, _ in events] == ["launched", "first_token", "finished", "released"]
        assert {data["req"] for _, data in events} == {int(headers["x-polykv-req"])}
        last = events[-1][1]
        assert (last["session"], last["n_prompt"], last["n_decoded"], last["reason"]) == (88, 3, 3, "limit")
        engine.end_session(88)

    def test_queued_request_that_is_left_is_dropped(self, engine_path: Path) -> None:
        """A named request that never launched ends in exactly one `dropped`."""
        with Engine(engine_path, tiny_model("full"), ["-c", 8192, "-np", 1, "-t", 1]) as engine:

            def act() -> None:
                with engine.lines(
                    "POST", "/completion", request_body([1, 2], 6000, stream=True, ignore_eos=True, n_probs=0)
                ) as lines:
                    next(lines)
                    queue_and_leave(engine, reset=False, headers=b"x-polykv-key: test-key\r\nx-polykv-req: 4242\r\n")
                    for _ in lines:
                        pass

            events = self.collect(engine, 2, act)
            assert [data["req"] for name, data in events if name == "dropped"] == [4242]

    def test_resume_after_the_last_id(self, engine: Engine) -> None:
        """`Last-Event-ID` continues where the reader was; an id of another boot gets a resync."""
        engine.completion([1, 2], 1, engine.attach_headers())
        with engine.lines("GET", "/_polykv/v1/events", headers={"Last-Event-ID": "0000000000000000:3"}) as lines:
            text = "".join(next(lines) + "\n" for _ in range(7))
        assert "event: resync" in text
        assert engine.hello()["boot_id"] in text


def test_sigterm_ends_the_engine_with_open_event_streams(engine_path: Path) -> None:
    """An open event stream does not hold up the exit."""
    with (
        Engine(engine_path, tiny_model("one-layer"), ["-c", 512, "-t", 1]) as engine,
        engine.lines("GET", "/_polykv/v1/events") as lines,
    ):
        assert next(lines) == "event: hello"
        engine.process.terminate()
        assert engine.process.wait(60) == 0


def test_sleep_and_wake_is_a_new_boot(engine_path: Path) -> None:
    """After idle sleep every sequence is gone, `state` answers without waking the engine, and a stale attach is served in full."""
    with Engine(engine_path, tiny_model("one-layer"), ["-c", 512, "-np", 2, "-t", 1, "--sleep-idle-seconds", 1]) as engine:
        boot = engine.hello()["boot_id"]
        seq = engine.materialise(list(range(400, 440)))
        engine.until_asleep()
        assert engine.state()["seqs"] == []
        assert engine.hello()["phase"] == "sleeping"
        reply = engine.attached([*range(400, 440), 7], seq)
        assert (reply.status, reply.n_shared, reply.miss) == (200, 0, "stale_seq")
        assert engine.hello()["boot_id"] != boot
        again = engine.materialise(list(range(400, 440)))
        assert engine.attached([*range(400, 440), 7], again).n_shared == 40


def test_attach_only_under_the_same_adapters(engine_path: Path, tmp_path: Path) -> None:
    """A pool records its LoRA set; under another set it is not attached, and the answer is that of a fresh prefill."""
    model = tiny_model("full")
    adapter = write_adapter(tmp_path / "a.gguf", "full", 1)
    with Engine(engine_path, model, ["-c", 1024, "-np", 2, "-t", 1, "--lora", adapter]) as engine:
        pool = list(range(600, 680))
        floor = noise_floor(engine)
        plain = engine.materialise(pool)
        assert engine.attached([*pool, 5], plain).n_shared == 80
        without = [{"id": 0, "scale": 0.0}]
        other = engine.attached([*pool, 5], plain, lora=without)
        assert (other.n_shared, other.miss) == (0, "lora")
        assert_equal(other, engine.fresh([*pool, 5], lora=without), floor)
        assert engine.http.post("/lora-adapters", json=without).status_code == 200
        swapped = engine.attached([*pool, 6], plain)
        assert (swapped.n_shared, swapped.miss) == (0, "lora")
        under = engine.materialise(pool)
        reply = engine.attached([*pool, 6], under)
        assert reply.n_shared == 80
        assert_equal(reply, engine.fresh([*pool, 6]), floor)


def test_state_answers_while_the_engine_decodes(engine_path: Path) -> None:
    """`state` reads the published snapshot: it never waits for a decode, and its number only grows."""
    with Engine(engine_path, tiny_model("full"), ["-c", 16384, "-np", 1, "-t", 1, "-b", 2048]) as engine:
        thread = threading.Thread(target=lambda: engine.completion(list(range(300, 10300)), 1, n_probs=0))
        thread.start()
        updates = [engine.state()["update"] for _ in range(50)]
        assert thread.is_alive()
        assert updates == sorted(updates)
        thread.join()


def test_api_key_guards_the_verbs_too(engine_path: Path) -> None:
    """With `--api-key` a verb wants both keys."""
    with Engine(engine_path, tiny_model("one-layer"), ["-c", 512, "-t", 1], env={"LLAMA_API_KEY": "secret"}) as engine:
        assert engine.http.get("/_polykv/v1/hello").status_code == 401
        reply = engine.http.get("/_polykv/v1/hello", headers={"Authorization": "Bearer secret"})
        assert isinstance(reply, httpx.Response)
        assert reply.status_code == 200
