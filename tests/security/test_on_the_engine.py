"""Keys, CORS and the private socket with the real engine behind them: what the proxy believes of it is so."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.fakes.proxy_process import Served
from tests.models import tiny_model

pytestmark = pytest.mark.engine

KEYS = ("plain-key", 'in"side', '"at-the-beginning', "admin-key")
ORIGIN = {"origin": "http://page.example:3000", "access-control-request-method": "POST"}


@pytest.fixture(scope="module")
def served(engine_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A proxy with keys of every kind, in files, over the engine."""
    folder = tmp_path_factory.mktemp("secured")
    files = {"--api-key-file": "# three\n" + "\n".join(KEYS[:3]) + "\n", "--admin-key-file": KEYS[3]}
    options = []
    for flag, text in files.items():
        path = folder / flag
        path.write_text(text)
        path.chmod(0o600)
        options += [flag, str(path)]
    with Served(engine_path, tiny_model("full"), folder, *options, key=KEYS[0], umask=0) as running:
        yield running
        assert running.stop() == 0


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "form", [{"authorization": "Bearer {}"}, {"authorization": "{}"}, {"x-api-key": "{}"}, {"x-api-key": "Bearer {}"}]
)
def test_each_key_opens_the_engine_s_routes_and_ours(served: Served, key: str, form: dict[str, str]) -> None:
    """In each form, on both: the engine reads the list of keys as we wrote it."""
    with httpx.Client(base_url=served.url, trust_env=False) as http:
        for path in ("/v1/models", "/props", "/polykv/pools", "/metrics"):
            for sent, status in ((key, 200), (key[:-1], 401), (key + "x", 401)):
                headers = {name: value.format(sent) for name, value in form.items()}
                assert http.get(path, headers=headers).status_code == status, (path, sent)


def test_a_preflight_is_answered_as_the_engine_answers_it(served: Served) -> None:
    """Field by field the same, asked through us and directly; our own routes let nobody in."""
    with (
        httpx.Client(transport=httpx.HTTPTransport(uds=served.socket), base_url="http://engine") as engine,
        httpx.Client(base_url=served.url, trust_env=False) as http,
    ):
        for method, path in (("OPTIONS", "/v1/chat/completions"), ("GET", "/health"), ("GET", "/v1/models")):
            direct, through = (client.request(method, path, headers=ORIGIN) for client in (engine, http))
            ours, theirs = (
                {k: v for k, v in reply.headers.items() if k.startswith("access-control-")} for reply in (through, direct)
            )
            assert through.status_code == direct.status_code
            assert ours == theirs
            assert theirs
        own = http.options("/polykv/pools", headers=ORIGIN)
        assert not [name for name in own.headers if name.startswith("access-control-")]


def test_it_prints_no_prompt_of_itself(served: Served) -> None:
    """At the verbosity that it comes with: its last lines, which health shows to holders of a key, are about slots and tokens."""
    mark = "zebra-on-a-unicycle"
    with httpx.Client(base_url=served.url, trust_env=False, headers={"x-api-key": KEYS[0]}, timeout=60) as http:
        for body in ({"prompt": mark, "n_predict": 2}, {"prompt": mark, "n_predict": 2, "session_id": "s"}, {"prompt": [mark, {}]}):
            http.post("/completion", json=body)
        http.post("/v1/chat/completions", content=f'{{"messages": [{{"role": "user", "content": "{mark}')
        lines = http.get("/polykv/health").json()["last_lines"]
    assert lines
    assert not [line for line in lines if mark in line]


def test_its_socket_is_its_user_s_and_its_command_holds_no_key(served: Served) -> None:
    """Under umask 000; the keys are in its environment alone."""
    assert stat.S_IMODE(Path(served.socket).stat().st_mode) & 0o077 == 0
    engine = psutil.Process(served.health["pid"])
    assert not [key for key in KEYS if key in " ".join(engine.cmdline()) + str(served.health)]
    assert all(key.lstrip('"') in engine.environ()["LLAMA_API_KEY"] for key in KEYS)
