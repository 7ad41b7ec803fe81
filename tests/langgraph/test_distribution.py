"""The distribution: what is in the wheel, what it says of itself, and that every public name is there."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import opencoti_langgraph

PROJECT = Path(opencoti_langgraph.__file__).parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=PROJECT, check=True, capture_output=True)
    (path,) = folder.glob("opencoti_langgraph-*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    """Every module, `py.typed`, the examples; nothing of the proxy or of tests."""
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    here = {f"opencoti_langgraph/{path.relative_to(PROJECT)}" for path in PROJECT.rglob("*.py")}
    assert names == here | {"opencoti_langgraph/py.typed"}


def test_it_says_what_it_needs(wheel: zipfile.ZipFile) -> None:
    """Version, extras and bounds; nothing of the proxy's."""
    (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    told = message_from_bytes(wheel.read(name))
    assert (told["Name"], told["Version"]) == ("opencoti-langgraph", opencoti_langgraph.__version__)
    assert told.get_all("Provides-Extra") == ["agents", "deepagents"]
    needs = told.get_all("Requires-Dist") or []
    assert all("<" in need for need in needs)
    assert not [need for need in needs if "polykv" in need]


def test_the_development_lock_is_within_the_bounds() -> None:
    """What is tested here is what users get: the lock has a version of each requirement."""
    lock = (PROJECT.parent / "requirements-dev.lock").read_text().lower().replace("_", "-").splitlines()
    locked = {line.split("==")[0] for line in lock if "==" in line}
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    needs = [*project["dependencies"], *(need for extra in project["optional-dependencies"].values() for need in extra)]
    assert {need.split(">=")[0] for need in needs} <= locked


def test_every_public_name_is_there() -> None:
    """What `__all__` promises can be imported, and nothing else can."""
    for name in opencoti_langgraph.__all__:
        assert getattr(opencoti_langgraph, name) is not None
    assert dir(opencoti_langgraph) == opencoti_langgraph.__all__
    with pytest.raises(AttributeError, match="nothing"):
        _ = opencoti_langgraph.nothing


def test_a_name_of_an_extra_says_which_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without langchain the middleware names the extra; the rest is there."""
    for name in [name for name in sys.modules if name.split(".")[0] == "langchain"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "langchain", None)
    monkeypatch.delitem(sys.modules, "opencoti_langgraph.backpressure", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"BackpressureMiddleware needs .*opencoti-langgraph\[agents\]"):
        _ = opencoti_langgraph.BackpressureMiddleware
    assert opencoti_langgraph.OpencotiChatModel is not None
