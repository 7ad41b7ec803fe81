"""F013: whatever the engine's metrics page is, ours is whole, readable and says what is missing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from polykv_proxy.engine.status import EngineState
from polykv_proxy.observability import engine_source
from tests.integration.metrics_rig import ENGINE_PAGE, GIVEN, OURS, scraped


@pytest.mark.parametrize(
    ("page", "kind", "failure"),
    [
        (ENGINE_PAGE, "text/plain; version=0.0.4", None),
        (json.dumps(ENGINE_PAGE.decode()).encode(), "application/json", "malformed"),
        (ENGINE_PAGE + b"llamacpp:x -nan\n", "text/plain", None),
        (ENGINE_PAGE, "application/json", None),
        (None, "", "refused"),
    ],
    ids=["normal", "quoted", "nan", "json type", "501"],
)
async def test_whatever_the_engine_s_page_is_ours_is_whole(
    tmp_path: Path, page: bytes | None, kind: str, failure: str | None
) -> None:
    """Always 200 and readable, our series always there; when its part is missing a counter has moved."""
    async with scraped(tmp_path) as rig:
        if page is not None:
            rig.proxy.server.pages["/metrics"] = (200, kind, page)
        rig.engine(EngineState.STARTING)
        rig.engine(EngineState.READY)
        async with asyncio.timeout(20):
            while True:
                text = await rig.page()
                failed = f'polykv_engine_page_failures_total{{reason="{failure}"}} 0.0' not in text
                if failed if failure else "llamacpp:" in text:
                    break
                await asyncio.sleep(0.005)
        assert OURS in text
        assert ("llamacpp:" in text) is (failure is None)
        assert "-nan" not in text


async def test_an_engine_that_hangs_on_its_page_delays_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers go without it, and in the end the attempt counts as failed."""
    monkeypatch.setattr(engine_source, "PATIENCE_S", 0.05)
    async with scraped(tmp_path) as rig:
        rig.proxy.server.pages["/metrics"] = GIVEN
        rig.proxy.server.metrics_door.clear()
        rig.engine(EngineState.STARTING)
        rig.engine(EngineState.READY)
        async with asyncio.timeout(20):
            while (found := await rig.samples())['polykv_engine_page_failures_total{reason="timeout"}'] == 0:
                assert not any(name.startswith("llamacpp:") for name in found)
        rig.proxy.server.metrics_door.set()


async def test_a_page_that_wants_another_key_is_missing(tmp_path: Path) -> None:
    """A 401 of the engine takes its part away and nothing else."""
    async with scraped(tmp_path) as rig:
        rig.proxy.server.pages["/metrics"] = GIVEN
        rig.proxy.engine.api_key = "another"
        found = await rig.until('polykv_engine_page_failures_total{reason="refused"}')
        assert not any(name.startswith("llamacpp:") for name in found)
