"""Locks and licences agree with each other, and what could not be looked up is never passed off as audited."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_SPEC = importlib.util.spec_from_file_location("audit", ROOT / "scripts" / "audit.py")
assert _SPEC is not None
assert _SPEC.loader is not None
audit = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(audit)

USERS, DEVELOPERS = audit.pins(ROOT / "requirements.lock"), audit.pins(ROOT / "requirements-dev.lock")


def test_the_lock_for_users_is_within_what_is_tested() -> None:
    """Each version is that of the development lock; what is not in there is for other systems. Each has a hash."""
    text = (ROOT / "requirements.lock").read_text()
    for name, version in USERS.items():
        block = re.search(rf"^{name}=={re.escape(version)}(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL | re.IGNORECASE)
        assert block is not None, name
        assert "--hash=sha256:" in block[0], name
        assert DEVELOPERS.get(name, version) == version, f"{name}: run scripts/audit --renew"
        assert name in DEVELOPERS or "sys_platform" in block[0], name


def test_the_lock_for_users_has_all_that_they_need() -> None:
    """Every dependency of the project and of its extra for traces."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for wanted in [*project["dependencies"], *project["optional-dependencies"]["otel"]]:
        name = re.split(r"[><=;\s]", wanted)[0].replace("_", "-").lower()
        assert name in USERS, f"{name}: run scripts/audit --renew"


def test_the_licences_are_those_of_the_lock_and_in_order() -> None:
    """The page lists what the lock has; nothing unknown or copyleft is among it."""
    rows = dict(re.findall(r"^\| ([a-z0-9-]+) \| ([^|]+) \| [^|]+ \|$", (ROOT / "docs" / "licences.md").read_text(), re.MULTILINE))
    assert {name: version.strip() for name, version in rows.items() if name != "package"} == USERS
    assert audit.objections(ROOT / "requirements.lock") == []


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        ([{"name": "a", "version": "1", "vulns": []}], 0, ""),
        ([{"name": "a", "skip_reason": "not found"}], 3, "NOT AUDITED: 1 packages could not be looked up, a\n"),
        (
            [{"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]}, {"name": "b", "skip_reason": "?"}],
            1,
            "a 1: X-1, mended in 2\nNOT AUDITED: 1 packages could not be looked up, b\n",
        ),
    ],
)
def test_what_could_not_be_looked_up_is_said(
    found: list[object], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Clean is 0, something known 1, no verdict 3."""
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"dependencies": found}))
    monkeypatch.setattr("sys.argv", ["audit.py", "advisories", str(report)])
    assert audit.main() == code
    assert capsys.readouterr().out == said
