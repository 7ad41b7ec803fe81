"""Tiny models with random weights: one for each memory class of the engine, loading in milliseconds.

Law: a file is a function of its kind and of this module (the name carries the hash of both), so equal names mean equal bytes. The
vocabulary and the chat template are SmolLM2's. Weights are scaled so that greedy text depends on the whole prompt and is far from
ties, and so that only whole lower-case words come out: such text tokenises back to the same ids.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

N_CTX_TRAIN = 32768
LOGIT_STD = 6.0
"""Spread of the logits of words: the two best of about 20,000 normal draws then lie 1.3 apart on average."""
RARE_STD = 0.3
"""Spread for everything else: never the best word, and still no exact ties where a grammar allows nothing else."""
ATTENTION_STD = 2.5
"""Spread of attention scores: sharp enough that single far tokens matter, in long prompts as well."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a kind is made of. `layers` names each layer: `a` attention, `m` Mamba, `c` short convolution."""

    arch: str
    layers: str
    n_embd: int = 64
    n_head: int = 4
    n_head_dim: int = 64
    full_precision: bool = False
    n_swa: int = 0
    seed: int = 1
    noise: float = 0.0


KINDS: dict[str, Shape] = {
    "full": Shape("llama", "aa"),
    "full-f32": Shape("llama", "aa", full_precision=True),
    "swa": Shape("gemma3", "aa", n_swa=64, seed=2),
    "recurrent": Shape("mamba", "mm", seed=3),
    "hybrid": Shape("jamba", "ma", n_head_dim=16, seed=4),
    "hybrid-swa": Shape("lfm2", "ca", n_head_dim=16, n_swa=64, seed=5),
    "one-layer": Shape("llama", "a", n_embd=32, seed=6),
    "draft": Shape("llama", "aa", noise=0.02),
}
"""The kinds. `swa` and `hybrid-swa` have a window of 64 tokens; `draft` is `full` with noise, so that most drafts are accepted."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """SmolLM2's tokens and chat template. `words[i]` says whether token i may come out of a tiny model."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    special: dict[str, int]
    template: str
    words: NDArray[np.bool_]


def build(kind: str, target: Path, donor: Path) -> Path:
    """Write the model of this kind to `target`, with the vocabulary of `donor`; whole or not at all."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind of tiny model: {kind}; known are {', '.join(KINDS)}")
    shape = KINDS[kind]
    with writing(target, shape.arch) as writer:
        write_header(writer, kind, shape)
        write_vocabulary(writer, read_vocabulary(donor))
        for name, values in tensors(shape, read_vocabulary(donor).words):
            half = values.ndim > 1 and not shape.full_precision and "conv" not in name and "ssm_a" not in name
            writer.add_tensor(name, values.astype(np.float16 if half else np.float32))
    return target


@contextlib.contextmanager
def writing(target: Path, arch: str) -> Iterator[gguf.GGUFWriter]:
    """A writer of a model of this architecture; afterwards `target` is there whole, or not at all."""
    part = target.with_name(f".{target.name}.{os.getpid()}")
    writer = gguf.GGUFWriter(part, arch)
    try:
        yield writer
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        part.replace(target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()


def file_name(kind: str, donor: str) -> str:
    """The name under which a kind is cached: it changes with this module and with the donor (by its name)."""
    key = hashlib.sha256(Path(__file__).read_bytes() + donor.encode()).hexdigest()
    return f"tiny-{kind}-{key[:12]}.gguf"


@cache
def read_vocabulary(donor: Path) -> Vocabulary:
    """Read tokens and template of a GGUF file with a GPT-2 kind of vocabulary."""
    fields = gguf.GGUFReader(donor).fields

    def value(key: str) -> Any:
        return fields[f"tokenizer.{key}"].contents()

    tokens: list[str] = value("ggml.tokens")
    types: list[int] = value("ggml.token_type")
    word = re.compile("Ġ[a-z]{2,}")
    words = [
        type_ == gguf.TokenType.NORMAL and word.fullmatch(token) is not None for token, type_ in zip(tokens, types, strict=True)
    ]
    special = {name: int(value(f"ggml.{name}_token_id")) for name in ("bos", "eos", "unknown", "padding")}
    return Vocabulary(tokens, types, value("ggml.merges"), special, value("chat_template"), np.array(words))


def write_header(writer: gguf.GGUFWriter, kind: str, shape: Shape) -> None:
    """Metadata: sizes, heads, window and state."""
    n_attention = [1 if layer == "a" else 0 for layer in shape.layers]
    mixed = 0 < sum(n_attention) < len(n_attention)
    writer.add_name(f"tiny {kind}")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if shape.full_precision else gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(len(shape.layers))
    writer.add_feed_forward_length(0 if shape.arch == "mamba" else 2 * shape.n_embd)
    writer.add_head_count(0 if shape.arch == "mamba" else shape.n_head)
    writer.add_head_count_kv(n_attention if mixed else n_attention[0])
    writer.add_layer_norm_rms_eps(1e-5)
    if any(n_attention):
        writer.add_key_length(shape.n_head_dim)
        writer.add_value_length(shape.n_head_dim)
        writer.add_rope_freq_base(100000.0)
    if shape.n_swa:
        writer.add_sliding_window(shape.n_swa)
    if shape.arch == "gemma3":
        writer.add_sliding_window_pattern([True, False])
    if "m" in shape.layers:
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(2 * shape.n_embd)
        writer.add_ssm_state_size(16)
        writer.add_ssm_time_step_rank(8)
    if "c" in shape.layers:
        writer.add_shortconv_l_cache(3)


def write_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    """Copy the tokenizer."""
    writer.add_vocab_size(len(vocabulary.tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(vocabulary.special["bos"])
    writer.add_eos_token_id(vocabulary.special["eos"])
    writer.add_unk_token_id(vocabulary.special["unknown"])
    writer.add_pad_token_id(vocabulary.special["padding"])
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(vocabulary.template)


def tensors(shape: Shape, words: NDArray[np.bool_]) -> Iterator[tuple[str, Array]]:
    """All tensors as (name, values), rows first: the engine's {n_in, n_out} is (n_out, n_in) here."""

    def normal(name: str, *size: int) -> Array:
        rng = np.random.default_rng([shape.seed, zlib.crc32(name.encode())])
        values = rng.standard_normal(size, dtype=np.float32)
        if shape.noise:
            values += shape.noise * np.random.default_rng([99, zlib.crc32(name.encode())]).standard_normal(size, dtype=np.float32)
        return values

    def linear(name: str, n_out: int, n_in: int, gain: float = 1.0) -> tuple[str, Array]:
        """Unit inputs come out with spread `gain`."""
        return f"{name}.weight", normal(name, n_out, n_in) * np.float32(gain / np.sqrt(n_in))

    def ones(name: str, n: int, gain: float = 1.0) -> tuple[str, Array]:
        return f"{name}.weight", np.full(n, gain, dtype=np.float32)

    n_embd, n_vocab = shape.n_embd, len(words)
    embedding_std = 1.0 / np.sqrt(n_embd) if shape.arch == "gemma3" else 1.0  # gemma scales what it reads by sqrt(n_embd)
    yield "token_embd.weight", normal("token_embd", n_vocab, n_embd) * np.float32(embedding_std)
    row_std = np.where(words, LOGIT_STD, RARE_STD).astype(np.float32)[:, None] / np.float32(np.sqrt(n_embd))
    yield "output.weight", normal("output", n_vocab, n_embd) * row_std
    yield ones("token_embd_norm" if shape.arch == "lfm2" else "output_norm", n_embd)
    mixers = {"a": attention, "m": mamba, "c": short_convolution}
    for i, layer in enumerate(shape.layers):
        yield ones(f"blk.{i}.attn_norm", n_embd)
        yield from mixers[layer](shape, f"blk.{i}", normal, linear, ones)
        if shape.arch != "mamba":
            yield from feed_forward(shape, f"blk.{i}", linear, ones)


Normal = Callable[..., Array]
Named = Callable[..., tuple[str, Array]]


def attention(shape: Shape, at: str, _: Normal, linear: Named, ones: Named) -> Iterator[tuple[str, Array]]:
    """One key/value head. The output counts double against the residual stream, so that context outweighs the last token."""
    n_q = shape.n_head * shape.n_head_dim
    normed = shape.arch in ("gemma3", "lfm2")
    score_gain = 1.0 if normed else float(np.sqrt(ATTENTION_STD))
    yield linear(f"{at}.attn_q", n_q, shape.n_embd, score_gain)
    yield linear(f"{at}.attn_k", shape.n_head_dim, shape.n_embd, score_gain)
    yield linear(f"{at}.attn_v", shape.n_head_dim, shape.n_embd)
    yield linear(f"{at}.attn_output", shape.n_embd, n_q, 3.0)
    if normed:
        yield ones(f"{at}.attn_q_norm", shape.n_head_dim, ATTENTION_STD)
        yield ones(f"{at}.attn_k_norm", shape.n_head_dim)
    if shape.arch == "gemma3":
        yield ones(f"{at}.post_attention_norm", shape.n_embd, 3.0)


def feed_forward(shape: Shape, at: str, linear: Named, ones: Named) -> Iterator[tuple[str, Array]]:
    """A gated block; silu halves its input, hence the gain."""
    yield ones(f"{at}.ffn_norm", shape.n_embd)
    yield linear(f"{at}.ffn_gate", 2 * shape.n_embd, shape.n_embd, 2.0)
    yield linear(f"{at}.ffn_up", 2 * shape.n_embd, shape.n_embd)
    yield linear(f"{at}.ffn_down", shape.n_embd, 2 * shape.n_embd)
    if shape.arch == "gemma3":
        yield ones(f"{at}.post_ffw_norm", shape.n_embd)


def mamba(shape: Shape, at: str, normal: Normal, linear: Named, ones: Named) -> Iterator[tuple[str, Array]]:
    """A Mamba block whose state remembers between 10 and 1,000 tokens (time steps 0.001 to 0.1, decay rates 1)."""
    n_inner, n_state, n_rank, n_conv = 2 * shape.n_embd, 16, 8, 4
    yield linear(f"{at}.ssm_in", 2 * n_inner, shape.n_embd, 2.0)
    yield linear(f"{at}.ssm_conv1d", n_inner, n_conv)
    yield f"{at}.ssm_conv1d.bias", np.zeros(n_inner, dtype=np.float32)
    yield linear(f"{at}.ssm_x", n_rank + 2 * n_state, n_inner, 3.0)
    yield linear(f"{at}.ssm_dt", n_inner, n_rank, 0.1)
    steps = np.geomspace(0.001, 0.1, n_inner)
    yield f"{at}.ssm_dt.bias", np.log(np.expm1(steps)).astype(np.float32)
    yield f"{at}.ssm_a", np.full((n_inner, n_state), -1.0, dtype=np.float32)
    yield f"{at}.ssm_d", np.full(n_inner, 0.3, dtype=np.float32)
    if shape.arch == "jamba":
        yield ones(f"{at}.ssm_dt_norm", n_rank)
        yield ones(f"{at}.ssm_b_norm", n_state, 3.0)
        yield ones(f"{at}.ssm_c_norm", n_state, 3.0)
    yield linear(f"{at}.ssm_out", shape.n_embd, n_inner, 3.0)


def short_convolution(shape: Shape, at: str, normal: Normal, linear: Named, _: Named) -> Iterator[tuple[str, Array]]:
    """LFM2's gated convolution over the last three tokens."""
    yield linear(f"{at}.shortconv.in_proj", 3 * shape.n_embd, shape.n_embd, 1.5)
    yield linear(f"{at}.shortconv.conv", shape.n_embd, 3)
    yield linear(f"{at}.shortconv.out_proj", shape.n_embd, shape.n_embd, 1.5)
