"""The patch tools on a toy series: what they refuse, and that import and export are inverse."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from scripts.patchlib import repo
from scripts.patchlib.__main__ import main
from scripts.patchlib.series import Patch, Series, SeriesError, complaints, parse
from scripts.patchlib.source import ROOT, git

SOURCE = {"a.cpp": "".join(f"  line {i}\n" for i in range(1, 21)), "b.cpp": "alone\n", ".gitignore": "*.cpp\n"}
HEADER = "Why: {}\nWhere: main()\nThread: main\nDrop when: never:\n  this is the feature\n\n"
TWICE = "diff --git a/a.cpp b/a.cpp\n--- a/a.cpp\n+++ b/a.cpp\n@@ -{0},2 +{0},3 @@\n   line {0}\n+  hook {0}\n   line {1}\n"
README = "# Patches\n\n<!-- table: written by scripts/patches export -->\n<!-- end of table -->\n\nThe end.\n"


def toy_unpack(target: Path, only: Iterable[str] | None = None) -> None:
    target.mkdir(exist_ok=True)
    for name in SOURCE if only is None else only:
        (target / name).write_text(SOURCE[name])


@pytest.fixture
def series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Series:
    """Two patches of one hook each, an own file, and a page with a table."""
    monkeypatch.setattr(repo, "unpack", toy_unpack)
    folder = tmp_path / "patches"
    (folder / "src").mkdir(parents=True)
    (folder / "src/own.cpp").write_text("own\n")
    (folder / "src/body.inc").write_text("one\ntwo\n")
    (folder / "series").write_text("# the order\n0001-first.patch\n0002-second.patch\n")
    (folder / "README.md").write_text(README)
    (folder / "0001-first.patch").write_text(HEADER.format("one") + TWICE.format(3, 4))
    (folder / "0002-second.patch").write_text(
        HEADER.format("two | three") + TWICE.format(11, 12).replace("-11,2 +11,3", "-12,2 +12,3")
    )
    made = Series(folder)
    made.write(made.patches())
    return made


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_good_series_has_no_complaints(series: Series) -> None:
    """Headers, order, budget and table agree."""
    assert complaints(series) == []
    assert (
        "| 0002-second | two \\| three | main() | main | never: this is the feature |" in (series.folder / "README.md").read_text()
    )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda s: s.write_text(s.read_text().replace("Thread: main\n", "")),
            "0001-first.patch: no 'Thread:' line ahead of the diff",
        ),
        (lambda s: s.write_text("Author: me\n" + s.read_text()), "0001-first.patch: unknown header line 'Author:'"),
        (lambda s: s.write_text(s.read_text().replace("Why: one", "Why: else")), "the table in patches/README.md differs"),
        (lambda s: s.with_name("0003-other.patch").write_text(s.read_text()), "patches/0003-other.patch is not in patches/series"),
        (lambda s: s.with_name("series").write_text("0001-first.patch\n" * 2), "patches/series names 0001-first.patch twice"),
        (lambda s: s.with_name("README.md").write_text("nothing"), "patches/README.md holds no table"),
        (lambda s: (s.parent / "src/body.inc").write_text("x\n" * 251), "hold 251 lines; 250 are allowed"),
        (lambda s: s.write_text(s.read_text() + "+more\n" * 449), "the patches add 451 lines; 450 are allowed"),
        (lambda s: s.write_text(s.read_text() + "-less\n" * 41), "the patches remove 41 lines; 40 are allowed"),
    ],
)
def test_each_broken_promise_is_named(series: Series, change, complaint: str) -> None:  # type: ignore[no-untyped-def]
    """What is wrong is said with the file and what is allowed."""
    change(series.folder / "0001-first.patch")
    assert any(complaint in found for found in complaints(series)), complaints(series)


def test_a_missing_patch_is_named(series: Series) -> None:
    """A series that names a file which is not there is an error of its own."""
    (series.folder / "0002-second.patch").unlink()
    with pytest.raises(SeriesError, match=r"names 0002-second\.patch, which"):
        series.patches()


def test_import_then_export_changes_nothing(series: Series, tmp_path: Path) -> None:
    """The repository holds the series exactly, whatever the engine's ignore rules say."""
    before = contents(series.folder)
    repo.import_series(series, tmp_path / "work", force=False)
    assert repo.export_series(series, tmp_path / "work") == []
    assert contents(series.folder) == before


def test_an_amended_commit_comes_out_as_its_patch(series: Series, tmp_path: Path) -> None:
    """A change of the last commit changes its patch only; a new commit becomes a new patch in series and table."""
    work = tmp_path / "work"
    repo.import_series(series, work, force=False)
    (work / "a.cpp").write_text((work / "a.cpp").read_text().replace("hook 11", "hook eleven"))
    git(work, "commit", "-aq", "--amend", "--no-edit")
    (work / "b.cpp").write_text("alone\nno more\n")
    git(work, "commit", "-aqm", f"0003-third\n\n{HEADER.format('four')}")
    assert repo.export_series(series, work) == ["0002-second.patch", "0003-third.patch", "README.md", "series"]
    assert "+  hook eleven\n" in (series.folder / "0002-second.patch").read_text()
    assert (series.folder / "series").read_text() == "# the order\n0001-first.patch\n0002-second.patch\n0003-third.patch\n"
    assert complaints(series) == []


def test_a_dropped_commit_drops_its_patch(series: Series, tmp_path: Path) -> None:
    """Without its commit a patch is gone from the folder and from the order."""
    repo.import_series(series, tmp_path / "work", force=False)
    git(tmp_path / "work", "reset", "-q", "--hard", "HEAD^")
    repo.export_series(series, tmp_path / "work")
    assert series.names() == ["0001-first.patch"]
    assert complaints(series) == []


def test_a_commit_of_another_name_is_refused(series: Series, tmp_path: Path) -> None:
    """A commit that is no patch stops the export before anything is written."""
    before = contents(series.folder)
    repo.import_series(series, tmp_path / "work", force=False)
    git(tmp_path / "work", "commit", "-q", "--allow-empty", "-m", "fixup! 0001-first")
    with pytest.raises(SeriesError, match="is called 'fixup! 0001-first'"):
        repo.export_series(series, tmp_path / "work")
    assert contents(series.folder) == before


def test_work_that_was_not_exported_is_kept(series: Series, tmp_path: Path) -> None:
    """Import refuses to overwrite changes and commits, unless it is forced."""
    work = tmp_path / "work"
    repo.import_series(series, work, force=False)
    (work / "b.cpp").write_text("changed\n")
    with pytest.raises(SeriesError, match="changes that are not committed"):
        repo.import_series(series, work, force=False)
    with pytest.raises(SeriesError, match="changes that are not committed"):
        repo.export_series(series, work)
    git(work, "commit", "-aqm", f"0003-third\n\n{HEADER.format('x')}")
    with pytest.raises(SeriesError, match="commits that were not exported"):
        repo.import_series(series, work, force=False)
    repo.import_series(series, work, force=True)
    assert (work / "b.cpp").read_text() == "alone\n"


def test_own_files_are_links_that_git_does_not_see(series: Series, tmp_path: Path) -> None:
    """Our files can be edited in the repository and stay out of the patches."""
    repo.import_series(series, tmp_path / "work", force=False)
    (tmp_path / "work/own.cpp").write_text("edited\n")
    assert (series.folder / "src/own.cpp").read_text() == "edited\n"
    assert repo.export_series(series, tmp_path / "work") == []


def test_offsets_are_not_accepted(series: Series, tmp_path: Path) -> None:
    """A patch that applies at another line than it says is refused, and so is one that does not apply."""
    moved = Patch("0001-first.patch", "", TWICE.format(3, 4).replace("@@ -3,2 +3,3", "@@ -5,2 +5,3"))
    with pytest.raises(SeriesError, match="applies only with offsets"):
        repo.create(tmp_path / "one", [moved], whole=False)
    foreign = Patch("0001-first.patch", "", TWICE.format(3, 4).replace("line 3", "line three"))
    with pytest.raises(SeriesError, match="does not apply"):
        repo.create(tmp_path / "two", [foreign], whole=False)


def test_context_grows_until_a_second_application_is_refused(series: Series, tmp_path: Path) -> None:
    """A hook that one line of context would let in twice gets more context."""
    text = "diff --git a/a.cpp b/a.cpp\n--- a/a.cpp\n+++ b/a.cpp\n@@ -3,2 +3,4 @@\n   line 3\n+  line 4\n+  line 3\n   line 4\n"
    repo.create(tmp_path / "work", [Patch("0001-first.patch", HEADER.format("x"), text)], whole=False)
    again = repo.read_back(tmp_path / "work")[0]
    assert again.diff != text
    assert repo.refuses_again(tmp_path / "work", again)


def test_text_without_a_diff_is_no_patch() -> None:
    """A patch file without a diff is an error that names it."""
    with pytest.raises(SeriesError, match=r"patches/0001-empty\.patch holds no 'diff --git' line"):
        parse("0001-empty.patch", "Why: nothing\n")


def test_counts_do_not_mistake_file_names_for_lines() -> None:
    """`+++` and `---` lines are names; an added line that begins with `++` counts."""
    patch = parse("p", TWICE.format(3, 4) + "+++i;\n---i;\n")
    assert (patch.added(), patch.removed(), patch.files()) == (2, 1, ["a.cpp"])


def test_the_command_applies_all_or_nothing(
    series: Series, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`apply` changes a tree completely, and politely refuses one that has the series."""
    tree = tmp_path / "tree"
    tree.mkdir()
    toy_unpack(tree)
    monkeypatch.setattr("sys.argv", ["patches", "--patches", str(series.folder), "apply", str(tree)])
    assert main() == 0
    assert "hook 3\n" in (tree / "a.cpp").read_text()
    assert (tree / "own.cpp").exists()
    before = contents(tree)
    assert main() == 1
    assert "the series has been applied there, nothing was changed" in capsys.readouterr().err
    assert contents(tree) == before
    shutil.rmtree(tree)
    tree.mkdir()
    toy_unpack(tree)
    (tree / "a.cpp").write_text(SOURCE["a.cpp"].replace("line 11", "line eleven"))
    assert main() == 1
    assert (tree / "a.cpp").read_text() == SOURCE["a.cpp"].replace("line 11", "line eleven")


def test_the_real_series_keeps_its_promises() -> None:
    """Everything that scripts/check_patches can tell without the engine source holds for this checkout."""
    assert complaints(Series(ROOT / "patches")) == []
