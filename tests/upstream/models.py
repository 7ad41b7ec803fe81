"""Local models in place of those that upstream's tests download: tiny, with random weights, of the same kind.

Law: a name that is not here stays a download, and tests that need it are skipped. What these models say is another matter than what
stories say, so words expected in answers are not judged (plugin.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from tests.models import smollm2, tiny, tiny_model
from tests.models.adapter import write_adapter

N_EMBD, N_LAYER, N_FF, N_CTX = 64, 2, 128, 512


def stand_ins(folder: Path, vocabulary: Path) -> dict[str, Path]:
    """Files by the end of the name under which the suite asks for them. `vocabulary`: the engine's own of BGE."""
    bert = _made(folder / "bert-ggml-model.gguf", lambda path: encoder(path, vocabulary))
    full, draft, windowed = tiny_model("full"), tiny_model("draft"), tiny_model("swa")
    return {
        "test-model-stories260K": full,
        "test-model-stories260K-infill": _made(folder / "infill.gguf", infill),
        "stories15M_MOE-F16.gguf": full,
        "moe_shakespeare15M.gguf": _made(folder / "adapter.gguf", lambda path: write_adapter(path, "full", seed=7)),
        "stories15M-q4_0.gguf": draft,
        "tinygemma3-GGUF:Q8_0": windowed,
        "bert-bge-small/ggml-model-f16.gguf": bert,
        "jina-reranker-v1-tiny-en/ggml-model-f16.gguf": bert,
    }


def _made(path: Path, make: Callable[[Path], object]) -> Path:
    if not path.exists():
        make(path)
    return path


def infill(path: Path) -> None:
    """The `full` kind with three of its special tokens as those of fill-in-the-middle."""
    shape, vocabulary = tiny.KINDS["full"], tiny.read_vocabulary(smollm2())
    with tiny.writing(path, shape.arch) as writer:
        tiny.write_header(writer, "full", shape)
        tiny.write_vocabulary(writer, vocabulary)
        for part, token in (("pre", "<repo_name>"), ("suf", "<file_sep>"), ("mid", "<filename>")):
            writer.add_uint32(f"tokenizer.ggml.fim_{part}_token_id", vocabulary.tokens.index(token))
        for name, values in tiny.tensors(shape, vocabulary.words):
            writer.add_tensor(name, values.astype(np.float16 if values.ndim > 1 else np.float32))


def encoder(path: Path, vocabulary: Path) -> None:
    """A BERT with a head for ranking: embeds and reranks."""
    with tiny.writing(path, "bert") as writer:
        fields = [field for field in gguf.GGUFReader(vocabulary).fields.values() if field.name.startswith("tokenizer.")]
        for field in fields:
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
        n_vocab = next(len(field.data) for field in fields if field.name == "tokenizer.ggml.tokens")
        writer.add_context_length(N_CTX)
        writer.add_embedding_length(N_EMBD)
        writer.add_block_count(N_LAYER)
        writer.add_feed_forward_length(N_FF)
        writer.add_head_count(4)
        writer.add_layer_norm_eps(1e-12)
        writer.add_causal_attention(False)
        writer.add_pooling_type(gguf.PoolingType.CLS)
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        rng = np.random.default_rng(11)
        for name, size in _tensors(n_vocab):
            flat = name.endswith(("norm.weight", "bias"))
            values = np.full(size, float(name.endswith("weight"))) if flat else rng.standard_normal(size) / np.sqrt(size[-1])
            writer.add_tensor(name, values.astype(np.float32))


def _tensors(n_vocab: int) -> list[tuple[str, tuple[int, ...]]]:
    wide, tall = (N_FF, N_EMBD), (N_EMBD, N_FF)
    square = (N_EMBD, N_EMBD)
    named: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (n_vocab, N_EMBD)),
        ("token_types.weight", (2, N_EMBD)),
        ("position_embd.weight", (N_CTX, N_EMBD)),
        ("token_embd_norm.weight", (N_EMBD,)),
        ("token_embd_norm.bias", (N_EMBD,)),
        ("cls.weight", square),
        ("cls.output.weight", (1, N_EMBD)),
    ]
    for n in range(N_LAYER):
        at = f"blk.{n}."
        named += [(f"{at}{one}.weight", square) for one in ("attn_q", "attn_k", "attn_v", "attn_output")]
        named += [(f"{at}ffn_up.weight", wide), (f"{at}ffn_down.weight", tall)]
        named += [
            (f"{at}{norm}.{part}", (N_EMBD,)) for norm in ("attn_output_norm", "layer_output_norm") for part in ("weight", "bias")
        ]
    return named
