"""The fake engine as a program that a proxy can start and watch, and that proxy: both as processes of their own.

Law: run as a script it serves on `--host PATH.sock` until it is ended, with the keys of its environment. Everything else on its
command line is ignored.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_server import FakeEngineServer
from tests.fakes.proxy_process import Served

ROOT = Path(__file__).parents[2]


class WithFakeEngine(Served):
    """A proxy process over a fake engine process. `variables` are added to its environment; `key` opens its health page."""

    @classmethod
    @contextmanager
    def running(
        cls, folder: Path, *options: str, variables: Mapping[str, str] | None = None, key: str = "", umask: int = -1
    ) -> Iterator[Self]:
        program, model = folder / "engine", folder / "model.gguf"
        program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {__file__} "$@"\n')
        program.chmod(0o755)
        model.touch()
        with cls(
            program, model, folder, "--max-pools", "4", *options, args=(), key=key, variables=variables, umask=umask
        ) as served:
            yield served


async def main() -> None:
    """Serve for ever."""
    engine = FakeEngine()
    engine.key = os.environ.get("LLAMA_ARG_POLYKV_KEY", engine.key)
    engine.api_key = os.environ.get("LLAMA_API_KEY")
    await FakeEngineServer(engine, Path(sys.argv[sys.argv.index("--host") + 1])).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    if "--help" in sys.argv:
        print("a fake engine; --host PATH.sock is where it listens")
    else:
        asyncio.run(main())
