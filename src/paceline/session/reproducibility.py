"""What else the bits depend on: checked before a reproducible run starts.

Invariant: a reproducible run that starts computes each shard with the same instructions on every rank.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from paceline.comm.group_collectives import all_gather_texts
from paceline.comm.net import Net
from paceline.errors import DeviceError, StrategyError
from paceline.job.mesh import Mesh
from paceline.parallel.sharded_model import ShardedModel

_SMALLEST_NORMAL = 2.0**-126


def numerics_fingerprint() -> dict[str, str]:
    """What the arithmetic of this process depends on beside the recipe, by name."""
    denormal = torch.tensor([_SMALLEST_NORMAL]) * 0.5
    return {
        "torch": torch.__version__,
        "processor": _cpu_model(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads in an operation": str(torch.get_num_threads()),
        "denormal numbers": "kept" if bool(denormal != 0) else "flushed to zero",
        "oneDNN": str(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled),
        "precision of float32 products": torch.get_float32_matmul_precision(),
        "default type": str(torch.get_default_dtype()),
    }


def fingerprint_differences(before: Mapping[str, str]) -> str:
    """What of an earlier fingerprint is different now, in words; empty if nothing is."""
    now = numerics_fingerprint()
    found = [f"{n}: {before[n]} then, {now[n]} now" for n in now if n in before and before[n] != now[n]]
    return ", ".join(found)


def _cpu_model() -> str:
    """The model of the processor: kernels are chosen by it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def check_numerics(
    mesh: Mesh, net: Net, sharded_model: ShardedModel, optimizer: torch.optim.Optimizer
) -> None:
    """Refuse a reproducible run that could not keep its promise; collective.

    Raises:
        StrategyError, TaskError: what is asked for here does not keep its bits.
        DeviceError: ranks do not compute alike.
    """
    check_this_rank(sharded_model.device, optimizer)
    check_types(sharded_model, mesh.axes["shard"].size)
    check_same_numerics(mesh, net)


def check_same_numerics(mesh: Mesh, net: Net) -> None:
    """Compare the fingerprints of all ranks; collective.

    Raises:
        DeviceError: they differ; names ranks, what differs and the values.
    """
    mine = numerics_fingerprint()
    known = [json.loads(text) for text in all_gather_texts(json.dumps(mine), mesh.world, net)]
    for name in mine:
        by_value: dict[str, list[int]] = {}
        for rank, found in enumerate(known):
            by_value.setdefault(found[name], []).append(rank)
        if len(by_value) > 1:
            spelled = ", ".join(f"{value} on ranks {ranks}" for value, ranks in by_value.items())
            raise DeviceError(
                f"reproducible = true, and ranks do not compute alike: {name} is {spelled}",
                next_step="use machines and settings of one kind, or leave out reproducible",
            )


def check_this_rank(device: torch.device, optimizer: torch.optim.Optimizer) -> None:
    """What one rank can see by itself.

    Raises:
        StrategyError: this rank computes on a GPU, on several threads, or with a fused optimizer.
    """
    reasons = {
        f"its kernels on {device} are not proven to keep their bits": device.type != "cpu",
        f"an operation runs on {torch.get_num_threads()} threads": torch.get_num_threads() > 1,
        "a fused optimizer rounds by where a tensor is cut": any(
            group.get("fused") for group in optimizer.param_groups
        ),
    }
    broken = [reason for reason, holds in reasons.items() if holds]
    if broken:
        raise StrategyError(
            f"reproducible = true, but {'; '.join(broken)}",
            next_step='runtime.device = "cpu", one thread (lanes use the cores), and fused = False'
            " in the task's own optimizer",
        )


def check_types(sharded_model: ShardedModel, num_shards: int) -> None:
    """A kernel rounds half types otherwise at the end of a run of memory than inside it.

    Raises:
        StrategyError: a parameter of a half type would be updated in parts.
    """
    half = [
        slot.name for slot, p in sharded_model.computes.items() if p.dtype in (torch.bfloat16, torch.float16)
    ]
    if half and num_shards > 1:
        raise StrategyError(
            f"reproducible = true, and '{half[0]}' is bf16 or fp16: its update depends on where it is cut",
            next_step="keep parameters in float32 (precision.compute sets the type of the arithmetic), or"
            " leave out shard",
        )
