"""Poisson batches: every sample takes part in a step by itself, with one probability.

The size of a batch differs from step to step, and can be 0. Its samples are shared by the ranks, and cut into
micro-batches of the usual size. There are no passes over the data, and the seed has no influence: draws are
secret (`paceline.privacy.noise`).

Invariant: all ranks draw the same batch, and each sample of it is in one micro-batch of one rank.
Source: Abadi et al. 2016, Deep Learning with Differential Privacy, arXiv:1607.00133, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.data.work import MicroBatch
from paceline.privacy.noise import PrivateDraws
from paceline.state.keys import key


@dataclass(frozen=True, eq=False)
class PoissonWork:
    """The work of one replica with Poisson batches.

    Args:
        draws: of the run.
        num_samples_in_data: N.
        expected: samples of a batch on average.
        max_samples: of a micro-batch.
        seed: of the run; keys of micro-batches derive from it.
        replica_rank, num_replicas: as for `LockstepWork`.
    """

    draws: PrivateDraws
    num_samples_in_data: int
    expected: int
    max_samples: int
    seed: int
    replica_rank: int = 0
    num_replicas: int = 1

    @property
    def shards(self) -> int:
        per_rank = -(-self.num_samples_in_data // self.num_replicas)
        return self.num_replicas * -(-per_rank // self.max_samples)

    @property
    def steps_per_epoch(self) -> int:
        """Return the steps in which as many samples are drawn as there are, on average."""
        return -(-self.num_samples_in_data // self.expected)

    def num_samples(self, step: int) -> int:
        """Return the samples of a batch on average: the number that was drawn is not to be seen."""
        return self.expected

    def num_micro_batches(self, step: int) -> int:
        return len(self.micro_batches(step))

    def micro_batches(self, step: int, version: int | None = None) -> tuple[MicroBatch, ...]:
        rate = self.expected / self.num_samples_in_data
        drawn = self.draws.poisson(self.num_samples_in_data, rate, "batch", step)
        own = drawn[self.replica_rank :: self.num_replicas]
        pieces = [own[start : start + self.max_samples] for start in range(0, len(own), self.max_samples)]
        shards = range(self.replica_rank, self.shards, self.num_replicas)
        return tuple(
            MicroBatch(step, shard, piece, key(self.seed, "unit", step, shard), version, self.seed)
            for shard, piece in zip(shards, pieces, strict=False)
        )

    def part(self, number: int, of: int) -> PoissonWork:
        return replace(self, replica_rank=number, num_replicas=of)
