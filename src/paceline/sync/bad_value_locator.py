"""The search for the rank and tensor of a bad value, in what each rank still holds of the step.

Nothing is computed or sent until there is trouble: then the gradients of this rank are still in place, and
its losses were kept without being read.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.comm.group_collectives import all_gather_texts
from paceline.comm.net import Net
from paceline.comm.reduction.gradients import Gradients
from paceline.errors import NumericError, format_count
from paceline.job.mesh import RankGroup
from paceline.parallel.model_runner import ModelRunner
from paceline.task import Loss, LossFunction

_MAX_MICRO_BATCHES = 1024
_NEXT_STEP = "lower optimizer.lr, set optimizer.clip_norm, look at the samples of this step, or see [health]"


RecordedLoss = tuple[Tensor, Tensor | float]
"""A total loss and its number of items, both unread."""


class LossRecorder:
    """A loss function that records its results in training, so that an error can name the rank."""

    def __init__(self, loss: LossFunction) -> None:
        self._loss = loss
        self._losses: deque[RecordedLoss] = deque(maxlen=_MAX_MICRO_BATCHES)

    def __call__(self, model: Any, batch: Any) -> Loss:
        """Return the loss of the inner function."""
        loss = self._loss(model, batch)
        # Kept as tensors: reading a number would wait for the device in every micro-batch.
        if model.training and isinstance(loss, Loss):
            self._losses.append((loss.total.detach(), loss.count))
        return loss

    def take(self) -> list[RecordedLoss]:
        """Return the losses since the last call."""
        recorded = [*self._losses]
        self._losses.clear()
        return recorded


@dataclass(frozen=True)
class RankEvidence:
    """The evidence of one rank about a step.

    Args:
        rank: global rank.
        loss: mean over its items; None: no loss was computed here.
        tensor: its non-finite gradient that is nearest to the loss; if all are finite, the largest.
        num_bad, num_values: non-finite values of that gradient, and all of its values; 0 if the gradient was
            released and only its norm is known.
        num_tensors: number of non-finite gradients.
        own: the gradients are this rank's, and not sums over ranks.
    """

    rank: int
    loss: float | None
    tensor: str = ""
    num_bad: int = 0
    num_values: int = 0
    num_tensors: int = 0
    own: bool = True

    @property
    def loss_is_bad(self) -> bool:
        """Return whether the loss is not finite."""
        return self.loss is not None and not math.isfinite(self.loss)

    def __str__(self) -> str:
        parts = [] if self.loss is None else [f"the loss is {self.loss:.6g}"]
        return f"on rank {self.rank} " + " and ".join([*parts, *([self.gradient] if self.is_bad else [])])

    @property
    def is_bad(self) -> bool:
        """Return whether a gradient is not finite."""
        return self.num_tensors > 0

    @property
    def gradient(self) -> str:
        """Describe the gradient that is not finite."""
        what = "gradient" if self.own else "sum over ranks of the gradient"
        others = self.num_tensors - 1
        more = (
            f", and so {'is' if others == 1 else 'are'} {format_count(others, 'other')}" if others > 0 else ""
        )
        how_many = self.num_bad or "some"
        return (
            f"the {what} of '{self.tensor}' is not finite ({how_many} of"
            f" {format_count(self.num_values, 'value')}{more})"
        )


@dataclass(frozen=True)
class BadValueLocator:
    """The search for the rank and tensor of a bad value.

    Args:
        runner: this rank's parameters, with their gradients still in place, or their norms if they were
            released; sums in one order keep neither, and then only the sums are known.
        loss_recorder: this rank's losses.
        group: the ranks that take a step together.
        net: this rank's collectives.
    """

    runner: ModelRunner
    loss_recorder: LossRecorder
    group: RankGroup
    net: Net

    def non_finite(
        self, what: str, step: int, losses: Sequence[RecordedLoss], sums: Gradients
    ) -> NumericError:
        """Return the error for a sum that is not finite; collective.

        Args:
            what: what is not finite, for the message.
            step: of the sum.
            losses: this rank's losses of the step.
            sums: over ranks, as far as this rank has them.
        """
        bad_evidence = [
            evidence
            for evidence in self._gather_evidence(losses, sums)
            if evidence.is_bad or evidence.loss_is_bad
        ]
        if not bad_evidence:
            text = f"{what} in step {step}: the values of each rank are finite, but their sum is not"
            return NumericError(text, where=f"step {step}", next_step=_NEXT_STEP)
        # A bad loss explains bad gradients, and `max` returns the first rank that has one.
        named = max(bad_evidence, key=lambda evidence: evidence.loss_is_bad)
        if not named.loss_is_bad:
            named = bad_evidence[-1]  # the last stage is nearest to the loss, where backward begins
            if not named.own:
                text = f"{what} in step {step}: {named.gradient}"
                return NumericError(text, where=f"step {step}", next_step=_NEXT_STEP)
        others = ", ".join(
            str(evidence.rank) for evidence in bad_evidence if evidence.own and evidence is not named
        )
        text = f"{what} in step {step}: {named}" + (f"; it has reached rank {others}" if others else "")
        return NumericError(text, where=f"rank {named.rank}, step {step}", next_step=_NEXT_STEP)

    def spike(self, what: str, step: int, losses: Sequence[RecordedLoss], sums: Gradients) -> NumericError:
        """Return the error for a loss that stands out; collective."""
        all_evidence = self._gather_evidence(losses, sums)
        worst = max(all_evidence, key=lambda evidence: -math.inf if evidence.loss is None else evidence.loss)
        text = f"{what}: {worst}, and the largest gradient is that of '{worst.tensor}'"
        return NumericError(text, where=f"rank {worst.rank}, step {step}", next_step=_NEXT_STEP)

    def _gather_evidence(self, losses: Sequence[RecordedLoss], sums: Gradients) -> list[RankEvidence]:
        """Return the evidence of every rank of the group, by rank. Wire: one ragged all_gather."""
        # As JSON, which Python writes with NaN and infinity too; names of tensors differ in length by rank.
        own_text = json.dumps(asdict(self._collect_evidence(losses, sums)))
        return [RankEvidence(**json.loads(text)) for text in all_gather_texts(own_text, self.group, self.net)]

    def _collect_evidence(self, losses: Sequence[RecordedLoss], sums: Gradients) -> RankEvidence:
        rank = self.group.ranks[self.group.rank]
        count = sum(float(num_items) for _, num_items in losses)
        loss = sum(float(total) for total, _ in losses) / count if count else None
        norms: dict[str, float] = {}
        bad: list[tuple[str, int, int]] = []
        grads = {slot: p.grad for slot, p in self.runner.sharded_model.computes.items()}
        # Sums are looked at only if no gradient of this rank is left: they name a tensor, but no rank.
        has_own_grads = any(grad is not None for grad in grads.values())
        if self.runner.norms and not has_own_grads:
            return self._by_norms(rank, loss)
        for slot, grad in (grads if has_own_grads else sums.tensors).items():
            if grad is None:
                continue
            num_bad = grad.numel() - int(torch.isfinite(grad).sum())
            bad += [(slot.name, num_bad, grad.numel())] if num_bad else []
            norms[slot.name] = float(torch.linalg.vector_norm(grad))
        if bad:
            # Backward reaches the last tensor of the model first, so the trouble most likely began there.
            return RankEvidence(rank, loss, *bad[-1], num_tensors=len(bad), own=has_own_grads)
        return RankEvidence(
            rank, loss, max(norms, key=lambda name: norms[name], default=""), own=has_own_grads
        )

    def _by_norms(self, rank: int, loss: float | None) -> RankEvidence:
        """Return the evidence from norms of gradients that were released."""
        order = [slot for slot in self.runner.sharded_model.computes if slot in self.runner.norms]
        norms = {slot: max(float(norm) for norm in self.runner.norms[slot]) for slot in order}
        bad = [s for s in order if not all(math.isfinite(float(norm)) for norm in self.runner.norms[s])]
        if bad:
            return RankEvidence(rank, loss, bad[-1].name, num_values=bad[-1].numel, num_tensors=len(bad))
        largest = max(order, key=lambda slot: norms[slot])
        return RankEvidence(rank, loss, largest.name)
