"""One run of upstream's suite against one server program, in a copy of its folder outside this repository and the engine's tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.upstream import models, plugin

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = {
    "test_router.py": "a router of several models: the proxy serves one engine with one model",
    "test_stream.py": "a router",
    "test_tools_builtin.py": "a router",
    "test_mcp_servers.py": "a router",
    "test_vision_api.py": "wants a download of a model that sees",
    "test_proxy.py::test_mcp_proxy": "asks the engine for a page of the internet",
}
"""Not run, and why. Skipped as well: what wants a download, or a file that the engine's source lacks."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a test ended, and where in the suite when it did not pass."""

    outcome: str
    at: str


class Suite:
    """The suite of the engine in `source` (its source tree), staged in `folder`."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.tests = folder / "tools" / "server" / "tests"
        if not self.tests.exists():
            shutil.copytree(source / "tools" / "server" / "tests", self.tests)
            (folder / "models").symlink_to(source / "models")
        (self.tests / "tmp").mkdir(exist_ok=True)
        self._folder = folder
        self._models = models.stand_ins(folder, source / "models" / "ggml-vocab-bert-bge.gguf")

    def run(self, server: Path, name: str, select: Sequence[str], more: Mapping[str, str], port: int) -> dict[str, Outcome]:
        """Run the selected tests (all, without a selection) with this program as the server. What they print goes to NAME.log."""
        outcomes, log = self._folder / f"{name}.json", self._folder / f"{name}.log"
        outcomes.unlink(missing_ok=True)
        left_out = [f"--{'deselect' if '::' in name else 'ignore'}=unit/{name}" for name in LEFT_OUT]
        options = ["-p", plugin.__name__, "-p", "no:cacheprovider", "-q", "--tb=short", "--timeout=120", "-W", "ignore"]
        command = [sys.executable, "-m", "pytest", *options, *(select or ["unit", *left_out])]
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "LLAMA_SERVER_BIN_PATH": str(server),
            "PORT": str(port),
            "LLAMA_ARG_THREADS": "1",
            plugin.MODELS: json.dumps({key: str(path) for key, path in self._models.items()}),
            plugin.OUTCOMES: str(outcomes),
            **more,
        }
        with log.open("w") as said:
            subprocess.run(command, cwd=self.tests, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=said, check=False)
        if not outcomes.exists():
            raise RuntimeError(f"the suite did not run to its end; {log} has what it said")
        return {test: Outcome(**found) for test, found in json.loads(outcomes.read_text()).items()}


def proxy_in_place(folder: Path) -> Path:
    """A program that takes a server's arguments and runs the proxy."""
    path = folder / "proxy-in-place"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m tests.upstream.stand_in "$@"\n')
    path.chmod(0o755)
    return path
