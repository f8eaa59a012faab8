"""Checks before a reproducible run: machine, software and settings on which the bits depend.

Invariant: a reproducible run that starts computes each shard with the same instructions on every rank.
Sums in one order are built elsewhere (`parallel.gradient_reduction`).
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
from paceline.job.cluster import change_environment, process_environment
from paceline.job.mesh import Mesh
from paceline.parallel.sharded_model import ShardedModel

_SMALLEST_NORMAL = 2.0**-126
MKL_VARIABLE, MKL_EQUAL_ROWS = "MKL_CBWR", "AUTO,STRICT"


def needs_equal_rows() -> bool:
    """Return whether a row among a few has other bits on this processor than the same row among many.

    Measured with MKL 2024.2: with AMX a row among 4 differs from that among 96; without it those of 4 and
    more were equal.
    """
    try:
        return " amx_tile " in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


def request_equal_rows() -> None:
    """Ask MKL for matrix products whose rows do not depend on how many rows there are, where that is needed.

    It chooses kernels by the shape of a product, so the policy of an actor may not be that of the learner.
    MKL reads the variable in the first product of a process, which is here unless the program has computed
    one before. A value that is set stays, and afterwards the environment is as it was.
    Source: oneMKL Developer Guide, Conditional Numerical Reproducibility, strict mode.
    """
    before = process_environment().get(MKL_VARIABLE)
    if before or not needs_equal_rows():
        return
    change_environment({MKL_VARIABLE: MKL_EQUAL_ROWS})
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    change_environment({MKL_VARIABLE: before})


def numerics_fingerprint() -> dict[str, str]:
    """Return by name what the arithmetic of this process depends on, besides the recipe."""
    # Half of the smallest normal number: zero if this process flushes denormal numbers.
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
        "kernels of MKL": process_environment().get(MKL_VARIABLE) or "by processor and shape",
    }


def fingerprint_differences(before: Mapping[str, str]) -> str:
    """Describe how this process differs from an earlier fingerprint; empty if it does not."""
    present = numerics_fingerprint()
    changed = [name for name in present if name in before and before[name] != present[name]]
    return ", ".join(f"{name}: {before[name]} before, {present[name]} now" for name in changed)


def _cpu_model() -> str:
    """Return the model of the CPU, by which kernels are chosen."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def check_numerics(
    mesh: Mesh, net: Net, sharded_model: ShardedModel, optimizer: torch.optim.Optimizer
) -> None:
    """Raise an error if the bits of a reproducible run could depend on the number of ranks; collective.

    Raises:
        StrategyError: this rank uses a GPU, several threads, a fused optimizer or a partitioned
            half-precision tensor.
        DeviceError: ranks have different machines or software.
    """
    check_this_rank(sharded_model.device, optimizer)
    check_types(sharded_model, mesh.axes["shard"].size)
    check_same_numerics(mesh, net)


def check_same_numerics(mesh: Mesh, net: Net) -> None:
    """Compare the fingerprints of all ranks; collective.

    Raises:
        DeviceError: they differ; the error names the ranks and their values.
    """
    local = numerics_fingerprint()
    fingerprints = [json.loads(text) for text in all_gather_texts(json.dumps(local), mesh.world, net)]
    for name in local:
        by_value: dict[str, list[int]] = {}
        for rank, fingerprint in enumerate(fingerprints):
            by_value.setdefault(fingerprint[name], []).append(rank)
        if len(by_value) > 1:
            values = ", ".join(f"{value} on ranks {ranks}" for value, ranks in by_value.items())
            raise DeviceError(
                f"reproducible = true, but ranks differ: {name} is {values}",
                next_step="use equal machines and settings on all ranks, or remove reproducible",
            )


def check_this_rank(device: torch.device, optimizer: torch.optim.Optimizer) -> None:
    """Check device, threads and optimizer of this rank.

    Raises:
        StrategyError: this rank computes on a GPU, on several threads, or with a fused optimizer.
    """
    reasons = {
        f"kernels on {device} are not known to be deterministic": device.type != "cpu",
        f"operations use {torch.get_num_threads()} threads": torch.get_num_threads() > 1,
        "a fused optimizer rounds depending on how a tensor is partitioned": any(
            group.get("fused") for group in optimizer.param_groups
        ),
    }
    broken = [reason for reason, holds in reasons.items() if holds]
    if broken:
        raise StrategyError(
            f"reproducible = true, but {'; '.join(broken)}",
            next_step='set runtime.device = "cpu", use one thread (lanes use the cores), and pass fused=False'
            " to the task's own optimizer",
        )


def check_types(sharded_model: ShardedModel, num_shards: int) -> None:
    """Check that no half-precision parameter is partitioned: kernels round its last elements differently.

    Raises:
        StrategyError: a bf16 or fp16 parameter would be updated in parts.
    """
    half = [
        slot.name for slot, p in sharded_model.computes.items() if p.dtype in (torch.bfloat16, torch.float16)
    ]
    if half and num_shards > 1:
        raise StrategyError(
            f"reproducible = true, but '{half[0]}' is bf16 or fp16, whose update depends on how it is"
            " partitioned",
            next_step="keep parameters in float32 (precision.compute sets the format of the arithmetic), or"
            " remove shard",
        )
