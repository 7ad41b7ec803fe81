"""`scripts/patches` and `scripts/check_patches`: parses, calls, prints, exits with a code."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from scripts.patchlib import repo
from scripts.patchlib.series import (
    MAX_ADDED,
    MAX_INCLUDE_LINES,
    MAX_REMOVED,
    Patch,
    Series,
    SeriesError,
    complaints,
    count_include_lines,
)
from scripts.patchlib.source import ROOT, cache


def main() -> int:
    """0: done; 1: the series needs work, said on stderr."""
    arguments = parse_arguments()
    series = Series(arguments.patches.resolve())
    try:
        return int(arguments.run(series, arguments))
    except (SeriesError, OSError) as error:
        print(f"[patches] {error}", file=sys.stderr)
        return 1


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/patches", description="Work on the patch series; patches/README.md describes how."
    )
    parser.add_argument("--patches", type=Path, default=ROOT / "patches", help="the folder of the series (default: patches)")
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("import", help="make a git repository with one commit a patch, for editing")
    verb.add_argument("--force", action="store_true", help="throw away what was not exported")
    verb.set_defaults(run=run_import)
    verb = verbs.add_parser("export", help="write that repository's commits back as patches")
    verb.set_defaults(run=run_export)
    for verb in verbs.choices.values():
        verb.add_argument(
            "--to", dest="folder", type=Path, default=cache() / "patchwork", help="the repository (default: %(default)s)"
        )
    verb = verbs.add_parser("apply", help="apply the series, own files included, to a llama.cpp tree of your own")
    verb.add_argument("tree", type=Path)
    verb.set_defaults(run=run_apply)
    verbs.add_parser("table", help="write the table in patches/README.md anew").set_defaults(run=run_table)
    verbs.add_parser("check", help="check everything that this project promises about its series").set_defaults(run=run_check)
    return parser.parse_args()


def run_import(series: Series, arguments: argparse.Namespace) -> int:
    """Print where the repository is."""
    repo.import_series(series, arguments.folder, force=arguments.force)
    print(f"{arguments.folder}: one commit a patch on branch 'series'. Edit, amend the commit, then run scripts/patches export.")
    return 0


def run_export(series: Series, arguments: argparse.Namespace) -> int:
    """Print what changed."""
    changed = repo.export_series(series, arguments.folder)
    print(f"changed: {', '.join(changed)}" if changed else "no difference")
    return 0


def run_table(series: Series, _: argparse.Namespace) -> int:
    """Renew the table, nothing else."""
    print(f"changed: {', '.join(series.write(series.patches())) or 'nothing'}")
    return 0


def run_apply(series: Series, arguments: argparse.Namespace) -> int:
    """Apply all or nothing: in a copy of the touched files first."""
    tree: Path = arguments.tree
    patches = series.patches()
    touched = sorted({name for patch in patches for name in patch.files()})
    if present := [name for name in series.own_files() if (tree / name).exists()]:
        raise SeriesError(f"{tree} already holds {present[0]}: the series has been applied there, nothing was changed")
    if missing := [name for name in touched if not (tree / name).is_file()]:
        raise SeriesError(f"{tree} holds no {missing[0]}: is it a llama.cpp tree?")
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        for path in touched:
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree / path, copy / path)
        for patch in patches:
            repo.apply(copy, patch)
        shutil.copytree(series.folder / "src", copy, dirs_exist_ok=True)
        shutil.copytree(copy, tree, dirs_exist_ok=True)
    print(f"applied {len(patches)} patches and {len(series.own_files())} files to {tree}")
    return 0


def run_check(series: Series, _: argparse.Namespace) -> int:
    """Say everything that is wrong, and one line of figures."""
    found = complaints(series)
    patches = series.patches()
    with tempfile.TemporaryDirectory() as name:
        repo.create(Path(name), patches, whole=False)
        twice = [patch for patch in patches if not repo.refuses_again(Path(name), patch)]
        again = {patch.name: patch.text for patch in repo.read_back(Path(name))}
    found += [f"{patch.name}: applies a second time; scripts/patches import and export give it more context" for patch in twice]
    other = [patch for patch in patches if again[patch.name] != patch.text]
    found += [f"{patch.name}: differs from what scripts/patches export writes" for patch in other]
    for complaint in found:
        print(f"[check_patches] {complaint}", file=sys.stderr)
    print(f"[check_patches] {figures(series, patches)}")
    return 1 if found else 0


def figures(series: Series, patches: list[Patch]) -> str:
    """The series in numbers, beside what is allowed."""
    added, removed = sum(patch.added() for patch in patches), sum(patch.removed() for patch in patches)
    hooks = f"{len(patches)} patches: +{added} (of {MAX_ADDED}) -{removed} (of {MAX_REMOVED}) lines"
    include = f"class-body includes: {sum(count_include_lines(series).values())} (of {MAX_INCLUDE_LINES}) lines"
    return f"{hooks}; {include}; own files: {len(series.own_files())}"


if __name__ == "__main__":
    sys.exit(main())
