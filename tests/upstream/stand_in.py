"""The proxy in place of a server: takes a server's arguments, as upstream's suite gives them, and serves.

Law: nothing is left out. What names the public port becomes the proxy's, the rest goes to the engine behind it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence

ENGINE = "POLYKV_UPSTREAM_ENGINE"
OPTIONS = "POLYKV_UPSTREAM_OPTIONS"
_OURS = ("--host", "--port")


def translate(args: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The proxy's arguments, and variables to set: keys, since all can read arguments. The engine's log goes to standard output."""
    ours, engine, more = ["--engine", env[ENGINE], "--engine-log", "/dev/stdout", *env.get(OPTIONS, "").split()], [], {}
    rest = iter(args)
    for arg in rest:
        if arg in _OURS:
            ours += [arg, next(rest)]
        elif arg == "--api-key":
            more["POLYKV_API_KEY"] = next(rest)
        else:
            engine.append(arg)
    return [*ours, "--", *engine], more


def main() -> None:
    """Serve; never returns."""
    args, more = translate(sys.argv[1:], os.environ)
    os.environ.update(more)
    with tempfile.TemporaryDirectory() as state:
        sys.argv = ["polykv-proxy", "--state-dir", state, *args]
        from polykv_proxy.cli import main as proxy  # noqa: PLC0415 - after the variables are set

        proxy()


if __name__ == "__main__":
    main()
