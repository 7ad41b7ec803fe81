"""What a GGUF file says about its attention, read from the head of the file.

Law: reads key-value pairs in order and stops as soon as the answer is known; never reads tensors, never maps the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from polykv_proxy.errors import SettingsError

PLAIN_POOLS = 16
OTHER_POOLS = 4

# Architectures whose memory is one plain attention cache in llama.cpp: no window, no recurrent state (src/llama-arch.cpp).
_PLAIN_NAMES = (
    "llama deci falcon grok gpt2 gptj gptneox mpt baichuan starcoder refact bloom stablelm qwen qwen2 qwen2moe qwen2vl qwen3 "
    "qwen3moe qwen3vl qwen3vlmoe phi2 phimoe plamo codeshell orion internlm2 minicpm minicpm3 gemma starcoder2 xverse command-r "
    "dbrx olmo olmoe openelm arctic deepseek deepseek2 chatglm glm4 glm4moe bitnet jais jais2 nemotron exaone granite granitemoe "
    "chameleon plm bailingmoe bailingmoe2 dots1 arcee ernie4_5 ernie4_5-moe hunyuan-moe hunyuan-dense smollm3 seed_oss grovemoe "
    "apertus minimax-m2 cogvlm pangu-embedded mistral3 mistral4 maincoder"
)
PLAIN_ARCHITECTURES = frozenset(_PLAIN_NAMES.split())

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class ModelHeader:
    """Architecture and memory class of a model file."""

    arch: str
    window: int
    recurrent: bool

    @property
    def plain(self) -> bool:
        """Plain attention: a share of any length is possible and pool ids cost nothing at start."""
        return self.arch in PLAIN_ARCHITECTURES and not self.window and not self.recurrent


def read_header(path: Path) -> ModelHeader:
    """The header of a GGUF file. SettingsError when it is none, or is cut short."""
    try:
        with path.open("rb") as file:
            return _read(file, path)
    except OSError as error:
        raise SettingsError(f"the model {path} cannot be read: {error.strerror}") from error
    except (struct.error, EOFError, UnicodeDecodeError) as error:
        raise SettingsError(f"the model {path} is not a whole GGUF file; fetch it again") from error


def auto_pools(path: Path | None, *, split: bool = False) -> int:
    """How many pools `auto` means for a model file; a file that is not known yet counts as an unknown architecture.

    On a `split` cache each takes as much memory as a slot.
    """
    return PLAIN_POOLS if path is not None and read_header(path).plain and not split else OTHER_POOLS


def _read(file: BinaryIO, path: Path) -> ModelHeader:
    magic, version, _tensors, pairs = struct.unpack("<4sIQQ", file.read(24))
    if magic != b"GGUF" or version < 2:
        raise SettingsError(f"the model {path} is not a GGUF file (version 2 or later)")
    arch, window, recurrent = "", 0, False
    for key, value in _pairs(file, pairs):
        if key == "general.architecture":
            arch = str(value)
        elif key.endswith(".attention.sliding_window"):
            window = value if isinstance(value, int) else 1
        elif ".ssm." in key or ".wkv." in key or key.endswith((".recurrent", ".shortconv.l_cache")):
            recurrent = True
        elif arch and key.startswith("tokenizer.ggml."):
            break  # the model's own keys come before its vocabulary
    return ModelHeader(arch or "unknown", window, recurrent)


def _pairs(file: BinaryIO, n: int) -> Iterator[tuple[str, object]]:
    for _ in range(n):
        yield _string(file), _value(file, _number(file, "<I"))


def _value(file: BinaryIO, kind: int) -> object:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        _skip_array(file)
        return None
    if kind not in _FORMATS:
        raise EOFError
    return struct.unpack(_FORMATS[kind], file.read(_SIZES[kind]))[0]


def _skip_array(file: BinaryIO) -> None:
    kind, n = _number(file, "<I"), _number(file, "<Q")
    if kind == _STRING:
        for _ in range(n):
            file.seek(_number(file, "<Q"), 1)
    elif kind in _SIZES:
        file.seek(n * _SIZES[kind], 1)
    else:
        raise EOFError


def _string(file: BinaryIO) -> str:
    n = _number(file, "<Q")
    data = file.read(n) if n < _LIMIT else b""
    if len(data) != n:
        raise EOFError
    return data.decode()


def _number(file: BinaryIO, form: str) -> int:
    value = struct.unpack(form, file.read(struct.calcsize(form)))[0]
    assert isinstance(value, int)
    return value
