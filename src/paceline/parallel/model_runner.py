"""What the micro-batches of one rank add up to.

What a layout gives to a rule: the model as one rank holds it, and forward and backward of some
micro-batches.

Gradients are named by the slot that the rank computes with. A rank calls `ready` for the slots that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.comm.reduction.gradients import GradientSink
from paceline.data.work import LoadedBatch
from paceline.errors import TaskError
from paceline.parallel.model_buffers import MicroBatchBuffers
from paceline.parallel.sharded_model import ShardedModel
from paceline.state.slot import TensorSlot
from paceline.task import Loss


class MetricNames:
    """Sorted names of the metrics that a loss returns: learned from its first call, then always the same.

    Args:
        names: if they are known already.
    """

    def __init__(self, names: Sequence[str] | None = None) -> None:
        self.found: tuple[str, ...] | None = None if names is None else tuple(names)

    def check(self, loss: Loss) -> tuple[str, ...]:
        """The names of this loss.

        Raises:
            TaskError: earlier it had others.
        """
        names = tuple(sorted(loss.metrics)) if loss.metrics else ()
        if self.found is None:
            self.found = names
        if names != self.found:
            raise TaskError(
                f"the loss returned the metrics {list(names)}, earlier {list(self.found)}",
                next_step="return the same metric names for every batch",
            )
        return names


class LossSums:
    """Running sums of loss, count and metrics, in float64 on the host once read.

    Losses stay on the device until `read`, so adding never waits for it.

    Args:
        names: the metrics, the same in every micro-batch.
        counts: whether its rows count as micro-batches, or are parts of those that another rank counts.
    """

    def __init__(self, names: MetricNames, *, counts: bool = True) -> None:
        self._names, self._counts = names, counts
        self._rows: list[list[Any]] = []

    @property
    def micro_batches(self) -> int:
        """How many micro-batches were added, and count."""
        return len(self._rows) if self._counts else 0

    def add(self, loss: Loss, *, joins: bool = False) -> None:
        """Add one micro-batch.

        Args:
            joins: it is a further part of the one that was added last.
        """
        names = self._names.check(loss)
        row = [loss.total, loss.count]
        if names:
            row += [loss.metrics[name] for name in names]
        found = [x.detach() if isinstance(x, Tensor) else float(x) for x in row]
        if joins:
            found = [a + b for a, b in zip(self._rows.pop(), found, strict=True)]
        self._rows.append(found)

    def extend(self, other: LossSums) -> None:
        """Add the micro-batches of another step."""
        self._rows += other._rows

    def reorder(self, places: Sequence[int]) -> None:
        """Put the micro-batches into another order: first the one at the first of these places."""
        self._rows = [self._rows[place] for place in places]

    def read(self) -> tuple[float, float, Mapping[str, float]]:
        """Total, count and metrics over all micro-batches."""
        table = self._table()
        columns = table[0] if len(table) == 1 else self._tensor(table).sum(0).tolist()
        return columns[0], columns[1], dict(zip(self._names.found or (), columns[2:], strict=True))

    def per_micro_batch(self) -> Tensor:
        """Float64 [micro-batches, 2 + num_metrics] on the host: total, count, metrics."""
        return self._tensor(self._table())

    def _tensor(self, table: Sequence[Sequence[float]]) -> Tensor:
        if not table:
            return torch.zeros(0, 2 + len(self._names.found or ()), dtype=torch.float64)
        return torch.tensor(table, dtype=torch.float64)

    def _table(self) -> list[list[float]]:
        """The rows as numbers; waits for the device, from which all come in one transfer."""
        if not (self._rows and self._rows[0][0].is_cuda):
            return [list(map(float, row)) for row in self._rows]
        numbers = iter(_read_scalars([x for row in self._rows for x in row if isinstance(x, Tensor)]))
        return [[next(numbers) if isinstance(x, Tensor) else x for x in row] for row in self._rows]


def _read_scalars(scalars: list[Tensor]) -> list[float]:
    """Their values, in one transfer from the device of the first."""
    device = scalars[0].device
    found: list[float] = torch.stack([x.to(device, torch.float64).reshape(()) for x in scalars]).tolist()
    return found


def raise_for_too_few_values(error: ValueError, num_samples: int) -> None:
    """Say in one sentence what PyTorch's BatchNorm says of too few values.

    Args:
        error: what a forward has raised; another one is left as it is.
        num_samples: of the micro-batch.
    Raises:
        TaskError: a shard of one sample went through a norm over the batch.
    """
    if "more than 1 value per channel" in str(error):
        raise TaskError(
            f"a micro-batch of {num_samples} samples has too few values for a norm over the batch",
            next_step="give every micro-batch two samples or more: a larger batch.size, fewer batch.shards or"
            " processes, batch.drop_last = true where the last batch is the small one; or"
            " batch.sync_batchnorm = true",
        ) from error


def check_loss(loss: Any) -> Loss:
    """The loss of one batch, if it keeps the contract.

    Raises:
        TaskError: not a `Loss`, or its total is not a scalar tensor.
    """
    if not isinstance(loss, Loss):
        raise TaskError(
            f"the loss function returned {type(loss).__name__}, not paceline.Loss",
            next_step="return Loss(total, count): the sum over items and how many; "
            "or Loss.mean(value, count) if you have a mean",
        )
    if not isinstance(loss.total, Tensor) or loss.total.numel() != 1:
        raise TaskError(
            "Loss.total must be a scalar tensor", next_step="sum the losses of the batch: losses.sum()"
        )
    return loss


ModelFunction = Callable[[nn.Module, Any], Any]
"""`ask(model, batch)` calls the model once, and does what it likes with the result: a loss is one."""


class ModelRunner(Protocol):
    """One rank's share of a replica.

    Attributes:
        sharded_model: what of the model this rank has in memory.
        metric_names: of the loss; agreed before training.
        used: names of the parameters that had a gradient here, in a micro-batch of the last `run`.
        norms: of gradients that were let go of in the last `run`, one for each micro-batch; unread.
        buffers: of the whole model; those that this rank does not hold do not move here.
    """

    @property
    def sharded_model(self) -> ShardedModel: ...
    @property
    def metric_names(self) -> MetricNames: ...
    @property
    def used(self) -> Collection[str]: ...
    @property
    def norms(self) -> Mapping[TensorSlot, Sequence[Tensor]]: ...
    @property
    def buffers(self) -> MicroBatchBuffers: ...

    def run(
        self, micro_batches: Iterable[LoadedBatch], count: int, sink: GradientSink, scale: float
    ) -> LossSums:
        """Forward and backward of some micro-batches of one step; every gradient goes to the sink once.

        Args:
            micro_batches: this replica's share of the step, in order.
            count: how many that is; 0 is allowed.
            sink: takes every gradient once, or once a micro-batch; None where no micro-batch used the
                parameter.
            scale: what the loss is multiplied with before backward.
        Returns:
            Sums over these micro-batches, on one rank of a replica; empty on its others.
        """

    def abort(self) -> None:
        """Drop a half `run`: buffers are those from before it, and no gradient is handed on."""

    def answer(self, micro_batches: Iterable[LoadedBatch], ask: ModelFunction) -> None:
        """Forward alone of some batches, without gradients or dropout; collective, with as many on all
        ranks that share the model.

        Args:
            ask: gets past its call of the model on ranks that have what the whole model computes: all, or
                those of the last stage. The first stage ends it there, other stages do not call it.
        """

    def evaluate(self, micro_batches: Iterable[LoadedBatch]) -> LossSums:
        """Loss, count and metrics of held-out micro-batches; empty where `run` returns empty sums."""
