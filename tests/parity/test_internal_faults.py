"""Faults planted inside Paceline, in each layer and layout: verification is red and names the cause.

The faults of `paceline.testing.planted_faults` exchange a component; these change one function.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from paceline.comm.handle import Handle
from paceline.comm.reduction import ScatterReducer, joint_norm
from paceline.comm.reduction.gradient_norm import SharedNorm
from paceline.comm.reduction.tied_gradients import TiedGradientReduction
from paceline.comm.routes.native import NativeCollective
from paceline.data.work import LockstepWork, split_evenly
from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.parallel.context import ring_attention
from paceline.parallel.model_buffers import MicroBatchBuffers
from paceline.parallel.model_runner import LossSums
from paceline.parallel.pipeline import forward_backward
from paceline.parallel.tensor import mappings
from paceline.parallel.zero import SharedReadAfterUpdate
from paceline.sync import update
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, make_task
from paceline.verification import compare_with_oracle
from tests.parity.test_strategy_combinations import gpt

Patch = AbstractContextManager[Any]
ZERO_1, ZERO_2 = "replicas=1 shard=2 zero=1", "replicas=1 shard=2 zero=2"
TENSOR, PIPELINE, CONTEXT = "replicas=1 tensor=2", "replicas=1 pipeline=2", "replicas=1 context=2"
MEMORY = "paceline.comm.routes.shared_memory"


class Fault(NamedTuple):
    """A fault under a strategy.

    Args:
        plant: returns the context manager that plants it.
        cause: the diagnosis that names it.
    """

    strategy: str
    plant: Callable[[], Patch]
    cause: str
    task: str = "byte-gpt"


def first_buffer_alone(buffers: list[Tensor], index: int) -> None:
    part = slice(*(len(buffers[0]) * end // len(buffers) for end in (index, index + 1)))
    for other in buffers[1:]:
        other[part].copy_(buffers[0][part])


def changed_sum(change: Callable[[Tensor], Tensor]) -> Patch:
    all_reduce = NativeCollective.all_reduce

    def changed(self: NativeCollective, x: Tensor, key: str) -> Handle:
        return all_reduce(self, x, key).then(lambda total: total.copy_(change(total)))

    return patch.object(NativeCollective, "all_reduce", changed)


def clip_by_norm_of_sums(clip_norm: float) -> update.UpdatePart:
    def part(record: update.PendingUpdate) -> None:
        if record.norm * record.divisor > clip_norm:
            record.multiplier = clip_norm / record.norm / record.divisor**2

    return part


def rate_of_update_before(rate: Any) -> update.UpdatePart:
    def part(record: update.PendingUpdate) -> None:
        rate.apply(record.state.optimizer, max(0, record.state.num_updates - 1))
        record.lr = float(record.state.optimizer.param_groups[0]["lr"])

    return part


def last_scatter_alone() -> Patch:
    complete = ScatterReducer._on_complete

    def replacing(self: ScatterReducer, scatter: Any, row: Tensor) -> None:
        scatter.bucket.is_fresh = True
        complete(self, scatter, row)

    return patch.object(ScatterReducer, "_on_complete", replacing)


def counted_twice() -> Patch:
    read = LossSums.read

    def doubled(self: LossSums) -> Any:
        total, count, metrics = read(self)
        return total, 2 * count, metrics

    return patch.object(LossSums, "read", doubled)


def own_buffers() -> Patch:
    end_step = MicroBatchBuffers.end_step
    return patch.object(
        MicroBatchBuffers, "end_step", lambda self, change, number: end_step(self, self.change, number / 2)
    )


def other_keys_in_stages() -> Patch:
    seed = forward_backward.seed_micro_batch
    return patch.object(
        forward_backward, "seed_micro_batch", lambda key, *args, **kwargs: seed(key + 1, *args, **kwargs)
    )


def doubled_blocks() -> Patch:
    backward = ring_attention._backward_block

    def doubled(*args: Any) -> Any:
        return tuple(None if g is None else 2 * g for g in backward(*args))

    return patch.object(ring_attention, "_backward_block", doubled)


def static(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], Patch]:
    return lambda: patch.object(owner, name, staticmethod(function))


FAULTS: dict[str, Fault] = {
    "shared memory adds nothing": Fault(
        "replicas=2", lambda: patch(f"{MEMORY}.sum_slice_in_all", lambda buffers, index: None), "not reduced"
    ),
    "shared memory leaves out a rank": Fault(
        "replicas=2", lambda: patch(f"{MEMORY}.sum_slice_in_all", first_buffer_alone), "a rank is left out"
    ),
    "a sum counts every rank twice": Fault(
        "replicas=2 route=native", lambda: changed_sum(lambda total: 2 * total), "sum instead of mean"
    ),
    "a sum is rounded to half precision": Fault(
        "replicas=2 route=native", lambda: changed_sum(lambda total: total.half().float()), "digits lost"
    ),
    "replicas share one block of shards": Fault(
        "replicas=2",
        lambda: patch.object(
            LockstepWork, "_block", lambda self: split_evenly(self.shards, self.num_replicas, 0)
        ),
        "same data on every rank",
    ),
    "the update divides by one": Fault(
        "replicas=2",
        lambda: patch.object(update, "divide_by", lambda reduction, part=update.divide_by: part("sum")),
        "not divided by the count",
    ),
    "the clip measures sums": Fault(
        "replicas=2", lambda: patch.object(update, "clip_to", clip_by_norm_of_sums), "wrong clip norm"
    ),
    "the rate is that of the update before": Fault(
        "replicas=2", lambda: patch.object(update, "set_rate", rate_of_update_before), "schedule off by one"
    ),
    "backward forgets the scale": Fault(
        "replicas=2",
        lambda: patch(
            "paceline.parallel.data_parallel.backward_scaled", lambda total, scale: total.backward()
        ),
        "loss not scaled",
    ),
    "items are counted twice": Fault("replicas=2", counted_twice, "wrong count of items"),
    "buffers follow this rank alone": Fault("replicas=2", own_buffers, "buffers not synchronised", "digits"),
    "a scatter replaces the one before": Fault(ZERO_2, last_scatter_alone, "accumulation lost"),
    "a scatter keeps the own row": Fault(
        ZERO_2, lambda: patch(f"{MEMORY}.sum_into_row", lambda rows, index, scratch: None), "not reduced"
    ),
    "parts are not gathered": Fault(
        ZERO_1,
        lambda: patch.object(SharedReadAfterUpdate, "__call__", lambda self: None),
        "parameters not gathered",
    ),
    "the norm is that of a rank": Fault(
        ZERO_2,
        lambda: patch.object(SharedNorm, "__call__", lambda self, grads: joint_norm(grads.norms)),
        "wrong clip norm",
    ),
    "partial outputs are not summed": Fault(
        TENSOR,
        static(mappings._ReduceFromRegion, "forward", lambda ctx, x, collective, key: x.clone()),
        "wrong forward of the partition",
    ),
    "partial gradients are not summed": Fault(
        TENSOR,
        static(mappings._CopyToRegion, "backward", lambda ctx, grad: (grad, None, None)),
        "wrong backward of the partition",
    ),
    "a gradient is counted on both ranks": Fault(
        TENSOR,
        static(mappings._ReduceFromRegion, "backward", lambda ctx, grad: (2 * grad, None, None)),
        "wrong backward of the partition",
    ),
    "a tied gradient is that of one stage": Fault(
        PIPELINE,
        lambda: patch.object(
            TiedGradientReduction,
            "_sum_over_holders",
            lambda self, slot, shards: self._held.get((slot, shards), torch.zeros(slot.sizes)),
        ),
        "tied gradient not summed",
    ),
    "stages draw other dropout masks": Fault(
        PIPELINE, other_keys_in_stages, "wrong forward of the partition"
    ),
    "blocks of attention are not merged": Fault(
        CONTEXT,
        lambda: patch.object(ring_attention, "_merge_softmax", lambda out, lse, block: None),
        "wrong forward of the partition",
    ),
    "blocks of attention have twice the gradient": Fault(
        CONTEXT, doubled_blocks, "wrong backward of the partition"
    ),
}


def diagnoses(cluster: Cluster) -> dict[str, tuple[bool, str]]:
    """Return for each fault whether verification is green, and the cause that it names."""
    found = {}
    for name, fault in FAULTS.items():
        # Heads that ranks cannot share, so that blocks of keys and values go around the ring.
        options = {**gpt(fault.strategy).options, "heads": 3 if fault.strategy == CONTEXT else 2}
        changes = {"options": {"model": "convnet"} if fault.task == "digits" else options}
        recipe = gpt(
            fault.strategy,
            task=fault.task,
            schedule={"decay": "cosine"},
            batch={"size": 21, "shards": 6},
            **changes,
        )
        try:
            with fault.plant():
                report = compare_with_oracle(recipe, make_task(recipe), cluster, CPU, 3)
        except TaskError as error:
            # Checks of a partitioned model refuse to start, on all ranks alike.
            found[name] = False, f"refused: {error.what}"
            continue
        found[name] = report.ok, "" if report.diagnosis is None else report.diagnosis.cause
    return found


@pytest.mark.capability("Z2")
def test_every_fault_inside_is_found_and_named() -> None:
    found = run_ranks(diagnoses, 2, deadline=600)[0]
    assert len(FAULTS) >= 20
    assert [name for name, (is_green, _) in found.items() if is_green] == []
    wrong = {
        name: cause
        for name, (_, cause) in found.items()
        if cause != FAULTS[name].cause
        and not (cause.startswith("refused: ") and FAULTS[name].strategy in (TENSOR, CONTEXT))
    }
    assert wrong == {}
