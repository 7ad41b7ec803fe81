"""Where the engine is to listen, and how an engine URL becomes an address.

Law: the run folder is 0700 and ours; names are resolved here, once, never per request.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from polykv_proxy.errors import SettingsError
from polykv_proxy.ports import EngineAddress

_PREFIX = "polykv-"
_UDS_LIMIT = 100
_CONNECT_S = 0.3


class RunFolder:
    """A private folder for the engine's socket, gone at `close`. Folders of proxies that were killed are swept."""

    def __init__(self, env: Mapping[str, str]) -> None:
        base = Path(env.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
        if not os.access(base, os.W_OK) or len(str(base)) > _UDS_LIMIT - 40:
            base = Path(tempfile.gettempdir())
        _sweep(base)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base))

    @property
    def socket_path(self) -> str:
        """Where the engine listens: its name ends in .sock, which is how the engine knows a unix socket."""
        return str(self.path / "engine.sock")

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


def private_address(folder: RunFolder, *, unix_socket: bool) -> EngineAddress:
    """A unix socket in the run folder, or a free loopback port where the engine knows no unix sockets."""
    if unix_socket:
        return EngineAddress(uds=folder.socket_path)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return EngineAddress(port=probe.getsockname()[1])


def from_url(url: str) -> tuple[EngineAddress, str]:
    """Address and path prefix of an engine URL: `http://host:port[/prefix]` or `unix:/path/engine.sock`. Raises SettingsError."""
    if url.startswith("unix:"):
        return EngineAddress(uds=url.removeprefix("unix:").removeprefix("//")), ""
    parts = urlsplit(url)
    try:
        port = parts.port or 80
    except ValueError as error:
        raise SettingsError(f"--engine-url {url}: the port is not a number") from error
    if parts.scheme != "http" or not parts.hostname or parts.query:
        raise SettingsError(f"--engine-url {url}: write http://HOST:PORT or unix:/PATH/engine.sock (TLS is not spoken to engines)")
    return EngineAddress(host=_resolve(parts.hostname, port), port=port), parts.path.rstrip("/")


def _resolve(host: str, port: int) -> str:
    """A numeric address; of several, the first that accepts a connection, IPv4 before IPv6."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SettingsError(f"--engine-url: the host {host} cannot be resolved: {error.strerror}") from error
    addresses = [str(entry[4][0]) for entry in sorted(found, key=lambda entry: entry[0] != socket.AF_INET)]
    if len(set(addresses)) == 1:
        return addresses[0]
    for address in addresses:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_CONNECT_S):
            return address
    return addresses[0]


def _sweep(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}*-*"):
        match = re.fullmatch(rf"{_PREFIX}(\d+)-\w+", folder.name)
        with contextlib.suppress(OSError):
            if match and folder.stat().st_uid == os.getuid() and not psutil.pid_exists(int(match[1])):
                shutil.rmtree(folder, ignore_errors=True)
