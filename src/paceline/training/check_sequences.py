"""Does a model on parts of a sequence compute what it does on the whole? Asked before the first step.

A model may look at positions elsewhere than in attention (a convolution, a mean, an index of its own that
begins at 0 on every rank), and a loss may compare neighbours: all of that would train something else in
silence. So every rank runs the first sample whole and in its part, in evaluation and in the parameters' type,
and compares what the model returns, value by value, and what the loss adds up to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.comm import Net
from paceline.data import collate_samples
from paceline.errors import TaskError
from paceline.layout import Holding, Placed
from paceline.layout.seed import seed_micro_batch
from paceline.mesh import Group, Mesh
from paceline.models.dropout import name_dropouts
from paceline.models.positions import positions
from paceline.task import Loss, Task
from paceline.training.contract import buffers_kept, check_loss

_CLOSE = 1e-4
_STEPS = 32  # of the coarsest type, where that is more


class _Looked(NamedTuple):
    outputs: list[Tensor]
    sums: Tensor


def check_task(task: Task, placed: Placed, net: Net, mesh: Mesh) -> None:
    """All that is asked of a task before the first step; collective. See `check_loss`, `check_sequences`."""
    check_loss(task, placed, net, mesh.world)
    if mesh.axes["context"].size > 1:
        check_sequences(task, placed.holding, net, mesh.axes["context"])


def check_sequences(task: Task, holding: Holding, net: Net, group: Group) -> None:
    """Compare the first sample whole and in parts; collective over the ranks of a context.

    Raises:
        TaskError: they differ, or the model has buffers that a forward changes.
    Wire: attention over one sample, and one all_reduce of some numbers.
    """
    batch = collate_samples(task, [task.data[0]], holding.device)
    holding.use.begin()
    with torch.no_grad(), torch.random.fork_rng(), buffers_kept(holding.model):
        _refuse_changing_buffers(task, holding, batch)
        holding.use.next()
        whole = _look(task, holding.model, batch)
        holding.use.next()
        with holding.seen(batch) as own:
            parts = _look(task, holding.model, own)
            off = [_off(a, b) for a, b in zip(whole.outputs, parts.outputs, strict=False)]
    holding.use.end()
    farthest = torch.tensor([max(off, default=0.0)], dtype=torch.float64, device=holding.device)
    farthest = net.all_reduce(farthest, group, "max").wait()
    together = net.all_reduce(parts.sums, group).wait()
    _require_equal(float(farthest), whole.sums, together, allowed_for(whole.outputs))


def allowed_for(tensors: Sequence[Tensor]) -> float:
    """How much of the largest value rounding may take, in their coarsest type."""
    types = {x.dtype for x in tensors if x.is_floating_point()}
    return max([_CLOSE, *(_STEPS * torch.finfo(one).eps for one in types)])


def _look(task: Task, model: nn.Module, batch: Any) -> _Looked:
    found: list[Tensor] = []
    hook = model.register_forward_hook(lambda _, inputs, output: found.extend(values_of(output)))
    model.eval()
    try:
        loss = task.loss(model, batch)
    finally:
        hook.remove()
    return _Looked(found, _sums(loss))


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


def _require_equal(farthest: float, whole: Tensor, together: Tensor, allowed: float) -> None:
    if farthest > allowed:
        raise TaskError(
            "on parts of a sequence the model returns something else than on the whole: a value is off by"
            f" {farthest:.1e} of the largest",
            next_step="take positions from paceline.models.positions, or cut position ids in Task.sequence;"
            " across positions only scaled_dot_product_attention may look",
        )
    for name, a, b in zip(("total", "count"), whole.tolist(), together.tolist(), strict=False):
        if abs(a - b) > allowed * abs(a):
            raise TaskError(
                f"the {name} of the loss of the first sample is {a:.9g}, and of its parts together {b:.9g}",
                next_step="the loss has to be a sum over positions; pair what it compares in Task.sequence",
            )


def _refuse_changing_buffers(task: Task, holding: Holding, batch: Any) -> None:
    """Raises: TaskError: a forward in training changes what the model keeps: statistics over positions."""
    model = holding.model
    state = model.state_dict()
    kept = {name: b.clone() for name, b in model.named_buffers() if name in state}
    if not kept:
        return
    holding.use.next()
    seed_micro_batch(0, holding.device, name_dropouts(model))
    task.loss(model.train(), batch)
    now = dict(model.named_buffers())
    changed = [name for name, before in kept.items() if not torch.equal(now[name], before)]
    if changed:
        raise TaskError(
            f"a forward changes the buffer '{changed[0]}', and under context a rank sees some positions only",
            next_step="use a norm without running statistics, or choose a strategy without context",
        )
