"""deploy/: the systemd unit and the container file say what is so, and keep what docs/install.md promises."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from polykv_proxy.settings import Settings

ROOT = Path(__file__).parents[2]
UNIT = (ROOT / "deploy" / "systemd" / "polykv-proxy.service").read_text()
CONTAINER = (ROOT / "deploy" / "Containerfile").read_text()
EXPOSURE = 1.5
"""Of 10, by `systemd-analyze security`; what is left is the network and the host's files, read only."""


def lines(name: str) -> list[str]:
    """Values of a setting of the unit."""
    return re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)


@pytest.mark.parametrize("text", [UNIT, CONTAINER], ids=["unit", "container"])
def test_variables_are_settings(text: str) -> None:
    """Each POLYKV_… variable is one that the proxy reads, or the cache's."""
    named = {name.lower() for name in re.findall(r"POLYKV_([A-Z_]+)", text)}
    assert named
    assert named <= set(Settings.model_fields) | {"cache"}


def test_the_service_has_time_to_stop() -> None:
    """systemd waits longer than a drain, copies of pools and the engine's grace together."""
    (seconds,) = lines("TimeoutStopSec")
    assert float(seconds) > Settings.model_fields["drain_grace_s"].default + 2 * Settings.model_fields["stop_grace_s"].default


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


def test_what_the_image_leaves_out_is_not_needed() -> None:
    """The wheel is built of what the context holds: nothing that it is made of is left out."""
    left_out = (ROOT / ".containerignore").read_text().split()
    project = (ROOT / "pyproject.toml").read_text()
    for needed in re.findall(r'^"([^"]+)" = "polykv_proxy/engine_source/', project, re.MULTILINE):
        assert not [name for name in left_out if (needed + "/").startswith(name.strip("*/") + "/")]
