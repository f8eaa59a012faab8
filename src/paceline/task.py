"""The task of a run: model, data and loss, as the user defines them.

Invariant: nothing here knows how the work is distributed. Losses and metrics are sums with counts, never
means, so they can be added over micro-batches and ranks exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, IterableDataset

from paceline.errors import TaskError

COUNT_OF = "#count of "
"""Prefix of the name of a `Metric`'s count, among the sums of a loss."""
AGGREGATIONS = ("mean", "sum", "first")
BufferRule = str | Callable[[nn.Module], Tensor]
"""How a buffer changes in a step; see `Task.buffers`."""


@dataclass(frozen=True)
class Metric:
    """A metric with its own count of items; the reported value is `total / count`.

    Args:
        total: the sum over the items, for example the number of masked words that were predicted correctly.
        count: the number of items, for example of masked words.
    """

    total: Tensor | float
    count: Tensor | float


@dataclass(frozen=True)
class Loss:
    """The sum of a loss over samples or tokens, and their number; means are taken once, at the end.

    Args:
        total: the sum of the losses of `count` items, a scalar tensor that carries gradients.
        count: number of items in the sum (samples, unmasked tokens, ...), a number or a scalar tensor.
        metrics: further sums by name: over the same items, or a `Metric` with its own count. A metric whose
            name begins with "_" is not reported; it is an input of `Task.derive`.
    """

    total: Tensor
    count: Tensor | float
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A metric with its own count is reduced as two sums; `finish_metrics` divides them again.
        if not self.metrics:
            return
        counted = {name: value for name, value in self.metrics.items() if isinstance(value, Metric)}
        if counted:
            sums: dict[str, Any] = {**self.metrics, **{name: value.total for name, value in counted.items()}}
            sums |= {COUNT_OF + name: value.count for name, value in counted.items()}
            object.__setattr__(self, "metrics", sums)

    @classmethod
    def mean(cls, value: Tensor, count: Tensor | float, **metrics: Tensor | float | Metric) -> Loss:
        """Build from a mean over `count` items; `metrics` are means over them, too, except for a `Metric`."""
        sums = {name: x if isinstance(x, Metric) else x * count for name, x in metrics.items()}
        return cls(value * count, count, sums)


@runtime_checkable
class SampleSource(Protocol):
    """Map-style data, such as a `torch.utils.data.Dataset` or a Hugging Face dataset."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


LossFunction = Callable[[nn.Module, Any], Loss]
PredictFunction = Callable[[nn.Module, Any], Any]
PositionSlicer = Callable[[Tensor, int], Tensor]
_REQUIRED: Any = None  # of a field that comes after one with a default; the constructor checks it


@dataclass(frozen=True)
class Task:
    """The definition of what is trained; the recipe defines how.

    Args:
        model: the module to train; it is built under a seeded generator and never knows its rank. Built
            inside `paceline.models.without_memory()`, a rank makes only the parameters that it holds.
        data: training samples: map-style (`SampleSource`); or what can be iterated again and again,
            such as an `IterableDataset`, a stream (docs/howto/data.md); or a `torch.utils.data.DataLoader`
            over either.
        loss: `loss(model, batch) -> Loss`; the batch is what `collate` returned, on the model's device.
        held_out: samples for evaluation, never trained on, as `data`; or several sets by name.
        collate: list of samples to batch; PyTorch's default if None.
        optimizer: `optimizer(model) -> torch.optim.Optimizer`, in place of the recipe's by name.
        blocks: the modules that activation checkpointing recomputes, one by one; by default the
            entries of every `nn.ModuleList`.
        initialize: `initialize(model, seed)`, sets weights by (seed, parameter name); None keeps what
            the constructor made under the seeded generator.
        derive: `derive(sums) -> metrics`: computes metrics that are no means (perplexity, F1, AUC) from the
            sums "loss", "count" and the metrics by name (`paceline.tasks.scores`).
        report: `report(model, evaluation) -> lines`: the lines that are printed after training.
        stages: `stages(model) -> modules`: modules that are the model's forward when called one after
            another; a pipeline splits this list. A tuple is passed as arguments. An `nn.Sequential` needs
            no function.
        tensor: how large layers are split under `tensor=N`: "column" or "row" by a pattern of module
            names, and "split" for a `KeyedDropout` between the two.
        sequence: `sequence(batch, part) -> batch`: selects the positions of a batch that a rank runs under
            `context=N`; `part(x, dim)` returns this rank's positions of a tensor along a dimension. The loss
            gets the result, so tokens and their next-token targets have to be paired before.
        callbacks: instances of `paceline.Callback`; every rank builds its own.
        num_tokens_per_sample: for the rate in the progress line, and as an estimate of the items that
            the loss counts in a sample; 0 if samples are not text.
        sampler: a `torch.utils.data.Sampler` that defines the samples of an epoch and their order.
        predict: `predict(model, batch) -> Tensor [N, ...]`, or a list of length N, or a mapping of these by
            name: the output of `paceline predict` for a batch of N samples. None: the model is called.
        order: the samples of each batch (`paceline.data.BatchOrder`); None: that of the sampler or recipe.
        buffers: how the changes of the micro-batches of a step to a buffer are combined, by a pattern of
            names: "mean" (the default), "sum" (a counter of samples), "first" (the first micro-batch's),
            "ema:0.99" (a moving average, with this decay, of a statistic that is summed over samples), or
            `function(module) -> Tensor`: the buffer's value from the other buffers of its module.
        for_recipe: `for_recipe(task, recipe) -> Task`: completes a task whose data follows from the recipe,
            such as the rows of environments (`paceline.rl`); called again on its result, it changes nothing.
        attach: `attach(session)`: called with every session that is built for the task, once it is complete.
        test: samples that no evaluation during training reads; with `evaluate.validation` it becomes
            `held_out`.
        clients: map-style data of each client of sync=federated, by name, in place of `data`, which is then
            all of it; `federated.partition = "natural"` keeps it apart.
        keeper: what is kept of each client of sync=federated between rounds, and how it corrects local steps
            (`paceline.federated.ClientKeeper`), as the control variates of SCAFFOLD.
        vocabulary: hash of the vocabulary of the data, as
            `paceline.data.tokenizer.vocabulary_of(text)` returns it for a tokenizer.json; weights with
            another one are refused. Empty: nothing is compared.
    """

    model: nn.Module
    data: Any = None
    loss: LossFunction = _REQUIRED
    held_out: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    blocks: Callable[[nn.Module], Iterable[nn.Module]] | None = None
    initialize: Callable[[nn.Module, int], None] | None = None
    derive: Callable[[Mapping[str, float]], Mapping[str, float]] | None = None
    report: Callable[[nn.Module, Mapping[str, float]], Sequence[str]] | None = None
    stages: Callable[[nn.Module], Iterable[nn.Module]] | None = None
    tensor: Mapping[str, str] | None = None
    sequence: Callable[[Any, PositionSlicer], Any] | None = None
    callbacks: Sequence[Any] = ()
    num_tokens_per_sample: int = 0
    sampler: Any = None
    predict: PredictFunction | None = None
    order: Any = None
    buffers: Mapping[str, BufferRule] = field(default_factory=dict)
    vocabulary: str = ""
    test: Any = None
    clients: Mapping[str, Any] = field(default_factory=dict)
    for_recipe: Callable[[Task, Any], Task] | None = None
    attach: Callable[[Any], None] | None = None
    keeper: Any = None

    def __post_init__(self) -> None:
        if self.loss is _REQUIRED:
            raise TaskError(
                "the task has no loss", next_step="return Task(model=..., data=..., loss=...) from build()"
            )
        if self.clients and self.data is None:
            for name, source in self.clients.items():
                require_samples(f"clients['{name}']", source)
            # A frozen dataclass can set a field only like this.
            object.__setattr__(self, "data", ConcatDataset([*self.clients.values()]))
        if not isinstance(self.model, nn.Module):
            raise TaskError(
                f"the task's model is {type(self.model).__name__}, not a torch.nn.Module",
                next_step="return Task(model=..., data=..., loss=...) or (model, data, loss) from build()",
            )
        for pattern, aggregation in self.buffers.items():
            is_known = aggregation in AGGREGATIONS or moving_average_decay(aggregation) is not None
            if not (callable(aggregation) or is_known):
                raise TaskError(
                    f"Task(buffers={{'{pattern}': '{aggregation}'}}): unknown aggregation",
                    next_step=f"use one of: {', '.join(AGGREGATIONS)}, ema:0.99, or a function; separate"
                    " values on each device would make the result depend on the number of devices",
                )
        require_samples("data", self.data)
        for name, source in held_out_sets(self.held_out).items():
            require_samples(f"held_out['{name}']" if name else "held_out", source)


def moving_average_decay(aggregation: BufferRule) -> float | None:
    """Return the decay of a moving average in `Task.buffers`, a word as "ema:0.99"; None for other rules.

    The number is between 0 and 1.
    """
    word, _, text = aggregation.partition(":") if isinstance(aggregation, str) else ("", "", "")
    try:
        decay = float(text) if word == "ema" else 0.0
    except ValueError:
        return None
    return decay if 0.0 < decay < 1.0 else None


def held_out_sets(held_out: Any) -> dict[str, Any]:
    """Return the held-out sets by name; a single set without a name is called ""."""
    if held_out is None:
        return {}
    if isinstance(held_out, Mapping) and held_out and all(isinstance(name, str) for name in held_out):
        return dict(held_out)
    return {"": held_out}


def is_stream(source: Any) -> bool:
    """Return whether samples can only be read one after another."""
    if isinstance(source, IterableDataset):  # has a __getitem__ that only raises
        return True
    return isinstance(source, Iterable) and not hasattr(source, "__getitem__")


def require_samples(name: str, source: Any) -> None:
    """Check that a source can be read, and more than once.

    Args:
        name: of the source, for the error message.
        source: samples.
    Raises:
        TaskError: it is no data, or can be read only once.
    """
    is_iterator = isinstance(source, Iterator)
    if isinstance(source, SampleSource) or (is_stream(source) and not is_iterator):
        return
    if is_iterator:
        raise TaskError(
            f"the task's {name} is {type(source).__name__}, which can be read only once: a run could not"
            " resume from a checkpoint, and `paceline verify` could not read it a second time",
            next_step="pass an object whose __iter__ starts from the beginning each time, or list(...) of it",
        )
    raise TaskError(
        f"the task's {name} is {type(source).__name__}, which lacks __iter__, and __len__ or __getitem__",
        next_step="pass a sequence, a torch Dataset or IterableDataset, a Hugging Face dataset",
    )


def finish_metrics(task: Task, loss: float, count: float, means: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics to report.

    Args:
        task: has the function that derives metrics.
        loss: mean over the `count` items of the loss.
        count: number of items.
        means: of the metrics, over the same items.
    Returns:
        Means over each metric's own items (NaN if there were none) and the metrics that the task derives from
        the sums, without those whose name begins with "_".
    """
    if not means and task.derive is None:
        return {}
    metrics = {name: value for name, value in means.items() if not name.startswith(COUNT_OF)}
    sums = {"loss": loss * count, "count": count, **{name: value * count for name, value in metrics.items()}}
    for name in metrics:
        if COUNT_OF + name in means:
            items = means[COUNT_OF + name]
            metrics[name] = metrics[name] / items if items else math.nan
    if task.derive is not None:
        metrics |= task.derive(sums)
    return {name: value for name, value in metrics.items() if not name.startswith("_")}
