"""A few of upstream's own server tests, against the engine and against the proxy in its place; `scripts/e2e upstream` runs all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.upstream.__main__ import Comparison
from tests.upstream.known import KNOWN
from tests.upstream.stand_in import ENGINE, OPTIONS, translate
from tests.upstream.suite import LEFT_OUT, ROOT, Suite

SOME = [
    "unit/test_basic.py::test_server_props",
    "unit/test_security.py::test_correct_api_key_anthropic_header",
    "unit/test_completion.py::test_completion_stream_with_openai_library",
]


@pytest.mark.engine
def test_some_end_alike(engine_path: Path, tmp_path: Path) -> None:
    """What passes directly passes through, and at least one does each of: a page, a key, a stream."""
    source = ROOT / "vendor" / "llamafile" / "llama.cpp"
    comparison = Comparison(Suite(source, tmp_path), engine_path, tmp_path, port=18490)
    direct = comparison.direct(SOME)
    assert {test: one.outcome for test, one in direct.items()} == dict.fromkeys(SOME, "passed")
    assert comparison.through("pools", SOME) == direct


def test_the_stand_in_leaves_nothing_out() -> None:
    """Address and port are the proxy's, a key is a variable, all else goes to the engine in its order."""
    env = {ENGINE: "/e", OPTIONS: "--off"}
    args = ["--port", "1", "--temp", "0", "--host", "h", "--api-key", "k", "--jinja"]
    assert translate(args, env) == (
        ["--engine", "/e", "--engine-log", "/dev/stdout", "--off", "--port", "1", "--host", "h", "--", "--temp", "0", "--jinja"],
        {"POLYKV_API_KEY": "k"},
    )


def test_what_is_left_out_and_what_differs_is_in_the_documentation() -> None:
    """By name, with the reason."""
    page = (ROOT / "docs" / "exactness.md").read_text()
    assert [name for name, why in (LEFT_OUT | KNOWN).items() if f"`{name}`" not in page or why not in page] == []
