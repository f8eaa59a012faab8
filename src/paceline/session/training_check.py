"""The check of the first step: a partitioned model trains as the whole model does, or the run is refused.

Evaluation and outputs alone do not show everything: two ranks can drop the same features, a gradient can stay
partial, a loss can read only this rank's weights. So a few samples run in training mode, forward and
backward, through the whole model before it is partitioned, and then through the runner of the layout. Losses,
metrics, gradients of all parameters and the draws from PyTorch's generators are compared.

A parameter that every tensor rank holds whole can have a partial gradient, because it is applied to a part of
the features or heads (a norm of queries and keys, `nn.PReLU`, a learned temperature). If the sum of these
gradients is that of the whole model, the parameter is marked: its gradient is summed over the tensor axis
from then on. Every other difference ends the run.

Parameters whose values are all equal (zeros, ones) are moved a little during the check, since a gate that
starts at zero would hide whatever is behind it. A gradient of zero, as where the samples are masked, does not
show whether it is partial, so more samples are tried until each parameter has had another one.

Invariant: after the check, parameters, buffers and random generators are as before it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from paceline.comm.group_collectives import all_gather_texts
from paceline.data.loader import collate_samples
from paceline.data.work import LoadedBatch
from paceline.errors import TaskError
from paceline.models.dropout import name_dropouts
from paceline.models.training_mode import enter_training
from paceline.parallel.data_parallel import ReplicatedRunner
from paceline.parallel.model_runner import ModelRunner
from paceline.parallel.pipeline.pipeline_runner import PipelineRunner
from paceline.parallel.placement import TensorPlacement
from paceline.parallel.rng_state import Draw, DrawRecorder, seed_micro_batch
from paceline.parallel.session_context import SessionContext
from paceline.parallel.state_hash import tensor_sha256
from paceline.session.task_contract import probe_batch, restore_buffers
from paceline.state.keys import key
from paceline.state.slot import TensorSlot, trained_parameters
from paceline.task import Loss, Task

_NUM_TRIALS = 2  # a rounding difference at a kink (ReLU, top-k) can change one of them, but not both
_MAX_TRIALS = 6  # while a parameter has had no gradient
_SAMPLES_PER_TRIAL = 2
_MIN_TOLERANCE = 1e-3  # of the largest value of a gradient
_MAX_ULPS = 64  # of the coarsest dtype of the parameters, if that is more
_GLOBAL_TOLERANCE = 1e-5  # of the largest gradient of all, for gradients that are zero up to rounding
_LEAST_SHOWN, _SHOWN_TOLERANCE = 1e-4, 1e-6  # the same, for gradients that are zero in the first right trial
_MIN_SUM_TOLERANCE = 1e-4
# Errors of a model. Those of Paceline have a message of their own and pass, the same on all ranks.
_MODEL_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError),
    *(NotImplementedError, RuntimeError, TypeError, ValueError),
)


PartitionedRunner = ReplicatedRunner | PipelineRunner
"""A runner of a model that is partitioned by tensor or context: without threads."""


@dataclass
class _TrialResult:
    """One trial: sums of the loss (if this rank has them), gradients by name, draws, and, of the whole model,
    the largest value of each gradient.
    """

    sums: Tensor | None
    gradients: dict[str, Tensor]
    draws: list[Draw]
    largest: dict[str, float] = field(default_factory=dict)


class TrainingCheck:
    """Trials of the whole model, which `compare` repeats under the layout.

    Args:
        context: of the session.
        task: with the loss as the user wrote it.
        model: whole, with equal weights on all ranks.
    """

    def __init__(self, context: SessionContext, task: Task, model: nn.Module) -> None:
        self._context, self._task, self._model = context, task, model
        self._batches, self._whole = list[LoadedBatch](), list[_TrialResult]()
        self._largest = 0.0  # value of any gradient of the whole model, in any trial
        self._constants = _constant_parameters(model)
        self._tolerance = _tolerance([*model.parameters()])

    def run_whole(self, placements: Mapping[str, TensorPlacement]) -> None:
        """Run the trials through the whole model, and keep the gradients of what this rank will hold.

        Args:
            placements: what this rank will compute with, by name.
        """
        slots = {name: placement.computes for name, placement in placements.items()}
        whole = [(slot, p) for slot, p in trained_parameters(self._model).items()]
        zero = {slot.name for slot, _ in whole}
        with _perturbed(whole, self._constants):
            while len(self._whole) < _NUM_TRIALS or (zero and len(self._whole) < _MAX_TRIALS):
                batch = _trial_batch(self._context, self._task, len(self._whole))
                if len(self._whole) >= _NUM_TRIALS:  # gradients take memory
                    slots = {name: slot for name, slot in slots.items() if name in zero}
                result = _run_whole(self._task, self._model, batch, slots, self._context.device)
                if result is None:
                    # Not a mistake of the layout: the check of the loss or the first step names it.
                    self._whole = []
                    return
                self._largest = max(self._largest, *result.largest.values(), 0.0)
                zero -= self._shown(result)
                self._batches.append(batch)
                self._whole.append(result)

    def compare(self, runner: ModelRunner) -> None:
        """Run the trials under the layout and compare; collective.

        Parameters with partial gradients are marked in the runner's `sharded_model`, so that the reduction
        that is built from it sums these gradients over the tensor axis.

        Raises:
            TaskError: the layout trains something else; the same error on every rank.
        Wire: forward and backward of a few samples, an all_reduce of each gradient that is summed over the
            tensor or context axis, and ragged all_gathers of some bytes.
        """
        assert isinstance(runner, PartitionedRunner)
        sharded_model, net, mesh = runner.sharded_model, self._context.net, self._context.mesh
        # A gradient that is zero on some ranks only could give them different numbers of trials.
        numbers = range(min(int(text) for text in all_gather_texts(str(len(self._whole)), mesh.world, net)))
        finding, zero, failed, summed = _Finding(), {*sharded_model.held}, set[str](), set[str]()
        is_right = False
        for number in numbers:
            if not is_right and number >= _NUM_TRIALS:
                break
            # All is compared until a trial is right, and then only gradients that were zero so far.
            shown = self._agree(_Finding(summed=sorted(zero & self._shown(self._whole[number])))).summed
            if is_right and not shown:
                continue
            found = self._try(number, runner, shown if is_right else None)
            if found.mistake:
                finding = found
                failed |= {*shown} if is_right else set()
                continue
            zero -= {*shown}
            summed |= {*found.summed}
            is_right = True
        if finding.mistake and (not is_right or self._agree(_Finding(summed=sorted(failed & zero))).summed):
            raise TaskError(finding.mistake, next_step=finding.next_step)
        runner.sharded_model = sharded_model.with_sums(summed, "tensor")

    def _shown(self, whole: _TrialResult) -> set[str]:
        """Return the names of gradients that are far from rounding errors."""
        least = _LEAST_SHOWN * self._largest
        return {name for name, largest in whole.largest.items() if largest > least}

    def _try(self, number: int, runner: PartitionedRunner, names: Collection[str] | None = None) -> _Finding:
        """Run one trial under the layout and compare it; collective, equal on every rank.

        Args:
            names: the gradients that are compared; None: all.
        """
        sharded_model, finding = runner.sharded_model, _Finding()
        with _perturbed([*sharded_model.computes.items(), *sharded_model.updates.items()], self._constants):
            # Ranks of a host can share memory: all of them have written before one of them reads.
            self._agree(_Finding())
            partitioned = _run_partitioned(runner, self._batches[number], self._context.device)
            finding = self._compare_one(self._whole[number], partitioned, runner, names)
        self._agree(_Finding())
        return finding

    def _compare_one(
        self,
        whole: _TrialResult,
        partitioned: _TrialResult | Exception,
        runner: PartitionedRunner,
        names: Collection[str] | None,
    ) -> _Finding:
        """Compare one trial; collective, equal on every rank."""
        local = _Finding()
        if isinstance(partitioned, Exception):
            local = _failure(partitioned)
        # A rank that failed left its collectives, so the others may not begin new ones before they know.
        failed = self._agree(local)
        if failed.mistake:
            return failed
        assert isinstance(partitioned, _TrialResult)
        floor = _GLOBAL_TOLERANCE * max(whole.largest.values(), default=0.0)
        if names is not None:
            floor = _SHOWN_TOLERANCE * self._largest
        comparison = _GradientComparison(
            self._context, runner, whole.gradients, (self._tolerance, floor), names
        )
        wrong, summed = comparison.compare(partitioned.gradients)
        local.summed = summed
        copies = comparison.different_copy(summed)
        draws = _different_draw(whole.draws, partitioned.draws)
        sums = _different_sum(self._context, whole, partitioned, runner.metric_names.names or ())
        if self._context.mesh.axes["pipeline"].size > 1:
            draws = ""  # a stage makes only some of the draws
        if wrong or sums or draws or copies:
            local.mistake, local.next_step = _describe(self._context, wrong, (sums, draws, copies), summed)
        return self._agree(local)

    def _agree(self, local: _Finding) -> _Finding:
        """Return the finding of the first rank with a mistake, and the names that any rank sums."""
        texts = all_gather_texts(local.to_json(), self._context.mesh.world, self._context.net)
        findings = [_Finding(**json.loads(text)) for text in texts]
        first = next((finding for finding in findings if finding.mistake), _Finding())
        return replace(first, summed=sorted({name for finding in findings for name in finding.summed}))


@dataclass
class _Finding:
    """Result of one comparison: a mistake and its next step, and parameters whose gradients are partial."""

    mistake: str = ""
    next_step: str = ""
    summed: Sequence[str] = ()

    def to_json(self) -> str:
        return json.dumps({**vars(self), "summed": [*self.summed]})


def needs_training_check(context: SessionContext, model: nn.Module) -> bool:
    """Return whether the layout partitions the computation of a model that is in memory."""
    axes, recipe = context.mesh.axes, context.recipe
    is_partitioned = axes["tensor"].size > 1 or axes["context"].size > 1
    return (
        recipe.debug.check
        and is_partitioned
        and recipe.strategy.lanes == 1
        and not recipe.runtime.compile
        and not any(p.is_meta for p in model.parameters())
    )


def _trial_batch(context: SessionContext, task: Task, number: int) -> LoadedBatch:
    """Return the next samples as a micro-batch of training, of at most the size that a step has."""
    batch_size = context.recipe.batch.size
    per_micro_batch = max(1, batch_size // max(1, context.shards))
    size = min(_SAMPLES_PER_TRIAL, per_micro_batch)
    if context.mesh.axes["pipeline"].size > 1:
        size = per_micro_batch  # a stage may split a micro-batch into parts
    indices = [i % len(task.data) for i in range(number * size, (number + 1) * size)]
    return probe_batch(collate_samples(task, [task.data[i] for i in indices], context.device), indices)


def _constant_parameters(model: nn.Module) -> dict[str, float]:
    """Return the value of each trained parameter whose values are all equal, by name."""
    values: dict[str, float] = {}
    for slot, p in trained_parameters(model).items():
        if p.numel() and not p.is_meta and bool((p == p.reshape(-1)[0]).all()):
            values[slot.name] = float(p.detach().reshape(-1)[0])
    return values


@contextmanager
def _perturbed(
    parameters: Sequence[tuple[TensorSlot, nn.Parameter]], values: Mapping[str, float]
) -> Iterator[None]:
    """Move parameters with equal values inside the block: parts as the whole tensors are moved."""
    parts = [(slot, p) for slot, p in parameters if slot.name in values and p.untyped_storage().size()]
    with torch.no_grad():
        for slot, p in parts:
            generator = torch.Generator().manual_seed(key(0, "training-check", slot.name))
            # Positive, so that a root or a logarithm of a value at zero stays finite.
            noise = torch.rand(slot.shape, generator=generator)[slot.index] * 0.04 + 0.01
            p.copy_(values[slot.name] + noise.view(p.shape))
    try:
        yield
    finally:
        with torch.no_grad():
            for slot, p in parts:
                p.fill_(values[slot.name])


def _tolerance(parameters: Sequence[Tensor]) -> float:
    """Return the error of a gradient, relative to its largest value, that rounding explains."""
    dtypes = {p.dtype for p in parameters if p.is_floating_point()}
    return max([_MIN_TOLERANCE, *(_MAX_ULPS * torch.finfo(dtype).eps for dtype in dtypes)])


@contextmanager
def _trial_surroundings(model: nn.Module, device: torch.device) -> Iterator[DrawRecorder]:
    """Run a trial in training mode, in the parameters' dtype; restore generators, modes and buffers."""
    modes = [(module, module.training) for module in model.modules()]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    recorder = DrawRecorder(device)
    try:
        with torch.random.fork_rng(devices), restore_buffers(model), recorder:
            yield recorder
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for module, training in modes:
            module.training = training


def _run_whole(
    task: Task,
    model: nn.Module,
    loaded: LoadedBatch,
    slots: Mapping[str, TensorSlot],
    device: torch.device,
) -> _TrialResult | None:
    """Run forward and backward of the whole model; keep the gradients of this rank's slots only.

    Returns:
        None if the model or its loss fails, or returns no loss that can be trained.
    """
    result = _TrialResult(None, {}, [])
    hooks = [
        p.register_post_accumulate_grad_hook(partial(_keep_part, result, slot, slots.get(slot.name)))
        for slot, p in trained_parameters(model).items()
    ]
    before = [p.grad for p in model.parameters()]
    try:
        with _trial_surroundings(model, device) as recorder, torch.autocast(device.type, enabled=False):
            enter_training(model)
            seed_micro_batch(loaded.micro_batch.key, device, name_dropouts(model))
            loss = task.loss(model, loaded.batch)
            if not isinstance(loss, Loss) or not loss.total.requires_grad:
                return None
            loss.total.backward()
    except _MODEL_ERRORS:
        return None  # it is raised again in the first step, with its own traceback
    finally:
        for hook in hooks:
            hook.remove()
        for p, grad in zip(model.parameters(), before, strict=True):
            p.grad = grad
    return replace(result, sums=_loss_values(loss), draws=recorder.draws)


def _keep_part(result: _TrialResult, slot: TensorSlot, kept: TensorSlot | None, p: Tensor) -> None:
    """Add the part of a complete gradient to those that are kept, and free the whole."""
    if p.grad is not None:
        grad, name = p.grad.to_dense() if p.grad.is_sparse else p.grad, slot.name
        value = float(grad.abs().nan_to_num().max()) if grad.numel() else 0.0
        result.largest[name] = max(value, result.largest.get(name, 0.0))
        if kept is not None:
            part = grad[kept.index].clone()
            result.gradients[name] = result.gradients[name] + part if name in result.gradients else part
        p.grad = None


def _loss_values(loss: Loss) -> Tensor:
    """Return total, count and metrics (sorted by name) as float64 on the CPU."""
    values = [loss.total, loss.count, *(loss.metrics[name] for name in sorted(loss.metrics or {}))]
    return torch.tensor([float(torch.as_tensor(x).detach()) for x in values], dtype=torch.float64)


class _GradientRecorder:
    """Gradient sink that copies the gradients of one micro-batch."""

    by_micro_batch = False

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}

    def micro_batch(self, shards: range, is_last: bool) -> None:
        pass

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        if grad is not None:
            self.gradients[slot.name] = grad.detach().clone()


def _run_partitioned(
    runner: PartitionedRunner, loaded: LoadedBatch, device: torch.device
) -> _TrialResult | Exception:
    """Run forward and backward under the layout; an error of the model is returned, not raised."""
    sink, model = _GradientRecorder(), runner.sharded_model.model
    try:
        with _trial_surroundings(model, device) as recorder, _full_precision(runner):
            sums = runner.run([loaded], 1, sink, 1.0)
    except _MODEL_ERRORS as error:
        with suppress(*_MODEL_ERRORS):
            runner.abort()
        return error
    finally:
        for p in runner.sharded_model.computes.values():
            p.grad = None
    rows = sums.per_micro_batch()
    return _TrialResult(rows.sum(0) if len(rows) else None, sink.gradients, recorder.draws)


@contextmanager
def _full_precision(runner: PartitionedRunner) -> Iterator[None]:
    """Run in the dtype of the parameters."""
    before = runner.precision
    runner.precision = replace(before, compute="fp32")
    try:
        yield
    finally:
        runner.precision = before


class _GradientComparison:
    """Comparison of this rank's gradients with those of the whole model.

    Args:
        expected: gradients of what this rank computes with, by name.
        tolerances: relative to the largest value of each gradient, and absolute.
        names: the gradients that are compared; None: all.
    """

    def __init__(
        self,
        context: SessionContext,
        runner: PartitionedRunner,
        expected: Mapping[str, Tensor],
        tolerances: tuple[float, float],
        names: Collection[str] | None,
    ) -> None:
        self._context, self._expected = context, expected
        self._tolerance, self._floor = tolerances
        held = runner.sharded_model.held
        self._held = {name: p for name, p in held.items() if names is None or name in names}
        self._actual = dict[str, Tensor]()

    def compare(self, actual: Mapping[str, Tensor]) -> tuple[dict[str, float], list[str]]:
        """Return the relative error of wrong gradients by name, and the names of partial ones; collective."""
        self._actual = dict(actual)
        net, axes = self._context.net, self._context.mesh.axes
        gradients = {name: self._gradient(name, actual) for name in self._held}
        for name, held in self._held.items():
            for axis in ("context", "tensor"):
                if axis in held.sums and axes[axis].size > 1:
                    gradients[name] = net.all_reduce(gradients[name], axes[axis]).wait()
        errors = {name: self._error(name, grad) for name, grad in gradients.items()}
        partial_names = self._partial(gradients, errors) if axes["tensor"].size > 1 else []
        partial_names += self._partial_of_zero(gradients, errors, partial_names)
        wrong = {n: e for n, e in errors.items() if e > 1.0 and n not in partial_names}
        return {name: error * self._tolerance for name, error in wrong.items()}, partial_names

    def different_copy(self, partial_names: Sequence[str]) -> str:
        """Describe the first gradient that is not the same bits on all tensor ranks; collective.

        Copies of a parameter drift apart if their gradients differ in a bit.
        """
        different = self._different_copies(partial_names)
        return f"tensor ranks have different bits of the gradient of '{different[0]}'" if different else ""

    def _different_copies(self, partial_names: Sequence[str]) -> list[str]:
        """Return the names of gradients that are not the same bits on all tensor ranks; collective."""
        context = self._context
        names = [n for n, held in self._held.items() if _is_replicated(held) and n not in partial_names]
        hashes = {name: tensor_sha256(self._gradient(name, self._actual)) for name in names}
        texts = all_gather_texts(json.dumps(hashes), context.mesh.axes["tensor"], context.net)
        by_rank = [json.loads(text) for text in texts]
        return [name for name in names if len({hashes[name] for hashes in by_rank}) > 1]

    def _gradient(self, name: str, gradients: Mapping[str, Tensor]) -> Tensor:
        placement = self._held[name]
        if name in gradients:
            return gradients[name].reshape(placement.computes.sizes).clone()
        known = self._expected.get(name)
        like = known if known is not None else torch.zeros(0)
        return torch.zeros(placement.computes.sizes, dtype=like.dtype, device=self._context.device)

    def _error(self, name: str, grad: Tensor) -> float:
        """Return the largest error as a multiple of what is allowed; 0 where a tied stage has the rest."""
        if self._held[name].holders or not grad.numel():
            return 0.0  # the stages that share a tensor each have a part of its gradient
        expected = self._expected.get(name)
        expected = torch.zeros_like(grad) if expected is None else expected.to(grad.dtype)
        allowed = self._tolerance * float(expected.abs().nan_to_num().max()) + self._floor
        error = float((grad - expected).abs().nan_to_num(posinf=float("inf")).max())
        return error / allowed if allowed else (0.0 if error == 0.0 else float("inf"))

    def _partial(self, gradients: Mapping[str, Tensor], errors: Mapping[str, float]) -> list[str]:
        """Return the whole tensors of which the sum over the tensor ranks is right, but not each rank's."""
        net, group = self._context.net, self._context.mesh.axes["tensor"]
        names = [n for n, held in self._held.items() if _is_replicated(held)]
        flags = torch.tensor([float(errors[n] > 1.0) for n in names], dtype=torch.float64)
        flags = net.all_reduce(flags.to(self._context.device), group, "max").wait().cpu() if names else flags
        found = []
        for name, flag in zip(names, flags.tolist(), strict=True):
            if flag:
                total = net.all_reduce(gradients[name].clone(), group).wait()
                if self._error(name, total) <= 1.0:
                    found.append(name)
        return found

    def _partial_of_zero(
        self, gradients: Mapping[str, Tensor], errors: Mapping[str, float], partial_names: Sequence[str]
    ) -> list[str]:
        """Return the whole tensors of which each rank has a part of a gradient that is zero up to rounding.

        The bias of a norm of keys is one. The sum of its parts is as close to zero as they are, while the sum
        of whole gradients, which rounding can make different too, is far from each of them. Collective.
        """
        net, group = self._context.net, self._context.mesh.axes["tensor"]
        if group.size == 1:
            return []
        found = []
        for name in self._different_copies(partial_names):
            own = torch.tensor([errors[name]], dtype=torch.float64).to(self._context.device)
            largest = float(net.all_reduce(own, group, "max").wait())
            total = net.all_reduce(gradients[name].clone(), group).wait()
            if self._error(name, total) <= min(1.0, _MAX_ULPS * largest):
                found.append(name)
        return found


def _is_replicated(held: TensorPlacement) -> bool:
    """Return whether all tensor ranks hold the tensor and compute the same gradient of it."""
    return "tensor" not in held.computes.axes and "tensor" not in held.sums


def _different_draw(whole: Sequence[Draw], partitioned: Sequence[Draw]) -> str:
    """Describe the first draw from a generator that the layout makes otherwise; empty if there is none."""
    for expected, actual in zip(whole, partitioned, strict=False):
        if expected != actual:
            return (
                f"{actual.function} draws values of shape {actual.shape}, and in one process"
                f" {expected.function} draws {expected.shape}"
            )
    if len(whole) != len(partitioned):
        return f"{len(partitioned)} calls draw random numbers, and {len(whole)} in one process"
    return ""


def _different_sum(
    context: SessionContext, whole: _TrialResult, partitioned: _TrialResult, names: Sequence[str]
) -> str:
    """Describe the first sum of the loss that differs; empty if there is none; collective."""
    group, sums = context.mesh.axes["context"], partitioned.sums
    if sums is not None and group.size > 1:
        sums = context.net.all_reduce(sums.to(context.device), group).wait().cpu()
    if sums is None or whole.sums is None or len(sums) != len(whole.sums):
        return ""
    for name, a, b in zip(("total", "count", *names), whole.sums.tolist(), sums.tolist(), strict=False):
        if abs(a - b) > _MIN_SUM_TOLERANCE * abs(a) + 1e-12:
            what = f"the {name} of the loss" if name in ("total", "count") else f"the metric '{name}'"
            return f"{what} is {b:.6g}, and {a:.6g} in one process"
    return ""


def _failure(error: Exception) -> _Finding:
    return _Finding(
        "the model runs in one process, but not under this layout:"
        f" {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        "change the tensor plan or Task.sequence such that every module gets what it expects, set the plan of"
        " the module to 'whole', or choose another layout",
    )


def _describe(
    context: SessionContext, wrong: Mapping[str, float], others: tuple[str, str, str], summed: Sequence[str]
) -> tuple[str, str]:
    """Return the sentence for a mistake, and the next step.

    Args:
        wrong: relative error of the gradients that differ.
        others: differences of the loss, of draws, and between the copies of a gradient; empty: none.
    """
    sums, draws, copies = others
    degrees = [f"{axis}={context.mesh.axes[axis].size}" for axis in ("tensor", "context")]
    words = " ".join(word for word in degrees if not word.endswith("=1"))
    facts = []
    if wrong:
        name, error = max(wrong.items(), key=lambda item: item[1])
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        facts.append(f"the gradient of '{name}' is off by {error:.1e} of its largest value{more}")
    facts += [text for text in (sums, draws, copies) if text]
    mistake = f"under {words} the model would train something else than in one process: {'; '.join(facts)}"
    if draws:
        return mistake, (
            "use paceline.models.KeyedDropout or nn.Dropout for dropout, draw numbers only in shapes that do"
            " not depend on the layout, or choose another layout"
        )
    if sums and not wrong:
        return mistake, (
            "a loss may depend on the outputs of the model only, and not on its weights: use"
            " optimizer.weight_decay for a penalty; or choose another layout"
        )
    if summed:
        return mistake, (
            f"'{summed[0]}' is applied to a part of the features of a rank, and its input gets a partial"
            " gradient: set the tensor plan of the layers around it to 'whole'"
        )
    return mistake, (
        "each feature between a column and its row must be computed by itself, and a loss must be a sum over"
        " positions; set the tensor plan of the module to 'whole', or choose another layout"
    )
