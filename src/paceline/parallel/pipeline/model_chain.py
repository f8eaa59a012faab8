"""Stand-ins for the model on a stage, so that the user writes one loss for every layout.

The first stage runs the loss until it calls the model: that is what goes into the pipeline, whatever the loss
does to the batch before. The last stage answers that call with what came out. The loss must call the model
once, and must not look into it: a stage holds a part.

The chain of modules that a model is, which the task names and a pipeline cuts.

Invariant: a chain that passed `check_chain` computes what the model computes, in training as in evaluation,
to the bit on the samples that were tried; between its links there are only tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from paceline.data.loader import collate_samples
from paceline.errors import TaskError
from paceline.models.dropout import name_dropouts
from paceline.parallel.model_buffers import MicroBatchBuffers
from paceline.parallel.model_runner import ModelFunction
from paceline.task import Loss, LossFunction, Task


class ModelCall(NamedTuple):
    """The arguments of a model."""

    inputs: tuple[Any, ...]
    named: dict[str, Any]


def record_call(loss: ModelFunction, batch: Any, *, training: bool) -> ModelCall:
    """See `CallRecorder.of`."""
    return CallRecorder().of(loss, batch, training=training)


class _CallRecorded(BaseException):
    """Ends the loss where it calls the model; no `except Exception` of the user's takes it for an error."""

    def __init__(self, call: ModelCall) -> None:
        super().__init__()
        self.call = call


class _ModelStandIn(nn.Module):
    def named_modules(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Parameters, buffers and modules are all found through this."""
        raise TaskError(
            "the loss looks at the model's parameters or modules, and a stage holds a part of them",
            next_step="use optimizer.weight_decay or l2 for a penalty, or choose a strategy without pipeline",
        )


class CallRecorder(_ModelStandIn):
    """Finds out what a model is called with; for any number of batches."""

    def of(self, loss: ModelFunction, batch: Any, *, training: bool) -> ModelCall:
        """What the loss, or whatever else asks, calls the model with, for a batch.

        Raises:
            TaskError: it never does, or it looks at the model's parameters before.
        """
        self.training = training
        try:
            loss(self, batch)
        except _CallRecorded as found:
            return found.call
        raise TaskError(
            "the loss never called the model", next_step="call it: loss(model, batch) computes model(...)"
        )

    def forward(self, *inputs: Any, **named: Any) -> NoReturn:
        raise _CallRecorded(ModelCall(inputs, named))


class OutputStandIn(_ModelStandIn):
    """Answers the call of the loss with what the pipeline has computed; for any number of batches.

    Raises:
        TaskError: a second call; it would be answered with the result of the first.
    """

    def __init__(self, answer: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._answer = answer

    def by(self, answer: Callable[[], Any], *, training: bool) -> OutputStandIn:
        """Itself, for the next batch.

        Args:
            answer: makes what came out of the model.
        """
        self._answer, self.training = answer, training
        return self

    def forward(self, *inputs: Any, **named: Any) -> Any:
        answer, self._answer = self._answer, None
        if answer is None:
            raise TaskError(
                "the loss calls the model twice, and a pipeline runs a batch once",
                next_step="put both parts into one batch, or choose a strategy without pipeline",
            )
        return answer()


def module_chain(task: Task, model: nn.Module) -> list[nn.Module]:
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
        links = module_chain(task, model)
    device = next(model.parameters()).device
    batch = collate_samples(task, [task.data[0], task.data[len(task.data) - 1]], device)
    held = {p for link in links for p in link.parameters()}
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p not in held]
    wrong = [f"leaves out '{name}'" for name in missing]
    for training in (False,) if without_memory else (True, False):
        given = record_call(task.loss, batch, training=training)
        with torch.no_grad(), torch.random.fork_rng():
            right = _call_seeded(model, model, given, training=training)
            if not without_memory:
                _require_own_model(task.loss, right, batch)
            found = wrong or _call_seeded(model, partial(_call_chain, links), given, training=training)
        other = "" if wrong else describe_difference(right, found)
        if other:
            when = "training" if training else "evaluation"
            wrong = [f"gives another result than the model in {when}: {other}"]
    if wrong:
        raise _chain_error(wrong[0])


def _chain_error(why: str) -> TaskError:
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
        found = loss(OutputStandIn(partial(_identity, answer)), batch)
    if isinstance(found, Loss) and isinstance(found.total, Tensor) and found.total.requires_grad:
        raise TaskError(
            "the loss touches parameters of a model from around it, and a stage holds a part of them",
            next_step="use optimizer.weight_decay or l2 for a penalty, or choose a strategy without pipeline",
        )


def _call_seeded(model: nn.Module, module: Callable[..., Any], given: ModelCall, *, training: bool) -> Any:
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


def _call_chain(links: Sequence[nn.Module], *inputs: Any, **named: Any) -> Any:
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


def _identity(x: Any) -> Any:
    return x


def describe_difference(right: Any, found: Any) -> str:
    """How the result of a chain differs from the model's, in types, shapes or bits; empty: not at all.

    A result may be a tensor, a tuple, or a mapping, whose values the chain gives in their order. A NaN equals
    itself.
    """
    names = list(right) if isinstance(right, Mapping) else [str(i) for i in range(len(as_tuple(right)))]
    theirs, ours = (list(x.values()) if isinstance(x, Mapping) else as_tuple(x) for x in (right, found))
    if len(ours) != len(theirs):
        return f"the model returns {len(theirs)} values ({', '.join(names)}), the chain {len(ours)}"
    pairs = zip(names, theirs, ours, strict=True)
    return next((text for name, a, b in pairs if (text := _describe_value_difference(name, a, b))), "")


def _describe_value_difference(name: str, right: Any, found: Any) -> str:
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


class StageModule(nn.Module):
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


class WritableInput(torch.autograd.Function):
    """What arrived, as a tensor that a module may change in place: a leaf of autograd must not be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        # the same memory, and no view of it
        return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]
