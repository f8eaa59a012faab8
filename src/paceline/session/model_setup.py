"""A task's model, made ready to be placed: its weights, and the same on every rank.

How buffers come together, as a task says it by patterns: looked up once, refused where it cannot be.

The optimizer of a session: the task's own, or the recipe's by name, in fused kernels where they suit.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from paceline.checkpoint.pretrained import load_weights
from paceline.comm.group_collectives import broadcast_coalesced
from paceline.comm.net import Net
from paceline.errors import StrategyError, TaskError
from paceline.job.mesh import RankGroup
from paceline.models.dropout import name_dropouts
from paceline.models.initialize import InitializeByName
from paceline.optim.build_optimizer import build_optimizer, reason_not_fused
from paceline.optim.compatibility import rebind_parameters, require_layout_support, require_one_gradient
from paceline.parallel.mixed_precision import compile_or_explain
from paceline.parallel.model_buffers import set_buffer_reductions
from paceline.parallel.recompute import recompute_blocks
from paceline.parallel.session_context import SessionContext
from paceline.parallel.sharded_model import ShardedModel
from paceline.recipe.recipe import Recipe
from paceline.session.task_contract import refuse_two_optimizers
from paceline.task import Task
from paceline.tuning.hardware_defaults import unfused_optimizer_warning


def prepare_model(
    recipe: Recipe,
    task: Task,
    device: torch.device,
    *,
    whole: bool = False,
    warn: Callable[[str], None] = lambda text: None,
) -> nn.Module:
    """The task's model on its device: weights from a file, or set by name where the task knows how.

    Args:
        whole: give memory to all parameters of a model that was built without; else they wait until it is
            known which of them this rank holds. Weights from a file are read whole, by every rank.
        warn: is told of files of which nobody says what their bytes should be.
    """
    waits = any(p.is_meta for p in task.model.parameters()) and recipe.init_from is None and not whole
    if task.initialize is not None and not waits:
        task.initialize(task.model, recipe.seed)
    if recipe.init_from is not None:
        taken = load_weights(task.model, recipe.init_from, vocabulary=task.vocabulary)
        doubt = taken.warning(recipe.init_from)
        if doubt:
            warn(doubt)
    name_dropouts(task.model)
    if not waits:
        return task.model.to(device)
    if isinstance(task.initialize, InitializeByName):
        initialize_allocated(task.model, recipe.seed, task.initialize)
    return task.model._apply(lambda t: t if t.is_meta else t.to(device))


def initialize_allocated(model: nn.Module, seed: int, initialize: InitializeByName) -> None:
    """Set the parameters of a model that have memory, though it was built without."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.is_meta:
                p.copy_(initialize.part(model, seed, name, tuple(slice(0, n) for n in p.shape)))


def broadcast_model(model: nn.Module, net: Net, group: RankGroup) -> None:
    """Give every rank the parameters and buffers of rank 0; what has no memory is made alike on every rank.

    Wire: n bytes received by each rank but the first, in broadcasts of some megabytes.
    """
    tensors: list[Tensor] = [p.detach() for p in model.parameters()] + list(model.buffers())
    broadcast_coalesced([t for t in tensors if not t.is_meta], net, group)


def recompute_and_compile(
    recipe: Recipe, task: Task, model: nn.Module, device: torch.device, warn: Callable[[str], None]
) -> None:
    """Change the model in place as the recipe's memory and runtime sections say."""
    if recipe.memory.recomputes:
        recompute_blocks(model, task.blocks, recipe.memory.recompute)
    if recipe.runtime.compile:
        reason = compile_or_explain(model, device.type)
        if reason:
            warn(reason)


def apply_buffer_reductions(recipe: Recipe, task: Task, model: nn.Module) -> None:
    """Tell the model's modules.

    Raises:
        TaskError: a pattern fits no persistent buffer.
        StrategyError: there are no micro-batches of ranks.
    """
    if not task.buffers:
        return
    kept = model.state_dict(keep_vars=True)
    names = [name for name, _ in model.named_buffers(remove_duplicate=False) if name in kept]
    for pattern in task.buffers:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise TaskError(
                f"Task(buffers=...) has the pattern '{pattern}', which fits no persistent buffer",
                next_step=f"the model has: {', '.join(names[:5]) or 'none'}",
            )
    if set(task.buffers.values()) != {"mean"}:
        _refuse_sync_batchnorm(recipe)
    found = {name: [how for p, how in task.buffers.items() if fnmatchcase(name, p)] for name in names}
    set_buffer_reductions(
        model, {name: buffer_reductions[0] for name, buffer_reductions in found.items() if buffer_reductions}
    )


def _refuse_sync_batchnorm(recipe: Recipe) -> None:
    if recipe.batch.sync_batchnorm:
        raise StrategyError(
            "Task(buffers=...) asks for the sum of changes, or those of the first micro-batch, and"
            " batch.sync_batchnorm has one forward of all ranks",
            next_step='leave sync_batchnorm out, or choose "mean"',
        )


def build_task_optimizer(
    context: SessionContext, task: Task, sharded_model: ShardedModel
) -> torch.optim.Optimizer:
    """The task's own optimizer, or the recipe's by name, over what this rank updates.

    Raises:
        StrategyError: it looks at more than one value, or tensor, at a time, and this rank would update a
            part of them.
        TaskError: the task brings its own, and the recipe sets options of one.
    """
    recipe = context.recipe
    if task.optimizer is None:
        optimizer = build_optimizer(
            sharded_model.model, recipe.optimizer, fused_allowed=not recipe.reproducible
        )
        _log_optimizer_kernels(context, sharded_model)
    else:
        refuse_two_optimizers(recipe)
        optimizer = require_one_gradient(task.optimizer(sharded_model.model))
    if task.optimizer is not None or not recipe.optimizer.spec.elementwise:
        require_layout_support(optimizer, sharded_model)
    rebind_parameters(optimizer, sharded_model)
    return optimizer


def _log_optimizer_kernels(context: SessionContext, sharded_model: ShardedModel) -> None:
    """Whether updates take a fused kernel, and why; what is slow here is told."""
    recipe, allowed = context.recipe.optimizer, not context.recipe.reproducible
    why_not = reason_not_fused(sharded_model.model, recipe, allowed)
    reason = why_not or "PyTorch has one for all that is trained"
    context.note("optimizer", {"name": recipe.name, "fused": not why_not, "reason": reason})
    context.warn(f"optimizer: {recipe.name} {'without a' if why_not else 'in a'} fused kernel, as {reason}")
    if not recipe.fused and not reason_not_fused(sharded_model.model, recipe.replace(fused=True), allowed):
        slow = unfused_optimizer_warning(
            recipe, sum(p.numel() for p in sharded_model.updates.values()), context.device
        )
        if slow:
            context.warn(slow)
