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
        "some samples count twice; a held-out loss that is a little worse, and no error",
        "bounds of ranges that were written down one by one",
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
        "hand-written splits; drop_last of a sampler where nobody asked for it",
        "of 11 samples on 2 ranks one is never trained on; the loss depends on the number of ranks",
        "n // world_size samples a rank are less than n together",
        "share = batch[rank * (n // world) : (rank + 1) * (n // world)]",
        "share = batch[rank * n // world : (rank + 1) * n // world]",
    )

    def share(self, step: int) -> list[list[int]]:
        whole = self.epoch(step)[step * SIZE % NUM_SAMPLES :][:SIZE]
        each = SIZE // self.world
        return [list(whole[self.rank * each : (self.rank + 1) * each])]


class PadsTheBatch(Loop):
    story = Story(
        "the sampler pads the last batch with samples that were there already",
        "torch DistributedSampler without drop_last, in training and above all in evaluation",
        "metrics change with the number of ranks; the first samples of the data count twice",
        "every rank gets the same number of samples, so the list is filled up from its beginning",
        "sampler = DistributedSampler(data)",
        "leave out what was padded: index >= len(data) in the padded list, or weigh by real counts",
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
        "a DataLoader without a DistributedSampler; Trainer arguments that switch the sampler off",
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
        "set_epoch is never called",
        "torch DistributedSampler",
        "every epoch has the order of the first: samples always meet the same others",
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
        "torch.manual_seed(seed) on every rank, as recipes ask for to make weights equal",
        "dropout regularises less on more processes; nothing else shows",
        "one seed for weights and for masks: rank 1's mask of its sample is rank 0's mask of its own",
        "torch.manual_seed(seed)  # once, on every rank",
        "torch.manual_seed(key(seed, step, shard))  # before each forward",
    )

    def seed(self, step: int, shard: int) -> int:
        return super().seed(step, 0)


class OtherWeightsOnEachRank(Loop):
    story = Story(
        "each rank starts from weights of its own",
        "hand-written loops, federated clients that each build a model; DDP hides it by a broadcast",
        "the loss is noisy and does not fall as it should; the saved model is one of P",
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
        "running statistics come from the samples of rank 0 alone",
        "BatchNorm under DistributedDataParallel with broadcast_buffers=True, its default",
        "evaluation depends on the number of ranks; worse with few samples a rank",
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
        "the schedule moves on once for every process",
        "Hugging Face Accelerate's prepared schedulers (they step num_processes times unless split_batches)",
        "on 2 ranks the rate reaches its end after half of the run",
        "the length of the schedule was computed in steps of one process",
        "scheduler = prepare(scheduler); scheduler.step()  # moves on by num_processes",
        "give it num_steps * num_processes, or count updates",
    )

    def updates_so_far(self, step: int) -> int:
        return min(step * self.world, STEPS)


class ScheduleOfMicroBatches(Loop):
    setup = Setup(falls=True, micro_batches=2)
    story = Story(
        "the schedule moves on at every micro-batch",
        "loops with gradient accumulation",
        "warm-up and decay are over too early by the factor of accumulation",
        "scheduler.step() stands beside backward, not beside optimizer.step()",
        "loss.backward(); scheduler.step()",
        "if last_micro_batch: optimizer.step(); scheduler.step()",
    )

    def updates_so_far(self, step: int) -> int:
        return min(step * self.setup.micro_batches, STEPS)


class ScheduleBeforeTheStep(Loop):
    setup = Setup(falls=True)
    story = Story(
        "the schedule moves on before the optimizer",
        "code from before PyTorch 1.1",
        "the first rate of the schedule is never used; PyTorch warns once",
        "the order of the two calls",
        "scheduler.step(); optimizer.step()",
        "optimizer.step(); scheduler.step()",
    )

    def updates_so_far(self, step: int) -> int:
        return step + 1


class DecayInsideTheMoments(Loop):
    setup = Setup(optimizer="adamw", lr=0.01, decay=0.5)
    story = Story(
        "weight decay is added to Adam's gradient",
        "Adam(weight_decay=...) where a paper says AdamW; configurations that call both 'adam'",
        "weights with large gradients hardly decay; results of a paper are not reached",
        "for adaptive optimizers decay and an L2 penalty differ: the penalty is divided by the second moment",
        "torch.optim.Adam(parameters, lr, weight_decay=0.5)",
        "torch.optim.AdamW(parameters, lr, weight_decay=0.5)",
    )

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), self.setup.lr, weight_decay=self.setup.decay)


class UpdatesInHalf(Loop):
    story = Story(
        "the weights themselves are bfloat16",
        "model.half() or model.bfloat16() in place of autocast; recipes that call it mixed precision",
        "the loss stops falling early: small updates vanish",
        "a bfloat16 weight of 1 cannot move by less than 0.004",
        "model = model.bfloat16()",
        "with torch.autocast('cpu', torch.bfloat16): loss = ...  # weights stay float32",
    )

    def clip(self) -> None:
        for p in self.model.parameters():
            p.data = p.data.bfloat16().float()


class ReportsItsOwnLoss(Loop):
    story = Story(
        "rank 0 prints the loss of its own samples",
        "print under `if rank == 0`; loggers that only log on rank 0",
        "the curve gets noisier with more processes, and runs cannot be compared",
        "nobody summed the loss over the ranks",
        "if rank == 0: log(loss.item())",
        "dist.all_reduce(loss_sum); log(loss_sum / tokens_of_all_ranks)",
    )

    def synchronise(self, count: Tensor) -> Tensor:
        super().synchronise(count)
        return count

    def report(self, total: Tensor, count: Tensor) -> None:
        self.losses.append(float(total / count))
