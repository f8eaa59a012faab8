"""Mistakes with gradients: what is summed, what divides, what is clipped."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from tests.known_mistakes.loop import Loop, Setup
from tests.known_mistakes.mistake import Story


class SumForMean(Loop):
    story = Story(
        "gradients are summed over ranks and never divided",
        "hand-written all_reduce loops; Horovod with op=Sum",
        "more processes need a smaller learning rate, and the run diverges on many",
        "all_reduce adds; on P ranks the gradient is P times too large, and with SGD so is the update",
        "dist.all_reduce(p.grad)",
        "dist.all_reduce(p.grad); p.grad /= count_of_all_ranks",
    )

    def synchronise(self, count: Tensor) -> Tensor:
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= count  # its own
        return self.sum_of(count)

    def sum_of(self, count: Tensor) -> Tensor:
        count = count.clone()
        dist.all_reduce(count)
        return count


class MeanOfMeans(SumForMean):
    story = Story(
        "the mean of the ranks' means is used as the mean",
        "DistributedDataParallel with a mean loss over tokens, or with a smaller last batch",
        "the loss depends on the number of processes, most if sequence lengths differ",
        "a rank with 6 tokens has the same weight as one with 12",
        "loss = F.cross_entropy(logits, targets); ddp averages over ranks",
        "loss = losses.sum() * world_size / tokens_of_all_ranks",
    )

    def synchronise(self, count: Tensor) -> Tensor:
        for p in self.model.parameters():
            p.grad /= count
            dist.all_reduce(p.grad)
            p.grad /= self.world
        return self.sum_of(count)


class DividedTwice(Loop):
    story = Story(
        "the gradient is divided by the number of ranks twice",
        "DistributedDataParallel, which already averages, in a loop ported from all_reduce",
        "more processes learn more slowly, as if the learning rate were P times smaller",
        "DDP averages; the hand-written division by the world size stayed in the loop",
        "ddp_loss.backward(); p.grad /= world_size",
        "ddp_loss.backward()",
    )

    def synchronise(self, count: Tensor) -> Tensor:
        count = super().synchronise(count)
        for p in self.model.parameters():
            p.grad /= self.world
        return count


class DroppedSum(Loop):
    story = Story(
        "the sum is written to a temporary tensor that is never used",
        "hand-written averaging, MPI Allreduce over a list",
        "no error; every rank trains on its own samples, and only rank 0's model is saved",
        "torch.stack, .cpu() and .clone() create new tensors, and the all_reduce changes only those",
        "dist.all_reduce(p.grad.clone())",
        "dist.all_reduce(p.grad)",
    )

    def synchronise(self, count: Tensor) -> Tensor:
        count = count.clone()
        dist.all_reduce(count)
        for p in self.model.parameters():
            dist.all_reduce(p.grad.clone())
            p.grad /= count
        return count


class AveragesParameters(Loop):
    story = Story(
        "parameters are averaged instead of gradients",
        "tutorials on hand-written data parallelism",
        "replicas are equal where it is called, and drift apart after the step",
        "before the step all copies are equal, so their mean changes nothing, and gradients stay local",
        "dist.all_reduce(p.data); p.data /= world_size",
        "dist.all_reduce(p.grad); p.grad /= count_of_all_ranks",
    )

    def synchronise(self, count: Tensor) -> Tensor:
        for p in self.model.parameters():
            dist.all_reduce(p.data)
            p.data /= self.world
            p.grad /= count
        count = count.clone()
        dist.all_reduce(count)
        return count


class ClipsBeforeTheSum(Loop):
    setup = Setup(clip_norm=0.1)
    story = Story(
        "each rank clips its own gradient, and the clipped ones are averaged",
        "hand-written loops; DDP's no_sync with a clip before the last micro-batch",
        "runs on more processes take smaller steps when the ranks' gradients differ",
        "the mean of clipped gradients is not the clipped mean",
        "clip_grad_norm_(parameters, c); all_reduce(grads)",
        "all_reduce(grads); clip_grad_norm_(parameters, c)",
    )

    def synchronise(self, count: Tensor) -> Tensor:
        total = count.clone()
        dist.all_reduce(total)
        for p in self.model.parameters():
            p.grad /= count
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= self.world
        return total


class ClipsItsOwnPart(Loop):
    setup = Setup(clip_norm=0.1)
    story = Story(
        "each rank clips its shard by the norm of that shard",
        "FullyShardedDataParallel: torch.nn.utils.clip_grad_norm_ instead of model.clip_grad_norm_",
        "shards are scaled by different factors, so the direction of the update depends on the sharding",
        "the global norm is the root of the sum of all shards' squares, and needs an all_reduce",
        "torch.nn.utils.clip_grad_norm_(fsdp.parameters(), c)",
        "fsdp.clip_grad_norm_(c)",
    )

    def clip(self) -> None:
        parameters = list(self.model.parameters())
        for owner in range(self.world):
            nn.utils.clip_grad_norm_(parameters[owner :: self.world], 0.1)


class ClipsScaled(Loop):
    setup = Setup(clip_norm=0.1, scale=1024.0)
    story = Story(
        "gradients are clipped while they still carry the loss scale",
        "torch.amp.GradScaler without scaler.unscale_(optimizer)",
        "training is very slow as soon as a clip norm is set, because every gradient exceeds it",
        "the norm is larger by the loss scale, initially 65,536, so every step is clipped to nearly nothing",
        "scaler.scale(loss).backward(); clip_grad_norm_(...)",
        "scaler.scale(loss).backward(); scaler.unscale_(optimizer); clip_grad_norm_(...)",
    )

    def synchronise(self, count: Tensor) -> Tensor:
        count = count.clone()
        dist.all_reduce(count)
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= count
        return count

    def clip(self) -> None:
        super().clip()
        for p in self.model.parameters():
            p.grad /= self.setup.scale
