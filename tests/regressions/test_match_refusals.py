"""What the engine refuses in a dry run is the caller's to mend, whatever number the engine gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Never

import pytest

from polykv_proxy.errors import EngineRefusedError
from tests.integration.rig import rig


@pytest.mark.parametrize(("engine", "ours"), [(400, 400), (500, 400), (501, 400), (503, 503)])
async def test_a_refused_match_is_not_a_broken_engine(
    engine: int, ours: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a character is the engine's 500, infill on a model without its tokens a 501; only 503 means that it is away."""

    async def refused(*_: object) -> Never:
        raise EngineRefusedError(engine, "server_error", "no")

    async with rig(tmp_path) as proxy:
        monkeypatch.setattr(proxy.runtime.hub.client, "dry_run", refused)
        reply = await proxy.api.post("/polykv/match", json={"prompt": "x"})
        assert reply.status_code == ours
