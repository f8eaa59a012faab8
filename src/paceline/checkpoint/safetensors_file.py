"""A safetensors file: its header, and its tensors as views of its bytes.

The header also says where each tensor lies in the whole tensor, as torch.distributed.checkpoint's reader of
Hugging Face checkpoints expects it. The format is written here because a file is streamed and hashed on the
way, which the safetensors library cannot do.

Source: the safetensors format, https://github.com/huggingface/safetensors (8 bytes of length, JSON, data).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from mmap import mmap
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from torch import Tensor

from paceline.checkpoint.strict_json import Count, parse, validate

_ALIGNMENT = 8
_METADATA = "__metadata__"
_DTYPE_CODES = {
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
_DTYPES_BY_CODE = {code: dtype for dtype, code in _DTYPE_CODES.items()}


@dataclass(frozen=True)
class TensorChunk:
    """A box of a tensor.

    Args:
        name: of the whole tensor.
        dtype: code of safetensors, such as "F32".
        shape: of the whole tensor.
        offsets: where the box begins in the whole tensor.
        sizes: of the box.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the box."""
        return prod(self.sizes) * dtype_of_code(self.dtype).itemsize


def dtype_code(dtype: torch.dtype) -> str | None:
    """Return the code of a dtype; None if the format has none."""
    return _DTYPE_CODES.get(dtype)


def is_dtype_code(word: str) -> bool:
    """Return whether the format has such a code."""
    return word in _DTYPES_BY_CODE


def dtype_of_code(code: str) -> torch.dtype:
    """Return the dtype of a code; KeyError if there is none."""
    return _DTYPES_BY_CODE[code]


def chunk_keys(chunks: Sequence[TensorChunk]) -> list[str]:
    """Return the names of chunks in their file: that of the tensor, with offsets if a file has several boxes
    of it.
    """
    count = Counter(chunk.name for chunk in chunks)
    return [c.name if count[c.name] == 1 else f"{c.name} at {list(c.offsets)}" for c in chunks]


def encode_header(chunks: Sequence[TensorChunk]) -> bytes:
    """Return the bytes in front of the data of the chunks, which follow each other without gaps."""
    keys = chunk_keys(chunks)
    offsets = {key: {"saved_offsets": c.offsets} for key, c in zip(keys, chunks, strict=True)}
    entries: dict[str, object] = {
        _METADATA: {
            "format": "pt",
            "DCP_SHARDING_INFO": json.dumps(offsets),
        }
    }
    end = 0
    for key, chunk in zip(keys, chunks, strict=True):
        begin, end = end, end + chunk.num_bytes
        entries[key] = {"dtype": chunk.dtype, "shape": chunk.sizes, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Padding aligns the data, so that readers can map tensors in place.
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def decode_tensors(data: bytes | bytearray | mmap) -> dict[str, Tensor]:
    """Return the tensors of a file, as views of its bytes.

    Raises:
        ValueError: this is no safetensors file.
    """
    try:
        return _decode(data)
    except (KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"it is no safetensors file: {type(error).__name__}: {error}") from error


def _decode(data: bytes | bytearray | mmap) -> dict[str, Tensor]:
    length = int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in parse_entries(bytes(data[8 : 8 + length]), len(data) - length - 8).items():
        count = (entry.end - entry.begin) // entry.dtype.itemsize
        # `torch.frombuffer` refuses to read 0 values.
        if count:
            flat = torch.frombuffer(data, dtype=entry.dtype, count=count, offset=8 + length + entry.begin)
        else:
            flat = torch.empty(0, dtype=entry.dtype)
        tensors[name] = flat.view(entry.shape)
    return tensors


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor in a header; `begin` and `end` are bytes after the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class _TensorModel(BaseModel):
    """The header entry of a tensor; other libraries may add keys."""

    model_config = ConfigDict(strict=True)

    dtype: str
    shape: list[Count]
    data_offsets: Annotated[tuple[Count, Count], Field(strict=False)]  # a list in JSON


_TENSOR = TypeAdapter(_TensorModel)
_HEADER: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any], config=ConfigDict(strict=True))
_TEXTS: TypeAdapter[dict[str, str]] = TypeAdapter(dict[str, str], config=ConfigDict(strict=True))


def parse_entries(header: bytes, num_bytes: int) -> dict[str, HeaderEntry]:
    """Return the tensors of a file, by name.

    Args:
        header: the JSON.
        num_bytes: of the data after it.
    Raises:
        ValueError: this is no header of such a file.
    """
    entries = validate(_HEADER, parse(header), "the header")
    return {
        name: _parse_entry(name, entry, num_bytes) for name, entry in entries.items() if name != _METADATA
    }


def _parse_entry(name: str, value: Any, num_bytes: int) -> HeaderEntry:
    entry = validate(_TENSOR, value, f"'{name[:80]}'")
    if not is_dtype_code(entry.dtype):
        raise ValueError(f"'{name[:80]}' has the type {entry.dtype[:20]}, which is unknown here")
    dtype, shape, (begin, end) = dtype_of_code(entry.dtype), tuple(entry.shape), entry.data_offsets
    if not begin <= end <= num_bytes:
        raise ValueError(f"'{name[:80]}' lies outside of the file")
    if end - begin != prod(shape) * dtype.itemsize:
        raise ValueError(f"'{name[:80]}' has {end - begin} bytes, which are not those of its shape")
    return HeaderEntry(dtype, shape, begin, end)


def parse_metadata(header: bytes) -> Mapping[str, str]:
    """Return the texts of a header that belong to no tensor.

    Raises:
        ValueError: this is no header of such a file.
    """
    entries = validate(_HEADER, parse(header), "the header")
    return validate(_TEXTS, entries.get(_METADATA, {}), _METADATA)
