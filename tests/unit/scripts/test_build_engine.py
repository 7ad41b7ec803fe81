"""scripts/build_engine.sh on a toy source: what it builds, what it says when something is missing, how it goes on.

The rig is a checkout of its own with the real script and a series of one patch; `ninja` is a stand-in whose engine is the text of
the source it was given.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PRISTINE = "int one;\nint two;\nint three;\n"
PATCH = """Why: a test
Where: here
Thread: none
Drop when: never

diff --git a/tools/server/server-context.cpp b/tools/server/server-context.cpp
--- a/tools/server/server-context.cpp
+++ b/tools/server/server-context.cpp
@@ -1,2 +1,3 @@
 int one;
+int hook;
 int two;
"""
CMAKE = """#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" = -B ] && build=$2; shift; done
mkdir -p "$build/bin" && touch "$build/build.ninja"
"""
NINJA = """#!/bin/sh
echo run >> "$POLYKV_CACHE/ninja-runs"
[ -z "$BREAK" ] || { echo "error: broken on purpose"; exit 1; }
[ -z "$HANG" ] || { echo > "$HANG"; read -r _ < "$HANG.never"; }
{ echo '#!/bin/sh'; cat "$2/../src/tools/server/server-context.cpp" "$2/../src/own.h" 2>/dev/null; } > "$2/bin/llama-server"
chmod +x "$2/bin/llama-server"
"""


@dataclass
class Rig:
    """A checkout, a source tree and a cache in one folder."""

    folder: Path

    def __post_init__(self) -> None:
        for name, text in {
            "source/tools/server/server-context.cpp": PRISTINE,
            "checkout/patches/series": "# order\n0001-hook.patch\n",
            "checkout/patches/0001-hook.patch": PATCH,
            "checkout/patches/src/own.h": "int own;\n",
        }.items():
            self.write(name, text)
        shutil.copytree(ROOT / "scripts", self.folder / "checkout/scripts", ignore=shutil.ignore_patterns("__pycache__"))
        self.write("checkout/vendor/llamafile/source.lock", (ROOT / "vendor/llamafile/source.lock").read_text())
        self.write("cache/tools/bin/cmake", CMAKE).chmod(0o755)
        self.write("cache/tools/bin/ninja", NINJA).chmod(0o755)
        self.write("cache/tools/bin/python", f'#!/bin/sh\nexec {sys.executable} "$@"\n').chmod(0o755)

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def engine(self) -> Path:
        return self.folder / "checkout/llamafile"

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def command(self, *options: str) -> list[str]:
        return [str(self.folder / "checkout/scripts/build_engine.sh"), "--source", str(self.folder / "source"), *options]

    def environment(self, **extra: str) -> dict[str, str]:
        return os.environ | {"POLYKV_CACHE": str(self.cache), "PIP_NO_INDEX": "1", "PYTHON": sys.executable} | extra

    def build(self, *options: str, **extra: str) -> subprocess.CompletedProcess[str]:
        return run(self.command(*options), self.environment(**extra))

    def ninja_runs(self) -> int:
        return len((self.cache / "ninja-runs").read_text().splitlines())


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_the_series_and_own_files_reach_the_compiler(rig: Rig) -> None:
    """What is built holds the hook and the own file, and nothing is built a second time."""
    done = rig.build()
    assert done.returncode == 0, done.stderr
    assert "int one;\nint hook;\nint two;\nint three;\nint own;\n" in rig.engine.read_text()
    assert rig.build().returncode == 0
    assert rig.ninja_runs() == 1


def test_the_twin_is_the_pristine_source(rig: Rig) -> None:
    """One tree serves both: the twin built after the patched engine holds neither hook nor own file, and back again."""
    rig.build()
    twin = rig.folder / "checkout/llamafile-stock"
    assert rig.build("--unpatched").returncode == 0
    assert twin.read_text() == f"#!/bin/sh\n{PRISTINE}"
    rig.write("checkout/patches/src/own.h", "int changed;\n")
    assert rig.build().returncode == 0
    assert "int hook;\n" in rig.engine.read_text()
    assert "int changed;\n" in rig.engine.read_text()
    assert len(list((rig.cache / "trees").iterdir())) == 1


def test_the_key_does_not_depend_on_the_checkout(rig: Rig, tmp_path: Path) -> None:
    """Two checkouts with equal content have one key; another patch or another compiler flag has another one."""
    other = Rig(tmp_path / "elsewhere")
    key = rig.build("--print-key").stdout
    assert other.build("--print-key").stdout == key
    assert other.build("--print-key", CXXFLAGS="-g").stdout != key
    assert other.build("--print-key", "--cuda").stdout != key
    other.write("checkout/patches/src/own.h", "int changed;\n")
    assert other.build("--print-key").stdout != key


def test_inside_of_a_repository_patches_are_applied_too(rig: Rig) -> None:
    """git must not mistake the repository around the cache for the tree to patch, nor follow a hook's environment."""
    subprocess.run(["git", "init", "-q", rig.folder], check=True)
    done = rig.build(GIT_DIR=str(rig.folder / ".git"))
    assert done.returncode == 0, done.stderr
    assert "int hook;" in rig.engine.read_text()


def test_a_patch_that_does_not_apply_is_named(rig: Rig) -> None:
    """The message names the patch and the page that says what to do; with the patch put right the build goes on."""
    rig.write("checkout/patches/0001-hook.patch", PATCH.replace("int two", "int 2"))
    done = rig.build()
    assert done.returncode == 1
    assert "FAILED while applying the patch series" in done.stderr
    assert "patches/0001-hook.patch does not apply" in done.stderr
    assert not rig.engine.exists()
    rig.write("checkout/patches/0001-hook.patch", PATCH)
    assert rig.build().returncode == 0


def test_a_series_that_names_a_missing_patch_is_refused(rig: Rig) -> None:
    """The missing file is named before anything is done."""
    rig.write("checkout/patches/series", "0001-hook.patch\n0002-gone.patch\n")
    done = rig.build()
    assert done.returncode == 1
    assert "patches/series names 0002-gone.patch" in done.stderr


def test_a_missing_compiler_is_named_with_its_package(rig: Rig) -> None:
    """Without a C++ compiler the message says what to install."""
    done = rig.build(CXX="no-such-compiler")
    assert done.returncode == 1
    assert "no C++ compiler" in done.stderr
    assert "apt-get install g++" in done.stderr


def test_an_old_python_is_named(rig: Rig) -> None:
    """A Python that fails the version check is refused with what to install."""
    old = rig.write("old-python", '#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.2 && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = rig.build(PYTHON=str(old))
    assert done.returncode == 1
    assert "Python 3.9.2, too old; install Python 3.11" in done.stderr


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_without_a_package_index_the_source_cannot_be_had(rig: Rig, damage: str) -> None:
    """A missing or damaged archive is fetched; when that fails the message says so and nothing half is left."""
    digest = (ROOT / "vendor/llamafile/source.lock").read_text().split("sha256:")[1].strip()
    if damage == "damaged":
        rig.write(f"cache/downloads/engine-source-{digest}.tar.gz", "half a file")
    done = run([str(rig.folder / "checkout/scripts/build_engine.sh")], rig.environment(PIP_FIND_LINKS=""))
    assert done.returncode == 1
    assert "FAILED while downloading the engine source" in done.stderr
    assert "is the package index reachable?" in done.stderr
    assert not list((rig.cache / "downloads").glob("get.*"))


def test_what_is_asked_for_as_source_is_the_engine_alone(rig: Rig) -> None:
    """pip looks into the archive with its build backend: the tools of that, cmake among them, may come as wheels."""
    pip = 'case "$*" in *download*) echo "$*" > "$POLYKV_CACHE/pip-asked"; exit 1 ;; esac\n'
    rig.write("cache/tools/bin/python", f"#!/bin/sh\n{pip}").chmod(0o755)
    assert run([*rig.command()[:1], "--fetch"], rig.environment()).returncode == 1
    asked = (rig.cache / "pip-asked").read_text().split()
    assert asked[asked.index("--no-binary") + 1] == "llama-cpp-python"


def test_without_a_package_index_the_tools_cannot_be_had(rig: Rig) -> None:
    """A missing ninja is installed; when that fails the message names it and the step."""
    (rig.cache / "tools/bin/ninja").unlink()
    done = rig.build(PIP_FIND_LINKS="")
    assert done.returncode == 1
    assert "FAILED while installing cmake and ninja" in done.stderr
    assert "pip could not install ninja>=1.11; is the package index reachable?" in done.stderr


def test_a_compile_error_is_shown(rig: Rig) -> None:
    """The compiler's words are shown, and the same command goes on from there."""
    done = rig.build(BREAK="1")
    assert done.returncode == 1
    assert "error: broken on purpose" in done.stderr
    assert rig.build().returncode == 0
    assert "int hook;" in rig.engine.read_text()


def test_the_twin_after_a_failed_build_is_pristine(rig: Rig) -> None:
    """Files that a failed patched build left in the tree do not get into the twin."""
    assert rig.build(BREAK="1").returncode == 1
    assert rig.build("--unpatched").returncode == 0
    assert (rig.folder / "checkout/llamafile-stock").read_text() == f"#!/bin/sh\n{PRISTINE}"


def test_an_interrupted_build_goes_on(rig: Rig) -> None:
    """A build that is stopped in the middle says how to go on, leaves no engine, and the next one succeeds."""
    for name in ("hang", "hang.never"):
        os.mkfifo(rig.folder / name)
    environment = rig.environment(HANG=str(rig.folder / "hang"))
    with subprocess.Popen(
        rig.command(), env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as build:
        (rig.folder / "hang").read_text()  # ninja is running
        os.killpg(build.pid, signal.SIGTERM)
        _, said = build.communicate()
    assert build.returncode == 143
    assert "stopped while compiling the engine" in said
    assert "run the same command again" in said
    assert not rig.engine.exists()
    assert not list((rig.cache / "trees").glob("*/wanted.*"))
    assert rig.build().returncode == 0


def test_an_interrupted_unpacking_starts_over(rig: Rig) -> None:
    """A tree without its mark of completeness is made anew."""
    assert rig.build(BREAK="1").returncode == 1
    tree = next((rig.cache / "trees").iterdir())
    (tree / ".unpacked").unlink()
    (tree / "src/tools/server/server-context.cpp").write_text("half")
    assert rig.build().returncode == 0
    assert "int three;" in rig.engine.read_text()


def test_two_builds_wait_for_each_other(rig: Rig) -> None:
    """While another build holds the lock this one says so and waits."""
    with (rig.cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen(
            rig.command(), env=rig.environment(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as build:
            assert build.stderr is not None
            assert "another build holds" in build.stderr.readline()
            fcntl.flock(lock, fcntl.LOCK_UN)
            build.communicate()
    assert build.returncode == 0
    assert rig.engine.exists()


def test_old_engines_make_room(rig: Rig) -> None:
    """The 24 engines used last are kept, the one just installed among them."""
    for age in range(30):
        folder = rig.write(f"cache/engines/old-{age}/llama-server", "old").parent
        os.utime(folder, (1_000_000 - age, 1_000_000 - age))
    assert rig.build().returncode == 0
    kept = {path.name for path in (rig.cache / "engines").iterdir()}
    assert len(kept) == 24
    assert {f"old-{age}" for age in range(23)} < kept


def test_clean_removes_trees_and_engines_only(rig: Rig) -> None:
    """Downloads and models outlive --clean."""
    rig.build()
    rig.write("cache/models/m.gguf", "model")
    assert rig.build("--clean").returncode == 0
    assert sorted(path.name for path in rig.cache.iterdir() if path.is_dir()) == ["downloads", "models", "tools"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--fast"], "unknown option: --fast"),
        (["--sanitize", "memory"], "--sanitize takes address or thread, not memory"),
        (["--jobs", "many"], "--jobs takes a number of at least 1, not many"),
        (["--source", "/nowhere"], "no such folder: /nowhere"),
    ],
)
def test_bad_options_are_named(rig: Rig, options: list[str], said: str) -> None:
    """A bad option is refused by a sentence that names it."""
    done = rig.build(*options)
    assert done.returncode != 0
    assert said in done.stderr


def test_a_source_that_is_no_engine_is_refused(rig: Rig) -> None:
    """--source with another kind of folder names the file that it looked for."""
    (rig.folder / "source/tools/server/server-context.cpp").unlink()
    rig.write("source/readme", "no engine here")
    done = rig.build()
    assert done.returncode == 1
    assert "--source takes a llama.cpp tree" in done.stderr
