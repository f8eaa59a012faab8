"""One safetensors file: its header, and its tensors as views of its bytes.

The header also says where each tensor lies in its whole, the way torch.distributed.checkpoint's reader of
Hugging Face checkpoints expects it. Written here because a file is streamed and hashed on the way, which
safetensors' own writer cannot do.

Source: the safetensors format, https://github.com/huggingface/safetensors (8 bytes of length, JSON, data).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from paceline.checkpoint.strict_json import parse

_ALIGNMENT = 8
_CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
_TYPES = {code: dtype for dtype, code in _CODES.items()}


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor.

    Args:
        name: of the whole tensor.
        dtype: "F32" and so on, as safetensors spells it.
        shape: of the whole tensor.
        offsets: where the box begins in the whole.
        sizes: of the box.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.sizes) * dtype_of(self.dtype).itemsize


def code_of(dtype: torch.dtype) -> str | None:
    """The format's word for a type; None if it has none."""
    return _CODES.get(dtype)


def is_code(word: str) -> bool:
    """Whether the format has such a word."""
    return word in _TYPES


def dtype_of(code: str) -> torch.dtype:
    """The type of a word; KeyError if it is none."""
    return _TYPES[code]


def keys_of(chunks: Sequence[Chunk]) -> list[str]:
    """What chunks are called in their file: by their tensor; boxes of one tensor also by their place."""
    count = Counter(chunk.name for chunk in chunks)
    return [c.name if count[c.name] == 1 else f"{c.name} at {list(c.offsets)}" for c in chunks]


def encode_header(chunks: Sequence[Chunk]) -> bytes:
    """What stands before the data of the chunks, which follow each other without gaps."""
    keys = keys_of(chunks)
    offsets = {key: {"saved_offsets": c.offsets} for key, c in zip(keys, chunks, strict=True)}
    entries: dict[str, object] = {
        "__metadata__": {
            "format": "pt",
            "DCP_SHARDING_INFO": json.dumps(offsets),
        }
    }
    end = 0
    for key, chunk in zip(keys, chunks, strict=True):
        begin, end = end, end + chunk.num_bytes
        entries[key] = {"dtype": chunk.dtype, "shape": chunk.sizes, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def decode(data: bytes | bytearray) -> dict[str, Tensor]:
    """The tensors of a file, as read-only views of its bytes.

    Raises:
        ValueError: this is no safetensors file.
    """
    try:
        return _decode(data)
    except (KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"it is no safetensors file: {type(error).__name__}: {error}") from error


def _decode(data: bytes | bytearray) -> dict[str, Tensor]:
    length = int.from_bytes(data[:8], "little")
    header = parse(bytes(data[8 : 8 + length]))
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, (begin, end) = dtype_of(entry["dtype"]), entry["data_offsets"]
        count = (end - begin) // dtype.itemsize
        if not 0 <= begin <= end <= len(data) - length - 8:
            raise ValueError(f"'{name[:80]}' lies outside of the file")
        if count:
            flat = torch.frombuffer(data, dtype=dtype, count=count, offset=8 + length + begin)
        else:
            flat = torch.empty(0, dtype=dtype)
        found[name] = flat.view(entry["shape"])
    return found
