"""The series as a repository: the pristine tree, then one commit a patch.

Law: a commit's subject is the patch's name, its body the patch's header; so nothing is lost on the way there and back.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from scripts.patchlib.series import Patch, Series, SeriesError
from scripts.patchlib.source import git, unpack

DIFF = ("diff", "--no-color", "--no-ext-diff", "--no-renames", "--src-prefix=a/", "--dst-prefix=b/", "--diff-algorithm=myers")


def create(folder: Path, patches: list[Patch], *, whole: bool) -> None:
    """Make the repository in an empty folder, from the whole source or only from the files that patches touch."""
    unpack(folder, None if whole else {name for patch in patches for name in patch.files()})
    git(folder, "init", "-q", "-b", "series")
    git(folder, "add", "-Af")
    git(folder, "commit", "-qm", "pristine")
    git(folder, "tag", "pristine")
    for patch in patches:
        apply(folder, patch)
        git(folder, "add", "-Af")
        git(folder, "commit", "-q", "--cleanup=verbatim", "-F", "-", stdin=f"{patch.name.removesuffix('.patch')}\n\n{patch.header}")
    git(folder, "tag", "-f", "imported")


def apply(folder: Path, patch: Patch) -> None:
    """Apply without fuzz and without offsets."""
    done = git(folder, "apply", "--verbose", "--whitespace=nowarn", "-", stdin=patch.diff, ok=(0, 1, 128))
    if done.returncode != 0:
        raise SeriesError(f"patches/{patch.name} does not apply:\n{done.stderr.strip()}")
    if moved := re.findall(r"^Hunk #\d+ succeeded at .*offset.*$", done.stderr, flags=re.MULTILINE):
        raise SeriesError(f"patches/{patch.name} applies only with offsets: {moved[0]}")


def refuses_again(folder: Path, patch: Patch) -> bool:
    """Whether the tree that holds the patch refuses it a second time."""
    return git(folder, "apply", "--check", "-", stdin=patch.diff, ok=(0, 1, 128)).returncode != 0


def read_back(folder: Path) -> list[Patch]:
    """The commits after `pristine` as patches. SeriesError for a commit whose message is not one of ours."""
    patches = []
    for commit in git(folder, "rev-list", "--reverse", "pristine..HEAD").stdout.split():
        subject, _, header = git(folder, "log", "-1", "--format=%B", commit).stdout.partition("\n\n")
        if not re.fullmatch(r"\d{4}-[a-z0-9-]+", subject):
            raise SeriesError(f"commit {commit[:12]} is called '{subject}'; patches are called like 0007-what-it-does")
        patches.append(smallest(folder, commit, f"{subject}.patch", header.rstrip("\n") + "\n\n"))
    return patches


def smallest(folder: Path, commit: str, name: str, header: str) -> Patch:
    """The patch with the least context with which the finished tree refuses it: little context survives changes around it."""
    for context in (1, 2, 3, 5, 8):
        diff = git(folder, *DIFF, f"-U{context}", f"{commit}^", commit).stdout
        patch = Patch(name, header, re.sub(r"^index .*\n", "", diff, flags=re.MULTILINE))
        if refuses_again(folder, patch):
            break
    return patch


def import_series(series: Series, folder: Path, *, force: bool) -> None:
    """Make `folder` the repository of the series; refuses to drop work that was not exported."""
    if (folder / ".git").exists() and not force:
        refuse_unexported(series, folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    create(folder, series.patches(), whole=True)
    link_own_files(series, folder)


def refuse_unexported(series: Series, folder: Path) -> None:
    """SeriesError when the repository holds something that the checkout does not."""
    if git(folder, "status", "--porcelain").stdout.strip():
        raise SeriesError(f"{folder} has changes that are not committed; commit them, or throw them away with --force")
    exported = git(folder, "rev-parse", "-q", "--verify", "imported^{commit}", ok=(0, 1)).stdout
    if git(folder, "rev-parse", "HEAD").stdout != exported:
        raise SeriesError(f"{folder} has commits that were not exported; export them, or throw them away with --force")


def link_own_files(series: Series, folder: Path) -> None:
    """Put links to our own files beside the engine's, for compilers and editors; git does not see them."""
    names = series.own_files()
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to((series.folder / "src" / name).resolve())
    (folder / ".git" / "info" / "exclude").write_text("".join(f"/{name}\n" for name in names))


def export_series(series: Series, folder: Path) -> list[str]:
    """Write the repository's commits as patches; returns the names of the files that changed."""
    if not (folder / ".git").exists():
        raise SeriesError(f"there is nothing to export in {folder}; scripts/patches import makes the repository")
    if git(folder, "status", "--porcelain").stdout.strip():
        raise SeriesError(
            f"{folder} has changes that are not committed; amend the commit they belong to (git commit --fixup, git rebase -i)"
        )
    changed = series.write(read_back(folder))
    git(folder, "tag", "-f", "imported")
    return changed
