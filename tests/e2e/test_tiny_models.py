"""Each tiny model runs on a stock engine, in the memory class it stands for, and its greedy text depends on its whole prompt."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import IO, Any

import pytest

from tests.models import tiny, tiny_model

pytestmark = pytest.mark.engine

MEMORY = {
    "full": {"llama_kv_cache"},
    "full-f32": {"llama_kv_cache"},
    "swa": {"llama_kv_cache", "llama_kv_cache_iswa"},
    "recurrent": {"llama_memory_recurrent"},
    "hybrid": {"llama_kv_cache", "llama_memory_recurrent"},
    "hybrid-swa": {"llama_kv_cache", "llama_kv_cache_iswa", "llama_memory_recurrent"},
    "one-layer": {"llama_kv_cache"},
    "draft": {"llama_kv_cache"},
}


@contextmanager
def running(engine: Path, kind: str) -> Iterator[tuple[str, list[str]]]:
    """A stock engine on a port of its own choice; yields its URL and its log, which goes on growing."""
    command: list[str | Path] = [
        engine,
        "-m",
        tiny_model(kind),
        "--port",
        "0",
        "-t",
        "1",
        "-c",
        "1024",
        "-np",
        "1",
        "--no-warmup",
        "-lv",
        "4",
    ]
    lines: list[str] = []
    url: Future[str] = Future()

    def drain(pipe: IO[str]) -> None:
        for line in pipe:
            lines.append(line)
            if not url.done() and (found := re.search(r"llama_server: listening on (http://\S+)", line)):
                url.set_result(found[1])
        if not url.done():
            url.set_exception(AssertionError("the engine ended:\n" + "".join(lines[-20:])))

    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        reader = Thread(target=drain, args=(process.stderr,))
        reader.start()
        try:
            yield url.result(), lines
        finally:
            process.kill()
            reader.join()


def complete(url: str, prompt: str) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": 12, "temperature": 0, "cache_prompt": False, "return_tokens": True}
    return fetch(urllib.request.Request(f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}))


def fetch(request: urllib.request.Request | str) -> dict[str, Any]:
    with urllib.request.urlopen(request) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_kind_runs_in_its_memory_class(kind: str, twin_path: Path) -> None:
    """The engine's log names the memory class, and two prompts that differ far back in the text go on differently."""
    with running(twin_path, kind) as (url, log):
        filler = "The quick brown fox jumps over the lazy dog. " * 3
        assert fetch(f"{url}/v1/models")["data"][0]["meta"]["n_ctx_train"] == tiny.N_CTX_TRAIN
        one, other = (complete(url, f"{filler}{word} {filler[:60]}") for word in ("Yes", "No"))
    assert set(re.findall(r"llama_(?:kv_cache\w*|memory_\w+)(?=:)", "".join(log))) == MEMORY[kind]
    assert one["tokens"] != other["tokens"]
    assert (one["tokens_predicted"], other["tokens_predicted"]) == (12, 12)
