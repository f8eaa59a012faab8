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
        "the run needs a smaller rate on more processes, and diverges on many",
        "all_reduce adds; on P ranks the gradient, and with SGD the update, is P times too large",
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
        "the mean of the ranks' means is taken for the mean",
        "DistributedDataParallel with a mean loss over tokens, or a last batch that is smaller",
        "the loss differs by the number of processes, most where sequences differ in length",
        "a rank with 6 tokens weighs as much as one with 12",
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
        "the gradient is divided by the number of ranks once more",
        "DistributedDataParallel, whose average is already one, with a loop ported from all_reduce",
        "more processes learn more slowly, as if the rate were P times smaller",
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
        "the sum goes into a temporary that nobody reads",
        "hand-written averaging, MPI Allreduce over a list",
        "no error; every rank trains on its own samples, and only rank 0's model is saved",
        "torch.stack, .cpu() and .clone() make new tensors: the all_reduce changes those",
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
        "parameters are averaged in place of gradients",
        "tutorials of data parallelism by hand",
        "replicas look equal where it is called, and have drifted apart after the step",
        "before the step all copies are equal, so their mean is what they were: gradients stay local",
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
        "runs on more processes take smaller steps where ranks disagree",
        "a mean of clipped gradients is not the clipped mean",
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
        "with sharded parameters each rank clips by the norm of its own part",
        "FullyShardedDataParallel: torch.nn.utils.clip_grad_norm_ instead of model.clip_grad_norm_",
        "parts are scaled by different factors; the direction of the update depends on the sharding",
        "the norm of the whole is the root of the sum of all parts' squares, and needs an all_reduce",
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
        "training crawls as soon as a clip is set: every gradient is over the bound",
        "the norm is larger by the scale, 65,536 at first: every step is clipped to nearly nothing",
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
