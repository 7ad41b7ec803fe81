"""deploy/: the systemd unit and the container file say what is so, and keep what docs/install.md promises."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from polykv_proxy.settings import Settings

ROOT = Path(__file__).parents[2]
UNIT = (ROOT / "deploy" / "systemd" / "polykv-proxy.service").read_text()
CONTAINER = (ROOT / "deploy" / "Containerfile").read_text()
INSTALL = (ROOT / "docs" / "install.md").read_text()
EXPOSURE = 1.5
"""Of 10, by `systemd-analyze security`; what is left is the network and the host's files, read only."""


def lines(name: str, section: str = "") -> list[str]:
    """Values of a setting of the unit, in this section of it."""
    return re.findall(rf"^{name}=(.*)$", UNIT.partition(f"[{section}]")[2].partition("\n[")[0] if section else UNIT, re.MULTILINE)


@pytest.mark.parametrize("text", [UNIT, CONTAINER], ids=["unit", "container"])
def test_variables_are_settings(text: str) -> None:
    """Each POLYKV_… variable is one that the proxy reads, or the cache's."""
    named = {name.lower() for name in re.findall(r"POLYKV_([A-Z_]+)", text)}
    assert named
    assert named <= set(Settings.model_fields) | {"cache"}


def test_service_and_container_have_time_to_stop() -> None:
    """systemd and podman wait longer than a drain, copies of pools and the engine's grace together."""
    (service,) = lines("TimeoutStopSec")
    (container,) = re.findall(r"podman run .*--stop-timeout (\d+)", INSTALL)
    assert (
        min(float(service), float(container))
        > Settings.model_fields["drain_grace_s"].default + 2 * Settings.model_fields["stop_grace_s"].default
    )


def test_what_cannot_start_is_tried_for_minutes_and_not_for_ever() -> None:
    """Want of memory for two minutes is survived; what takes a minute to fail is given up as well."""
    (pause,), (hour,), (starts,) = (
        lines("RestartSec", "Service"),
        lines("StartLimitIntervalSec", "Unit"),
        lines("StartLimitBurst", "Unit"),
    )
    assert hour == "1h"
    assert float(pause) * int(starts) > 120
    assert (float(pause) + 60) * int(starts) < 3600
    assert f"after {starts} starts within an\nhour" in INSTALL
    assert "reset-failed polykv-proxy" in INSTALL


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_the_unit_is_valid_and_confined(tmp_path: Path) -> None:
    """systemd takes every line of it, and finds it little exposed."""
    (command,) = lines("ExecStart")
    unit = tmp_path / "polykv-proxy.service"
    unit.write_text(UNIT.replace(command, "/bin/true"))
    checked = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    command_line = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
    told = subprocess.run(command_line, capture_output=True, text=True, check=False).stdout
    found = re.search(r"exposure level .*: ([\d.]+)", told)
    assert found, told
    assert float(found[1]) <= EXPOSURE


def test_the_container_runs_as_nobody_in_particular_and_tells_how_it_is() -> None:
    """What runs is the second stage: a number for a user, a health check, a signal that drains, one folder to write."""
    build, run = re.split(r"^FROM (?!.* AS build$).*$", CONTAINER, flags=re.MULTILINE)
    assert "g++" in build
    assert "g++" not in run
    for line in ("USER 10001", "VOLUME /var/lib/polykv", "STOPSIGNAL SIGTERM", 'ENTRYPOINT ["polykv-proxy"]'):
        assert line in run
    assert run.index("USER") < run.index("ENTRYPOINT")
    assert "HEALTHCHECK" in run
    assert re.findall(r"^COPY --from=build (\S+) \1$", run, re.MULTILINE) == ["/opt/polykv"]


@contextmanager
def engine_page(status: int) -> Iterator[int]:
    """The port of a server whose /health answers so, and whose other pages are not found."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (404, 1)])
def test_the_health_check_says_what_the_engine_says(status: int, code: int) -> None:
    """It asks the port of the settings, past any proxy of the environment: podman hands those of the host on."""
    (check,) = re.findall(r"^HEALTHCHECK .*\\\n *CMD (.*)$", CONTAINER, re.MULTILINE)
    _python, *arguments = json.loads(check)
    with engine_page(status) as port:
        environment = os.environ | {"POLYKV_PORT": str(port), "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
        assert subprocess.run([sys.executable, *arguments], env=environment, check=False).returncode == code


def test_the_image_is_made_in_the_format_that_has_health_checks() -> None:
    """podman's own format drops HEALTHCHECK with no more than a warning."""
    builds = re.findall(r"podman build .*", INSTALL)
    assert builds
    assert all("--format docker" in build for build in builds)


def test_what_the_image_leaves_out_is_not_needed() -> None:
    """The wheel is built of what the context holds: nothing that it is made of is left out."""
    left_out = (ROOT / ".dockerignore").read_text().split()
    project = (ROOT / "pyproject.toml").read_text()
    for needed in re.findall(r'^"([^"]+)" = "polykv_proxy/engine_source/', project, re.MULTILINE):
        assert not [name for name in left_out if (needed + "/").startswith(name.strip("*/") + "/")]
