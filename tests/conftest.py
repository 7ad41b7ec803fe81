"""Fixtures that every room's tests share: where engines and models are. Anything more belongs to the room that needs it."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings
from schemathesis.pytest.plugin import SchemathesisFunction
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from tests import models

settings.register_profile("polykv", deadline=None, derandomize=True)
settings.load_profile("polykv")

ROOT = Path(__file__).resolve().parents[1]


def built(name: str, how: str) -> Path:
    path = Path(os.environ.get(f"POLYKV_TEST_{name.upper().replace('-', '_')}") or ROOT / name)
    if not path.exists():
        pytest.fail(f"this test needs ./{name}; build it with {how}", pytrace=False)
    return path


@pytest.fixture(scope="session")
def engine_path() -> Path:
    """The patched engine."""
    return built("llamafile", "scripts/build_engine.sh")


@pytest.fixture(scope="session")
def twin_path() -> Path:
    """The unpatched twin."""
    return built("llamafile-stock", "scripts/build_engine.sh --unpatched")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return models.smollm2()


@pytest.fixture(scope="session")
def gemma3() -> Path:
    return models.gemma3()


LONGEST = (
    "tests/e2e/test_soak.py",
    "tests/engine/test_tree_matrix.py",
    "tests/engine/test_tree_lives.py",
    "tests/e2e/test_benches.py",
    "tests/browser/",
    "tests/langgraph/test_killed.py",
    "tests/engine/test_gpu_share.py",
    "tests/e2e/test_kill_rounds.py",
    "tests/e2e/test_upstream.py",
    "tests/e2e/test_kv_on_disk.py",
    "tests/e2e/test_gpu_share.py",
    "tests/e2e/test_pool_tree.py",
)
"""Files that take more than ten seconds; they begin first, so that the workers end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        return next((n for n, name in enumerate(LONGEST) if item.nodeid.startswith(name)), len(LONGEST))

    items.sort(key=place)
    for item in items:
        if isinstance(item, SchemathesisFunction) and item.id.params is None:  # all operations have one id
            item._id = item.id.with_params(item.operation_label)
    doubles = [nodeid for nodeid, n in Counter(item.nodeid for item in items).items() if n > 1]
    assert not doubles, f"xdist would run only one of each: {doubles}"


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """A file of tests stays with one worker, and all that drive a browser are one file: two browsers at once starve each other."""

    def _split_scope(self, nodeid: str) -> str:
        browsers = "tests/browser"
        return browsers if nodeid.startswith(browsers) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    config.option.loadscopereorder = False  # by default, files of few tests come last, however long they are
    return ByFile(config, log)
