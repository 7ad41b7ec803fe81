"""A model that says, word for word, what its chat template chose: for what an engine does with tool calls and forms.

Law: the template is the mind. It looks at the tools and the last turn, and ends the prompt with a token that names a saying. The
weights are a chain: each piece of a saying is a token of its own with one likely successor, the last one's is the end of the turn.
So an answer depends on the prompt's last token alone; for what depends on all of a prompt there are the models of `tiny`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np

from tests.models import tiny

TEMPLATE = Path(__file__).with_name("chatml_tools.jinja")
CALLS: dict[str, dict[str, object]] = {
    "task": {"description": "Look at the lamps.", "subagent_type": "helper"},
    "magic_function": {"input": 3},
    "magic_function_no_args": {},
    "greeting_generator": {"answer_style": "Pirate"},
    "get_weather": {"location": "San Francisco, CA"},
    "unicode_customer": {"customer_name": "你好啊集团, こんにちは株式会社", "description": "a company"},
    "Joke": {"setup": "Why do cats purr?", "punchline": "To save ink."},
}
"""Tools that it knows, each with its arguments: the first of them that a request offers is called after a user's turn."""
SAYINGS = {
    "talk": "Aye, aye, captain.",
    "joke": json.dumps(CALLS["Joke"]),
    **{
        name: f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'
        for name, arguments in CALLS.items()
    },
}
_SHAPE = tiny.Shape("llama", "a")
_PIECE = 6
"""Letters in a token of a saying, at least."""
_TAIL = 15
"""Letters in its last one: longer than the ends that sayings have in common."""
_END = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
_MIND = """\
{%- if add_generation_prompt %}
{%- set mind = namespace(say='talk') %}
{%- set last = messages[-1] %}
{%- if last.role == 'user' %}
{%- if tools %}
{%- for tool in tools %}
{%- if mind.say == 'talk' and tool.function.name in KNOWN %}{%- set mind.say = tool.function.name %}{%- endif %}
{%- endfor %}
{%- elif 'joke' in last.content %}{%- set mind.say = 'joke' %}
{%- endif %}
{%- endif %}
{{- '<|im_start|>assistant\\n<|say:' + mind.say + '|>' }}
{%- endif %}"""


def file_name(donor: str) -> str:
    """Where it is cached: the name changes with this module, with `tiny` and with the donor."""
    made_by = [Path(__file__), Path(tiny.__file__), TEMPLATE]
    key = hashlib.sha256(b"".join(path.read_bytes() for path in made_by) + donor.encode()).hexdigest()
    return f"puppet-{key[:12]}.gguf"


def template() -> str:
    """The template for tools, with a mind in the place of its last line."""
    body = TEMPLATE.read_text()
    assert _END in body
    return body.replace(_END, _MIND.replace("KNOWN", json.dumps(list(CALLS))))


def build(target: Path, donor: Path) -> Path:
    """Write the model to `target`, with the vocabulary of `donor` and the pieces of all sayings; whole or not at all."""
    known = tiny.read_vocabulary(donor)
    chains = list(_chains(set(known.tokens)))
    added = [piece for chain in chains for piece in chain]
    types = [gguf.TokenType.CONTROL if at == 0 else gguf.TokenType.NORMAL for chain in chains for at in range(len(chain))]
    vocabulary = replace(known, tokens=[*known.tokens, *added], types=[*known.types, *types], template=template())
    with tiny.writing(target, _SHAPE.arch) as writer:
        tiny.write_header(writer, "puppet", _SHAPE)
        tiny.write_vocabulary(writer, vocabulary)
        successors = _successors(chains, len(known.tokens), known.special["eos"])
        for name, values in _tensors(successors, len(vocabulary.tokens), known.special["eos"]):
            writer.add_tensor(name, values.astype(np.float16 if values.ndim > 1 else np.float32))
    return target


def _chains(taken: set[str]) -> Iterator[list[str]]:
    """Each saying as tokens, its name first. Every token is new, so that it has one successor."""
    letters = _letters()
    for name, text in SAYINGS.items():
        chain, piece = [f"<|say:{name}|>"], ""
        for at, letter in enumerate(text, 1):
            piece += "".join(letters[byte] for byte in letter.encode())
            if len(piece) >= _PIECE and piece not in taken and len(text) - at > _TAIL:
                chain.append(piece)
                piece = ""
        assert piece not in taken
        chain.append(piece)
        taken.update(chain)
        yield chain


def _letters() -> dict[int, str]:
    """How GPT-2's vocabularies write a byte: itself where it can be seen, else a letter from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {**{byte: chr(byte) for byte in seen}, **{byte: chr(256 + n) for n, byte in enumerate(hidden)}}


def _successors(chains: list[list[str]], first: int, end: int) -> dict[int, int]:
    """Which token follows which."""
    following: dict[int, int] = {}
    for chain in chains:
        ids = list(range(first, first + len(chain)))
        following.update(zip(ids, [*ids[1:], end], strict=True))
        first += len(chain)
    return following


def _tensors(successors: dict[int, int], n_vocab: int, end: int) -> Iterator[tuple[str, tiny.Array]]:
    """Each token that follows another has a direction, which is the other's embedding; all that mixes tokens is zero."""
    n, following = _SHAPE.n_embd, sorted(set(successors.values()))
    output = np.zeros((n_vocab, n), dtype=np.float32)
    output[following] = np.random.default_rng(7).choice(np.array([-1, 1], dtype=np.float32), size=(len(following), n))
    embedding = np.tile(output[end], (n_vocab, 1))  # after text of others the turn ends
    embedding[list(successors)] = output[list(successors.values())]
    logits = embedding[list(successors)] @ output.T
    assert (logits.argmax(axis=1) == list(successors.values())).all(), "two tokens point the same way; take another seed"
    yield "token_embd.weight", embedding
    yield "output.weight", output
    yield "output_norm.weight", np.ones(n, dtype=np.float32)
    yield "blk.0.attn_norm.weight", np.ones(n, dtype=np.float32)
    yield "blk.0.ffn_norm.weight", np.ones(n, dtype=np.float32)
    heads = _SHAPE.n_head * _SHAPE.n_head_dim
    sizes = {"attn_q": (heads, n), "attn_k": (_SHAPE.n_head_dim, n), "attn_v": (_SHAPE.n_head_dim, n), "attn_output": (n, heads)}
    for name, size in {**sizes, "ffn_gate": (2 * n, n), "ffn_up": (2 * n, n), "ffn_down": (n, 2 * n)}.items():
        yield f"blk.0.{name}.weight", np.zeros(size, dtype=np.float32)
