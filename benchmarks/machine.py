"""The machine and the versions, as every result carries them: no host name and no path."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from paceline.tuning.hardware_defaults import MatrixProduct, choose_precision, find_gain

_GPT_PRODUCT = MatrixProduct(rows=2048, inner=192, columns=768)
"""Eight windows of 256 bytes through the wide layer of recipes/byte-gpt.toml."""
_PACKAGES = ("paceline", "torch", "accelerate", "lightning", "numpy")


def describe_machine() -> dict[str, str]:
    """What a reader needs to judge a time, in words."""
    load = " ".join(f"{x:.2f}" for x in os.getloadavg())
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "processor": f"{processor_model()}, {len(os.sched_getaffinity(0))} cores",
        "versions": ", ".join(["python " + python_version(), *_versions()]),
        "load average at the start (1, 5, 15 min)": load,
    }


def number_format(asked: str) -> tuple[str, str]:
    """The format in which the GPT computes, and why: what was asked for, or what one product says is fast.

    Args:
        asked: "bf16", "fp32" or "auto".
    """
    if asked != "auto":
        return asked, f"{asked}, as asked for"
    choice = choose_precision([find_gain(_GPT_PRODUCT, torch.device("cpu"))])
    return choice.compute, f"{choice.compute}, as {choice.reason}"


def processor_model() -> str:
    """The name that the processor gives itself."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def python_version() -> str:
    """For example 3.11.7."""
    return ".".join(str(part) for part in __import__("sys").version_info[:3])


def _versions() -> list[str]:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    return found
