"""The evidence of a divergence: gradients of all ranks, and what the oracle computes for known mistakes.

All ranks take part in the collectives, rank 0 diagnoses (`diagnosis`), and every rank gets its result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.data.work import MicroBatch, split_evenly
from paceline.job.mesh import AXES, DATA_AXES, span_ranks
from paceline.verification.diagnosis import (
    NOT_REPEATED,
    UNKNOWN_CAUSE,
    ErrorDiagnosis,
    GradientEvidence,
    PartitionSite,
    UpdateEvidence,
    diagnose_after_reduction,
    diagnose_gradient,
    diagnose_update,
)
from paceline.verification.error_bounds import TensorComparison
from paceline.verification.oracle import ShardResult
from paceline.verification.oracle_update import ReferenceUpdate, loss_scale_of

if TYPE_CHECKING:
    from paceline.verification.verifier import StrategyVerifier


def diagnose_failure(
    verifier: StrategyVerifier, step: int, update: int, reference: ReferenceUpdate | None
) -> ErrorDiagnosis:
    """Diagnose the first failure of the report; collective, equal result on every rank.

    Args:
        step: number of the step that failed.
        update: number of the update in the run.
        reference: the oracle's results on rank 0; None on other ranks.
    """
    failure = verifier.report.failure
    if failure is None:
        return UNKNOWN_CAUSE
    stage = _STAGES.get(failure.quantity, _explain_gradient)
    tensors = sorted(
        {f.tensor for f in verifier.report.worst.values() if not f.ok and f.quantity == "gradient"}
    )
    gathered = _gather_sums(verifier, tensors) if failure.quantity in ("gradient", "loss") else []
    ranks = _ranks_of_sum(verifier, failure)
    # A server has made the sum of all workers, so every rank holds the same one.
    observed = [gathered[rank] for rank in ranks][: _num_sharers(verifier)] if gathered else []
    diagnosis = UNKNOWN_CAUSE
    # An oracle that runs the whole batch in one forward has no shards to compare.
    if reference is not None and not (verifier.oracle.at_once and stage is _explain_gradient):
        diagnosis = stage(verifier, step, update, reference, tensors, observed)
    return _broadcast_diagnosis(verifier, diagnosis)


def _explain_gradient(
    v: StrategyVerifier,
    step: int,
    update: int,
    reference: ReferenceUpdate,
    tensors: list[str],
    observed: list[Tensor],
) -> ErrorDiagnosis:
    v.oracle_state.load(reference.before, reference.scalars)
    micro_batches = v.oracle.work.micro_batches(step)
    shards = list(v.oracle.shards(micro_batches))
    repeated_total = sum(s.total for s in shards)
    if abs(repeated_total - reference.sums.total) > 1e-5 * sum(abs(s.total) for s in shards):
        if v.loop is not None:
            return replace(
                UNKNOWN_CAUSE,
                explanation="the losses depend on values that the loop keeps from earlier batches",
            )
        return replace(
            NOT_REPEATED, explanation=NOT_REPEATED.explanation.format(reference.sums.total, repeated_total)
        )
    if not tensors:
        text = "the loss differs and no gradient does: check how ranks add their losses and counts of items"
        return ErrorDiagnosis("wrong sum of losses", text)
    replicas = _num_sharers(v)
    first_keys = _keys_of_first(micro_batches, replicas)
    with_first_keys = [_flatten(s.gradients, tensors, v) for s in v.oracle.shards(first_keys)]
    flats = [_flatten(s.gradients, tensors, v) for s in shards]
    changed = any(not torch.equal(a, b) for a, b in zip(flats, with_first_keys, strict=True))
    return diagnose_gradient(
        GradientEvidence(
            world=replicas,
            shards=flats,
            samples=[len(s.micro_batch.indices) for s in shards],
            counts=[s.count for s in shards],
            observed=observed,
            previous=None if v.previous is None else _flatten(v.previous, tensors, v),
            with_first_keys=with_first_keys if changed else None,
            scale=loss_scale_of(v.session, v.oracle_state),
            site=_partition_site(v, tensors),
        )
    )


def _partition_site(v: StrategyVerifier, wrong: Sequence[str]) -> PartitionSite:
    axes, held = v.session.mesh.axes, v.session.runner.sharded_model.held
    split = [f"{name}={axes[name].size}" for name in _COMPUTING_AXES if axes[name].size > 1]
    worst = v.report.worst.values()
    return PartitionSite(
        axes=" ".join(split),
        loss_differs=any(not f.ok and f.quantity == "loss" and f.tensor == "loss" for f in worst),
        # The order of the slots is that of the model, and backward begins at its end.
        first_wrong=next(
            slot.name for slot in reversed(v.session.runner.sharded_model.slots) if slot.name in wrong
        ),
        only_tied=all(name in held and len(held[name].holders) > 1 for name in wrong),
    )


_COMPUTING_AXES = ("tensor", "context", "pipeline")
"""Axes whose ranks compute one micro-batch together."""


def _explain_tail(
    v: StrategyVerifier,
    step: int,
    update: int,
    reference: ReferenceUpdate,
    tensors: list[str],
    observed: list[Tensor],
) -> ErrorDiagnosis:
    record = v.record
    rates = {k: float(v.oracle.options(max(0, update + k))[0]["lr"]) for k in (-1, 0, 1)}
    names = sorted(reference.final)
    actual, expected = _flatten(record.final, names, v), _flatten(reference.final, names, v)
    ratio = float(actual @ expected) / max(float(expected @ expected), 1e-300)
    proportional = float((actual - ratio * expected).norm()) <= 1e-3 * max(float(actual.norm()), 1e-300)
    return diagnose_after_reduction(
        UpdateEvidence(
            ratio=ratio if proportional else None,
            world=_num_sharers(v),
            num_shards=reference.sums.num_shards,
            count=reference.sums.count,
            clip_norm=v.oracle.clip_norm,
            clip_value=v.oracle.clip_value,
            right_norm=reference.norm,
            local_norms=_local_norms(v, step, reference),
            norm=record.update.grad_norm if record.update is not None else 0.0,
            lr=record.update.lr if record.update is not None else 0.0,
            right_lr=rates[0],
            near_lrs={k: rates[k] for k in (-1, 1)},
        )
    )


def _explain_state(
    v: StrategyVerifier,
    step: int,
    update: int,
    reference: ReferenceUpdate,
    tensors: list[str],
    observed: list[Tensor],
) -> ErrorDiagnosis:
    failure = v.report.failure
    buffers = {f"model/{name}" for name in v.oracle.buffers()}
    if failure is not None and failure.tensor in buffers:
        return ErrorDiagnosis(
            "buffers not synchronised", "parameters agree, but running statistics differ between ranks"
        )
    tail = _explain_tail(v, step, update, reference, tensors, observed)
    if tail.cause in ("schedule off by one", "wrong learning rate"):
        return tail
    return diagnose_update(v, update, reference)


def _explain_evaluation(*evidence: object) -> ErrorDiagnosis:
    return ErrorDiagnosis(
        "another evaluation",
        "the state is the same: check the held-out samples, and model and loss in evaluation mode",
    )


_STAGES: dict[str, Callable[..., ErrorDiagnosis]] = {
    "evaluation": _explain_evaluation,
    "gradient": _explain_gradient,
    "loss": _explain_gradient,
    "update": _explain_tail,
    "final gradient": _explain_tail,
    "state": _explain_state,
}


def _num_sharers(v: StrategyVerifier) -> int:
    """Return the number of ranks that share the batch; servers hold state and run no samples."""
    return v.session.mesh.data.size - v.session.recipe.strategy.servers


def _keys_of_first(micro_batches: tuple[MicroBatch, ...], world: int) -> tuple[MicroBatch, ...]:
    """Return the micro-batches with the key that the first rank uses at the same index."""
    first = split_evenly(len(micro_batches), world, 0)
    keys = {
        i: micro_batches[first[min(index, len(first) - 1)]].key
        for rank in range(world)
        for index, i in enumerate(split_evenly(len(micro_batches), world, rank))
    }
    return tuple(replace(u, key=keys[i]) for i, u in enumerate(micro_batches))


def _local_norms(v: StrategyVerifier, step: int, reference: ReferenceUpdate) -> list[float]:
    v.oracle_state.load(reference.before, reference.scalars)
    shards: list[ShardResult] = list(v.oracle.shards(v.oracle.work.micro_batches(step)))
    names = sorted(reference.final)
    flats = [_flatten(s.gradients, names, v) for s in shards]
    norms = []
    replicas = _num_sharers(v)
    for rank in range(replicas):
        mine = split_evenly(len(shards), replicas, rank)
        if not mine:  # the oracle runs the whole batch at once
            continue
        whole = torch.stack([flats[i] for i in mine]).sum(0)
        norms += [
            float(whole.norm()) / reference.sums.count,
            float(whole.norm()) / sum(shards[i].count for i in mine),
        ]
    return norms


def _flatten(gradients: Mapping[str, Tensor], names: list[str], v: StrategyVerifier) -> Tensor:
    shapes = {slot.name: slot.shape for slot in v.session.runner.sharded_model.slots}
    device = v.session.runner.sharded_model.device
    zero = {n: torch.zeros(shapes[n], device=device) for n in names if n not in gradients}
    dense = [gradients.get(n, zero.get(n)) for n in names]
    return torch.cat([p.detach().reshape(-1).to(torch.float64) for p in dense if p is not None])


def _ranks_of_sum(v: StrategyVerifier, failure: TensorComparison) -> Sequence[int]:
    """Return the ranks that sum the gradient with the largest error, in the order of their shards."""
    sizes = tuple(v.session.mesh.axes[axis].size for axis in AXES)
    worst = max(range(len(failure.errors)), key=lambda rank: failure.errors[rank])
    return next(ranks for ranks in span_ranks(DATA_AXES, sizes) if worst in ranks)


def _gather_sums(v: StrategyVerifier, names: list[str]) -> list[Tensor]:
    if not names:
        return []
    mine = _flatten(v.record.sums, names, v)
    sums: list[Tensor] = v.net.all_gather(mine, v.session.mesh.world).wait()
    return sums


def _broadcast_diagnosis(v: StrategyVerifier, diagnosis: ErrorDiagnosis) -> ErrorDiagnosis:
    text = json.dumps([diagnosis.cause, diagnosis.explanation, diagnosis.residual]).encode()
    # Of fixed size, since other ranks do not know the length of the text.
    data = torch.zeros(4096, dtype=torch.uint8)
    data[: len(text)] = torch.tensor(list(text[:4096]), dtype=torch.uint8)
    data = v.net.broadcast(data.to(v.session.runner.sharded_model.device), v.session.mesh.world).wait().cpu()
    cause, explanation, residual = json.loads(bytes(data.tolist()).rstrip(b"\0"))
    return ErrorDiagnosis(cause, explanation, residual)
