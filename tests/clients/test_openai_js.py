"""OpenAI's JavaScript client: chat, completions and responses, streamed and not, errors, leaving early, six at once."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import httpx
import pytest

from tests.clients.conftest import said
from tests.clients.node import script
from tests.fakes.proxy_process import Served

pytestmark = pytest.mark.engine

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Where is the keel? ä€😀"}], "max_tokens": 12, "temperature": 0}
COMPLETION = {"model": "m", "prompt": "the river carries", "max_tokens": 12, "temperature": 0}
RESPONSE = {"model": "m", "input": "the river carries", "max_output_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def seen(served: Served) -> dict[str, Any]:
    asks = json.dumps({"chat": CHAT, "completion": COMPLETION, "response": RESPONSE})
    done = subprocess.run(["node", script("talk.mjs"), served.url, asks], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_answers_are_the_engine_s(seen: dict[str, Any], direct: httpx.Client) -> None:
    """Chat, streamed chat, completions and responses."""
    chat = said(direct, "/v1/chat/completions", CHAT)
    assert seen["chat"]["choices"] == chat["choices"]
    assert seen["stream"]["text"] == chat["choices"][0]["message"]["content"] != ""
    assert seen["stream"]["usage"]["completion_tokens"] == chat["usage"]["completion_tokens"] == 12
    assert seen["completion"] == said(direct, "/v1/completions", COMPLETION)["choices"][0]["text"]
    response = said(direct, "/v1/responses", RESPONSE)
    assert seen["response"] == response["output"][-1]["content"][0]["text"]
    assert seen["events"] == ["response.created", "response.completed"]
    assert seen["models"] == [model["id"] for model in direct.get("/v1/models").json()["data"]]


def test_an_error_is_of_its_class(seen: dict[str, Any]) -> None:
    """A bad request is one for the client too."""
    assert seen["error"] == {"name": "BadRequestError", "status": 400}


def test_leaving_early_frees_the_slot(seen: dict[str, Any], direct: httpx.Client) -> None:
    """After an abort in a long stream six others are served, and nothing runs in the end."""
    assert 3 <= seen["heard"] < 1500  # what was read already is still handed on
    assert seen["many"] == [seen["chat"]["choices"][0]["message"]["content"]] * 6
    while any(slot["is_processing"] for slot in direct.get("/slots").json()):
        pass
