"""The thread-shared hub of the engine, alone, under ThreadSanitizer and under AddressSanitizer: no engine and no model is needed.

Law: the hub is compiled from `patches/src`, with the engine's headers, and linked with nothing but the engine's JSON wrapper. What
is compiled is kept in the cache folder, by the content of all that went into it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.models import cache_dir

ROOT = Path(__file__).resolve().parents[2]
OURS = ROOT / "patches" / "src" / "tools" / "server"
SOURCES = (OURS / "server-polykv.cpp", OURS / "server-polykv-state.cpp", ROOT / "tests" / "cpp" / "hub_driver.cpp")
STRICT = ("-Wall", "-Wextra", "-Werror")
KINDS = {"thread": ["thread"], "address": ["address", "undefined"]}
FOLDERS = ("common", "include", "ggml/include", "vendor/nlohmann")
"""Of the engine's tree: where the headers are."""
HANG_GUARD_S = 250


def engine_tree() -> Path:
    """The engine's source: the tree of the last build, or else the headers out of the pinned archive."""
    tree = ROOT / "vendor" / "llamafile" / "llama.cpp"
    if (tree / "common" / "json.cpp").exists():
        return tree
    done = subprocess.run([ROOT / "scripts" / "build_engine.sh", "--fetch"], stdout=subprocess.PIPE, text=True, check=True)
    archive = Path(done.stdout.strip())
    target = cache_dir().parent / "headers" / archive.name.removesuffix(".tar.gz")
    if not target.exists():
        new = target.with_name(f"{target.name}.{os.getpid()}")
        with tarfile.open(archive) as tar:
            for member in wanted(tar):
                tar.extract(member, new, filter="data")
        shutil.rmtree(target, ignore_errors=True)
        new.rename(target)
    return target


def wanted(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        _, found, path = member.name.partition("/vendor/llama.cpp/")
        if found and member.isfile() and path.startswith(tuple(f"{folder}/" for folder in FOLDERS)):
            member.name = path
            yield member


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        list(map(str, command)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=HANG_GUARD_S,
        env=os.environ | (env or {}),
    )
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{done.stdout[:6000]}"
    return done.stdout


class Compiler:
    """Compiles with one sanitizer."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.tree, self.folder = engine_tree(), folder
        self.command = [os.environ.get("CXX") or "c++", "-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer"]
        self.command += [f"-fsanitize={','.join(KINDS[kind])}", "-fno-sanitize-recover=all", "-pthread"]

    def compile(self, source: Path, target: Path, *flags: str) -> Path:
        includes = [f"-I{OURS}", *(f"-isystem{self.tree / folder}" for folder in (*FOLDERS, "vendor"))]
        run(*self.command, *flags, *includes, "-c", source, "-o", target)
        return target

    def ours(self, source: Path) -> Path:
        return self.compile(source, self.folder / f"{source.stem}.o", *STRICT)

    def json(self) -> Path:
        """The engine's JSON wrapper: the slow one to compile, and the one that never changes."""
        source = self.tree / "common" / "json.cpp"
        files = [source, source.with_suffix(".h"), *sorted((self.tree / "vendor" / "nlohmann").iterdir())]
        return self.kept("json.o", files, lambda target: self.compile(source, target))

    def link(self, target: Path) -> None:
        with ThreadPoolExecutor(2) as threads:
            jobs = [threads.submit(self.json), *(threads.submit(self.ours, source) for source in SOURCES)]
            objects = [job.result() for job in jobs]
        run(*self.command, *objects, "-o", target)

    def driver(self) -> Path:
        headers = [file for folder in FOLDERS for file in sorted((self.tree / folder).rglob("*.h*"))]
        files = [*SOURCES, *sorted(OURS.iterdir()), *headers, self.tree / "common" / "json.cpp"]
        return self.kept("hub_driver", files, self.link)

    def kept(self, name: str, files: Iterable[Path], make: Callable[[Path], object]) -> Path:
        """What `make` makes of these files, in the cache folder by their content."""
        key = hashlib.sha256(" ".join([*self.command, *STRICT]).encode() + run(self.command[0], "--version").encode())
        for file in files:
            key.update(file.read_bytes())
        target = cache_dir().parent / "objects" / f"{key.hexdigest()[:20]}-{name}"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            new = target.with_name(f"{target.name}.{os.getpid()}")
            make(new)
            new.replace(target)
        return target


@pytest.mark.engine
@pytest.mark.parametrize("kind", KINDS)
def test_the_hub_holds_its_laws_under_many_threads(kind: str, tmp_path: Path) -> None:
    """Every law of `tests/cpp/hub_driver.cpp` holds, and the sanitizer has nothing to say."""
    driver = Compiler(kind, tmp_path).driver()
    said = run(driver, env={"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1"})
    assert [line.partition(": ")[2] for line in said.splitlines()] == ["holds"] * 9, said
