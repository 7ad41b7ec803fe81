"""Every field case has a test here that is named after it, and a line in docs/reliability.md that names the file."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CASES = ROOT.parent / "shared" / "cases" / "field-cases.md"
"""The catalogue. A checkout by itself has only the list of it in docs/reliability.md."""


def listed() -> dict[str, str]:
    """By number, the rest of its line."""
    text = (ROOT / "docs" / "reliability.md").read_text()
    return dict(re.findall(r"^\| (F\d{3}) \|(.*)$", text, re.MULTILINE))


def test_every_case_has_a_file_and_a_line() -> None:
    """By its number, whatever else the file is called; and every file named so is in the list."""
    files = {f"F{name[6:9]}": set[str]() for name in (path.name for path in HERE.glob("test_f[0-9][0-9][0-9]_*.py"))}
    for path in HERE.glob("test_f[0-9][0-9][0-9]_*.py"):
        files[f"F{path.name[6:9]}"].add(path.name)
    lines = listed()
    assert sorted(lines) == sorted(files)
    missing = {case: [name for name in sorted(names) if name not in lines[case]] for case, names in files.items()}
    assert {case: names for case, names in missing.items() if names} == {}


def test_the_list_is_that_of_the_catalogue() -> None:
    """Where the catalogue is at hand: no case of it is left out, and none made up."""
    if CASES.exists():
        assert sorted(listed()) == sorted(re.findall(r"^### (F\d{3}) ", CASES.read_text(), re.MULTILINE))
