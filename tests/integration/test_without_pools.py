"""Where there are no pools, `/polykv/*` says the real cause and what helps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from polykv_proxy.cli_doctor import diagnose
from tests.fakes.async_proxy import free_port, process, up
from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import served


@pytest.mark.parametrize(
    ("options", "cause", "remedy"),
    [
        (["--off"], "the proxy was started with --off", "start it without"),
        (
            ["--engine-key", "wrong"],
            "does not speak the pool protocol (hello: 404 File Not Found)",
            "either --engine-key is not the",
        ),
        ([], "does not speak the pool protocol (hello: 404 File Not Found)", "give --engine-key, the LLAMA_ARG_POLYKV_KEY"),
    ],
)
async def test_each_cause_has_its_remedy(tmp_path: Path, options: Sequence[str], cause: str, remedy: str) -> None:
    """In the 501, in the health page, in `doctor` and at the start."""
    async with served(FakeEngine(), tmp_path) as server:
        command = [
            "--engine-url",
            f"unix:{server.path}",
            "--port",
            str(port := free_port()),
            "--state-dir",
            str(tmp_path / "s"),
            *options,
        ]
        async with process(command) as proxy, up(proxy, port) as (client, said):
            assert remedy in said or options == ["--off"]
            reply = await client.get("/polykv/pools")
            assert (reply.status_code, reply.json()["error"]["code"]) == (501, "pools_unsupported")
            for word in (cause, remedy):
                assert word in reply.json()["error"]["message"]
            health = (await client.get("/polykv/health")).json()
            assert cause in health["pools"]["reason"]
            assert any(remedy in finding.remedy for finding in diagnose(health))
            asked = [path for _, path in server.calls if path.startswith("/_polykv/")]
            assert bool(asked) == (options != ["--off"])


async def test_an_engine_that_wants_another_key_is_named_as_that(tmp_path: Path) -> None:
    """It is no stock engine: the key is the matter."""
    engine = FakeEngine()
    engine.api_key = "theirs"
    async with served(engine, tmp_path) as server:
        command = ["--engine-url", f"unix:{server.path}", "--engine-key", engine.key, "--port", str(port := free_port())]
        async with process([*command, "--state-dir", str(tmp_path / "s")]) as proxy, up(proxy, port) as (client, _):
            message = (await client.get("/polykv/pools")).json()["error"]["message"]
            assert "the engine refuses the API key of this proxy (hello: 401 Invalid API Key); give --api-key a key" in message
