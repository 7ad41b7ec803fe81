"""Tiny LoRA adapters: what they add is about as large as the weights, so that answers change and stay finite."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests.models.tiny import KINDS

RANK = 4


def write_adapter(path: Path, kind: str, seed: int) -> Path:
    """Write an adapter for one matrix of a tiny model, or of SmolLM2."""
    arch, name, n_in, n_out = adapted(kind)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", RANK)
    rng = np.random.default_rng(seed)
    writer.add_tensor(f"{name}.lora_a", rng.normal(scale=n_in**-0.5, size=(RANK, n_in)).astype(np.float32))
    writer.add_tensor(f"{name}.lora_b", rng.normal(scale=RANK**-0.5, size=(n_out, RANK)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def adapted(kind: str) -> tuple[str, str, int, int]:
    """Architecture, tensor, and its sizes in and out."""
    if kind == "smollm2":
        return "llama", "blk.0.attn_q.weight", 576, 576
    shape = KINDS[kind]
    if "a" in shape.layers:
        return shape.arch, f"blk.{shape.layers.index('a')}.attn_q.weight", shape.n_embd, shape.n_head * shape.n_head_dim
    return shape.arch, "blk.0.ssm_in.weight", shape.n_embd, 4 * shape.n_embd
