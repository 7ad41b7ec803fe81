"""The proxy as a process of its own, in front of a real engine that it supervises or that runs already."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import httpx

ARGS = ("-c", "2048", "-t", "1", "--seed", "1", "--temp", "0", "--jinja")


class Served:
    """A proxy that runs as its own process."""

    def __init__(
        self,
        engine: Path,
        model: Path,
        folder: Path,
        *options: str,
        args: Sequence[str] = ARGS,
        key: str = "",
        variables: Mapping[str, str] | None = None,
        umask: int = -1,
    ) -> None:
        self._start(["--engine", str(engine), "-m", str(model), *options], folder, args, key, variables, umask)
        command_line = self.health["command"]
        self.socket = command_line[command_line.index("--host") + 1]

    @classmethod
    def before(cls, socket: Path, engine_key: str, folder: Path, *options: str) -> Self:
        """A proxy in front of an engine that runs already and listens on a unix socket."""
        served = cls.__new__(cls)
        served._start(["--engine-url", f"unix:{socket}", "--engine-key", engine_key, *options], folder, (), "")
        served.socket = str(socket)
        return served

    def _start(
        self,
        options: Sequence[str],
        folder: Path,
        args: Sequence[str],
        key: str,
        variables: Mapping[str, str] | None = None,
        umask: int = -1,
    ) -> None:
        command = [sys.executable, "-m", "polykv_proxy.cli", "--port", "0", "--state-dir", str(folder / "state"), *options]
        command += ["--", *args] if args else []
        env = {**os.environ, "TERM": "dumb", **(variables or {})}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env, umask=umask)
        assert self.process.stderr is not None
        self.said = ""
        for line in self.process.stderr:
            self.said += line
            if line.startswith("  try ") or '"message": "try ' in line:
                break
        found = re.search(r"ready at (http://[^\s\"]+)", self.said)
        if not found:
            self.__exit__()
            raise AssertionError(self.said)
        self.url = found[1]
        self.health = httpx.get(self.url + "/polykv/health", trust_env=False, verify=False, headers={"x-api-key": key}).json()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stderr is not None
        self.said += self.process.stderr.read()
        self.process.stderr.close()
        return self.process.wait(60)
