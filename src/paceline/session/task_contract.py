"""Checks of a task before the first step: its data, its model, and its loss on samples alone and together.

Invariant: an error here names a mistake that would have trained something else silently. Mistakes that a few
samples cannot show pass (a loss of zero, a metric that is zero for all samples that are tried).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.comm.group_collectives import all_gather_texts
from paceline.comm.net import Net
from paceline.data.loader import collate_samples
from paceline.data.sample_order import BatchOrder
from paceline.data.sample_reader import seeded_generators
from paceline.data.task_data import build_order
from paceline.data.work import LoadedBatch, MicroBatch
from paceline.errors import DataError, StrategyError, TaskError, format_count
from paceline.job.mesh import RankGroup
from paceline.parallel.batch_gather import WholeBatch, gather_scope
from paceline.parallel.model_runner import ModelRunner
from paceline.parallel.session_context import SessionContext
from paceline.recipe.optimizer_recipe import OptimizerRecipe
from paceline.recipe.recipe import Recipe
from paceline.task import COUNT_OF, Loss, Task

_RELATIVE_TOLERANCE = 1e-3
_ADDITIVE_TOLERANCE = {"fp32": 1e-3, "fp16": 1e-2, "bf16": 1e-1}  # kernels round by the size of a batch
_ZERO = 1e-12
_DATA_ERRORS = (AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
_MAX_CHUNKS = 4  # of half a micro-batch, in which a metric may be zero everywhere
_COUNT = "Loss(total, count): count is the number of items in the total, for example len(batch)"
_MAX_PROBED_SAMPLES = 8  # samples, until one has an item
_SHARED_OPTIMIZER_KEYS = (
    "clip_norm",
    "clip_value",
)  # of the recipe's optimizer, when the task brings its own


def require_data(task: Task) -> None:
    """Raise a DataError if the training data is empty."""
    if len(task.data) == 0:
        raise DataError(
            "the training data is empty", next_step="check the task's options that select the data"
        )


def check_task_loss(context: SessionContext, recipe: Recipe, task: Task, runner: ModelRunner) -> Loss:
    """Call the loss on a few samples, alone and together, and learn the names of its metrics; collective.

    The layout runs the model, in evaluation mode, since a rank may hold a part of it; ranks that compute the
    loss send it to the others. A loss that draws random numbers cannot be compared with a sum over samples.

    Args:
        context: of the first rule.
        recipe: with all rules of the run.
    Returns:
        The loss of the first sample that has items.
    Raises:
        TaskError: the loss does not return a `Loss`, counts nothing, returns means instead of sums, or
            compares samples, so that its result would depend on the number of processes.
        StrategyError: the loss gathers rows of all ranks, and the strategy does not support it.
    Wire: forwards of 8 samples, and of half a micro-batch 3 times if a metric is 0 for a sample; a ragged
        all_gather of some bytes for each.
    """
    probe = LossProbe(context, task, runner)
    num_probed = min(_MAX_PROBED_SAMPLES, len(task.data))
    # A sample may have no items, for example only padding.
    for index in range(num_probed):
        once, twice = probe([[index], [index] * 2])
        if float(once.count) > 0:
            break
    else:
        raise TaskError(
            f"the loss counts {format_count(float(once.count), 'item')} in the first"
            f" {format_count(num_probed, 'sample')}, so nothing would be trained",
            next_step=_COUNT,
        )
    refuse_means(once, twice)
    _check_zero_metrics(probe, once, context)
    if probe.gathers:
        require_gather_support(context, recipe, build_order(recipe, task))
    else:
        _check_additive(probe, index, context)
    return once


def _check_zero_metrics(probe: LossProbe, once: Loss, context: SessionContext) -> None:
    """Try metrics that are 0 for a sample, as an accuracy often is, on half a micro-batch once and twice."""
    undecided = {name for name in once.metrics if abs(float(once.metrics[name])) < _ZERO}
    num_samples = max(1, context.recipe.batch.size // context.shards // 2)
    for first in range(0, min(len(probe.task.data), _MAX_CHUNKS * num_samples), num_samples):
        if not undecided:
            return
        chunk = [*range(first, min(first + num_samples, len(probe.task.data)))]
        losses = probe.try_together([chunk, chunk * 2])
        if losses is None:
            return
        refuse_means(*losses)
        undecided -= {name for name, value in losses[0].metrics.items() if abs(float(value)) >= _ZERO}


def _check_additive(probe: LossProbe, index: int, context: SessionContext) -> None:
    """Compare the loss of two samples together with the sum of both alone.

    Raises:
        TaskError: they differ, and the samples of a micro-batch depend on the number of processes.
    """
    other = (index + 1) % len(probe.task.data)
    losses = probe.try_together([[index], [other], [index, other], [index]]) if other != index else None
    if losses is None or probe.draws or float(losses[0].total) != float(losses[3].total):
        return
    recipe, (first, second, both, _) = context.recipe, losses
    problem = describe_coupling(first, second, both, _ADDITIVE_TOLERANCE.get(recipe.precision.compute, 1e-3))
    # Micro-batches that are the same on any number of processes give the same answer, coupled or not.
    if not problem or recipe.batch.shards is not None or recipe.reproducible:
        return
    if context.shards > 1:
        raise TaskError(
            f"{problem}: it compares the samples of a micro-batch with each other, and their number depends"
            " on the number of processes",
            next_step="collect what is compared over all ranks with paceline.gather"
            " (docs/howto/micro-batches.md), or fix the micro-batches with batch.shards",
        )
    context.warn(
        f"warning: {problem}: on several processes this loss needs paceline.gather or batch.shards"
        " (docs/howto/micro-batches.md)."
    )


def describe_coupling(first: Loss, second: Loss, both: Loss, tolerance: float) -> str:
    """Describe how the loss of two samples differs from the sum over each of them; empty if it does not.

    Args:
        first, second: of each sample alone.
        both: of the two together.
        tolerance: relative to the magnitudes of the three.
    """
    for name in ("count", "total"):
        parts = [float(getattr(loss, name)) for loss in (first, second)]
        together = float(getattr(both, name))
        largest = sum(map(abs, (*parts, together)))
        if math.isfinite(largest) and abs(together - sum(parts)) > tolerance * largest:
            return (
                f"the {name} of the loss for two samples together is {together:.6g}, and the sum over each of"
                f" them alone is {sum(parts):.6g}"
            )
    return ""


class LossProbe:
    """Calls of the loss on chosen samples, in evaluation mode, with equal results on all ranks.

    Args:
        context: its net and mesh share the results.
        task: its samples are read once and cached.
        runner: runs the model; its parameters, buffers and the random numbers of this process stay.

    Attributes:
        draws: a forward of any rank has drawn random numbers.
        gathers: the loss calls `paceline.gather`.
    """

    def __init__(self, context: SessionContext, task: Task, runner: ModelRunner) -> None:
        self.task, self._runner, self._context = task, runner, context
        self._samples: dict[int, Any] = {}
        self.draws = self.gathers = False

    def __call__(self, batches: Sequence[Sequence[int]]) -> list[Loss]:
        """Return the losses of some batches of samples; collective.

        Args:
            batches: indices of the samples of each.
        """
        whole, drew = WholeBatch(), False
        device, names = self._runner.sharded_model.device, self._runner.metric_names

        def loaded() -> Iterator[LoadedBatch]:
            nonlocal drew
            for indices in batches:
                batch = probe_batch(self._collate(indices, device), indices)
                # The same numbers for each batch; random states are compared after its forward.
                _seed_generators()
                before = _generator_states(device)
                yield batch
                drew |= _generator_states(device) != before

        with (
            seeded_generators(0, np.random.MT19937()),
            torch.random.fork_rng(),
            gather_scope(whole),
            restore_buffers(self._runner.sharded_model.model),
        ):
            rows = self._runner.evaluate(loaded()).per_micro_batch().tolist()
        local = json.dumps([rows, names.names, drew, whole.num_calls > 0])
        answers = [*map(json.loads, all_gather_texts(local, self._context.mesh.world, self._context.net))]
        rows, learned, _, _ = next(answer for answer in answers if answer[0])
        names.names = tuple(learned)
        self.draws |= any(answer[2] for answer in answers)
        self.gathers |= any(answer[3] for answer in answers)
        return [
            Loss(torch.tensor(total), count, dict(zip(learned, metrics, strict=True)))
            for total, count, *metrics in rows
        ]

    def try_together(self, batches: Sequence[Sequence[int]]) -> list[Loss] | None:
        """Return the losses of batches of different samples; None if these cannot be collated."""
        failure = ""
        try:
            for indices in batches:
                self._collate(indices, torch.device("cpu"))
        # What cannot be read or collated is an error of the first step, if it has such a batch at all.
        except _DATA_ERRORS as error:
            failure = type(error).__name__
        if any(all_gather_texts(failure, self._context.mesh.world, self._context.net)):
            return None
        return self(batches)

    def _collate(self, indices: Sequence[int], device: torch.device) -> Any:
        with seeded_generators(0, np.random.MT19937()):
            # Read once: augmented samples differ in every read.
            for index in indices:
                if index not in self._samples:
                    self._samples[index] = self.task.data[index]
            return collate_samples(self.task, [self._samples[index] for index in indices], device)


def _seed_generators() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _generator_states(device: torch.device) -> list[Any]:
    """Return values that change if a forward draws from a global generator."""
    of_numpy: Any = np.random.get_state()
    of_torch = torch.default_generator.get_state().numpy().tobytes()
    states = [random.getstate(), of_numpy[1].tobytes(), of_numpy[2], of_torch]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).numpy().tobytes())
    return states


def require_gather_support(context: SessionContext, recipe: Recipe, order: BatchOrder) -> None:
    """Require that every rank runs one micro-batch in every step, for a loss that gathers rows of all.

    Args:
        context: of the first rule.
        recipe: with all rules of the run.
        order: of the samples.
    Raises:
        StrategyError: it does not; a rank would wait in a gather that others do not reach.
    """
    strategy, ranks, shards = recipe.strategy, context.mesh.data.size, context.shards
    last_batch = order.batch_size(order.steps_per_epoch - 1)
    reasons = {
        f"a batch has {shards} micro-batches for {ranks} ranks that share it": shards != ranks,
        f"the last batch of an epoch has {last_batch} samples for {ranks} ranks": last_batch < ranks,
        f"sync={strategy.sync} does not run all ranks in every step": not strategy.sync_spec.exact
        or strategy.servers > 0
        or len(strategy.sync_words) > 1
        or bool(strategy.sync_choices),
        "balance=speed moves micro-batches between ranks": strategy.balances_by_speed,
        f"lanes={strategy.lanes} run parts of a batch as threads": strategy.lanes > 1,
        "context splits the positions of a sample": strategy.context > 1,
        "rechunk runs parts of a micro-batch": strategy.is_set("rechunk"),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise StrategyError(
            "the loss uses paceline.gather, which needs one micro-batch on every rank in every step, but "
            + "; ".join(found),
            next_step=f"set batch.shards = {ranks}, batch.drop_last = true if the last batch is too small,"
            " and sync=every-step; or fix the micro-batches with batch.shards and leave out gather",
        )


def probe_batch(batch: Any, indices: Sequence[int] = (0,)) -> LoadedBatch:
    """Return a collated batch as a micro-batch of step 0 and key 0, for a check."""
    micro_batch = MicroBatch(step=0, shard=0, indices=np.array(indices, dtype=np.int64), key=0)
    return LoadedBatch(micro_batch, batch)


@contextmanager
def restore_buffers(model: nn.Module) -> Iterator[None]:
    """Return a context manager that restores all buffers, also non-persistent ones, at its end."""
    before = [(m, n, b, b.clone()) for m in model.modules() for n, b in m._buffers.items() if b is not None]
    yield
    for module, name, buffer, value in before:
        module._buffers[name] = buffer
        if not buffer.is_meta:
            buffer.copy_(value)


def refuse_means(once: Loss, twice: Loss) -> None:
    """Raise a TaskError if a sum does not double for two copies of a sample."""
    total, count = (
        _growth_factor(float(getattr(once, name)), float(getattr(twice, name))) for name in ("total", "count")
    )
    if total == 1 and count == 2:
        raise TaskError(
            "the loss has the same total for one sample and for two copies of it, but different counts:"
            " the total is a mean, and would be divided by the count again",
            next_step="use Loss.mean(value, count) for a mean, or sum the losses: reduction='sum'",
        )
    if count == 1 and total in (1, 2):
        raise TaskError(
            f"the loss counts {format_count(float(once.count), 'item')} in a sample and as many in two"
            " copies of it: micro-batches of different sizes would have equal weights",
            next_step=_COUNT,
        )
    # Where copies of a sample compete with each other (contrastive losses), metrics show nothing.
    if count != 2 or total != 2:
        return
    squared = _metrics_that_grow(once.metrics, twice.metrics, 4)
    if squared:
        raise TaskError(
            f"the metric '{squared[0]}' is four times as large for two copies of a sample as for one: it is a"
            " sum, but Loss.mean takes means, and multiplies them by the count",
            next_step="pass its mean, or Metric(total, count); or return Loss(total, count, metrics), whose"
            " metrics are sums",
        )
    wrong = _metrics_that_grow(once.metrics, twice.metrics, 1)
    if wrong:
        raise TaskError(
            f"the metric '{wrong[0]}' is the same for one sample and for two copies of it: it is a mean, but"
            " metrics are added up",
            next_step=f"return the sum, for example {wrong[0]} * len(batch), or Metric(total, count)",
        )


def _metrics_that_grow(once: Mapping[str, Any], twice: Mapping[str, Any], by: int) -> list[str]:
    """Return the names of the metrics that two copies of a sample multiply by a factor."""
    return [
        name.removeprefix(COUNT_OF)
        for name in once
        if name in twice and _growth_factor(float(once[name]), float(twice[name])) == by
    ]


def _growth_factor(once: float, twice: float) -> int:
    """Return 1 if equal, 2 if doubled, 4 if squared with the count, 0 if none or too small to decide."""
    if not math.isfinite(once) or not math.isfinite(twice) or abs(once) < _ZERO:
        return 0
    return next(
        (f for f in (1, 2, 4) if math.isclose(twice, f * once, rel_tol=_RELATIVE_TOLERANCE)),
        0,
    )


def refuse_two_optimizers(recipe: Recipe) -> None:
    """Raise a TaskError if the recipe sets optimizer options that the task's own optimizer does not read."""
    defaults = OptimizerRecipe()
    unread = [
        name
        for name in OptimizerRecipe.model_fields
        if name not in _SHARED_OPTIMIZER_KEYS and getattr(recipe.optimizer, name) != getattr(defaults, name)
    ]
    if unread:
        keys = ", ".join(f"optimizer.{name}" for name in unread)
        raise TaskError(
            f"the task has its own optimizer, Task(optimizer=...), which does not read {keys} of the recipe",
            next_step="pass them to the task's optimizer by [options], or remove Task(optimizer=...)",
        )


def refuse_repeated_momentum_or_clip(recipe: Recipe, task: Task) -> None:
    """Raise if the optimizer repeats what a codec already does to gradients: momentum or clipping.

    Raises:
        StrategyError: codec=dgc is combined with an optimizer that has momentum, or with
            `optimizer.clip_norm` or `clip_value`.
    """
    codecs, optimizer = recipe.strategy.codec_alternatives, recipe.optimizer
    clips = [key for key in _SHARED_OPTIMIZER_KEYS if getattr(optimizer, key) is not None]
    if clips and any(codec.clip_norm is not None for codec in codecs):
        raise StrategyError(
            f"codec=dgc:K:M:C clips the gradients of each rank, and optimizer.{clips[0]} would clip their"
            " sum again",
            next_step=f"remove optimizer.{clips[0]}, or remove C from dgc:K:M:C",
        )
    has_momentum = any(codec.codec_has_momentum for codec in codecs)
    if has_momentum and task.optimizer is None and (optimizer.name != "sgd" or optimizer.momentum):
        raise StrategyError(
            "codec=dgc applies momentum to the gradients of each rank, and the optimizer would apply it"
            f" again: found {optimizer.name}, momentum = {optimizer.momentum:g}",
            next_step='set optimizer.name = "sgd" without momentum, and its momentum as codec=dgc:0.01:0.9',
        )


def warn_large_batch(recipe: Recipe, task: Task, warn: Callable[[str], None]) -> None:
    """Warn if a batch is larger than the data, which is rarely intended."""
    size, num_samples = recipe.batch.size, len(task.data)
    if size > num_samples and not recipe.strategy.sync_spec.trains_clients:
        warn(
            f"warning: batch.size = {size} is larger than the data set of"
            f" {format_count(num_samples, 'sample')}, so"
            " every step trains on all of them."
        )


def require_same_order(order: BatchOrder, net: Net, group: RankGroup) -> None:
    """Compare the sample order of all ranks; collective if it does not follow from the recipe alone.

    Raises:
        DataError: the sampler or stream of a rank differs from that of rank 0, or from its own second pass.
    Wire: one ragged all_gather of a hash, if the order has one.
    """
    local = order.fingerprint()
    fingerprints = all_gather_texts(local, group, net) if local else [local]
    if len(set(fingerprints)) > 1:
        rank = next(rank for rank, other in enumerate(fingerprints) if other != fingerprints[0])
        raise DataError(
            f"rank {rank} reads other samples than rank 0, but every rank must see the same data; otherwise"
            " some samples would be skipped and others used twice",
            next_step="remove sharding by rank or machine, because Paceline distributes samples to ranks; and"
            " draw random numbers from the global generators, which are seeded alike",
        )


def require_equal_shapes(model: nn.Module, net: Net, group: RankGroup) -> None:
    """Compare names, shapes and dtypes of the models that the ranks have built; collective.

    Raises:
        TaskError: they differ; the error names the rank and the first tensor that differs.
    Wire: one ragged all_gather of a hash; another one of all names and shapes if the hashes differ.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    text = json.dumps({name: f"{tuple(t.shape)} {t.dtype}" for name, t in tensors})
    hashes = all_gather_texts(blake2b(text.encode(), digest_size=16).hexdigest(), group, net)
    if len(set(hashes)) == 1:
        return
    # All names and shapes are sent only to name the difference.
    models = [json.loads(model) for model in all_gather_texts(text, group, net)]
    first = models[0]
    rank = next(rank for rank, model in enumerate(models) if list(model.items()) != list(first.items()))
    other = models[rank]
    names = [name for name in [*first, *other] if first.get(name) != other.get(name)]
    name = names[0] if names else next(a for a, b in zip(first, other, strict=True) if a != b)
    raise TaskError(
        f"ranks have built different models: '{name}' is {first.get(name, 'missing')} on rank 0 and"
        f" {other.get(name, 'missing')} on rank {rank}" + ("" if names else ", in another order"),
        next_step="build the same model on every rank: nothing in it may depend on the rank or the machine",
    )
