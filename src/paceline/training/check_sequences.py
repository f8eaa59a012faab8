"""Does a model on parts of a sequence compute what it does on the whole? Asked before the first step.

A model may look at positions elsewhere than in attention (a convolution, a mean, an index of its own that
begins at 0 on every rank), and a loss may compare neighbours: all of that would train something else in
silence. So the ranks run the first sample whole and in parts, as they are laid out (stages pass it on), in
evaluation and in the parameters' type. What the model returns is compared value by value, and what the loss
adds up to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.comm import Net
from paceline.comm.text import gather_texts
from paceline.data import LoadedBatch, MicroBatch, collate_samples
from paceline.errors import TaskError
from paceline.layout import Placed
from paceline.layout.context import Trial
from paceline.mesh import Group, Mesh
from paceline.models.positions import positions
from paceline.slot import Slot
from paceline.task import Loss, Task
from paceline.training.contract import buffers_kept, check_loss

_CLOSE = 1e-4
_STEPS = 32  # of the coarsest type, where that is more


class _Looked(NamedTuple):
    """What a rank has seen of the model's outputs: the tensors, or how far each is off; and of the losses."""

    outputs: list[Any]
    sums: list[Tensor]


def check_task(task: Task, placed: Placed, net: Net, mesh: Mesh) -> None:
    """All that is asked of a task before the first step; collective. See `check_loss`, `check_sequences`."""
    check_loss(task, placed, net, mesh.world)
    if mesh.axes["context"].size > 1:
        check_sequences(task, placed, net, mesh)


def check_sequences(task: Task, placed: Placed, net: Net, mesh: Mesh) -> None:
    """Compare the first sample whole and in parts; collective.

    Raises:
        TaskError: they differ, or the model has buffers that a forward changes; the same on every rank.
    Wire: what the layout sends for a training of one sample and two forwards, and a few numbers.
    """
    batch = collate_samples(task, [task.data[0]], placed.holding.device)
    with torch.random.fork_rng(), buffers_kept(placed.holding.model):
        _agree(_of_buffers(placed, batch), net, mesh.world)
        whole = _look(task, placed, Trial(batch, is_whole=True), [])
        parts = _look(task, placed, Trial(batch, is_whole=False), whole.outputs)
    _agree(_of_values(whole, parts, net, mesh.axes["context"]), net, mesh.world)


def _agree(mistake: tuple[str, str] | None, net: Net, world: Group) -> None:
    """Raises: TaskError: a rank has found a mistake; that of the first, on every rank."""
    texts = gather_texts(json.dumps(mistake) if mistake else "", world, net)
    found = next((text for text in texts if text), "")
    if found:
        what, next_step = json.loads(found)
        raise TaskError(what, next_step=next_step)


def allowed_for(tensors: Sequence[Tensor]) -> float:
    """How much of the largest value rounding may take, in their coarsest type."""
    types = {x.dtype for x in tensors if x.is_floating_point()}
    return max([_CLOSE, *(_STEPS * torch.finfo(one).eps for one in types)])


def _look(task: Task, placed: Placed, batch: Trial, whole: Sequence[Tensor]) -> _Looked:
    """Forward; what the model returns, or how far that is off the whole, where that is known."""
    looked = _Looked([], [])

    def listen(_: nn.Module, inputs: Any, output: Any) -> None:
        values = values_of(output)
        looked.outputs.extend(map(_off, whole, values) if whole else values)

    placed.answer([_loaded(batch)], partial(_ask, task, listen, looked.sums))
    return looked


def _ask(task: Task, listen: Any, sums: list[Tensor], model: nn.Module, batch: Any) -> None:
    hook = model.register_forward_hook(listen)
    try:
        loss = task.loss(model, batch)
    finally:
        hook.remove()
    sums.append(_sums(loss))


def _loaded(batch: Any) -> LoadedBatch:
    return LoadedBatch(MicroBatch(step=0, shard=0, indices=np.zeros(1, dtype=np.int64), key=0), batch)


def values_of(output: Any) -> list[Tensor]:
    """The floating-point tensors in what a module returned."""
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def _sums(loss: Loss) -> Tensor:
    numbers = [loss.total, loss.count, *(loss.metrics[name] for name in sorted(loss.metrics))]
    device = loss.total.device
    return torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device).reshape(()) for x in numbers])


def _off(whole: Tensor, part: Tensor) -> float:
    """How far a part is from the same positions of the whole, of the largest value; 0 without positions."""
    dims = [d for d in range(min(whole.dim(), part.dim())) if whole.shape[d] != part.shape[d]]
    if whole.dim() != part.dim() or len(dims) != 1:
        return 0.0
    there = positions(part, dims[0])
    assert isinstance(there, Tensor)
    same, largest = whole.index_select(dims[0], there), float(whole.abs().max())
    return float((same - part).abs().max()) / largest if largest else 0.0


def _of_values(whole: _Looked, parts: _Looked, net: Net, group: Group) -> tuple[str, str] | None:
    """What is wrong with what came out, and what to do; None also where another stage has it. Collective."""
    if not whole.sums:
        return None
    device, allowed = whole.sums[0].device, allowed_for(whole.outputs)
    farthest = torch.tensor([max(parts.outputs, default=0.0)], dtype=torch.float64, device=device)
    farthest = net.all_reduce(farthest, group, "max").wait()
    together = net.all_reduce(parts.sums[0], group).wait()
    if float(farthest) > allowed:
        return (
            "on parts of a sequence the model returns something else than on the whole: a value is off by"
            f" {float(farthest):.1e} of the largest",
            "take positions from paceline.models.positions, or cut position ids in Task.sequence;"
            " across positions only scaled_dot_product_attention may look",
        )
    for name, a, b in zip(("total", "count"), whole.sums[0].tolist(), together.tolist(), strict=False):
        if abs(a - b) > allowed * abs(a):
            return (
                f"the {name} of the loss of the first sample is {a:.9g}, and of its parts together {b:.9g}",
                "the loss has to be a sum over positions; pair what it compares in Task.sequence",
            )
    return None


class _Deaf:
    """Takes gradients, and does nothing with them."""

    by_micro_batch = False

    def micro_batch(self, shards: range, is_last: bool) -> None:
        """See `GradientSink`."""

    def ready(self, slot: Slot, grad: Tensor | None) -> None:
        """See `GradientSink`."""


def _of_buffers(placed: Placed, batch: Any) -> tuple[str, str] | None:
    """Whether a forward in training changes what the model keeps, statistics over positions; collective."""
    if not placed.buffers.names:
        return None
    placed.run([_loaded(batch)], 1, _Deaf(), 1.0)
    changed = placed.buffers.changed
    if not changed:
        return None
    return (
        f"a forward changes the buffer '{changed[0]}', and under context a rank sees some positions only",
        "use a norm without running statistics, or choose a strategy without context",
    )
