"""Fixtures of the LangGraph package's tests: a scripted engine, and no traces to anywhere."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from tests.fakes.scripted_server import Scripted, scripted

SKIPS = pytest.StashKey[set[tuple[type | None, str]]]()
"""Tests of this folder that were skipped: class and name."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note what is skipped, so that a test can say that nothing is without a reason."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and isinstance(item, pytest.Function):
        item.config.stash.setdefault(SKIPS, set()).add((item.cls, item.originalname))
    return report


def skipped(config: pytest.Config, *classes: type) -> set[str]:
    """Names of tests of these classes that were skipped."""
    return {name for cls, name in config.stash.get(SKIPS, set()) if cls in classes}


@pytest.fixture(autouse=True)
def no_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """LangSmith and OpenAI settings of the machine stay out."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_ORG_ID", "OPENAI_PROXY", "LANGSMITH_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


@pytest.fixture(scope="session")
def _scripted() -> Iterator[Scripted]:
    with scripted() as state:
        yield state


@pytest.fixture
def engine(_scripted: Scripted) -> Scripted:
    """A scripted engine, as new."""
    _scripted.__init__(_scripted.url)  # type: ignore[misc]
    return _scripted
