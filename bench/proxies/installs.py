"""What a bench installs when it is asked to: packages that the product does not use, each in a folder of its own in the cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def litellm_python() -> Path:
    """The interpreter of LiteLLM's own environment: it pins versions of what we use, too."""
    return _cache() / "litellm" / "bin" / "python"


def install_litellm() -> None:
    """A few minutes, once."""
    if not (litellm_python().parent / "litellm").exists():
        _say("LiteLLM's proxy, in an environment of its own")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(litellm_python().parents[1])], check=True)
        subprocess.run([str(litellm_python()), "-m", "pip", "install", "-qq", "litellm[proxy]"], check=True, stdout=sys.stderr)


def granian_folder() -> Path:
    """Where granian lies; to be put on the module path of those that try it."""
    return _cache() / "granian"


def install_granian() -> None:
    """A wheel."""
    if not granian_folder().exists():
        _say("granian")
        command = [sys.executable, "-m", "pip", "install", "-qq", "--target", str(granian_folder()), "granian"]
        subprocess.run(command, check=True, stdout=sys.stderr)


def _cache() -> Path:
    root = os.environ.get("POLYKV_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polykv"
    return Path(root) / "bench"


def _say(what: str) -> None:
    print(f"installing {what}", file=sys.stderr, flush=True)
