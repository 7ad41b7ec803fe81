"""Fixtures that every room's tests share: where engines and models are. Anything more belongs to the room that needs it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings
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


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """A file of tests stays with one worker, and all that drive a browser are one file: two browsers at once starve each other."""

    def _split_scope(self, nodeid: str) -> str:
        browsers = "tests/browser"
        return browsers if nodeid.startswith(browsers) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    return ByFile(config, log)
