"""What the user brings: a model, data and a loss. Nothing here knows how the work is distributed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from paceline.errors import TaskError

_COUNT_OF = "#count of "
AGGREGATIONS = ("mean", "sum", "first")


@dataclass(frozen=True)
class Metric:
    """A sum over items of its own, and how many those were: what is reported is their mean.

    Args:
        total: for example how many of the masked words were right.
        count: for example how many words were masked.
    """

    total: Tensor | float
    count: Tensor | float


@dataclass(frozen=True)
class Loss:
    """A sum over samples (or tokens) and how many there were; means are taken once, at the end.

    Args:
        total: the sum of the losses of `count` items, a scalar tensor that carries gradients.
        count: number of items in the sum (samples, unmasked tokens, ...), a number or a scalar tensor.
        metrics: further sums by name: over the same items, or a `Metric` with a count of its own. One whose
            name begins with "_" is not reported: it is for `Task.derive`.
    """

    total: Tensor
    count: Tensor | float
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """A metric with its own count travels as two sums; `finish_metrics` puts them together again."""
        if not self.metrics:
            return
        own = {name: value for name, value in self.metrics.items() if isinstance(value, Metric)}
        if own:
            sums: dict[str, Any] = {**self.metrics, **{name: value.total for name, value in own.items()}}
            sums |= {_COUNT_OF + name: value.count for name, value in own.items()}
            object.__setattr__(self, "metrics", sums)

    @classmethod
    def mean(cls, value: Tensor, count: Tensor | float, **metrics: Tensor | float | Metric) -> Loss:
        """Build from a mean over `count` items; `metrics` are sums."""
        return cls(value * count, count, metrics)


@runtime_checkable
class SampleSource(Protocol):
    """Map-style data: `torch.utils.data.Dataset` and Hugging Face data sets fit as they are."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


LossFunction = Callable[[nn.Module, Any], Loss]
PredictFunction = Callable[[nn.Module, Any], Any]
PositionSlicer = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Task:
    """Everything that is trained, and nothing about how.

    Args:
        model: the module to train; it is built under a seeded generator and never knows its rank. Built
            inside `paceline.models.without_memory()`, a rank makes only the parameters that it holds.
        data: training samples: map-style (`SampleSource`); or what can be iterated again and again, such as an
            `IterableDataset`, a stream (docs/howto/data.md); or a `torch.utils.data.DataLoader` over either.
        loss: `loss(model, batch) -> Loss`; the batch is what `collate` returned, on the model's device.
        held_out: samples for evaluation, never trained on; or several sets by name.
        collate: list of samples to batch; PyTorch's default if None.
        optimizer: `optimizer(model) -> torch.optim.Optimizer`, in place of the recipe's by name.
        blocks: the modules that activation checkpointing recomputes, one by one; by default the
            entries of every `nn.ModuleList`.
        initialize: `initialize(model, seed)`, sets weights by (seed, parameter name); None keeps what
            the constructor made under the seeded generator.
        derive: `derive(sums) -> metrics`: what follows from sums over all items, "loss", "count" and the
            metrics by name: a perplexity, an F1, an AUC, which are no means (`paceline.tasks.scores`).
        report: `report(model, evaluation) -> lines`; what to print after training.
        stages: `stages(model) -> modules`, which called one after another are the model's forward: what a
            pipeline cuts. A tuple is passed on as arguments. An `nn.Sequential` needs none.
        tensor: how large layers are cut under `tensor=N`: "column" or "row" by a pattern of module names, and
            "split" for a `KeyedDropout` between the two.
        sequence: `sequence(batch, part) -> batch`, which positions of a batch a rank runs under `context=N`:
            `part(x, dim)` gives this rank's positions of a tensor along a dimension. The loss takes what it
            returns, so whatever looks at two positions (targets that are the next token) is paired before.
        callbacks: see `paceline.Callback`; every rank builds its own.
        num_tokens_per_sample: for the rate on the progress line, and as a guess of how many items the
            loss counts in a sample; 0 if samples are not text.
        sampler: a `torch.utils.data.Sampler` that says which samples an epoch has, in which order.
        predict: `predict(model, batch) -> Tensor [N, ...]`, or a list of N, or a mapping of such by name:
            what `paceline predict` says of a batch of N samples. None: the model is called with the batch.
        order: which samples make up each batch (`paceline.data.BatchOrder`); None: as sampler or recipe say.
        buffers: how the changes that the micro-batches of a step make to a buffer come together, by a pattern
            of names: "mean", as of all that are not named, "sum" (a counter of samples), or "first": that of
            the first micro-batch only.
        vocabulary: hash of which number stands for which piece of text, as
            `paceline.data.tokenizer.vocabulary_of(text)` says it of a tokenizer.json; weights of another are
            refused. Empty: nothing is compared.
    """

    model: nn.Module
    data: Any
    loss: LossFunction
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
    buffers: Mapping[str, str] = field(default_factory=dict)
    vocabulary: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise TaskError(
                f"the task's model is {type(self.model).__name__}, not a torch.nn.Module",
                next_step="return Task(model=..., data=..., loss=...) or (model, data, loss) from build()",
            )
        for pattern, how in self.buffers.items():
            if how not in AGGREGATIONS:
                raise TaskError(
                    f"Task(buffers={{'{pattern}': '{how}'}}): no buffer comes together so",
                    next_step=f"one of: {', '.join(AGGREGATIONS)}; values of each device's own would make the"
                    " answer depend on the number of devices",
                )
        require_samples("data", self.data)
        for name, source in held_out_sets(self.held_out).items():
            require_samples(f"held_out['{name}']" if name else "held_out", source)


def held_out_sets(held_out: Any) -> dict[str, Any]:
    """Held-out sets by name; one that has none is called ""; empty: there are none."""
    if held_out is None:
        return {}
    if isinstance(held_out, Mapping) and held_out and all(isinstance(name, str) for name in held_out):
        return dict(held_out)
    return {"": held_out}


def is_stream(source: Any) -> bool:
    """Whether samples can be had one after another only."""
    if isinstance(source, IterableDataset):  # its __getitem__ is there, and only raises
        return True
    return isinstance(source, Iterable) and not hasattr(source, "__getitem__")


def require_samples(name: str, source: Any) -> None:
    """Raises: TaskError: it is no data, or can be read once only."""
    once = isinstance(source, Iterator)
    if isinstance(source, SampleSource) or (is_stream(source) and not once):
        return
    if once:
        raise TaskError(
            f"the task's {name} is {type(source).__name__}, which can be read once only: no run could go on"
            " from a checkpoint, and no oracle could read it beside",
            next_step="give a class with __iter__ that begins anew each time, or list(...) of it",
        )
    raise TaskError(
        f"the task's {name} is {type(source).__name__}, which lacks __iter__, and __len__ or __getitem__",
        next_step="pass a sequence, a torch Dataset or IterableDataset, a Hugging Face dataset",
    )


def finish_metrics(task: Task, loss: float, count: float, means: Mapping[str, float]) -> dict[str, float]:
    """What is reported of the metrics.

    Args:
        loss, means: over the `count` items of the loss.
    Returns:
        Means over each metric's own items (NaN if there were none), what the task derives from the sums, and
        nothing whose name begins with "_".
    """
    if not means and task.derive is None:
        return {}
    found = {name: value for name, value in means.items() if not name.startswith(_COUNT_OF)}
    sums = {"loss": loss * count, "count": count, **{name: value * count for name, value in found.items()}}
    for name in found:
        if _COUNT_OF + name in means:
            own = means[_COUNT_OF + name]
            found[name] = found[name] / own if own else math.nan
    if task.derive is not None:
        found |= task.derive(sums)
    return {name: value for name, value in found.items() if not name.startswith("_")}
