"""Encoding and decoding by each codec in GB/s of float32 values, beside memcpy of as many.

One thread, values that no cache holds. Both ways of a codec and the copy take turns; a number is the median
of the rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.report import Options, Report, Table, present
from paceline.comm.codecs import Codec, CodecKeys, bf16_fp16, fixed_point, int8_int4_int2, sign, top_k
from paceline.comm.codecs.codec_kernels import load_kernels
from paceline.comm.codecs.strategy_codec import build_codec
from paceline.comm.workspace import Workspace
from paceline.recipe import Strategy

_CODECS = (
    "bf16",
    "fp16",
    "int8",
    "int8:stochastic",
    "int4",
    "int2",
    "fixed:8",
    "sign",
    "topk:0.01",
    "topk:0.01+int4",
    "randomk:0.01",
)
_KEYS = CodecKeys(1, 2)


def without_kernels(word: str) -> Codec:
    """A codec as it is where there is no compiler."""
    with ExitStack() as patches:
        for module in (fixed_point, bf16_fp16, int8_int4_int2, sign, top_k):
            patches.enter_context(patch.object(module, "load_kernels", lambda: None))
        return built(word)


def built(word: str) -> Codec:
    """A codec by its word."""
    found = build_codec(Strategy(codec=word))
    assert found is not None
    return found


def sides_of(codec: Codec, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What is timed of a codec; memory is there already."""
    workspace, out = Workspace(), torch.empty_like(x)
    payload = codec.encode(x, _KEYS, Workspace())
    return {
        "encode": lambda: codec.encode(x, _KEYS, workspace),
        "decode": lambda: codec.decode(payload, out, _KEYS, workspace),
    }


def measure_all(num_values: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of every side, by `codec, way`, in turns."""
    x = torch.randn(1, num_values, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(x)
    sides: dict[str, Callable[[], object]] = {"memcpy": lambda: out.copy_(x)}
    for word in _CODECS:
        for how, codec in (("kernels", built(word)), ("PyTorch", without_kernels(word))):
            sides |= {f"{word}, {way}, {how}": run for way, run in sides_of(codec, x).items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats + 1):
        for name, run in sides.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return {name: found[1:] for name, found in seconds.items()}


def measure(options: Options) -> Report:
    """All codecs."""
    num_values, repeats = (1 << 14, 2) if options.quick else (1 << 23, 9)
    torch.set_num_threads(1)
    found = measure_all(num_values, repeats)
    medians = {name: statistics.median(times) for name, times in found.items()}
    copy = medians["memcpy"]

    def cells(word: str, way: str) -> list[str]:
        fast, slow = (medians[f"{word}, {way}, {how}"] for how in ("kernels", "PyTorch"))
        return [f"{4e-9 * num_values / slow:.2f}", f"{4e-9 * num_values / fast:.2f}", f"{copy / fast:.2f}"]

    rows = [[word, *cells(word, "encode"), *cells(word, "decode")] for word in _CODECS]
    have = "are there" if load_kernels() is not None else "are not there (no compiler): both ways are PyTorch"
    remarks = [f"memcpy: {4e-9 * num_values / copy:.2f} GB/s; compiled kernels {have}"]
    columns = (
        "codec",
        "encode, PyTorch",
        "with kernels",
        "of memcpy",
        "decode, PyTorch",
        "with kernels",
        "of memcpy",
    )
    title = f"GB/s of float32, {num_values >> 20} Mi values, 1 thread, median of {repeats}"
    data: dict[str, Any] = {"seconds": found, "num_values": num_values}
    return Report("How fast codecs code, beside memcpy.", [Table(title, columns, rows, remarks)], data)


if __name__ == "__main__":
    present(measure, __doc__ or "")
