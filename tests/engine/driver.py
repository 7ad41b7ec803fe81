"""Starts one engine on a unix socket and speaks its protocol, one method per verb. Plain calls, no policy.

Law: what a method returns is what the engine said; judging is the tests' business.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Self

import httpx

KEY = "test-key"
HANG_GUARD_S = 120.0
"""No test times anything; this only ends a test that hangs."""
EXIT_GRACE_S = 20.0
"""After SIGTERM; then the engine is killed, as its supervisor does."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One completion: what was generated, and the facts of the attach."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def tokens(self) -> list[int]:
        return self.body["tokens"]

    @property
    def logprobs(self) -> list[float | None]:
        """A position each; the engine computes none for an accepted draft."""
        return [entry["logprob"] if entry["top_logprobs"] else None for entry in self.body["completion_probabilities"]]

    @property
    def gaps(self) -> list[float]:
        """Log-prob distance of the best candidate to the second best, a position each."""
        best = [[top["logprob"] for top in entry["top_logprobs"]] for entry in self.body["completion_probabilities"]]
        return [first - second for first, second in best]

    @property
    def n_computed(self) -> int:
        return self.body["timings"]["prompt_n"]

    @property
    def n_cached(self) -> int:
        return self.body["timings"]["cache_n"]

    @property
    def n_shared(self) -> int:
        return int(self.headers["x-polykv-shared"])

    @property
    def miss(self) -> str | None:
        return self.headers.get("x-polykv-miss")


@dataclass
class Engine:
    """A running engine. Use as a context manager; leaving it stops the process and checks that it ended well."""

    path: Path
    model: Path
    args: Sequence[str | int | Path] = ()
    max_pools: int = 4
    env: dict[str, str] = field(default_factory=dict)
    expect_exit: int | None = 0

    def __enter__(self) -> Self:
        self.folder = tempfile.TemporaryDirectory(prefix="polykv-engine-")
        self.socket = Path(self.folder.name) / "engine.sock"
        self.log_path = Path(self.folder.name) / "log"
        env = os.environ | {"LLAMA_ARG_POLYKV_KEY": KEY, "LLAMA_ARG_POLYKV_MAX_POOLS": str(self.max_pools)} | self.env
        command = [self.path, "--host", self.socket, "-m", self.model, *self.args]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env
            )
        self.http = self.client({"x-polykv-key": KEY})
        self.numbers = count(1)
        try:
            self._wait_ready()
        except BaseException:
            self.expect_exit = None
            self.__exit__(None)
            raise
        return self

    def client(self, headers: dict[str, str]) -> httpx.Client:
        """A client that opens a connection a request: the engine closes idle ones when it likes."""
        transport = httpx.HTTPTransport(verify=False, uds=str(self.socket), limits=httpx.Limits(max_keepalive_connections=0))
        return httpx.Client(transport=transport, base_url="http://engine", timeout=HANG_GUARD_S, headers=headers)

    def __exit__(self, kind: object, *rest: object) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.terminate()
        try:
            code = self.process.wait(EXIT_GRACE_S)
        except (
            subprocess.TimeoutExpired
        ):  # the engine's signal handler takes a lock, and can wait for itself; the supervisor kills too
            self.process.kill()
            self.process.wait()
            code = self.expect_exit
        log = self.log()
        self.folder.cleanup()
        if code == -signal.SIGTERM:
            return  # the engine is ready a moment before it has a handler
        if kind is None and self.expect_exit is not None:
            assert code == self.expect_exit, f"the engine ended with {code}:\n{log[-4000:]}"

    def _wait_ready(self) -> None:
        end = time.monotonic() + HANG_GUARD_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"the engine ended at start with {self.process.returncode}:\n{self.log()[-4000:]}")
            if self._listens():
                try:
                    if self.http.get("/health").status_code == 200:
                        return
                except httpx.TransportError:
                    pass
            time.sleep(0.02)
        raise TimeoutError(f"the engine did not become ready:\n{self.log()[-4000:]}")

    def _listens(self) -> bool:
        """Asked first: httpx leaves the socket of a refused connection open, and a slow start refuses many."""
        with socket.socket(socket.AF_UNIX) as sock:
            return sock.connect_ex(str(self.socket)) == 0

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @contextmanager
    def lines(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Iterator[Iterator[str]]:
        """The lines of a streamed answer; leaving early closes the connection, as a client that goes away does."""
        with (
            self.client({"x-polykv-key": KEY}) as client,
            client.stream(method, path, json=body, headers=headers) as stream,
            closing(stream.iter_lines()) as lines,
        ):
            yield lines

    # the protocol

    def hello(self) -> dict[str, Any]:
        return self.http.get("/_polykv/v1/hello").raise_for_status().json()

    def state(self) -> dict[str, Any]:
        return self.http.get("/_polykv/v1/state").raise_for_status().json()

    def idle_state(self) -> dict[str, Any]:
        """The state once all slots are idle. Answers and `progress` come before the state that shows them, so the one that is
        published may still be that of before the request: ending a session that does not exist publishes a new one first."""
        self.end_session(2**62)
        while True:
            assert self.process.poll() is None
            state = self.state()
            if all(slot["state"] == "idle" for slot in state["slots"]):
                return state

    def until_asleep(self) -> None:
        """Until it sleeps, for want of work."""
        while self.state()["phase"] != "sleeping":
            assert self.process.poll() is None
            time.sleep(0.02)

    def used_cells(self) -> int:
        return self.state()["cells"]["used"]

    def post_seqs(self, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The last event (name, data), with the most that a `progress` called cached; an error known at once comes as
        ("http", {status, type, message})."""
        reply = self.http.post("/_polykv/v1/seqs", json=body)
        if reply.status_code != 200:
            return "http", {"status": reply.status_code, **reply.json()["error"]}
        events = list(parse_events(reply.text))
        assert sum(name in ("done", "error") for name, _ in events) == 1
        name, data = events[-1]
        return name, {**data, "n_cached": max((step["cached"] for kind, step in events if kind == "progress"), default=0)}

    def materialise(self, tokens: Sequence[int], **more: Any) -> str:
        name, data = self.post_seqs({"tokens": list(tokens), **more})
        assert name == "done", data
        assert data["n_tokens"] == len(tokens)
        return data["seq"]

    def snapshot(self, session: int, **more: Any) -> dict[str, Any]:
        name, data = self.post_seqs({"session": session, **more})
        return data if name == "done" else {"failed": data}

    def seq_tokens(self, seq: str) -> list[int]:
        raw = self.http.get(f"/_polykv/v1/seqs/{seq}/tokens").raise_for_status().content
        return ints(raw)

    def free(self, seq: str) -> dict[str, Any]:
        return self.http.delete(f"/_polykv/v1/seqs/{seq}").raise_for_status().json()

    def end_session(self, session: int) -> dict[str, Any]:
        return self.http.delete(f"/_polykv/v1/sessions/{session}").raise_for_status().json()

    def attach_headers(self, seq: str | None = None, shared: int = 1 << 20, session: int = 0, **more: str) -> dict[str, str]:
        headers = {"x-polykv-req": str(next(self.numbers)), **{name.replace("_", "-"): value for name, value in more.items()}}
        if seq:
            headers |= {"x-polykv-seq": seq, "x-polykv-shared": str(shared)}
        if session:
            headers["x-polykv-session"] = str(session)
        return headers

    def completion(self, prompt: object, n: int = 4, headers: dict[str, str] | None = None, **body: Any) -> Reply:
        """A greedy completion with log-probs. `headers` from `attach_headers` make it a named one."""
        reply = self.http.post("/completion", json=request_body(prompt, n, **body), headers=headers or {})
        return Reply(reply.status_code, reply.json(), dict(reply.headers))

    def attached(self, prompt: object, seq: str, n: int = 4, session: int = 0, shared: int = 1 << 20, **body: Any) -> Reply:
        return self.completion(prompt, n, self.attach_headers(seq, shared, session), **body)

    def fresh(self, prompt: object, n: int = 4, **body: Any) -> Reply:
        """The same without any cache: the reference."""
        return self.completion(prompt, n, cache_prompt=False, **body)


def request_body(prompt: object, n: int, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "n_predict": n, "temperature": 0, "seed": 1, "return_tokens": True, "n_probs": 2, **more}


def parse_events(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Named events of a whole server-sent event body."""
    for block in filter(None, text.split("\n\n")):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if "data" in fields:
            yield fields.get("event", "message"), json.loads(fields["data"])


def ints(raw: bytes) -> list[int]:
    return [int.from_bytes(raw[i : i + 4], "little", signed=True) for i in range(0, len(raw), 4)]
