"""What others offer where a model is shared among ranks, as wrappings of the same hand-written loop.

FSDP2 and ZeroRedundancyOptimizer share the state of replicas, and so does DeepSpeed, where it is installed;
`parallelize_module` cuts layers. Each is set up as its documentation shows.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks.libraries import Library
from benchmarks.loops import Wrapping, adamw, autocast_of
from benchmarks.subjects import Subject

_LLAMA_PLAN = {
    "model.layers.*.self_attn.q_proj": ColwiseParallel,
    "model.layers.*.self_attn.k_proj": ColwiseParallel,
    "model.layers.*.self_attn.v_proj": ColwiseParallel,
    "model.layers.*.self_attn.o_proj": RowwiseParallel,
    "model.layers.*.mlp.gate_proj": ColwiseParallel,
    "model.layers.*.mlp.up_proj": ColwiseParallel,
    "model.layers.*.mlp.down_proj": RowwiseParallel,
}


def fsdp2(subject: Subject, *, keeps: bool = False) -> Wrapping:
    """PyTorch's FSDP2, which gathers a block for its forward and again for its backward.

    Args:
        keeps: what was gathered stays until its backward, as under ZeRO-2.
    """
    model = subject.fresh().model.train()
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, reshard_after_forward=not keeps)
    fully_shard(model, reshard_after_forward=not keeps)
    return Wrapping(
        "FSDP2, kept" if keeps else "FSDP2",
        model,
        adamw(model, subject.recipe),
        clip=partial(nn.utils.clip_grad_norm_, list(model.parameters())),
        autocast=autocast_of(subject.recipe),
    )


def zero_redundancy(subject: Subject) -> Wrapping:
    """PyTorch's ZeRO-1: whole gradients by DDP, an optimizer that updates a part and broadcasts it."""
    plain = subject.fresh().model.train()
    model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
    usual = adamw(plain, subject.recipe)
    optimizer = ZeroRedundancyOptimizer(usual.param_groups, type(usual), lr=usual.defaults["lr"], fused=True)
    return Wrapping(
        "ZeroRedundancyOptimizer",
        model,
        optimizer,
        clip=partial(nn.utils.clip_grad_norm_, list(model.parameters())),
        autocast=autocast_of(subject.recipe),
        quiet=model.no_sync,
    )


def deepspeed_if_installed() -> list[Library]:
    """DeepSpeed's ZeRO-1 and 2, or nothing."""
    if importlib.util.find_spec("deepspeed") is None:
        return []
    return [partial(deepspeed, stage=1), partial(deepspeed, stage=2)]


def deepspeed(subject: Subject, *, stage: int) -> Wrapping:
    """DeepSpeed, whose engine clips, updates, and counts micro-batches by the calls of its `step`."""
    import deepspeed as library

    recipe = subject.recipe
    plain = subject.fresh().model.train()
    micro_batches = (recipe.batch.shards or 1) // torch.distributed.get_world_size()
    options: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": recipe.batch.size // (recipe.batch.shards or 1),
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": recipe.optimizer.clip_norm or 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if recipe.precision.compute == "bf16":
        options["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    engine, *_ = library.initialize(model=plain, optimizer=adamw(plain, recipe), config=options)
    return Wrapping(
        f"DeepSpeed, ZeRO-{stage}",
        engine,
        _EngineSteps(engine),
        clip=_clipped_inside,
        backward=partial(engine.backward, scale_wrt_gas=False),
        autocast=autocast_of(recipe),
        quiet=partial(_counted, engine),
    )


class _EngineSteps:
    """The optimizer of an engine, as the loop calls it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.param_groups = engine.optimizer.param_groups

    def zero_grad(self, set_to_none: bool) -> None:
        """The engine's step has done it."""

    def step(self) -> None:
        """Of the engine."""
        self._engine.step()


def _clipped_inside(max_norm: float) -> None:
    """The engine clips in its step."""


@contextmanager
def _counted(engine: Any) -> Iterator[None]:
    yield
    engine.step()


def parallelized_llama(subject: Subject) -> Wrapping:
    """`parallelize_module` over all ranks, as in PyTorch's tutorial of Llama; logits are gathered."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = subject.fresh().model.train()
    plan: dict[str, Any] = {pattern: style() for pattern, style in _LLAMA_PLAN.items()}
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, plan)
    return Wrapping(
        "parallelize_module",
        model,
        adamw(model, subject.recipe),
        clip=partial(_clip_parts, list(model.parameters())),
        autocast=autocast_of(subject.recipe),
    )


def _clip_parts(parameters: Sequence[nn.Parameter], max_norm: float) -> None:
    """By the global norm of cut and whole gradients, with one sum over the ranks."""
    grads = [p.grad for p in parameters if p.grad is not None]
    cut: list[Tensor] = [g.to_local() for g in grads if isinstance(g, DTensor)]
    whole = [g for g in grads if not isinstance(g, DTensor)]
    squares = [torch.stack(torch._foreach_norm(own)).square().sum() for own in (cut, whole)]
    torch.distributed.all_reduce(squares[0])
    factor = max_norm / (math.sqrt(float(squares[0] + squares[1])) + 1e-6)
    if factor < 1.0:
        torch._foreach_mul_([*cut, *whole], factor)


SHARING: Sequence[Callable[[Subject], Wrapping]] = (fsdp2, partial(fsdp2, keeps=True), zero_redundancy)
