"""Contract of a model runner: forward and backward of some micro-batches, and the sums that it returns.

A runner is what a layout gives to a sync rule. Gradients are named by the slot that the rank computes with; a
rank calls `sink.ready` for the slots that it holds and no others. A runner never sees the optimizer, and it
never communicates gradients: the sink does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.comm.reduction.gradients import GradientSink
from paceline.data.work import LoadedBatch
from paceline.errors import TaskError, format_count
from paceline.parallel.model_buffers import MicroBatchBuffers
from paceline.parallel.sharded_model import ShardedModel
from paceline.pipeline_schedule.schedule_table import MeasuredSchedule
from paceline.state.slot import TensorSlot
from paceline.task import Loss


class MetricNames:
    """Sorted names of the metrics that a loss returns, learned from its first call and fixed from then on.

    Args:
        names: the names, if they are already known.
    """

    def __init__(self, names: Sequence[str] | None = None) -> None:
        self.names: tuple[str, ...] | None = None if names is None else tuple(names)

    def check(self, loss: Loss) -> tuple[str, ...]:
        """Return the names of the metrics of this loss.

        Raises:
            TaskError: an earlier loss returned other names.
        """
        # Sorted: ranks add metrics by their position, and dicts may have another order.
        names = tuple(sorted(loss.metrics)) if loss.metrics else ()
        if self.names is None:
            self.names = names
        if names != self.names:
            raise TaskError(
                f"the loss returned the metrics {list(names)}, earlier {list(self.names)}",
                next_step="return the same metric names for every batch",
            )
        return names


class LossSums:
    """Running sums of loss, count and metrics; float64 on the host once read.

    Losses stay on the device until `read`, so adding one never waits for the device.

    Args:
        names: of the metrics, the same in every micro-batch.
        counts: whether the rows are micro-batches of this rank, or parts of those that another rank counts.
    """

    def __init__(self, names: MetricNames, *, counts: bool = True) -> None:
        self._names, self._counts = names, counts
        self._rows: list[list[Any]] = []

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches that were added; 0 if another rank counts them."""
        return len(self._rows) if self._counts else 0

    def add(self, loss: Loss, *, continues_micro_batch: bool = False) -> None:
        """Add the loss of one micro-batch.

        Args:
            continues_micro_batch: this is a further part of the micro-batch that was added last.
        """
        names = self._names.check(loss)
        row = [loss.total, loss.count]
        if names:
            row += [loss.metrics[name] for name in names]
        # Detached: a sum with a graph would keep the activations of every micro-batch.
        values = [x.detach() if isinstance(x, Tensor) else float(x) for x in row]
        if continues_micro_batch:
            values = [a + b for a, b in zip(self._rows.pop(), values, strict=True)]
        self._rows.append(values)

    def extend(self, other: LossSums) -> None:
        """Append the micro-batches of another step."""
        self._rows += other._rows

    def reorder(self, indices: Sequence[int]) -> None:
        """Reorder the micro-batches: the new i-th is the old one at `indices[i]`."""
        self._rows = [self._rows[index] for index in indices]

    def read(self) -> tuple[float, float, Mapping[str, float]]:
        """Return the total loss, the count and the metrics, summed over all micro-batches."""
        table = self._table()
        columns = table[0] if len(table) == 1 else self._tensor(table).sum(0).tolist()
        return columns[0], columns[1], dict(zip(self._names.names or (), columns[2:], strict=True))

    def per_micro_batch(self) -> Tensor:
        """Return float64 [micro-batches, 2 + num_metrics] on the host: total, count and metrics of each."""
        return self._tensor(self._table())

    def _tensor(self, table: Sequence[Sequence[float]]) -> Tensor:
        if not table:
            return torch.zeros(0, 2 + len(self._names.names or ()), dtype=torch.float64)
        return torch.tensor(table, dtype=torch.float64)

    def _table(self) -> list[list[float]]:
        """Return the rows as numbers; waits for the device and moves all values in one transfer."""
        if not (self._rows and self._rows[0][0].is_cuda):
            return [list(map(float, row)) for row in self._rows]
        numbers = iter(_read_scalars([x for row in self._rows for x in row if isinstance(x, Tensor)]))
        return [[next(numbers) if isinstance(x, Tensor) else x for x in row] for row in self._rows]


def _read_scalars(scalars: list[Tensor]) -> list[float]:
    """Return the values of scalar tensors, moved in one transfer from the device of the first."""
    device = scalars[0].device
    values: list[float] = torch.stack([x.to(device, torch.float64).reshape(()) for x in scalars]).tolist()
    return values


def raise_for_too_few_values(error: Exception, num_samples: int) -> None:
    """Raise a TaskError in place of PyTorch's error for BatchNorm of a single value.

    Args:
        error: an error of a forward; any other error is left alone.
        num_samples: number of samples of the micro-batch.
    Raises:
        TaskError: a micro-batch of one sample went through a norm over the batch.
    """
    if "more than 1 value per channel" in str(error):
        raise TaskError(
            f"a micro-batch of {format_count(num_samples, 'sample')} has too few values for a norm over"
            " the batch",
            next_step="give every micro-batch two samples or more: a larger batch.size, fewer batch.shards or"
            " processes, batch.drop_last = true where the last batch is the small one; or"
            " batch.sync_batchnorm = true",
        ) from error


def check_loss(loss: Any) -> Loss:
    """Return the loss of one batch if it keeps the contract of `Task.loss`.

    Raises:
        TaskError: it is not a `Loss`, or its total is not a scalar tensor.
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


_NO_GRAPH = ("does not require grad", "not have been used in the graph")


def is_missing_graph(error: RuntimeError) -> bool:
    """Return whether an error says that a function takes gradients of values that have none."""
    return any(words in str(error) for words in _NO_GRAPH)


class EvaluationCall:
    """Calls of a function of (model, batch) without gradients, unless the function takes gradients itself.

    A loss with `torch.autograd.grad` in it (a gradient penalty, forces) needs the graph of the model in
    evaluation, too. The first call finds it out, on all ranks that share the model alike.
    """

    def __init__(self) -> None:
        self._needs_graph = False

    def __call__(self, function: ModelFunction, model: nn.Module, batch: Any) -> None:
        if not self._needs_graph:
            try:
                function(model, batch)
                return
            except RuntimeError as error:
                if not is_missing_graph(error):
                    raise
                self._needs_graph = True
        with torch.enable_grad():
            function(model, batch)


ModelFunction = Callable[[nn.Module, Any], Any]
"""Function of (model, batch) that calls the model exactly once and may use the output freely, like a loss."""


class ModelRunner(Protocol):
    """Forward and backward of one rank's part of a replica.

    Attributes:
        sharded_model: the part of the model that this rank has in memory.
        metric_names: of the loss; agreed between ranks before training.
        used: names of the parameters that had a gradient in a micro-batch of the last `run`.
        norms: norms of the gradients that were freed in the last `run`, one for each micro-batch, as tensors
            that were not read yet.
        buffers: of the whole model; buffers that this rank does not hold never change here.
        schedule: the last `run` of this rank's stages, planned and measured; None without stages.
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
    @property
    def schedule(self) -> MeasuredSchedule | None: ...

    def run(
        self, micro_batches: Iterable[LoadedBatch], num_micro_batches: int, sink: GradientSink, scale: float
    ) -> LossSums:
        """Run forward and backward of some micro-batches of one step; every gradient goes to the sink once.

        Args:
            micro_batches: this replica's share of the step, in order.
            num_micro_batches: how many they are; 0 is allowed.
            sink: receives every gradient once, or once for each micro-batch; None if no micro-batch used the
                parameter.
            scale: factor of the loss before backward.
        Returns:
            Sums over these micro-batches on one rank of a replica; empty sums on its other ranks.
        """

    def abort(self) -> None:
        """Drop an unfinished `run`: restore the buffers from before it and hand on no more gradients."""

    def forward_only(self, micro_batches: Iterable[LoadedBatch], function: ModelFunction) -> None:
        """Run the forward of some batches without gradients or dropout; collective.

        All ranks that share the model pass equally many batches.

        Args:
            function: called with the model and a batch. It gets past its call of the model only on ranks that
                have the output of the whole model: all ranks, or those of the last stage. The first stage
                ends it at that call, and the other stages never call it.
        """

    def evaluate(self, micro_batches: Iterable[LoadedBatch]) -> LossSums:
        """Return loss, count and metrics of held-out micro-batches; empty where `run` returns empty sums."""
