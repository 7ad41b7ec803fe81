"""What no handler of ours knows: one answer, one word in the log."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi.responses import StreamingResponse

from polykv_proxy.engine.client import EngineClient
from polykv_proxy.runtime import hub
from tests.integration.rig import relayed, rig


async def test_a_fault_of_ours_is_answered_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """500 with our error object; the log has the request and where it failed, not twice."""
    async with rig(tmp_path) as proxy, relayed(proxy) as (_, client):
        monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
        monkeypatch.setattr(proxy.runtime, "look", None)
        reply = await client.get("/polykv/pools")
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
    (told,) = [record for record in caplog.records if record.exc_info]
    assert told.getMessage() == "GET /polykv/pools failed"


async def test_a_fault_in_the_middle_breaks_the_reply_off_and_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What has begun cannot become an error answer: the client sees that it is cut."""
    async with rig(tmp_path) as proxy, relayed(proxy) as (_, client):
        monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)

        async def half() -> AsyncIterator[bytes]:
            yield b"half"
            raise RuntimeError("in the middle")

        proxy.app.add_api_route("/polykv/half", lambda: StreamingResponse(half()))
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/polykv/half")
    assert len([record for record in caplog.records if record.exc_info]) == 1


async def test_an_engine_that_does_not_answer_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many ask for its state; and once more when it has answered in between."""

    async def silent(_client: EngineClient) -> None:
        await asyncio.Event().wait()

    async with rig(tmp_path) as proxy:
        for n in (1, 2):
            with monkeypatch.context() as world:
                world.setattr(hub, "STATE_S", 0.001)
                world.setattr(EngineClient, "state", silent)
                assert [await proxy.runtime.hub.state() for _ in range(5)] == [None] * 5
            assert sum(one.levelno >= logging.WARNING and "no state" in one.message for one in caplog.records) == n
            assert await proxy.runtime.hub.state() is not None
