"""On what a process computes: an NVIDIA GPU of its own, or the processor."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from paceline.errors import DeviceError


def choose_device(name: str, local_rank: int, processes_here: int) -> torch.device:
    """`auto` takes one NVIDIA GPU a process where there are enough, the processor otherwise.

    Raises:
        DeviceError: "cuda" was asked for and is not there.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cuda" and count < processes_here:
        raise DeviceError(
            f'runtime.device = "cuda": this host has {count} NVIDIA GPUs for {processes_here} processes',
            next_step='start fewer processes, or set runtime.device = "auto" to use the processor',
        )
    if name == "cpu" or count < processes_here:
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def idle_gpus(asked: str, device: torch.device, processes_here: int) -> Iterator[str]:
    """A sentence if there are GPUs and this job uses none of them though it was free to.

    Args:
        asked: `runtime.device`.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "auto" and device.type == "cpu" and count:
        yield (
            f"this host has {count} NVIDIA GPUs for {processes_here} processes, so all compute on the"
            f" processor; with at most {count} processes each has a GPU"
        )
