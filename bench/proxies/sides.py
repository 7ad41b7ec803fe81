"""What stands between a load and the engine: nothing, nginx, LiteLLM, ours.

Law: each is a context manager that is up when entered and gone when left; `pids` are those whose processor time and memory are
its own.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.kit.rig import ROOT, cpu_s
from bench.proxies import installs
from tests.fakes.proxy_process import Served

HANG_S = 120.0
_NGINX = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log error;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder}; keepalive_requests 100000000; keepalive_timeout 600; client_max_body_size 0;
  upstream engine {{ server unix:{uds}; keepalive 512; keepalive_requests 100000000; }}
  server {{ listen 127.0.0.1:{port} backlog=1024;
    location / {{ proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }} }}
}}
"""
_LITELLM = """
model_list: [{{model_name: stub, litellm_params: {{model: openai/stub, api_base: "http://127.0.0.1:{port}/v1", api_key: none}}}}]
"""


@dataclass(frozen=True, slots=True)
class Side:
    """Where a load goes, and whose processes those are."""

    name: str
    port: int
    pids: tuple[int, ...] = ()

    def cpu_s(self) -> float:
        return sum(map(cpu_s, self.pids))

    def rss_mib(self) -> float:
        return sum(psutil.Process(pid).memory_info().rss for pid in self.pids) / 2**20


@dataclass(frozen=True, slots=True)
class Stub:
    """The engine: its socket and its port."""

    uds: Path
    port: int


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@contextmanager
def stub(folder: Path) -> Iterator[Stub]:
    """The scripted engine."""
    uds, port = folder / "engine.sock", free_port()
    with _process([sys.executable, "-m", "bench.proxies.stub", str(uds), str(port)], port):
        yield Stub(uds, port)


@contextmanager
def direct(engine: Stub) -> Iterator[Side]:
    """Nothing between."""
    yield Side("direct", engine.port)


@contextmanager
def nginx(engine: Stub, folder: Path) -> Iterator[Side]:
    """One worker, connections to the engine kept, replies not buffered: a reverse proxy as people set it up before an engine."""
    port = free_port()
    folder.mkdir()
    conf = folder / "nginx.conf"
    conf.write_text(_NGINX.format(folder=folder, uds=engine.uds, port=port) + ("" if os.getuid() else "user root;\n"))
    with _process([nginx_path() or "nginx", "-e", str(folder / "start.log"), "-c", str(conf)], port) as process:
        yield Side("nginx", port, _family(process))


def nginx_path() -> str | None:
    """Debian keeps it where only root looks."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


@contextmanager
def litellm(engine: Stub, folder: Path, python: Path) -> Iterator[Side]:
    """LiteLLM's proxy with its defaults, one worker, nothing logged and nobody told."""
    port = free_port()
    folder.mkdir()
    config = folder / "litellm.yaml"
    config.write_text(_LITELLM.format(port=engine.port))
    command = [str(python.parent / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--telemetry", "False"]
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION", "NO_PROXY": "*"}
    quiet["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"  # it listens on loopback alone
    with _process(command, port, quiet, folder) as process:
        yield Side("litellm", port, _family(process))


@contextmanager
def ours(engine: Stub, folder: Path, *options: str, name: str = "ours") -> Iterator[Side]:
    """The whole product, before an engine that has pools."""
    folder.mkdir()
    with Served.before(engine.uds, "bench", folder, *options) as served:
        yield Side(name, int(served.url.rpartition(":")[2]), (served.process.pid,))


@contextmanager
def contender(engine: Stub, server: str, loop: str, client: str) -> Iterator[Side]:
    """A relay of contenders.py."""
    port = free_port()
    command = [sys.executable, "-m", "bench.proxies.contenders", server, loop, str(port)]
    paths = os.pathsep.join([str(ROOT), str(installs.granian_folder())])
    with _process(command, port, {"BENCH_CLIENT": client, "BENCH_UDS": str(engine.uds), "PYTHONPATH": paths}) as process:
        name = " + ".join([server, loop] if server == "protocol" else [server, loop, client])
        yield Side(name, port, _family(process))


@contextmanager
def _process(
    command: Sequence[str], port: int, env: dict[str, str] | None = None, folder: Path = ROOT
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that listens on this port, ended when left."""
    whole = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=folder, env=whole, stdin=quiet, stdout=quiet, stderr=quiet) as process:
        try:
            _wait_for(process, port)
            yield process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def _family(process: subprocess.Popen[bytes]) -> tuple[int, ...]:
    return (process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True)))


def _wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + HANG_S
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"{process.args!r} does not listen")
        time.sleep(0.05)
