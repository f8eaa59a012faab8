"""The comparison of a session with the oracle, step by step and update by update.

Before each step the oracle takes over the state of rank 0, so both sides compute the same step from the same
bits, errors cannot add up, and the bounds are those of one step. By induction a run of correct steps is
correct. Updates are compared in this order: loss, summed gradients, final gradients, parameters, optimizer
state and buffers, on every rank. The comparison stops at the first update that rounding does not explain, and
`divergence_evidence` looks for its cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.net import Net
from paceline.parallel.sharded_model import unsharded_model
from paceline.parallel.state_hash import state_sha256
from paceline.parallel.state_transfer import StateSnapshot, gather_whole, share_snapshot
from paceline.rl.rollout_rounds import RolloutRounds
from paceline.session.callback import Callback
from paceline.session.checkpointing import interval_passed
from paceline.session.early_stopping import value_of_metric
from paceline.session.evaluation import evaluate
from paceline.session.session import Session
from paceline.state.slot import TensorPiece, TensorSlot
from paceline.state.train_state import TrainState
from paceline.sync.magnitude_pruning import MASKS_KEY
from paceline.sync.update import PendingUpdate, UpdateResult, UpdateStep
from paceline.verification.diagnosis import ACTOR_DIFFERS, DIFFERENT_START
from paceline.verification.divergence_evidence import diagnose_failure
from paceline.verification.error_bounds import (
    UNIT_ROUNDOFF,
    KernelAgreement,
    TensorComparison,
    compare_tensors,
    final_bounds,
    multiplier_error,
    norm_error,
    state_bounds,
    unit_roundoff,
)
from paceline.verification.loop_verification import LoopPair
from paceline.verification.oracle import Oracle, Tensors
from paceline.verification.oracle_update import ReferenceUpdate, loss_scale_of
from paceline.verification.plain_evaluation import PlainEvaluation, evaluation_values
from paceline.verification.verification_report import VerificationReport

SlotTensors = Mapping[TensorSlot, Tensor]


@dataclass(frozen=True)
class OracleUpdateRecord:
    """The inputs and results of one update of the session, on one rank.

    Args:
        total, count: sums of the loss, on which all ranks agree.
        sums: this rank's parts of the gradients that reached the update step, without the scale of the loss.
        final: gradients as the optimizer got them.
        update: result of the update step; None: it was not called.
        after: copy of the whole state after the update, if the same step can have further updates.
    """

    total: float = 0.0
    count: float = 0.0
    sums: SlotTensors = field(default_factory=dict)
    final: SlotTensors = field(default_factory=dict)
    update: UpdateResult | None = None
    after: StateSnapshot | None = None


@dataclass(frozen=True)
class WholeUpdateRecord:
    """One update, gathered from the records of all ranks of a replica; tensors are whole, by name."""

    total: float = 0.0
    count: float = 0.0
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    final: Mapping[str, Tensor] = field(default_factory=dict)
    update: UpdateResult | None = None


class UpdateRecorder:
    """A recorder of the updates of a session.

    Args:
        step: the update step; its first part and an observer record.
        snapshot: returns the whole state, for steps of several updates; collective.
    """

    def __init__(self, step: UpdateStep, snapshot: Callable[[], StateSnapshot] | None = None) -> None:
        self._snapshot, self._records = snapshot, list[OracleUpdateRecord]()
        self._sums: SlotTensors = {}
        step.parts = {"record": self._enter, **step.parts}
        step.observers.append(self._leave)

    def take(self) -> list[OracleUpdateRecord]:
        """Return the updates since the last call, in order."""
        records, self._records = self._records, []
        return records

    def _enter(self, record: PendingUpdate) -> None:
        grads = record.grads
        self._sums = {slot: g / grads.scale for slot, g in grads.tensors.items() if g is not None}

    def _leave(self, record: PendingUpdate) -> None:
        final = {slot: p.grad.clone() for slot, p in record.updates.items() if p.grad is not None}
        after = self._snapshot().copied() if self._snapshot is not None else None
        tally = record.tally
        self._records.append(
            OracleUpdateRecord(tally.total, tally.count, self._sums, final, record.update, after)
        )


class StrategyVerifier:
    """The comparison of a session with the oracle; all methods are collective.

    Args:
        session: its update step is recorded.
        oracle: the same task with a model and optimizer of its own, on every rank; only rank 0 computes.
        loop: the user's own loop, which makes the rounds of the session and the losses of the oracle; None:
            the rule of the recipe and the task do.
    """

    def __init__(self, session: Session, oracle: Oracle, loop: LoopPair | None = None) -> None:
        self.session, self.oracle, self.loop = session, oracle, loop
        self.recorder = UpdateRecorder(session.update_step, session.snapshot if loop is not None else None)
        self.net = Net(session.net.deadline_seconds, times_calls=session.net.times_calls)
        self.oracle_state = TrainState(unsharded_model(oracle.model), oracle.optimizer)
        if oracle.masks is not None:
            self.oracle_state.extra_states[MASKS_KEY] = oracle.masks
        self.report = VerificationReport(str(session.recipe.strategy), session.cluster.world_size)
        recipe = session.recipe
        compute, axes = recipe.precision.compute, session.mesh.axes
        same = not recipe.runtime.compile and session.runner.sharded_model.device.type == "cpu"
        in_parts = oracle.at_once or any(axes[axis].size > 1 for axis in ("tensor", "context"))
        # Stages that run a micro-batch in parts add the gradients of the parts, each rounded by itself.
        in_parts = in_parts or bool(recipe.strategy.rechunk) or recipe.strategy.schedule_spec.reads_file
        # In half precision every partial product is rounded, so parts do not add up to the same bits.
        same = same and (compute == "fp32" or not in_parts)
        self.kernels = KernelAgreement(same, compute, in_parts)
        self._evaluate_plainly = PlainEvaluation(oracle, oracle.task, recipe)
        self.previous: Tensors | None = None
        self.record = WholeUpdateRecord()
        self.now: Mapping[str, Tensor] = {}
        self.part = ""
        self._flags = _flags_of(session.runner.sharded_model.model)

    def run(self, steps: int, observe: Callable[[int], None] = lambda step: None) -> VerificationReport:
        """Compare up to `steps` steps, and stop after the first that diverges."""
        self._check_start()
        if self.loop is None:
            self._run_callbacks(lambda callback: callback.on_begin(self.session))
        rounds = self.session.rounds() if self.loop is None else self.loop.rounds
        for step in range(self.session.state.step, self.session.state.step + steps):
            if self.report.failure is not None or not self._compare_step(step, rounds):
                break
            self.report.steps += 1
            observe(step)
        if self.session.recipe.reproducible and self.report.ok and self.report.steps:
            self.report.sha256 = state_sha256(self.now)
        return self.report

    def _check_start(self) -> None:
        """Check that every rank starts from the initial parameters of the oracle."""
        mine = self._with_server_state(self.session.snapshot())
        theirs = self.oracle_state.tensors()
        bounds = dict.fromkeys(theirs, 0.0)
        self._compare(-1, "initial value", mine, theirs, bounds, mine)
        if self.report.failure is not None:
            self.report.diagnosis = DIFFERENT_START

    def _compare_step(self, step: int, rounds: Iterator[Any]) -> bool:
        update = self.session.state.num_updates
        before = self.session.snapshot()
        # The step changes the tensors in place, and rank 0 starts the oracle from those of before.
        before = before.copied() if self.session.is_first else before
        # Drop updates that were made outside of the compared steps.
        self.recorder.take()
        stats = next(rounds, None)
        if stats is None:
            return False
        if not self._is_the_actor(step):
            return False
        records = self.recorder.take() or [OracleUpdateRecord()]
        parts = self.loop.parts() if self.loop is not None else ("",)
        for number, (self.part, record) in enumerate(zip(parts, records[-len(parts) :], strict=True)):
            self.record = self._whole(record)
            # Of a loop from before its callbacks, which may write to the weights.
            after = record.after if record.after is not None else self.session.snapshot()
            self.now = self._with_server_state(after)
            self._verify_update(step, number, update, before)
            if self.report.failure is not None:
                break
            update += record.update is not None and record.update.applied
            before = after
        if self.report.failure is None:
            self._evaluate_for_schedule(step)
        # Those of a loop were called by its fit.
        self._run_callbacks(
            lambda callback: callback.on_step(self.session, stats) if self.loop is None else None
        )
        return not self._stop_requested()

    def _is_the_actor(self, step: int) -> bool:
        """Add how many rows of a first minibatch have other bits in learner and actor; return if none has."""
        rule = self.session.rule
        if isinstance(rule, RolloutRounds) and rule.expects_equal_bits and rule.num_not_equal is not None:
            errors = (float(rule.num_not_equal),) * self.session.mesh.world.size
            self.report.add([TensorComparison(step, "log-probability", "first minibatch", errors, 0.0)])
        if self.report.failure is not None:
            self.report.diagnosis = ACTOR_DIFFERS
        return self.report.failure is None

    def _evaluate_for_schedule(self, before: int) -> None:
        """Compare the evaluation that is due after a step if the rates follow evaluations, and count it."""
        session, plateau, recipe = self.session, self.session.plateau, self.session.recipe
        if plateau is None or not interval_passed(recipe.evaluate.every_steps, before, session.state.step):
            return
        evaluation, reference = evaluate(session), None
        assert evaluation is not None, "the schedule requires held-out data"
        if session.is_first:
            reference = self._evaluate_plainly(self.oracle.model, session.state.step)
        values = evaluation_values(evaluation, reference, self.kernels)
        self._compare(values.step, "evaluation", values.mine, values.theirs, values.bounds, values.mine)
        # Both sides go on with one value, since a rounding can decide whether it is an improvement.
        value = value_of_metric("schedule.metric", recipe.schedule.metric, evaluation)
        plateau.observe(evaluation.step, value)
        self.oracle.record_evaluation(value)

    def _run_callbacks(self, call: Callable[[Callback], None]) -> None:
        """Run a call on all callbacks, and follow in the oracle what they have frozen or switched."""
        self.session.run_callbacks(call)
        flags, before = _flags_of(self.session.runner.sharded_model.model), self._flags
        self._flags = flags
        changed = {key: flag for key, flag in flags.items() if before.get(key, flag) != flag}
        loops = self.loop.models() if self.loop is not None else ()
        for (kind, name), flag in changed.items():
            if kind == "module":
                self.oracle.switch_mode(name, training=flag)
                continue
            for model in (self.oracle.model, *loops):
                model.get_parameter(name).requires_grad_(flag)

    def _stop_requested(self) -> bool:
        """Return whether a callback of any rank has asked for the end; collective if there are any."""
        session = self.session
        return bool(session.callbacks) and session.sum(float(bool(session.stop_reason))) > 0

    def _verify_update(self, step: int, number: int, update: int, before: StateSnapshot) -> None:
        record, reference = self.record, None
        if self.session.is_first:
            reference = self._reference_update(number, before)
        for values in self.loop.evaluations(self.kernels) if self.loop is not None else ():
            self._compare(values.step, "evaluation", values.mine, values.theirs, values.bounds, values.mine)
        if record.update is None or record.update.applied:
            self._compare_sums(step, reference)
        if record.update is not None and record.update.applied:
            if reference is not None:
                reference.finish(self.oracle, self.oracle_state, record.sums, update)
            self._compare_update(step, reference)
        else:
            self._compare_skip(step, reference)
        if self.report.failure is not None:
            self.report.diagnosis = diagnose_failure(self, step, update, reference)
        self.previous = reference.sums.gradients if reference is not None else None

    def _reference_update(self, number: int, before: StateSnapshot) -> ReferenceUpdate:
        """Compute the sums of an update of the step with the oracle; on rank 0."""
        state, oracle = self.oracle_state, self.oracle
        state.load(before.tensors(), before.scalars())
        scale, micro_batches = loss_scale_of(self.session, state), oracle.work.micro_batches(state.step)
        if self.loop is None:
            sums = oracle.accumulate(micro_batches, scale)
        else:
            sums = self.loop.totals(micro_batches, scale, self.part, number, self.record.update)
        reference = ReferenceUpdate(before.tensors(), before.scalars(), sums)
        if self.kernels.in_parts:
            roundoff = UNIT_ROUNDOFF[self.kernels.compute]
            reference.measure_noise(oracle, state, scale, roundoff, anew=self.loop is not None)
        return reference

    def _whole(self, record: OracleUpdateRecord) -> WholeUpdateRecord:
        """Gather the records of all ranks of a replica; of a server, share its record with all workers."""
        if self.session.recipe.strategy.servers:
            return self._shared_by_server(record)
        sums, final = (
            gather_whole(
                [TensorPiece(slot, g) for slot, g in gradients.items()], self.session.mesh.inside, self.net
            )
            for gradients in (record.sums, record.final)
        )
        return WholeUpdateRecord(record.total, record.count, sums, final, record.update)

    def _shared_by_server(self, record: OracleUpdateRecord) -> WholeUpdateRecord:
        """Return the record of the server, which alone makes updates, on every rank."""
        whole = self._share(
            {f"sums/{slot.name}": g for slot, g in record.sums.items()}
            | {f"final/{slot.name}": g for slot, g in record.final.items()},
            {
                "total": record.total,
                "count": record.count,
                "update": None if record.update is None else asdict(record.update),
            },
        )
        tensors, numbers = whole.tensors(), whole.scalars()
        sums, final = (
            {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            for prefix in ("sums/", "final/")
        )
        update = None if numbers["update"] is None else UpdateResult(**numbers["update"])
        return WholeUpdateRecord(numbers["total"], numbers["count"], sums, final, update)

    def _with_server_state(self, after: StateSnapshot) -> Mapping[str, Tensor]:
        """Return the whole state of this rank; a worker has no optimizer state, and gets that of the
        server.
        """
        # Open episodes and rows are the input of the steps, as samples are, and both sides read the same.
        own = {
            name: t
            for name, t in after.tensors().items()
            if not name.startswith(("rl/", "replay/", "normalizers/", "policies/"))
        }
        if not self.session.recipe.strategy.servers:
            return own
        # Without what only a server has, such as its record of pushes: it changes no update.
        compared = {name: t for name, t in own.items() if name.startswith(("model/", "optimizer/"))}
        shared = self._share(compared, {}).tensors()
        return {name: own.get(name, t) if name.startswith("model/") else t for name, t in shared.items()}

    def _share(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> StateSnapshot:
        """Broadcast tensors and numbers of rank 0."""
        device = self.session.runner.sharded_model.device
        mine = StateSnapshot(0, tensors, numbers)
        return StateSnapshot(0, *share_snapshot(mine, self.session.mesh.world, self.net, device))

    def _compare_sums(self, step: int, reference: ReferenceUpdate | None) -> None:
        record, like = self.record, self._slots()
        mine = {"loss": _scalar(record.total), "count": _scalar(record.count)}
        theirs = mean = bounds = scalar_bounds = None
        if reference is not None:
            sums = reference.sums
            theirs = {"loss": _scalar(sums.total), "count": _scalar(sums.count)}
            roundoffs = {n: unit_roundoff(g) for n, g in sums.gradients.items()}
            bounds = self.kernels.gradient_bounds(
                sums.magnitudes, roundoffs, sums.num_shards, sums.count, reference.noise
            )
            share = 1e-6 + (0.0 if self.kernels.same else 1e-2)
            scalar_bounds = {"loss": share * abs(sums.total), "count": 0.0}
            mean = {n: g / sums.count for n, g in sums.gradients.items()}
        self._compare(step, "loss", mine, theirs, scalar_bounds, mine)
        count = record.count or 1.0
        self._compare(step, "gradient", {n: g / count for n, g in record.sums.items()}, mean, bounds, like)

    def _compare_update(self, step: int, reference: ReferenceUpdate | None) -> None:
        self._compare_scalars(step, reference)
        mine, like = self.now, self._slots()
        if reference is None:
            self._compare(step, "final gradient", self.record.final, None, None, like)
            self._compare(step, "state", mine, None, None, mine)
            return
        clip, final, theirs = self.oracle.clip_norm, reference.final, self.oracle_state.tensors()
        # Within the error of the norm, one side may clip and the other may not.
        clipped = clip is not None and reference.norm * (1.0 + norm_error(final)) > clip
        error = multiplier_error(final, clipped)
        self._compare(step, "final gradient", self.record.final, final, final_bounds(final, error), like)
        bounds = state_bounds(theirs, reference.moved, error)
        self._compare(step, "state", mine, theirs, bounds, mine)

    def _compare_skip(self, step: int, reference: ReferenceUpdate | None) -> None:
        """Check that a skipped step overflows in the oracle too, and changed no parameter."""
        mine, theirs = {"skipped": _scalar(1.0)}, None
        before = None
        if reference is not None:
            overflow = any(not bool(torch.isfinite(g).all()) for g in reference.sums.gradients.values())
            theirs = {"skipped": _scalar(float(overflow or reference.sums.count == 0))}
            before = {n: reference.before[f"model/{n}"] for n in self._slots()}
        self._compare(step, "update", mine, theirs, {"skipped": 0.0}, mine)
        like = self._slots()
        self._compare(step, "skipped update", self._parameters(), before, dict.fromkeys(like, 0.0), like)

    def _compare_scalars(self, step: int, reference: ReferenceUpdate | None) -> None:
        update = self.record.update
        assert update is not None
        mine = {"norm": _scalar(update.grad_norm), "rate": _scalar(update.lr)}
        theirs = bounds = None
        if reference is not None:
            rate = float(self.oracle.optimizer.param_groups[0]["lr"])
            theirs = {"norm": _scalar(reference.norm), "rate": _scalar(rate)}
            bounds = {"norm": norm_error(reference.final) * reference.norm, "rate": 1e-12 * abs(rate)}
        self._compare(step, "update", mine, theirs, bounds, mine)

    def _slots(self) -> dict[str, Tensor]:
        """Return meta tensors like the trained parameters, by name, in the order of the gradients."""
        slots = self.session.runner.sharded_model.slots
        types = {n: p.dtype for n, p in self.session.runner.sharded_model.model.named_parameters()}
        return {s.name: torch.empty(s.shape, dtype=types[s.name], device="meta") for s in slots}

    def _parameters(self) -> dict[str, Tensor]:
        """Return the whole trained parameters after the update, by name."""
        return {name: self.now[f"model/{name}"] for name in self._slots()}

    def _compare(
        self,
        step: int,
        quantity: str,
        mine: Mapping[str, Tensor],
        theirs: Mapping[str, Tensor] | None,
        bounds: Mapping[str, float] | None,
        like: Mapping[str, Tensor],
    ) -> None:
        if self.session.recipe.reproducible and bounds is not None:
            # Both sides must have the same bits.
            bounds = dict.fromkeys(bounds, 0.0)
        reference = (theirs, bounds) if self.session.is_first else (None, None)
        device = self.session.runner.sharded_model.device
        world = self.session.mesh.world
        comparisons = compare_tensors(step, quantity, mine, *reference, like, self.net, world, device)
        # The update of a part of the model has no gradients of other parameters, so "equal" means nothing.
        prefix = f"{self.part}." if self.part and "gradient" in quantity else ""
        self.report.add(
            [replace(f, part=self.part) for f in comparisons if f.tensor.startswith(prefix) or not f.ok]
        )


def _flags_of(model: nn.Module) -> dict[tuple[str, str], bool]:
    """Return which parameters take gradients and which modules are in training mode.

    If the model as a whole is in evaluation mode, the next step puts it into training mode again.
    """
    flags = {("parameter", name): p.requires_grad for name, p in model.named_parameters()}
    if model.training:
        flags |= {("module", name): module.training for name, module in model.named_modules()}
    return flags


def _scalar(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)
