"""What the oracle computes in an update of a strategy, from the bits that the strategy starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.state import TrainState
from paceline.sync import gradient_scale
from paceline.training import Session
from paceline.verification.compare import largest
from paceline.verification.conditioning import Conditioning
from paceline.verification.noise import rounding_noise
from paceline.verification.oracle import Oracle, Totals
from paceline.verification.plain_buffers import Tensors, moved


@dataclass
class Reference:
    """The oracle's view of one update, on rank 0.

    Args:
        before: the state that the update starts from.
        sums: of loss, count, gradients and buffers over all shards.
        norm: of the mean gradient, before the clip; from `finish` on.
        final: gradients as the optimizer got them; from `finish` on.
        noise: by name of a gradient, see `rounding_noise`; nothing unless it is measured.
        moved: by name of a tensor, see `compare.state_bounds`; from `finish` on.
    """

    before: Mapping[str, Tensor]
    scalars: Mapping[str, Any]
    sums: Totals
    norm: float = 0.0
    final: Tensors = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)

    def measure_noise(
        self, oracle: Oracle, state: TrainState, scale: float, roundoff: float, *, anew: bool
    ) -> None:
        """Where ranks compute a shard together; the oracle's state is that before the update.

        Args:
            scale: of the loss.
            roundoff: of the arithmetic.
            anew: what is asked beside the steps may be another sum; see `LoopLoss`.
        """
        micro_batches = oracle.work.micro_batches(state.step)
        sums = oracle.accumulate(micro_batches, scale) if anew else self.sums
        self.noise = rounding_noise(oracle, micro_batches, scale, sums.gradients, roundoff)

    def finish(self, oracle: Oracle, state: TrainState, sums: Mapping[str, Tensor], update: int) -> None:
        """Let the oracle divide, clip and update, with the gradients that rank 0 really had.

        Args:
            state: the oracle's.
            sums: those gradients, by parameter.
            update: its number, for the schedule.
        """
        oracle.set_buffers(moved(oracle.buffers(), self.sums.buffers))
        buffers = oracle.buffers()
        self.norm = oracle.set_gradients({name: g.clone() for name, g in sums.items()}, self.sums.count)
        self.final = {n: p.grad.clone() for n, p in oracle.model.named_parameters() if p.grad is not None}
        if not oracle.ordered:
            self.moved = Conditioning(oracle, state, self.before, self.scalars, self.final).measure(update)
            self.moved |= {f"model/{n}": largest(change) for n, change in self.sums.buffers.items()}
        oracle.set_buffers(buffers)
        for name, p in oracle.model.named_parameters():
            p.grad = self.final[name].clone() if name in self.final else None
        oracle.update(update)
        self.final = {n: p.grad for n, p in oracle.model.named_parameters() if p.grad is not None}


def scale_of(session: Session, state: TrainState) -> float:
    """What losses are multiplied with before backward in a state."""
    return gradient_scale(session.work, state, max(1, session.task.num_tokens_per_sample))
