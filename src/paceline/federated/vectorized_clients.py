"""Local training of several clients as one batched computation, by `torch.func`.

The weights of the clients of a group are stacked along a first dimension. A batched step takes the gradients
of all clients whose next batch has the same shape, by `vmap` over the task's loss, and moves the weights by
plain SGD. Clients with fewer samples, or with a smaller last batch, sit out the steps that they
do not have, so each client takes the local steps that it takes alone, on the same samples.

Exactness: that of another order of additions inside of a kernel; tests/parity/test_vectorized_clients.py. Who
shares a computation follows from the recipe and the round, so the bits do not depend on the number of ranks.

Not done here: models that write to a buffer, draw random numbers or decide by values. They are refused before
the first round, with the name of the module, by training two clients once and comparing their gradients with
those of the ordinary way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from paceline.data.work import BatchStream, MicroBatch
from paceline.errors import StrategyError, TaskError
from paceline.federated.cohort_table import LocalSums
from paceline.models.dropout import KeyedDropout
from paceline.models.training_mode import enter_training
from paceline.observe.step_stats import PhaseTimer
from paceline.parallel.mixed_precision import MixedPrecision
from paceline.parallel.model_layout import ModelLayout
from paceline.parallel.model_runner import LossSums, ModelRunner, check_loss
from paceline.parallel.per_sample_gradients import ParameterPlaces
from paceline.parallel.session_context import SessionContext
from paceline.recipe.recipe import Recipe
from paceline.state.train_state import TrainState
from paceline.task import Loss, LossFunction

_KEY = "federated.vectorize"
_ONE_AFTER_ANOTHER = "set federated.vectorize = 0, which trains clients one after another"


@dataclass(frozen=True)
class BatchRows:
    """Batches of one shape, stacked.

    Args:
        rows: the clients.
        leaves: the tensors of the batches, with the clients along the first dimension.
        places: of these among the values.
        values: all leaves of the batch of the first client.
        spec: of the batch; None: it is a list.
    """

    rows: list[int]
    leaves: list[Tensor]
    places: list[int]
    values: list[Any]
    spec: TreeSpec | None

    def batch(self, leaves: Sequence[Any]) -> Any:
        """Return a batch with these tensors."""
        values = list(self.values)
        for place, leaf in zip(self.places, leaves, strict=True):
            values[place] = leaf
        return tree_unflatten(values, self.spec) if self.spec is not None else values


def split_rows(batch: Sequence[Tensor], rows: list[int]) -> BatchRows:
    """Divide a list of tensors [clients x samples, ...] among clients with equally many samples."""
    leaves = [t.view(len(rows), len(t) // len(rows), *t.shape[1:]) for t in batch]
    return BatchRows(rows, leaves, [*range(len(leaves))], leaves, None)


def stack_batches(batches: Mapping[int, Any]) -> Iterator[BatchRows]:
    """Stack the batches of clients; those of different shapes apart."""
    groups: dict[Any, list[int]] = {}
    flattened = {index: tree_flatten(batch) for index, batch in batches.items()}
    for index, (leaves, spec) in flattened.items():
        shapes = tuple(
            (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
        )
        groups.setdefault((shapes, repr(spec) if len(batches) > 1 else ""), []).append(index)
    for rows in groups.values():
        leaves, spec = flattened[rows[0]]
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        stacked = [torch.stack([flattened[row][0][place] for row in rows]) for place in places]
        yield BatchRows(rows, stacked, places, leaves, spec)


@dataclass(frozen=True)
class PlainSGD:
    """SGD without momentum, for stacked weights.

    Args:
        optimizer: of the clients; its groups have the rates of the round.
        names: of the parameters, by id.
        divides: the loss of a step is a mean.
        clip_norm, clip_value, proximal: as in the recipe.
    """

    optimizer: torch.optim.Optimizer
    names: Mapping[int, str]
    divides: bool
    clip_norm: float | None
    clip_value: float | None
    proximal: float

    def step(
        self,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        counts: float | Tensor,
        start: Mapping[str, Tensor],
    ) -> None:
        """Move the weights by the gradients of the sums of the losses.

        Args:
            weights: [clients, ...]; changed in place.
            gradients: of the same shapes; changed in place.
            counts: items of each client in this step, [clients], or of all alike.
            start: the weights at the start of the round.
        """
        divisor = counts if self.divides else 1.0
        factor: float | Tensor = 1.0 / divisor
        if self.proximal or self.clip_norm is not None or self.clip_value is not None:
            _multiply(gradients, factor)
            factor = self._limited(weights, gradients, start)
        for group in self.optimizer.param_groups:
            names = [name for p in group["params"] if (name := self.names[id(p)]) in gradients]
            moved, moves = [weights[n] for n in names], [gradients[n] for n in names]
            if isinstance(factor, Tensor) or group["weight_decay"]:
                _multiply(dict(zip(names, moves, strict=True)), factor)
                if group["weight_decay"]:
                    torch._foreach_add_(moves, moved, alpha=group["weight_decay"])
                torch._foreach_add_(moved, moves, alpha=-group["lr"])
            else:
                torch._foreach_add_(moved, moves, alpha=-group["lr"] * factor)

    def _limited(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], start: Mapping[str, Tensor]
    ) -> float | Tensor:
        """Add the proximal term to gradients and limit their values; return the factor of a clip."""
        for name, g in gradients.items() if self.proximal else ():
            g.add_(weights[name] - start[name], alpha=self.proximal)
        if self.clip_value is not None:
            for g in gradients.values():
                (torch.view_as_real(g) if g.is_complex() else g).clamp_(-self.clip_value, self.clip_value)
        if self.clip_norm is None:
            return 1.0
        norms = [torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in gradients.values()]
        norm = torch.linalg.vector_norm(torch.stack(norms).to(torch.float64), dim=0)
        return torch.where(norm > self.clip_norm, self.clip_norm / norm, 1.0)


def _multiply(gradients: Mapping[str, Tensor], factor: float | Tensor) -> None:
    """Multiply gradients [clients, ...] by a number, or by one for each client."""
    for g in gradients.values():
        if isinstance(factor, Tensor):
            g.mul_(factor.to(g.dtype).view(-1, *[1] * (g.dim() - 1)))
        elif factor != 1.0:
            g.mul_(factor)


class VectorizedClients:
    """The local training of the clients of a group.

    Args:
        runner: of a whole model in memory.
        loss: of the task, which every client computes alone.
        sgd: the optimizer.
        start: the weights at the start of a round, in the order of `runner.sharded_model.computes`.
        precision: of the forward.
        phases: measures the seconds of each phase.
        joins_batches: as for `CohortWork`.
    """

    def __init__(
        self,
        runner: ModelRunner,
        loss: LossFunction,
        sgd: PlainSGD,
        start: Sequence[Tensor],
        precision: MixedPrecision,
        phases: PhaseTimer,
        *,
        joins_batches: bool = False,
    ) -> None:
        self._joins_batches = joins_batches
        computes, self._runner = runner.sharded_model.computes, runner
        self._start = {slot.name: t for slot, t in zip(computes, start, strict=True)}
        self._parameters = {slot.name: p for slot, p in computes.items()}
        self._num_parameters = len(self._parameters)
        self._stacked_start = {name: t.unsqueeze(0) for name, t in self._start.items()}
        self._model = runner.sharded_model.model
        self._task_loss, self._places = loss, ParameterPlaces(self._model, [*computes.values()])
        self._sgd, self._precision, self._phases = sgd, precision, phases
        self._constants: dict[str, float] = {}
        self._stacked: BatchRows
        self._is_checked = False
        self._losses = vmap(self._loss, randomness="error")

    def train(
        self, num_clients: int, steps: Sequence[Mapping[int, MicroBatch]], stream: BatchStream
    ) -> tuple[list[Tensor], list[LocalSums]]:
        """Train the clients of a group from the weights at the start of the round.

        Args:
            steps: for each batched step the batches by client, in the order of the stream.
        Returns:
            Each parameter [num_clients, ...], and the sums of the loss of each client.
        Raises:
            TaskError: `torch.func` cannot run the model, or computes other gradients.
        """
        if not self._model.training:
            enter_training(self._model)
        weights = {n: t.repeat(num_clients, *[1] * (t.dim() - 1)) for n, t in self._stacked_start.items()}
        sums = [LocalSums.empty() for _ in range(num_clients)]
        for batches in steps:
            self._phases.begin("data")
            if self._joins_batches:
                parts = [split_rows(next(stream).batch, [*batches])]
            else:
                parts = [*stack_batches({index: next(stream).batch for index in batches})]
            if not self._is_checked:
                self._check(parts[0])
            self._phases.begin("forward")
            for stacked in parts:
                self._step(weights, stacked, sums)
        return [*weights.values()], sums

    def _step(self, weights: Mapping[str, Tensor], stacked: BatchRows, sums: Sequence[LocalSums]) -> None:
        """Take a step of all clients whose batches have one shape."""
        some = weights
        index = None if len(stacked.rows) == len(sums) else torch.tensor(stacked.rows)
        if index is not None:
            some = {n: w.index_select(0, index.to(w.device)) for n, w in weights.items()}
        gradients, results = self._run(some, stacked)
        constants = self._constants
        with torch.no_grad():
            counts = constants["count"] if "count" in constants else results["count"]
            self._sgd.step(some, gradients, counts, self._start)
            if index is not None:
                for name, w in weights.items():
                    w.index_copy_(0, index.to(w.device), some[name])
        columns = {name: value.tolist() for name, value in results.items()}
        columns |= {name: [value] * len(stacked.rows) for name, value in constants.items()}
        totals, counted = columns.pop("total"), columns.pop("count")
        for number, row in enumerate(stacked.rows):
            metrics = {name[1:]: float(column[number]) for name, column in columns.items()}
            sums[row].add(float(totals[number]), float(counted[number]), metrics)

    def _run(
        self, weights: Mapping[str, Tensor], stacked: BatchRows
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return gradients and sums of all clients, [clients, ...] each."""
        self._stacked = stacked
        leaves = [w.detach().requires_grad_() for w in weights.values()]
        # Plain arguments: a nested structure is flattened several times in every call.
        results = self._losses(*leaves, *stacked.leaves)
        # No client's loss depends on the weights of another, so the gradient of the sum is that of each. It
        # takes two thirds of the time of `torch.func.grad` inside of `vmap`.
        total = results["total"].sum()
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
        used = {n: g for n, g in zip(weights, gradients, strict=True) if g is not None}
        return used, {name: value.detach() for name, value in results.items()}

    def _loss(self, *values: Tensor) -> dict[str, Tensor]:
        """Return the tensors among the sums of one client's loss; numbers are put aside."""
        weights, leaves = values[: self._num_parameters], values[self._num_parameters :]
        with self._precision.autocast(), self._places.replaced(weights):
            loss = check_loss(self._task_loss(self._model, self._stacked.batch(leaves)))
        # A metric may have the name of the loss or of the count.
        sums = {"total": loss.total, "count": loss.count, **{f" {n}": m for n, m in loss.metrics.items()}}
        self._constants = {n: float(value) for n, value in sums.items() if not isinstance(value, Tensor)}
        return {n: value for n, value in sums.items() if isinstance(value, Tensor)}

    # -- the check before the first round

    def _check(self, stacked: BatchRows) -> None:
        """Compare the gradients of two clients with those of the ordinary way."""
        model = self._model
        _refuse_keyed_dropout(model)
        numbers = (0, min(1, len(stacked.rows) - 1))
        pair = replace(stacked, leaves=[torch.stack([t[n] for n in numbers]) for t in stacked.leaves])
        weights = {n: torch.stack([p.detach()] * 2) for n, p in self._parameters.items()}
        buffers = [(name, b, b._version) for name, b in model.named_buffers()]
        with _named_failure(model):
            gradients, results = self._run(weights, pair)
        # Every rank writes the metrics by the order of their names, as an ordinary step has learned them.
        LossSums(self._runner.metric_names).add(_without_clients(results, self._constants))
        for (name, before, version), (_, b) in zip(buffers, model.named_buffers(), strict=True):
            if b is not before or b._version != version:
                raise _refusal(f"the forward writes to the buffer '{name}'")
        self._compare(gradients, pair)
        self._is_checked = True

    def _compare(self, gradients: Mapping[str, Tensor], pair: BatchRows) -> None:
        for number in range(2):
            with self._precision.autocast():
                batch = pair.batch([leaf[number] for leaf in pair.leaves])
                total = check_loss(self._task_loss(self._model, batch)).total
            parameters = [*self._parameters.values()]
            ordinary: Sequence[Tensor | None] = torch.autograd.grad(total, parameters, allow_unused=True)
            largest = max(
                (float(g.abs().max()) for g in ordinary if g is not None and g.numel()), default=0.0
            )
            for (name, p), expected in zip(self._parameters.items(), ordinary, strict=True):
                if expected is None:
                    continue
                found = gradients[name][number] if name in gradients else torch.zeros_like(expected)
                error = float((found - expected).abs().max()) if p.numel() else 0.0
                # Not finite on both sides is trouble of the client, which is left out later.
                if error > math.sqrt(torch.finfo(p.dtype).eps) * largest:
                    raise _refusal(f"the gradient of '{name}' is another one in a batched computation")


def _without_clients(results: Mapping[str, Tensor], constants: Mapping[str, float]) -> Loss:
    """Return the loss of the first client."""
    values: dict[str, Any] = {name: value[0] for name, value in results.items()} | dict(constants)
    metrics = {name[1:]: value for name, value in values.items() if name.startswith(" ")}
    return Loss(values["total"], values["count"], metrics)


def _refuse_keyed_dropout(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, KeyedDropout) and module.p and module.training:
            raise _refusal(f"'{name}' (KeyedDropout) would draw one mask for all clients of a group")


@contextmanager
def _named_failure(model: nn.Module) -> Iterator[None]:
    """Name the module in which an error of `torch.func` occurs."""
    names = {id(module): name or "the model" for name, module in model.named_modules()}
    running, handles = list[nn.Module](), list[RemovableHandle]()

    def enter(module: nn.Module, inputs: Any) -> None:
        running.append(module)

    def leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
        running.pop()

    for module in model.modules():
        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    except (RuntimeError, NotImplementedError, ValueError) as error:
        where = "the loss or its backward"
        if running:
            where = f"'{names[id(running[-1])]}' ({type(running[-1]).__name__})"
        why = str(error).strip().partition("\n")[0]
        raise _refusal(f"torch.func cannot run {where}: {why}") from error
    finally:
        for handle in handles:
            handle.remove()


def _refusal(why: str) -> TaskError:
    return TaskError(
        f"clients of this task cannot run as one batched computation: {why}",
        where=_KEY,
        next_step=f"{_ONE_AFTER_ANOTHER}; or use layers without running statistics, dropout and decisions"
        " by value",
    )


def require_plain_sgd(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that a batched step does not have.

    Raises:
        StrategyError: it is not SGD without momentum, or it has hooks.
    """
    why = ""
    if type(optimizer) is not torch.optim.SGD:
        why = f"the optimizer is {type(optimizer).__name__}"
    elif any(group["momentum"] or group["maximize"] for group in optimizer.param_groups):
        why = "the optimizer has momentum, or maximizes"
    elif optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        why = "the optimizer has hooks"
    if why:
        raise StrategyError(
            f"federated.vectorize moves stacked weights by SGD without momentum, and {why}",
            where=_KEY,
            next_step=f'set optimizer.name = "sgd" without momentum, or {_ONE_AFTER_ANOTHER}',
        )


def build_vectorized(
    context: SessionContext, layout: ModelLayout, state: TrainState, start: Sequence[Tensor]
) -> Callable[..., VectorizedClients]:
    """Return the constructor of the batched computation, from the loss of the task and `joins_batches`.

    Args:
        start: the weights at the start of a round, in the order of the parameters.
    Raises:
        StrategyError: the optimizer of the clients is not plain SGD.
    """
    recipe, runner = context.recipe, layout.runner
    require_plain_sgd(state.optimizer)
    names = {id(p): slot.name for slot, p in runner.sharded_model.updates.items()}
    sgd = _sgd_of(recipe, state.optimizer, names)
    # Without a cache of casts: every call has other weights.
    precision = MixedPrecision(recipe.precision.compute, context.device.type, caches=False)

    def build(loss: LossFunction, *, joins_batches: bool) -> VectorizedClients:
        return VectorizedClients(
            runner, loss, sgd, start, precision, context.phases, joins_batches=joins_batches
        )

    return build


def _sgd_of(recipe: Recipe, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> PlainSGD:
    limits = recipe.optimizer.clip_norm, recipe.optimizer.clip_value
    return PlainSGD(optimizer, names, recipe.batch.reduction == "mean", *limits, recipe.federated.proximal)
