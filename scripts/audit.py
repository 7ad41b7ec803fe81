"""What scripts/audit says of dependencies: licences of those that users install, and advisories as pip-audit found them.

Law: standard library only. A package that could not be looked up was not audited, and is never passed off as clean.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ALLOWED = re.compile(r"MIT|BSD|Apache|ISC|PSF|Python Software Foundation|MPL|Mozilla|Unlicense|0BSD|Zlib|CC0", re.IGNORECASE)
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+?)(?:\s*;\s*(.*?))?\s*\\?$")
_LONGEST = 60


def pins(lock: Path) -> dict[str, str]:
    """Names and versions of a lock."""
    found = (_PIN.match(line) for line in lock.read_text().splitlines())
    return {re.sub(r"[-_.]+", "-", pin[1]).lower(): pin[2] for pin in found if pin}


def licence(name: str) -> str | None:
    """What a package says of itself; None where it is not installed."""
    try:
        meta = distribution(name).metadata
    except PackageNotFoundError:
        return None
    for said in (*(meta.get_all("License-Expression") or []), *(meta.get_all("License") or [])):
        if len(said) <= _LONGEST and "\n" not in said:
            return str(said)
    named = [line.rpartition(" :: ")[2] for line in meta.get_all("Classifier") or [] if line.startswith("License ::")]
    return ", ".join(named) or _from_file(distribution(name))


def _from_file(package: Distribution) -> str:
    """The first line of its licence."""
    for file in package.files or []:
        if "licen" in file.name.lower() or "copying" in file.name.lower():
            return next((line.strip() for line in file.read_text().splitlines() if line.strip()), "unknown")[:_LONGEST]
    return "unknown"


def page(lock: Path) -> str:
    """docs/licences.md."""
    lines = [
        "# Licences of what is installed with polykv-proxy",
        "",
        "Made by `scripts/audit --renew` from `requirements.lock` and what the packages say of themselves.",
        "",
        "| package | version | licence |",
        "|---|---|---|",
    ]
    return (
        "\n".join(
            [
                *lines,
                *(f"| {name} | {version} | {licence(name) or 'not for this system'} |" for name, version in pins(lock).items()),
            ]
        )
        + "\n"
    )


def objections(lock: Path) -> list[str]:
    """Packages whose licence is not among those that this project is combined with."""
    said = {name: licence(name) for name in pins(lock)}
    return [f"{name}: licence {found}" for name, found in said.items() if found is not None and not ALLOWED.search(found)]


def advisories(report: Path) -> tuple[list[str], list[str]]:
    """Of pip-audit's JSON: what is known to be wrong, and what could not be looked up."""
    wrong, unknown = [], []
    for one in json.loads(report.read_text())["dependencies"]:
        if "skip_reason" in one:
            unknown.append(str(one["name"]))
        for found in one.get("vulns", []):
            fixed = ", ".join(found["fix_versions"]) or "no version yet"
            wrong.append(f"{one['name']} {one['version']}: {found['id']}, mended in {fixed}")
    return wrong, unknown


def main() -> int:
    """`licences LOCK`, `page LOCK` or `advisories REPORT`; 1 when there is something to mend, 3 when nothing could be looked up."""
    what, path = sys.argv[1], Path(sys.argv[2])
    unknown: list[str] = []
    if what == "page":
        print(page(path), end="")
        return 0
    if what == "licences":
        wrong = objections(path)
    else:
        wrong, unknown = advisories(path)
    print("\n".join(wrong), end="\n" if wrong else "")
    if unknown:
        print(f"NOT AUDITED: {len(unknown)} packages could not be looked up, {', '.join(unknown[:5])}{' …' if unknown[5:] else ''}")
    return 1 if wrong else 3 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
