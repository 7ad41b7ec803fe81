"""The series as text: order, headers, hook counts, and the table in patches/README.md.

Law: reads and renders; runs nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FIELDS = ("Why", "Where", "Thread", "Drop when")
TABLE_BEGIN, TABLE_END = "<!-- table: written by scripts/patches export -->", "<!-- end of table -->"
MAX_ADDED, MAX_REMOVED, MAX_INCLUDE_LINES = 450, 40, 250


class SeriesError(Exception):
    """Something about the series that a person has to put right; the message says what, where, and what to do."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One patch: `header` is the text before the diff as it stands, the empty line included."""

    name: str
    header: str
    diff: str

    @property
    def text(self) -> str:
        """The file's content."""
        return self.header + self.diff

    def fields(self) -> dict[str, str]:
        """The header's fields; a line that begins with white space continues the one before."""
        joined = re.sub(r"\n[ \t]+", " ", self.header)
        return {key: value.strip() for key, colon, value in (line.partition(":") for line in joined.splitlines()) if colon}

    def files(self) -> list[str]:
        """The files it touches."""
        return re.findall(r"^\+\+\+ b/(.+)$", self.diff, flags=re.MULTILINE)

    def added(self) -> int:
        """Number of lines added."""
        return len(re.findall(r"^\+(?!\+\+ )", self.diff, flags=re.MULTILINE))

    def removed(self) -> int:
        """Number of lines removed."""
        return len(re.findall(r"^-(?!-- )", self.diff, flags=re.MULTILINE))

    def header_complaints(self) -> list[str]:
        """What its header lacks."""
        fields = self.fields()
        found = [f"{self.name}: no '{key}:' line ahead of the diff" for key in FIELDS if not fields.get(key)]
        found += [f"{self.name}: unknown header line '{key}:'" for key in fields if key not in FIELDS]
        return found


def parse(name: str, text: str) -> Patch:
    """Split a patch file at its first `diff --git` line."""
    at = re.search(r"^diff --git ", text, flags=re.MULTILINE)
    if at is None:
        raise SeriesError(f"patches/{name} holds no 'diff --git' line")
    return Patch(name, text[: at.start()], text[at.start() :])


@dataclass(frozen=True, slots=True)
class Series:
    """The folder `patches/`."""

    folder: Path

    def names(self) -> list[str]:
        """Names in order."""
        lines = (self.folder / "series").read_text().splitlines()
        return [line.strip() for line in lines if line.strip() and not line.startswith("#")]

    def patches(self) -> list[Patch]:
        """Patches in order."""
        missing = [name for name in self.names() if not (self.folder / name).is_file()]
        if missing:
            raise SeriesError(f"patches/series names {', '.join(missing)}, which patches/ does not hold")
        return [parse(name, (self.folder / name).read_text()) for name in self.names()]

    def own_files(self) -> list[str]:
        """Our own source files, as paths inside the engine's tree."""
        return sorted(str(path.relative_to(self.folder / "src")) for path in (self.folder / "src").rglob("*") if path.is_file())

    def write(self, patches: list[Patch]) -> list[str]:
        """Put these patches, their order and their table in place; returns the names of the files that changed."""
        wanted = {patch.name: patch.text for patch in patches}
        comments = [line for line in (self.folder / "series").read_text().splitlines() if line.startswith("#")]
        wanted["series"] = "".join(f"{line}\n" for line in [*comments, *(patch.name for patch in patches)])
        readme = (self.folder / "README.md").read_text() if (self.folder / "README.md").exists() else ""
        if TABLE_BEGIN in readme:
            wanted["README.md"] = with_table(readme, patches)
        gone = [path for path in self.folder.glob("*.patch") if path.name not in wanted]
        for path in gone:
            path.unlink()
        changed = [name for name, text in wanted.items() if not same(self.folder / name, text)]
        for name in changed:
            (self.folder / name).write_text(wanted[name])
        return sorted(changed + [path.name for path in gone])


def same(path: Path, text: str) -> bool:
    """Whether the file holds this text."""
    return path.exists() and path.read_text() == text


def table(patches: list[Patch]) -> str:
    """The table of patches: one row each, from the headers."""
    rows = ["| patch | why | call site | thread | drop when |", "|---|---|---|---|---|"]
    for patch in patches:
        fields = patch.fields()
        cells = [patch.name.removesuffix(".patch"), *(fields.get(key, "").replace("|", "\\|") for key in FIELDS)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def with_table(readme: str, patches: list[Patch]) -> str:
    """The page with its table renewed."""
    head, _, rest = readme.partition(TABLE_BEGIN)
    return f"{head}{TABLE_BEGIN}\n\n{table(patches)}\n{TABLE_END}{rest.partition(TABLE_END)[2]}"


def complaints(series: Series) -> list[str]:
    """Everything that can be said about the series from its text alone."""
    names, patches = series.names(), series.patches()
    found = [f"patches/series names {name} twice" for name in sorted(set(names)) if names.count(name) > 1]
    found += [
        f"patches/{path.name} is not in patches/series" for path in sorted(series.folder.glob("*.patch")) if path.name not in names
    ]
    for patch in patches:
        found += patch.header_complaints()
    return found + budget_complaints(series, patches) + table_complaints(series, patches)


def budget_complaints(series: Series, patches: list[Patch]) -> list[str]:
    """Whether the hooks are still few."""
    added, removed = sum(patch.added() for patch in patches), sum(patch.removed() for patch in patches)
    found = []
    if added > MAX_ADDED:
        found.append(f"the patches add {added} lines; {MAX_ADDED} are allowed: move code into files under patches/src")
    if removed > MAX_REMOVED:
        found.append(f"the patches remove {removed} lines; {MAX_REMOVED} are allowed")
    include_lines = sum(count_include_lines(series).values())
    if include_lines > MAX_INCLUDE_LINES:
        found.append(f"the .inc files under patches/src hold {include_lines} lines; {MAX_INCLUDE_LINES} are allowed")
    return found


def count_include_lines(series: Series) -> dict[str, int]:
    """Lines of the files that are included in the body of a class of the engine."""
    return {
        name: len((series.folder / "src" / name).read_text().splitlines()) for name in series.own_files() if name.endswith(".inc")
    }


def table_complaints(series: Series, patches: list[Patch]) -> list[str]:
    """Whether patches/README.md says what the headers say."""
    path = series.folder / "README.md"
    if not path.exists() or TABLE_BEGIN not in path.read_text():
        return [f"patches/README.md holds no table (a line '{TABLE_BEGIN}')"]
    if path.read_text() != with_table(path.read_text(), patches):
        return ["the table in patches/README.md differs from the headers of the patches; scripts/patches table writes it anew"]
    return []
