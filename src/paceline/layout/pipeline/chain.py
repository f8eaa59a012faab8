"""The chain of modules that a model is, which the task names and a pipeline cuts.

Invariant: a chain that passed `check_chain` computes what the model computes, in training as in evaluation,
to the bit on the samples that were tried; between its links there are only tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data import collate_samples
from paceline.errors import TaskError
from paceline.layout.buffers import MicroBatchBuffers
from paceline.layout.pipeline.view import Answers, Call, asked
from paceline.models.dropout import name_dropouts
from paceline.task import Loss, LossFunction, Task


def chain_of(task: Task, model: nn.Module) -> list[nn.Module]:
    """The modules whose composition is the model."""
    if task.stages is not None:
        return list(task.stages(model))
    if isinstance(model, nn.Sequential):
        return list(model)
    raise TaskError(
        f"a pipeline cuts a chain of modules, and nothing says which chain {type(model).__name__} is",
        next_step="pass Task(stages=lambda model: [first, ...]), or choose a strategy without pipeline",
    )


def check_chain(task: Task, model: nn.Module, links: Sequence[nn.Module]) -> None:
    """Run two samples through both, in training and in evaluation: they must agree to the bit.

    Raises:
        TaskError: they do not, or the chain leaves a trained parameter out, or the loss asks for more than
            one call of the model.
    """
    without_memory = any(p.is_meta for p in model.parameters())
    if without_memory:  # shapes and types are compared, not bits
        model = copy.deepcopy(model).to("meta")
        links = chain_of(task, model)
    device = next(model.parameters()).device
    batch = collate_samples(task, [task.data[0], task.data[len(task.data) - 1]], device)
    held = {p for link in links for p in link.parameters()}
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p not in held]
    wrong = [f"leaves out '{name}'" for name in missing]
    for training in (False,) if without_memory else (True, False):
        given = asked(task.loss, batch, training=training)
        with torch.no_grad(), torch.random.fork_rng():
            right = _try(model, model, given, training=training)
            if not without_memory:
                _require_own_model(task.loss, right, batch)
            found = wrong or _try(model, partial(_through, links), given, training=training)
        other = "" if wrong else difference(right, found)
        if other:
            when = "training" if training else "evaluation"
            wrong = [f"gives another result than the model in {when}: {other}"]
    if wrong:
        raise _no_chain(wrong[0])


def _no_chain(why: str) -> TaskError:
    advice = (
        "set model.config.use_cache = False: keys and values of earlier calls are for generation"
        if "past_key_values" in why
        else "return modules that, called one after another, are model.forward"
    )
    return TaskError(f"the chain of Task(stages=...) {why}", next_step=advice)


def _require_own_model(loss: LossFunction, answer: Any, batch: Any) -> None:
    """The rest of a loss, after a model's answer without a graph, has no gradient to give.

    Raises:
        TaskError: it has, so it touches parameters by another way than through its argument.
    """
    with torch.enable_grad():
        found = loss(Answers(partial(_same, answer)), batch)
    if isinstance(found, Loss) and isinstance(found.total, Tensor) and found.total.requires_grad:
        raise TaskError(
            "the loss touches parameters of a model from around it, and a stage holds a part of them",
            next_step="use optimizer.weight_decay or l2 for a penalty, or choose a strategy without pipeline",
        )


def _try(model: nn.Module, module: Callable[..., Any], given: Call, *, training: bool) -> Any:
    """Call a module with keyed random numbers; the model's buffers stay as they are."""
    model.train(training)
    torch.manual_seed(0)
    dropouts, buffers = name_dropouts(model), MicroBatchBuffers(model)
    for dropout in dropouts:
        dropout.micro_batch_key = 0
    buffers.begin_step()
    buffers.lend()
    try:
        return module(*given.inputs, **given.named)
    finally:
        buffers.abort_step()
        for dropout in dropouts:
            dropout.micro_batch_key = None


def _through(links: Sequence[nn.Module], *inputs: Any, **named: Any) -> Any:
    """The result of a chain; between two links there are only tensors."""
    x = links[0](*inputs, **named)
    for before, link in pairwise(links):
        if not all(isinstance(part, Tensor) for part in as_tuple(x)):
            raise TaskError(
                f"{type(before).__name__} returns {type(x).__name__}, and only tensors travel between stages",
                next_step="return a tensor or a tuple of tensors, which are the arguments of the next module",
            )
        x = link(*as_tuple(x))
    return x


def as_tuple(x: Any) -> tuple[Any, ...]:
    """What a link returned, as the arguments of the next."""
    return x if isinstance(x, tuple) else (x,)


def _same(x: Any) -> Any:
    return x


def difference(right: Any, found: Any) -> str:
    """How the result of a chain differs from the model's, in types, shapes or bits; empty: not at all.

    A result may be a tensor, a tuple, or a mapping, whose values the chain gives in their order. A NaN equals
    itself.
    """
    names = list(right) if isinstance(right, Mapping) else [str(i) for i in range(len(as_tuple(right)))]
    theirs, ours = (list(x.values()) if isinstance(x, Mapping) else as_tuple(x) for x in (right, found))
    if len(ours) != len(theirs):
        return f"the model returns {len(theirs)} values ({', '.join(names)}), the chain {len(ours)}"
    pairs = zip(names, theirs, ours, strict=True)
    return next((text for name, a, b in pairs if (text := _unlike(name, a, b))), "")


def _unlike(name: str, right: Any, found: Any) -> str:
    """How one value differs; empty: not at all."""
    if not (isinstance(right, Tensor) and isinstance(found, Tensor)):
        return f"value {name} is {type(right).__name__} of the model and {type(found).__name__} of the chain"
    kinds = [f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in (right, found)]
    if kinds[0] != kinds[1]:
        return f"value {name} is {kinds[0]} of the model and {kinds[1]} of the chain"
    if right.is_meta or torch.equal(right.nan_to_num(), found.nan_to_num()):
        return ""
    largest = float((right.double() - found.double()).abs().max()) if not right.is_complex() else float("nan")
    return f"value {name} differs by up to {largest:.2g}"


class Stage(nn.Module):
    """The links of one stage, called one after another."""

    def __init__(self, links: Sequence[nn.Module]) -> None:
        super().__init__()
        self.links = nn.ModuleList(links)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        first, *others = self.links
        x = first(*inputs, **named)
        for link in others:
            x = link(*as_tuple(x))
        return x


class Enter(torch.autograd.Function):
    """What arrived, as a tensor that a module may change in place: a leaf of autograd must not be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        # the same memory, and no view of it
        return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]
