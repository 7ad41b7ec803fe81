"""The second half of scripts/quickstart: starts the proxy, makes a pool, asks with and without it, shows the figures, serves.

Law: a client like any other; it uses the public port alone. The proxy is its child and never outlives it, in a group of its own,
so that Ctrl-C comes here first and the pool of the tour can be released.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

NAME = "quickstart"
RELEASE_S = 5.0
HANDBOOK = """You answer questions about the tool library of Harbour Street.
Members borrow up to four tools at a time for seven days and may renew a loan once, unless somebody else is waiting for the tool.
Power tools need a short introduction, which takes place every Tuesday at six in the evening; hand tools do not.
Bring tools back clean and dry. A late tool costs fifty cents a day, at most ten euros. Broken tools are repaired together on the
first Saturday of the month, and nobody pays for wear. Membership is twenty euros a year, ten for students and people out of work.
The library is open on Tuesdays from four to eight and on Saturdays from ten to two. Drills, sanders and saws are kept on the left,
ladders at the back, garden tools in the shed, and the pressure washer must be booked by telephone because there is only one.
Answer in one short sentence and say so when you do not know."""
QUESTIONS = {"first agent, pool": "How many tools may I borrow?", "second agent, pool": "When is the library open?"}
PLAIN_QUESTION = "What does membership cost?"


class TourError(Exception):
    """Something that a person has to know; the message says what and what to do."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What one chat request cost. `cached` counts prompt tokens that were not computed, `shared` those taken from the pool."""

    label: str
    n_prompt: int
    cached: int
    shared: int
    ttft_s: float
    answer: str

    def row(self) -> str:
        """Its line of the table."""
        return (
            f"  {self.label:<22}{self.n_prompt:>8}{self.n_prompt - self.cached:>12}{self.shared:>12}{self.ttft_s * 1000:>11.0f} ms"
        )


def main() -> int:
    """0 when the tour was shown and serving ended as asked for."""
    parser = argparse.ArgumentParser(prog="scripts/quickstart")
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int)
    parser.add_argument("--once", action="store_true")
    arguments = parser.parse_args()
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, _: sys.exit(128 + number))
    try:
        port = choose_port(arguments.port)
        command = [
            Path(sys.executable).with_name("polykv-proxy"),
            "--engine",
            arguments.engine,
            "-m",
            arguments.model,
            "--port",
            str(port),
        ]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0) as proxy, open_client(port) as client:
            try:
                show(proxy, client)
                return 0 if arguments.once else serve(proxy, port)
            finally:
                stop(proxy, client)
    except TourError as error:
        say(f"FAILED: {error}")
        return 1
    except KeyboardInterrupt:
        say("stopped")
        return 130


def say(text: str) -> None:
    """One line, the way the other scripts speak."""
    print(f"[quickstart] {text}", file=sys.stderr, flush=True)


def choose_port(wanted: int | None) -> int:
    """The port asked for, else 8080 if it is free, else a free one. TourError when the one asked for is taken."""
    for port in [wanted] if wanted is not None else [8080, 0]:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                say(f"port {port} cannot be used ({error.strerror})")
                continue
            chosen: int = probe.getsockname()[1]
            if port == 0 and wanted is None:
                say(f"taking port {chosen} instead")
            return chosen
    raise TourError(f"port {wanted} cannot be used; give another one with --port")


def open_client(port: int) -> httpx.Client:
    """A client of the proxy."""
    key = os.environ.get("POLYKV_API_KEY", "").split(",")[0].strip()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=None, trust_env=False)


def show(proxy: subprocess.Popen[bytes], client: httpx.Client) -> None:
    """The tour: wait, create the pool, ask, print the table."""
    wait_until_ready(proxy, client)
    pool = create_pool(client)
    asked = [ask(client, label, question, pool["pool_id"]) for label, question in QUESTIONS.items()]
    asked.append(ask(client, "the same, no pool", PLAIN_QUESTION, None))
    print(table(pool, asked), flush=True)


def wait_until_ready(proxy: subprocess.Popen[bytes], client: httpx.Client) -> None:
    """As long as the proxy lives and the model is not loaded: wait. TourError when the proxy ends or has no pools."""
    while True:
        if proxy.poll() is not None:
            raise TourError(f"the proxy ended with code {proxy.returncode}; its messages are above")
        try:
            health = client.get("/polykv/health").json()
        except httpx.TransportError:
            health = {}
        if health.get("state") == "ready" and health.get("pools", {}).get("state") in ("on", "off"):
            break
        time.sleep(0.1)
    if health["pools"]["state"] != "on":
        raise TourError(f"the engine has no pools: {health['pools'].get('reason')}")


def create_pool(client: httpx.Client) -> dict[str, Any]:
    """A pool of the handbook alone, made anew; the time it took is added as `took_s`."""
    client.delete(f"/polykv/pools/{NAME}")
    started = time.monotonic()
    reply = client.post("/polykv/pools", json={"name": NAME, "messages": [{"role": "system", "content": HANDBOOK}]})
    if reply.status_code != 201:
        raise TourError(f"creating a pool was answered by {reply.status_code}: {reply.text[:400]}")
    pool: dict[str, Any] = reply.json()
    return pool | {"took_s": time.monotonic() - started}


def ask(client: httpx.Client, label: str, question: str, pool_id: int | None) -> Asked:
    """One streamed chat request. Without a pool nothing is reused: the figures of a slot that is new to the prompt."""
    body: dict[str, Any] = {
        "messages": [{"role": "system", "content": HANDBOOK}, {"role": "user", "content": question}],
        "max_tokens": 24,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body |= {"cache_prompt": False} if pool_id is None else {"pool_id": pool_id}
    started, first, text, usage, shared = time.monotonic(), None, [], None, 0
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            raise TourError(f"a chat request was answered by {reply.status_code}: {reply.read().decode()[:400]}")
        for event in events(reply):
            piece = "".join(choice["delta"].get("content") or "" for choice in event.get("choices", []))
            if piece and first is None:
                first = time.monotonic() - started
            text.append(piece)
            usage = event.get("usage") or usage
            shared = event.get("opencoti", {}).get("cached_prefix_tokens", shared)
    if usage is None or first is None:
        raise TourError("a chat request ended without an answer")
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return Asked(label, usage["prompt_tokens"], cached, shared, first, "".join(text).strip())


def events(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON events of a stream. TourError for one that reports an error."""
    for line in reply.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event: dict[str, Any] = json.loads(line[len("data: ") :])
            if "error" in event:
                raise TourError(f"a chat request failed: {event['error']}")
            yield event


def table(pool: dict[str, Any], asked: list[Asked]) -> str:
    """The figures, for a person."""
    head = f"  {'request':<22}{'prompt':>8}{'prefilled':>12}{'from pool':>12}{'first token':>14}"
    made = f"  {'creating the pool':<22}{pool['prefix_len']:>8}{pool['prefix_len']:>12}{'':>12}{pool['took_s'] * 1000:>11.0f} ms"
    lines = ["", head, "  " + "-" * (len(head) - 2), made, *(one.row() for one in asked), ""]
    pooled, plain = asked[-2], asked[-1]
    lines.append(
        f"  The second agent's first token came {plain.ttft_s / pooled.ttft_s:.1f} times sooner than without the pool: "
        f"{pooled.shared} of its {pooled.n_prompt} prompt tokens were there."
    )
    return "\n".join(lines)


def serve(proxy: subprocess.Popen[bytes], port: int) -> int:
    """Until Ctrl-C, or until the proxy ends by itself."""
    example = json.dumps({"pool_id": NAME, "messages": [{"role": "system", "content": "..."}, {"role": "user", "content": "..."}]})
    text = (
        f"\n  Serving on http://127.0.0.1:{port} (Ctrl-C stops). Attach to the pool by its name, with the system text it holds "
        f"(HANDBOOK in scripts/quickstart_tour.py):\n    {example}\n"
    )
    try:
        print(text, flush=True)
        return proxy.wait()
    except KeyboardInterrupt:
        say("stopping")
        return 0


def stop(proxy: subprocess.Popen[bytes], client: httpx.Client) -> None:
    """Release the pool, ask the proxy to end, and wait; a second Ctrl-C ends it at once."""
    if proxy.poll() is not None:
        return
    try:
        with contextlib.suppress(httpx.HTTPError):
            client.delete(f"/polykv/pools/{NAME}", timeout=RELEASE_S)
        proxy.terminate()
        proxy.wait()
    except KeyboardInterrupt:
        proxy.kill()
        proxy.wait()


if __name__ == "__main__":
    sys.exit(main())
