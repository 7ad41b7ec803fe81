"""Packs the check of the GPU share: patched engine source without what it does not need, a model, the measurement, and `run`.

The model is as large as one that keeps a GPU busy (12 layers, 1.2 GiB at 16 bit) and packs to a hundredth: its rows repeat. Speed
does not depend on what weights say.
"""

from __future__ import annotations

import argparse
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.models import smollm2, tiny

HERE = Path(__file__).resolve().parent
SHAPE = tiny.Shape("llama", "a" * 12, n_embd=2048, n_head=32)
N_ROWS = 2
LEFT_OUT = (
    *("app", "benches", "ci", "conversion", "docs", "examples", "gguf-py", "grammars", "media", "models", "pocs", "requirements"),
    *("scripts", "skills", "tests", "vendor/llama.cpp", "tools/ui/src", "tools/ui/static", "tools/mtmd/tests"),
    *(
        f"ggml/src/ggml-{name}"
        for name in ("cann", "et", "hexagon", "metal", "opencl", "openvino", "rpc", "sycl", "virtgpu", "vulkan")
    ),
    *("ggml/src/ggml-webgpu", "ggml/src/ggml-zdnn"),
)


def write_model(target: Path) -> None:
    """The rows of each matrix are the same few."""
    vocabulary = tiny.read_vocabulary(smollm2())
    with tiny.writing(target, SHAPE.arch) as writer:
        tiny.write_header(writer, "device check", SHAPE)
        tiny.write_vocabulary(writer, vocabulary)
        for name, values in tiny.tensors(SHAPE, vocabulary.words):
            wide = values if values.ndim == 1 else np.resize(values[:N_ROWS].astype(np.float16), values.shape)
            writer.add_tensor(name, wide)


def sources(tree: Path) -> Iterator[Path]:
    """Files of the engine's tree that a server with CUDA is built from."""
    for path in sorted(tree.rglob("*")):
        name = path.relative_to(tree).as_posix()
        if path.is_file() and not any(name == left or name.startswith(f"{left}/") for left in LEFT_OUT):
            yield path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path, help="the patched source")
    parser.add_argument("archive", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tarfile.open(given.archive, "w:gz", compresslevel=6) as archive:
        model = Path(folder) / "model.gguf"
        write_model(model)
        for path, name in ((model, "model.gguf"), (HERE / "measure.py", "measure.py"), (HERE / "run", "run")):
            archive.add(path, f"gpu_device/{name}")
        for path in sources(given.tree):
            archive.add(path, f"gpu_device/src/{path.relative_to(given.tree)}")


if __name__ == "__main__":
    main()
