"""The proxy as a process of its own, in front of a real engine that it supervises."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

ARGS = ("-c", "2048", "-t", "1", "--seed", "1", "--temp", "0", "--jinja")


class Served:
    """A proxy that runs as its own process."""

    def __init__(self, engine: Path, model: Path, folder: Path, *options: str, args: Sequence[str] = ARGS, key: str = "") -> None:
        command = [sys.executable, "-m", "polykv_proxy.cli", "--engine", str(engine), "-m", str(model), "--port", "0"]
        command += ["--state-dir", str(folder / "state"), *options, "--", *args]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TERM": "dumb"})
        assert self.process.stderr is not None
        self.said = ""
        for line in self.process.stderr:
            self.said += line
            if line.startswith("  try "):
                break
        found = re.search(r"ready at (http://\S+)", self.said)
        assert found, self.said
        self.url = found[1]
        self.health = httpx.get(self.url + "/polykv/health", trust_env=False, headers={"x-api-key": key}).json()
        command_line = self.health["command"]
        self.socket = command_line[command_line.index("--host") + 1]

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
