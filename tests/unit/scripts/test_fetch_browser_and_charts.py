"""scripts/fetch_browser.sh and scripts/fetch_charts.sh without a registry."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def tool(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder for PATH with what the scripts need of a system, and nothing more."""
    (tmp_path / "bin").mkdir()
    for name in ("bash", "dirname", "basename", "mkdir", "rm", "mv", "cat", "flock", "tar", "gzip", "mktemp", "rmdir"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    return tmp_path / "bin"


def run(script: Path, path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": str(path),
        "HOME": str(path.parent),
        "POLYKV_CACHE": str(path.parent / "cache"),
        "PYTHON": sys.executable,
    }
    return subprocess.run(
        [script], env={**environment, **variables}, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def test_a_browser_that_is_there_is_taken(bare: Path) -> None:
    """POLYKV_CHROMIUM counts first, then the path; nothing is fetched."""
    mine, systems = tool(bare.parent, "mine", "exit 0"), tool(bare, "chromium", "exit 0")
    script = ROOT / "scripts/fetch_browser.sh"
    assert run(script, bare, POLYKV_CHROMIUM=str(mine)).stdout == f"{mine}\n"
    assert run(script, bare).stdout == f"{systems}\n"


def test_a_browser_that_does_not_run_is_named(bare: Path) -> None:
    """One that was asked for is an error, not replaced by another."""
    done = run(ROOT / "scripts/fetch_browser.sh", bare, POLYKV_CHROMIUM="/nowhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert "POLYKV_CHROMIUM is /nowhere, which does not run" in done.stderr


def test_without_debians_tools_it_is_said_what_to_do(bare: Path) -> None:
    """A system without apt-get gets a remedy, and nothing is left behind."""
    done = run(ROOT / "scripts/fetch_browser.sh", bare)
    assert done.returncode == 1
    assert "there is no apt-get here: install Chromium, or set POLYKV_CHROMIUM to one" in done.stderr
    assert not (bare.parent / "cache").exists()


def test_an_unreachable_archive_leaves_nothing(bare: Path) -> None:
    """apt-get's failure is ours, in words, and the next run begins anew."""
    tool(bare, "apt-get", "exit 100")
    tool(bare, "dpkg-deb", "exit 0")
    done = run(ROOT / "scripts/fetch_browser.sh", bare)
    assert done.returncode == 1
    assert "are Debian's packages reachable?" in done.stderr
    assert [path.name for path in (bare.parent / "cache").iterdir()] == [".chromium.lock"]


def test_a_chart_library_of_another_sum_is_not_put_in_place(bare: Path) -> None:
    """What npm hands over is held against the pinned sum before anything is unpacked."""
    home = bare.parent / "checkout"
    (home / "scripts").mkdir(parents=True)
    for name in ("fetch_charts.sh", "lib.sh"):
        shutil.copy(ROOT / "scripts" / name, home / "scripts" / name)
    tool(bare, "npm", 'while [ "$1" != --pack-destination ]; do shift; done; echo other >"$2/uplot-1.tgz"')
    done = run(home / "scripts/fetch_charts.sh", bare)
    assert done.returncode == 1
    assert "it has another sum than the pinned one" in done.stderr
    assert not (home / "polykv_proxy/ui/static/vendor/uplot").exists()
    assert list((bare.parent / "cache/npm").glob("*.tgz")) == []


def test_npm_that_fails_is_named(bare: Path) -> None:
    """The message says what could not be reached."""
    home = bare.parent / "checkout"
    (home / "scripts").mkdir(parents=True)
    for name in ("fetch_charts.sh", "lib.sh"):
        shutil.copy(ROOT / "scripts" / name, home / "scripts" / name)
    tool(bare, "npm", "exit 1")
    done = run(home / "scripts/fetch_charts.sh", bare)
    assert done.returncode == 1
    assert "is the npm registry reachable?" in done.stderr


def test_the_installed_charts_are_left_alone() -> None:
    """In a checkout that has them the script does nothing, quickly and quietly."""
    version = ROOT / "polykv_proxy/ui/static/vendor/uplot/VERSION"
    if not version.exists():
        pytest.skip("scripts/fetch_charts.sh has not put charts here")
    before = version.stat().st_mtime_ns
    done = subprocess.run(
        [ROOT / "scripts/fetch_charts.sh"], env=os.environ, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert version.stat().st_mtime_ns == before
