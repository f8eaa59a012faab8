"""The chain of modules that a pipeline splits, and stand-ins for the model on a stage.

With the stand-ins, the user writes one loss for every layout. The first stage runs the loss until it calls
the model: these arguments go into the pipeline, whatever the loss does to the batch before. The last stage
answers that call with the output of the pipeline. The loss must call the model once and must not look into
it, since a stage holds only a part.

Invariant: a chain that passed `check_chain` computes what the model computes, in training and in evaluation,
bit by bit on the samples that were tried; between its links there are only tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from paceline.data.loader import collate_samples
from paceline.errors import TaskError, format_count
from paceline.models.dropout import name_dropouts
from paceline.models.module_copy import deep_copy
from paceline.models.stage_plans import refuse_to_stage, stages_of
from paceline.models.training_mode import enter_training, restored_modes
from paceline.parallel.batch_gather import whole_batch_scope
from paceline.parallel.model_buffers import MicroBatchBuffers
from paceline.parallel.model_runner import ModelFunction, is_missing_graph
from paceline.parallel.rng_state import preserved_generators, seed_micro_batch
from paceline.task import Loss, LossFunction, Task


class ModelCall(NamedTuple):
    """Arguments of a call of the model."""

    inputs: tuple[Any, ...]
    named: dict[str, Any]


def record_call(loss: ModelFunction, batch: Any, *, training: bool) -> ModelCall:
    """Return what a loss calls the model with, for one batch that is whole."""
    with whole_batch_scope():
        return CallRecorder().record(loss, batch, training=training)


class _CallRecorded(BaseException):
    """Exception that ends a loss where it calls the model.

    It is a BaseException, so that `except Exception` in the loss lets it pass.
    """

    def __init__(self, call: ModelCall) -> None:
        super().__init__()
        self.call = call


class _ModelStandIn(nn.Module):
    def named_modules(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise TaskError; parameters, buffers and modules are all found through this method."""
        raise TaskError(
            "the loss uses the model's parameters or modules ('model.parameters()' or the like), but a stage"
            " holds only a part of them",
            next_step="use optimizer.weight_decay or l2 for a penalty, or choose a strategy without pipeline",
        )


@contextmanager
def describe_missing_graph() -> Iterator[None]:
    """Turn PyTorch's error about a value without a graph into one that names the pipeline.

    Raises:
        TaskError: the loss takes a gradient through the model, of which the last stage has a part.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_missing_graph(error):
            raise
        raise TaskError(
            "the loss takes a gradient through the model (torch.autograd.grad), but the last stage of a"
            f" pipeline has only the graph of its own layers: {error}",
            next_step="choose a strategy without pipeline: replicas, or shard=N zero=3 if memory is short",
        ) from error


class CallRecorder(_ModelStandIn):
    """Stand-in for the model that records what it is called with; reusable for any number of batches."""

    def record(self, loss: ModelFunction, batch: Any, *, training: bool) -> ModelCall:
        """Return what the loss, or another function, calls the model with for a batch.

        Raises:
            TaskError: it never calls the model, or uses the model's parameters first.
        """
        self.training = training
        try:
            loss(self, batch)
        except _CallRecorded as recorded:
            return recorded.call
        raise TaskError(
            "the loss never called the model", next_step="call it: loss(model, batch) computes model(...)"
        )

    def forward(self, *inputs: Any, **named: Any) -> NoReturn:
        raise _CallRecorded(ModelCall(inputs, named))


class OutputStandIn(_ModelStandIn):
    """Stand-in for the model that returns the output of the pipeline; reusable for any number of batches.

    Raises:
        TaskError: it is called a second time, which would return the result of the first call.
    """

    def __init__(self, output: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._output = output

    def with_output(self, output: Callable[[], Any], *, training: bool) -> OutputStandIn:
        """Prepare for the next batch and return itself.

        Args:
            output: function that computes the output of the model.
        """
        self._output, self.training = output, training
        return self

    def forward(self, *inputs: Any, **named: Any) -> Any:
        output, self._output = self._output, None
        if output is None:
            raise TaskError(
                "the loss calls the model twice, but a pipeline runs a batch once",
                next_step="put both parts into one batch, or choose a strategy without pipeline",
            )
        return output()


def module_chain(task: Task, model: nn.Module) -> list[nn.Module]:
    """Return the modules whose composition is the model.

    Raises:
        TaskError: the task names no chain, the model is no `nn.Sequential`, and no stages of it ship.
    """
    if task.stages is not None:
        return list(task.stages(model))
    if isinstance(model, nn.Sequential):
        return list(model)
    shipped = stages_of(model)
    return refuse_to_stage(model) if shipped is None else shipped


def check_chain(task: Task, model: nn.Module, links: Sequence[nn.Module]) -> None:
    """Run two samples through the model and the chain, in training and in evaluation, and compare bit by bit.

    Raises:
        TaskError: they differ, the chain leaves out a trained parameter, or the loss needs more than one
            call of the model.
    """
    without_memory = any(p.is_meta for p in model.parameters())
    # Without values, only shapes and dtypes can be compared.
    if without_memory:
        model = deep_copy(model).to("meta")
        links = module_chain(task, model)
    device = next(model.parameters()).device
    # Two samples, since BatchNorm may reject a single one in training.
    batch = collate_samples(task, [task.data[0], task.data[len(task.data) - 1]], device)
    parameters = {p for link in links for p in link.parameters()}
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p not in parameters]
    wrong = [f"leaves out '{name}'" for name in missing]
    for training in (False,) if without_memory else (True, False):
        call = record_call(task.loss, batch, training=training)
        with torch.no_grad(), preserved_generators(), restored_modes(model):
            right = _call_seeded(model, model, call, training=training)
            if not without_memory:
                _require_own_model(task.loss, right, batch)
            result = wrong or _call_seeded(model, partial(_call_chain, links), call, training=training)
        # Shipped stages return no keys and values of earlier calls, which are for generation.
        expected = right if task.stages is not None else _without_caches(right)
        difference = "" if wrong else describe_difference(expected, result)
        if difference:
            when = "training" if training else "evaluation"
            wrong = [f"gives another result than the model in {when}: {difference}"]
    if wrong and (task.stages is not None or isinstance(model, nn.Sequential)):
        raise _chain_error("the chain of Task(stages=...)", wrong[0])
    if wrong:
        raise _chain_error(f"the chain of stages that ships for {type(model).__name__}", wrong[0])


def _chain_error(chain: str, why: str) -> TaskError:
    advice = "return modules that, called one after another, are model.forward"
    if "past_key_values" in why:
        advice = "set model.config.use_cache = False: keys and values of earlier calls are for generation"
    elif "Task" not in chain:
        advice = (
            "leave out what the stages do not return or train, such as output_hidden_states, or pass"
            " Task(stages=lambda model: [first, ...])"
        )
    return TaskError(f"{chain} {why}", next_step=advice)


def _without_caches(output: Any) -> Any:
    """Return the output of a model without keys and values of earlier calls."""
    if not isinstance(output, Mapping):
        return output
    return {name: value for name, value in output.items() if name != "past_key_values"}


def _require_own_model(loss: LossFunction, answer: Any, batch: Any) -> None:
    """Require that the loss uses parameters only through its model argument.

    With an output that has no graph, a loss that still has a gradient must have used parameters in another
    way.

    Raises:
        TaskError: it has.
    """
    with torch.enable_grad(), whole_batch_scope(), describe_missing_graph():
        loss_of_output = loss(OutputStandIn(partial(_identity, answer)), batch)
    if (
        isinstance(loss_of_output, Loss)
        and isinstance(loss_of_output.total, Tensor)
        and loss_of_output.total.requires_grad
    ):
        raise TaskError(
            "the loss uses parameters of a model outside of its arguments, but a stage holds a part of them",
            next_step="use optimizer.weight_decay or l2 for a penalty, or choose a strategy without pipeline",
        )


def _call_seeded(model: nn.Module, module: Callable[..., Any], call: ModelCall, *, training: bool) -> Any:
    """Call a module with fixed random numbers; the model's buffers stay as they are."""
    enter_training(model) if training else model.eval()
    dropouts, buffers = name_dropouts(model), MicroBatchBuffers(model)
    # Model and chain draw the same numbers, so that these cause no difference.
    seed_micro_batch(0, next(model.parameters()).device, dropouts)
    buffers.begin_step()
    buffers.swap_in()
    try:
        return module(*call.inputs, **call.named)
    finally:
        buffers.abort_step()
        for dropout in dropouts:
            dropout.micro_batch_key = None


def _call_chain(links: Sequence[nn.Module], *inputs: Any, **named: Any) -> Any:
    """Return the result of a chain; raise TaskError if anything but dense tensors is between two links."""
    x = links[0](*inputs, **named)
    for previous, link in pairwise(links):
        if not all(isinstance(value, Tensor) for value in as_tuple(x)):
            raise TaskError(
                f"{type(previous).__name__} returns {type(x).__name__}, but stages can only send tensors",
                next_step="return a tensor or a tuple of tensors, which are the arguments of the next module",
            )
        kinds = [_kind_of_memory(value) for value in as_tuple(x)]
        unsendable = next((kind for kind in kinds if kind), None)
        if unsendable is not None:
            raise TaskError(
                f"{type(previous).__name__} returns a {unsendable} tensor, but stages only send dense ones",
                next_step="pad the samples of a batch in collate, and pass their lengths or a mask; or choose"
                " a strategy without pipeline",
            )
        x = link(*as_tuple(x))
    return x


def _kind_of_memory(t: Tensor) -> str:
    """Return "nested" or "sparse"; empty if a tensor is dense."""
    return "nested" if t.is_nested else "" if t.layout == torch.strided else "sparse"


def _as_dense(t: Tensor) -> Tensor:
    """Return the values of a nested or sparse tensor as a dense one."""
    if t.is_nested:
        return torch.cat([part.reshape(-1) for part in t.unbind()])
    return t if t.layout == torch.strided else t.to_dense()


def as_tuple(x: Any) -> tuple[Any, ...]:
    """Return the result of a link as the arguments of the next one."""
    return x if isinstance(x, tuple) else (x,)


def _identity(x: Any) -> Any:
    return x


def describe_difference(expected: Any, actual: Any) -> str:
    """Describe how the result of a chain differs from the model's, in dtypes, shapes or bits; empty if equal.

    A result can be a tensor, a tuple, or a mapping, whose values the chain returns in their order. A NaN
    equals a NaN.
    """
    names = (
        list(expected) if isinstance(expected, Mapping) else [str(i) for i in range(len(as_tuple(expected)))]
    )
    expected_values, actual_values = (
        list(x.values()) if isinstance(x, Mapping) else as_tuple(x) for x in (expected, actual)
    )
    if len(actual_values) != len(expected_values):
        num_expected, num_actual = len(expected_values), len(actual_values)
        return (
            f"the model returns {format_count(num_expected, 'value')} ({', '.join(names)}), the chain"
            f" {num_actual}"
        )
    pairs = zip(names, expected_values, actual_values, strict=True)
    return next((text for name, a, b in pairs if (text := _describe_value_difference(name, a, b))), "")


def _describe_value_difference(name: str, expected: Any, actual: Any) -> str:
    """Describe how one value differs; empty if equal."""
    if not (isinstance(expected, Tensor) and isinstance(actual, Tensor)):
        return (
            f"value {name} is {type(expected).__name__} in the model and {type(actual).__name__} in the chain"
        )
    expected, actual = _as_dense(expected), _as_dense(actual)
    kinds = [f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in (expected, actual)]
    if kinds[0] != kinds[1]:
        return f"value {name} is {kinds[0]} in the model and {kinds[1]} in the chain"
    if expected.is_meta or torch.equal(expected.nan_to_num(), actual.nan_to_num()):
        return ""
    largest = (
        float((expected.double() - actual.double()).abs().max())
        if not expected.is_complex()
        else float("nan")
    )
    return f"value {name} differs by up to {largest:.2g}"


class StageModule(nn.Module):
    """Module that calls the links of one stage one after another."""

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
    """Identity whose result may be changed in place, which autograd forbids for received tensors (leaves)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        # The same memory, but not a view: autograd forbids in-place changes of views of leaves, too.
        return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]
