"""What the oracle computes in a step of a strategy, from the bits that the strategy starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from paceline.layout.whole import Snapshot
from paceline.state import TrainState
from paceline.sync import gradient_scale
from paceline.training import Session
from paceline.verification.oracle import Oracle, Tensors, Totals, moved


@dataclass
class Reference:
    """The oracle's view of one step, on rank 0.

    Args:
        before: the state that the step starts from.
        sums: of loss, count, gradients and buffers over all shards.
        norm: of the mean gradient, before the clip; from `finish` on.
        final: gradients as the optimizer got them; from `finish` on.
    """

    before: Tensors
    sums: Totals
    norm: float = 0.0
    final: Tensors = field(default_factory=dict)

    def finish(self, oracle: Oracle, sums: Mapping[str, Tensor], update: int) -> None:
        """Let the oracle divide, clip and update, with the gradients that rank 0 really had.

        Args:
            sums: those gradients, by parameter.
            update: its number, for the schedule.
        """
        oracle.set_buffers(moved(oracle.buffers(), self.sums.buffers))
        self.norm = oracle.apply({name: g.clone() for name, g in sums.items()}, self.sums.count, update)
        self.final = {n: p.grad for n, p in oracle.model.named_parameters() if p.grad is not None}


def look_up(oracle: Oracle, oracle_state: TrainState, session: Session, before: Snapshot) -> Reference:
    """The oracle's sums of the step that comes next in the session, from the state before it."""
    tensors = {name: t.detach().clone() for name, t in before.tensors().items()}
    oracle_state.load(tensors, before.scalars())
    scale = gradient_scale(oracle.work, session.state, max(1, session.task.num_tokens_per_sample))
    return Reference(tensors, oracle.accumulate(oracle.work.units(session.state.step), scale))
