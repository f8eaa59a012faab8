"""Mistakes within a step: accumulation, wrappers, what is cleared and what is updated."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from tests.known_mistakes.loop import Loop, Setup, build, loss_of
from tests.known_mistakes.mistake import Story


class MeanOfMicroBatches(Loop):
    setup = Setup(micro_batches=2)
    story = Story(
        "gradient accumulation gives each micro-batch the same weight",
        "the fix of October 2024 in Hugging Face Transformers; most hand-written accumulation",
        "the same batch has another loss with more accumulation steps",
        "the loss is the mean over micro-batches of their means over tokens",
        "loss = F.cross_entropy(logits, targets) / accumulation_steps",
        "loss = losses.sum() / tokens_of_the_whole_batch",
    )

    def backward(self, value: Tensor, tokens: Tensor) -> None:
        (value / tokens / self.setup.micro_batches / self.world).backward()

    def synchronise(self, count: Tensor) -> Tensor:
        count = count.clone()
        dist.all_reduce(count)
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
        return count


class MicroBatchesNotDivided(MeanOfMicroBatches):
    setup = Setup(micro_batches=2)
    story = Story(
        "accumulated gradients are never divided by the number of micro-batches",
        "hand-written accumulation loops",
        "more accumulation needs a smaller learning rate; with a clip norm every step is clipped",
        "backward adds to .grad, so the means of all micro-batches are added up",
        "loss.backward()  # accumulation_steps times",
        "(loss_sum / tokens_of_the_whole_batch).backward()",
    )

    def backward(self, value: Tensor, tokens: Tensor) -> None:
        (value / tokens / self.world).backward()


class Wrapped(Loop):
    """The same with DistributedDataParallel, whose average is made the global mean: right, no mistake."""

    def __init__(self, setup: Setup, order: list[list[int]]) -> None:
        super().__init__(setup, order)
        self.ddp = DistributedDataParallel(self.model)

    def compute(self, step: int) -> tuple[Tensor, Tensor]:
        total, count = torch.zeros(()), torch.zeros(())
        batches = [default_collate([self.data[i] for i in part]) for part in self.share(step)]
        of_all = torch.stack([batch[2].sum() for batch in batches]).sum().float()
        dist.all_reduce(of_all)
        for k, batch in enumerate(batches):
            total, count = self.one(batch, of_all, total, count, is_last=k == len(batches) - 1)
        return total, count

    def one(
        self, batch: list[Tensor], of_all: Tensor, total: Tensor, count: Tensor, *, is_last: bool
    ) -> tuple[Tensor, Tensor]:
        self.ddp.require_backward_grad_sync = self.syncs(is_last)
        value, tokens = loss_of(self.forward(), batch)
        (value * self.world / of_all).backward()
        return total + value.detach(), count + tokens

    def syncs(self, is_last: bool) -> bool:
        return is_last

    def forward(self) -> nn.Module:
        return self.ddp

    def synchronise(self, count: Tensor) -> Tensor:
        count = count.clone()
        dist.all_reduce(count)
        return count


class NeverSyncs(Wrapped):
    setup = Setup(micro_batches=2)
    story = Story(
        "`no_sync` covers the last micro-batch too",
        "DistributedDataParallel.no_sync, accelerator.accumulate with a wrong step count",
        "replicas drift apart without an error",
        "gradients are averaged only in a backward outside no_sync, and there is none",
        "with ddp.no_sync(): all micro-batches",
        "with ddp.no_sync(): all but the last; then the last outside",
    )

    def syncs(self, is_last: bool) -> bool:
        return False


class CallsTheModule(Wrapped):
    story = Story(
        "the forward bypasses the wrapper",
        "DistributedDataParallel: ddp.module(x), or a custom method of the module",
        "replicas drift apart without an error",
        "the wrapper prepares its reducer in its own forward; without it, backward averages nothing",
        "loss = criterion(ddp.module(x), y)",
        "loss = criterion(ddp(x), y)",
    )

    def forward(self) -> nn.Module:
        return self.ddp.module


class GradientsNeverCleared(Loop):
    story = Story(
        "gradients of earlier steps are never cleared",
        "every training tutorial's first bug; zero_grad of another optimizer",
        "as with a momentum of 1: the loss falls, then oscillates and grows",
        "backward adds to the existing gradient",
        "loss.backward(); optimizer.step()",
        "optimizer.zero_grad(); loss.backward(); optimizer.step()",
    )

    def step(self, step: int) -> None:
        self.optimizer.zero_grad = lambda set_to_none=True: None
        super().step(step)


class ClearedBeforeTheStep(Loop):
    story = Story(
        "gradients are cleared between backward and step",
        "loops that were reordered for accumulation or mixed precision",
        "the loss does not change; there is no error",
        "an optimizer skips parameters without a gradient",
        "loss.backward(); optimizer.zero_grad(); optimizer.step()",
        "optimizer.zero_grad(); loss.backward(); optimizer.step()",
    )

    def clip(self) -> None:
        self.optimizer.zero_grad()


class HalfOfATie(Loop):
    setup = Setup(model="tied")
    story = Story(
        "one stage's gradient of a weight that two pipeline stages share is lost",
        "pipelines with tied embeddings (Megatron-LM sums the two over an embedding group)",
        "the two copies drift apart, or learn from half of the gradient",
        "each stage has the gradient of its own copy; the gradient of the weight is their sum",
        "stage_optimizer.step()",
        "dist.all_reduce(tied.grad, group=first_and_last_stage); stage_optimizer.step()",
    )

    def compute(self, step: int) -> tuple[Tensor, Tensor]:
        model = self.model
        whole, model.forward = model.forward, lambda x: model.last(model.first(x).detach())
        try:
            return super().compute(step)
        finally:
            model.forward = whole


class StaleOptimizer(Loop):
    story = Story(
        "the optimizer holds parameters that the model no longer has",
        "an optimizer created before FSDP wraps, before .to(xla), or before LoRA or loading replaces modules",
        "the loss does not change; there is no error",
        "wrapping created new parameters; the optimizer updates the old ones, which are no longer used",
        "optimizer = SGD(model.parameters()); model = wrap(model)",
        "model = wrap(model); optimizer = SGD(model.parameters())",
    )

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer()
        copy = build(self.setup)
        copy.load_state_dict(self.model.state_dict())
        self.model = copy
        return optimizer
