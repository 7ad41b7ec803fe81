"""`build-engine`: builds the patched engine, in a checkout or where the package is installed.

Law: it finds the build script, which the wheel carries with patches and all, and hands over; what is built and what is kept is
the script's business.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from polykv_proxy.cli_http import fail

CARRIED = Path(__file__).parent / "engine_source"
"""In an installed package: the folders of a checkout that the script needs (`pyproject.toml`, force-include)."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("build-engine")(build_engine)


def build_engine(  # noqa: PLR0917 - typer reads options from the signature and passes them by name
    output: Annotated[Path, typer.Option("--output", help="Where to put the engine.")] = Path("llamafile"),
    cuda: Annotated[bool, typer.Option("--cuda", help="With the CUDA backend; needs the CUDA toolkit.")] = False,
    vulkan: Annotated[bool, typer.Option("--vulkan", help="With the Vulkan backend; needs the Vulkan SDK and glslc.")] = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Compile jobs. Default: one for each core.", show_default=False)
    ] = None,
    print_key: Annotated[bool, typer.Option("--print-key", help="Only say under which key the build is kept.")] = False,
    clean: Annotated[bool, typer.Option("--clean", help="Only delete what builds have left in the cache folder.")] = False,
) -> None:
    """Build the patched engine: about ten minutes on two cores the first time, seconds when it is in the cache.

    Needs git, bash and a C++ compiler, and the package index for the source. The cache is POLYKV_CACHE, or ~/.cache/polykv.
    """
    bash = shutil.which("bash") or fail("bash is missing; install it (the build is a shell script)")
    options = {"--cuda": cuda, "--vulkan": vulkan, "--print-key": print_key, "--clean": clean}
    command = [bash, str(script()), "--output", str(output.absolute()), *(name for name, given in options.items() if given)]
    command += ["--jobs", str(jobs)] if jobs is not None else []
    os.execve(bash, command, {"PYTHON": sys.executable, **os.environ})  # noqa: S606 # our own script


def script() -> Path:
    """The build script of this installation."""
    root = CARRIED if CARRIED.exists() else Path(__file__).parents[1]
    return root / "scripts" / "build_engine.sh"
