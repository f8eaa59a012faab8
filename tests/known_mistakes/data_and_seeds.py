"""Mistakes with samples, seeds, buffers, rates and reports: who reads what, and when something changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data.distributed import DistributedSampler

from tests.known_mistakes.loop import NUM_SAMPLES, SIZE, STEPS, Loop, Setup, build
from tests.known_mistakes.mistake import Story


class Overlaps(Loop):
    story = Story(
        "the ranks' shares overlap",
        "hand-written ranges such as 1-600 and 501-1000",
        "some samples count twice; the held-out loss is slightly worse, and there is no error",
        "the bounds of the ranges were written by hand",
        "share = batch[rank * n // world : (rank + 1) * n // world + 1]",
        "share = batch[rank * n // world : (rank + 1) * n // world]",
    )

    def share(self, step: int) -> list[list[int]]:
        whole = self.epoch(step)[step * SIZE % NUM_SAMPLES :][:SIZE]
        (own,) = super().share(step)
        end = whole.index(own[-1]) + 2
        return [list(whole[whole.index(own[0]) : end])]


class LosesTheRemainder(Loop):
    story = Story(
        "integer division loses the remainder of a batch",
        "hand-written splits; a sampler's drop_last that is on unintentionally",
        "one of 11 samples on 2 ranks is never used; the loss depends on the number of ranks",
        "n // world_size samples per rank are fewer than n in total",
        "share = batch[rank * (n // world) : (rank + 1) * (n // world)]",
        "share = batch[rank * n // world : (rank + 1) * n // world]",
    )

    def share(self, step: int) -> list[list[int]]:
        whole = self.epoch(step)[step * SIZE % NUM_SAMPLES :][:SIZE]
        each = SIZE // self.world
        return [list(whole[self.rank * each : (self.rank + 1) * each])]


class PadsTheBatch(Loop):
    story = Story(
        "the sampler pads the last batch with samples that were already used",
        "torch DistributedSampler without drop_last, in training and especially in evaluation",
        "metrics depend on the number of ranks; the first samples of the data count twice",
        "every rank gets the same number of samples, so the list is padded from its beginning",
        "sampler = DistributedSampler(data)",
        "drop the padding (index >= len(data) in the padded list), or weight by real counts",
    )

    def share(self, step: int) -> list[list[int]]:
        whole = self.epoch(step)[step * SIZE % NUM_SAMPLES :][:SIZE]
        sampler: DistributedSampler[int] = DistributedSampler(
            list(whole), num_replicas=self.world, rank=self.rank, shuffle=False
        )
        return [[whole[i] for i in sampler]]


class SameSamplesEverywhere(Loop):
    story = Story(
        "every rank reads the same samples",
        "a DataLoader without a DistributedSampler; Trainer arguments that turn the sampler off",
        "more processes cost more and change nothing",
        "the mean over P equal gradients is one of them",
        "loader = DataLoader(data, shuffle=True, generator=seeded)",
        "loader = DataLoader(data, sampler=DistributedSampler(data))",
    )

    def share(self, step: int) -> list[list[int]]:
        rank, self.rank = self.rank, 0
        try:
            return super().share(step)
        finally:
            self.rank = rank


class SameOrderEveryEpoch(Loop):
    setup = Setup(shuffle=True)
    story = Story(
        "`set_epoch` is never called",
        "torch DistributedSampler",
        "every epoch has the order of the first, so batches always have the same samples",
        "the order is a function of (seed, epoch), and the epoch stays 0",
        "for epoch in range(epochs): for batch in loader: ...",
        "for epoch in range(epochs): sampler.set_epoch(epoch); for batch in loader: ...",
    )

    def epoch(self, step: int) -> Sequence[int]:
        return self.order[0]


class OneSeedForAllMasks(Loop):
    setup = Setup(model="dropout")
    story = Story(
        "all ranks draw the same dropout masks",
        "torch.manual_seed(seed) on every rank, as is often recommended to make weights equal",
        "dropout regularizes less on more processes; there is no other sign",
        "weights and masks share one seed, so rank 1 uses rank 0's masks for its own samples",
        "torch.manual_seed(seed)  # once, on every rank",
        "torch.manual_seed(key(seed, step, shard))  # before each forward",
    )

    def seed(self, step: int, shard: int) -> int:
        return super().seed(step, 0)


class OtherWeightsOnEachRank(Loop):
    story = Story(
        "each rank starts from its own weights",
        "hand-written loops; federated clients that each build a model; DDP hides it with a broadcast",
        "the loss is noisy and does not fall as expected; the saved model is one of P",
        "gradients of one model are applied to another",
        "torch.manual_seed(seed + rank); model = build()",
        "model = build(); for t in model.state_dict().values(): dist.broadcast(t, 0)",
    )

    def start(self) -> nn.Module:
        torch.manual_seed(7 + self.rank)
        return build(self.setup)


class BuffersOfRankZero(Loop):
    setup = Setup(model="batch-norm")
    story = Story(
        "running statistics use the samples of rank 0 only",
        "BatchNorm under DistributedDataParallel with broadcast_buffers=True, its default",
        "evaluation depends on the number of ranks, more with few samples per rank",
        "rank 0's buffers overwrite all others before every forward",
        "DistributedDataParallel(model)",
        "average the change of the buffers over all ranks after the step",
    )

    def agreed_buffers(self, before: list[Tensor], changes: list[list[Tensor]]) -> list[Tensor]:
        own = [b + change for b, change in zip(before, changes[-1], strict=True)]
        for b in own:
            dist.broadcast(b, 0)
        return own


class ScheduleOfEveryRank(Loop):
    setup = Setup(falls=True)
    story = Story(
        "the schedule advances once per process",
        "Hugging Face Accelerate's prepared schedulers (they step num_processes times unless split_batches)",
        "on 2 ranks the schedule ends after half of the run",
        "the length of the schedule was computed in steps of one process",
        "scheduler = prepare(scheduler); scheduler.step()  # advances by num_processes",
        "give it num_steps * num_processes, or count updates",
    )

    def updates_so_far(self, step: int) -> int:
        return min(step * self.world, STEPS)


class ScheduleOfMicroBatches(Loop):
    setup = Setup(falls=True, micro_batches=2)
    story = Story(
        "the schedule advances at every micro-batch",
        "loops with gradient accumulation",
        "warm-up and decay end too early, by the number of accumulation steps",
        "scheduler.step() is called after backward, not after optimizer.step()",
        "loss.backward(); scheduler.step()",
        "if last_micro_batch: optimizer.step(); scheduler.step()",
    )

    def updates_so_far(self, step: int) -> int:
        return min(step * self.setup.micro_batches, STEPS)


class ScheduleBeforeTheStep(Loop):
    setup = Setup(falls=True)
    story = Story(
        "the schedule advances before the optimizer",
        "code from before PyTorch 1.1",
        "the first rate of the schedule is never used; PyTorch warns once",
        "the two calls are in the wrong order",
        "scheduler.step(); optimizer.step()",
        "optimizer.step(); scheduler.step()",
    )

    def updates_so_far(self, step: int) -> int:
        return step + 1


class DecayInsideTheMoments(Loop):
    setup = Setup(optimizer="adamw", lr=0.01, decay=0.5)
    story = Story(
        "weight decay is added to Adam's gradient",
        "Adam(weight_decay=...) where a paper uses AdamW; configurations that call both 'adam'",
        "weights with large gradients hardly decay; published results are not reached",
        "with adaptive optimizers, decay differs from an L2 penalty, which is divided by the second moment",
        "torch.optim.Adam(parameters, lr, weight_decay=0.5)",
        "torch.optim.AdamW(parameters, lr, weight_decay=0.5)",
    )

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), self.setup.lr, weight_decay=self.setup.decay)


class UpdatesInHalf(Loop):
    story = Story(
        "the weights themselves are bfloat16",
        "model.half() or model.bfloat16() instead of autocast; recipes that call it mixed precision",
        "the loss stops falling early because small updates are lost",
        "a bfloat16 weight of 1 cannot change by less than 0.004",
        "model = model.bfloat16()",
        "with torch.autocast('cpu', torch.bfloat16): loss = ...  # weights stay float32",
    )

    def clip(self) -> None:
        for p in self.model.parameters():
            p.data = p.data.bfloat16().float()


class ReportsItsOwnLoss(Loop):
    story = Story(
        "rank 0 logs the loss of its own samples only",
        "printing under `if rank == 0`; loggers that only log on rank 0",
        "the curve is noisier with more processes, and runs cannot be compared",
        "the loss is not summed over the ranks",
        "if rank == 0: log(loss.item())",
        "dist.all_reduce(loss_sum); log(loss_sum / tokens_of_all_ranks)",
    )

    def synchronise(self, count: Tensor) -> Tensor:
        super().synchronise(count)
        return count

    def report(self, total: Tensor, count: Tensor) -> None:
        self.losses.append(float(total / count))
