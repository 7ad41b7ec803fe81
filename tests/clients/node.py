"""Scripts for Node with OpenAI's client beside them, in the cache. Without Node, or the packages, the test is skipped."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.models import cache_dir

HERE = Path(__file__).parent / "js"


def script(name: str) -> Path:
    """The script of that name beside its packages."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("there is no node and npm here")
    names = ("package.json", "package-lock.json")
    key = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in names)).hexdigest()[:12]
    folder = cache_dir().parent / "js-clients" / key
    if not (folder / "node_modules" / ".package-lock.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for package in names:
            shutil.copy(HERE / package, folder)
        command = [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"npm cannot install the client: {done.stderr[-300:]}")
    return Path(shutil.copy(HERE / name, folder))
