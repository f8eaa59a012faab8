"""Set up the task's model and optimizer: weights, equal on every rank; buffers; recomputation; fused kernels.

Invariant: before a model is partitioned, every rank has the same weights, either broadcast from rank 0 or,
for parameters without memory, made by name from the seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from paceline.checkpoint.pretrained import load_weights
from paceline.comm.group_collectives import all_gather_texts, broadcast_coalesced
from paceline.comm.net import Net
from paceline.data.sample_order import BatchOrder
from paceline.errors import StrategyError, TaskError, format_count
from paceline.job.mesh import RankGroup
from paceline.models.dropout import name_dropouts
from paceline.models.initialize import InitializeByName
from paceline.optim.build_optimizer import build_optimizer, reason_not_fused
from paceline.optim.compatibility import rebind_parameters, require_layout_support, require_one_gradient
from paceline.optim.slot_norms import SlotGroup, SlotOptimizer
from paceline.optim.user_optimizer import member_optimizers
from paceline.parallel.mixed_precision import compile_or_explain
from paceline.parallel.model_buffers import set_buffer_reductions
from paceline.parallel.recompute import recompute_blocks
from paceline.parallel.session_context import SessionContext
from paceline.parallel.sharded_model import ShardedModel
from paceline.parallel.sync_batchnorm import synchronize_batch_norms
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
    """Return the task's model on its device, with weights from a file or set by name if the task knows how.

    Args:
        whole: give memory to all parameters of a model that was built on the meta device. Otherwise they
            get it when it is known which of them this rank holds. Every rank reads weights from a file as
            a whole.
        warn: receives a sentence about files whose content cannot be verified by a hash.
    """
    has_meta = any(p.is_meta for p in task.model.parameters())
    stays_meta = has_meta and recipe.init_from is None and not whole
    if task.initialize is not None and not stays_meta:
        task.initialize(task.model, recipe.seed)
    if recipe.init_from is not None:
        loaded = load_weights(task.model, recipe.init_from, vocabulary=task.vocabulary)
        warning = loaded.warning(recipe.init_from)
        if warning:
            warn(warning)
    name_dropouts(task.model)
    if not stays_meta:
        return task.model.to(device)
    if isinstance(task.initialize, InitializeByName):
        initialize_allocated(task.model, recipe.seed, task.initialize)
    return task.model._apply(lambda t: t if t.is_meta else t.to(device))


def initialize_allocated(model: nn.Module, seed: int, initialize: InitializeByName) -> None:
    """Set the parameters that have memory in a model of which others have none."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.is_meta:
                p.copy_(initialize.part(model, seed, name, tuple(slice(0, n) for n in p.shape)))


def broadcast_model(model: nn.Module, net: Net, group: RankGroup) -> None:
    """Give every rank the parameters and buffers of rank 0; those without memory are made by name later.

    Wire: every rank but the first receives the n bytes of the model, in broadcasts of some megabytes.
    """
    tensors: list[Tensor] = [p.detach() for p in model.parameters()] + list(model.buffers())
    broadcast_coalesced([t for t in tensors if not t.is_meta], net, group)


def recompute_and_compile(
    recipe: Recipe, task: Task, model: nn.Module, device: torch.device, warn: Callable[[str], None]
) -> None:
    """Apply activation recomputation and `torch.compile` to the model in place, as the recipe says."""
    if recipe.memory.recomputes:
        recompute_blocks(model, task.blocks, recipe.memory.recompute)
    if recipe.runtime.compile:
        reason = compile_or_explain(model, device.type)
        if reason:
            warn(reason)


def set_up_sync_batchnorm(context: SessionContext, model: nn.Module, order: BatchOrder) -> None:
    """Let BatchNorm compute its statistics over all ranks of a step; collective.

    Raises:
        StrategyError: in some step a rank runs no micro-batch or several. A rank without a forward would
            leave the others waiting in the collective of a BatchNorm.
    """
    group, shards = context.mesh.data, context.shards
    last_batch = order.batch_size(order.steps_per_epoch - 1)
    if shards != group.size:
        raise StrategyError(
            "batch.sync_batchnorm needs exactly one micro-batch per rank in every step, but a batch has"
            f" {format_count(shards, 'micro-batch')} for {format_count(group.size, 'rank')}",
            next_step="remove batch.shards",
        )
    if last_batch < shards:
        raise StrategyError(
            "batch.sync_batchnorm needs exactly one micro-batch per rank in every step, but the last batch"
            f" of an epoch has {format_count(last_batch, 'sample')} for {format_count(shards, 'rank')}",
            next_step="set batch.drop_last = true",
        )
    if group.size > 1:
        context.close_callbacks.append(synchronize_batch_norms(model, group, context.net))


def apply_buffer_reductions(recipe: Recipe, task: Task, model: nn.Module) -> None:
    """Set on the model's modules how their buffers are combined over micro-batches, by `Task(buffers=...)`.

    Raises:
        TaskError: a pattern fits no persistent buffer.
        StrategyError: changes are to be combined per micro-batch, and SyncBatchNorm has one forward of all
            ranks.
    """
    if not task.buffers:
        return
    persistent = model.state_dict(keep_vars=True)
    names = [name for name, _ in model.named_buffers(remove_duplicate=False) if name in persistent]
    for pattern in task.buffers:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise TaskError(
                f"the pattern '{pattern}' in Task(buffers=...) matches no persistent buffer of the model",
                next_step=f"the model has these buffers: {', '.join(names[:5]) or 'none'}",
            )
    if set(task.buffers.values()) != {"mean"} and recipe.batch.sync_batchnorm:
        raise StrategyError(
            'Task(buffers=...) combines buffers per micro-batch ("sum", "first", "ema"), but with'
            " batch.sync_batchnorm all ranks run one forward together",
            next_step='remove batch.sync_batchnorm, or use "mean"',
        )
    # The first pattern that matches a name decides.
    matches = {name: [how for p, how in task.buffers.items() if fnmatchcase(name, p)] for name in names}
    set_buffer_reductions(model, {name: reductions[0] for name, reductions in matches.items() if reductions})


def build_task_optimizer(
    context: SessionContext, task: Task, sharded_model: ShardedModel
) -> torch.optim.Optimizer:
    """Build the task's own optimizer, or the recipe's by name, over the parameters that this rank updates.

    Raises:
        StrategyError: the optimizer needs whole tensors or several of them at once, and this rank has
            parts only.
        TaskError: the task brings its own, and the recipe sets options of one.
    """
    recipe = context.recipe
    if task.optimizer is None:
        optimizer = build_optimizer(
            sharded_model.model, recipe.optimizer, fused_allowed=not recipe.reproducible
        )
        if context.trains:
            _log_optimizer_kernels(context, type(optimizer).__name__, sharded_model)
    else:
        refuse_two_optimizers(recipe)
        optimizer = require_one_gradient(task.optimizer(sharded_model.model))
    if task.optimizer is not None or not recipe.optimizer.spec.elementwise:
        _require_layout_support(context, optimizer, sharded_model)
    _bind_slots(context, optimizer, sharded_model)
    rebind_parameters(optimizer, sharded_model)
    return optimizer


def _bind_slots(
    context: SessionContext, optimizer: torch.optim.Optimizer, sharded_model: ShardedModel
) -> None:
    """Give optimizers that need whole tensors the group of ranks that hold them; collective.

    Raises:
        StrategyError: the run is reproducible, and the sums of an optimizer depend on where tensors are
            split.
    """
    members = [member for member in member_optimizers(optimizer) if isinstance(member, SlotOptimizer)]
    if not members:
        return
    group = build_slot_group(context, sharded_model)
    for member in members:
        if group.by_row and group.size > 1 and not member.is_ordered:
            raise StrategyError(
                f"reproducible = true, but the sums of {type(member).__name__} over parts of tensors depend"
                " on where they are split",
                next_step="leave out shard and tensor, or choose another optimizer",
            )
        member.bind(group, {p: slot.name for slot, p in sharded_model.computes.items()})


def build_slot_group(context: SessionContext, sharded_model: ShardedModel) -> SlotGroup:
    """Return the ranks that hold the parts of the tensors of this rank's stage; collective."""
    # What is whole on the tensor ranks is counted by the first of them.
    counts_whole = context.mesh.coordinate("tensor") == 0
    group = SlotGroup(
        slots={p: slot for slot, p in sharded_model.updates.items()},
        tensors=tuple(slot for slot in sharded_model.slots if slot.name in sharded_model.held),
        counted=frozenset(
            name
            for name, placement in sharded_model.held.items()
            if counts_whole or "tensor" in placement.computes.axes
        ),
        dtypes={slot.name: p.dtype for slot, p in sharded_model.computes.items()},
        group=context.mesh.group_over({"shard", "tensor"}),
        net=context.net,
        by_row=context.recipe.is_ordered,
    )
    return context.components.slot_group(group)


def _require_layout_support(
    context: SessionContext, optimizer: torch.optim.Optimizer, sharded_model: ShardedModel
) -> None:
    """Raise the StrategyError of the first rank that cannot update its parts, on every rank; collective."""
    local = ""
    try:
        require_layout_support(optimizer, sharded_model)
    except StrategyError as error:
        local = json.dumps([error.what, error.next_step])
    # Each rank tries the parts that it updates, and one rank's can be wrong alone.
    texts = all_gather_texts(local, context.mesh.world, context.net)
    first = next((text for text in texts if text), "")
    if first:
        what, next_step = json.loads(first)
        raise StrategyError(what, next_step=next_step)


def _log_optimizer_kernels(context: SessionContext, class_name: str, sharded_model: ShardedModel) -> None:
    """Print whether the optimizer is fused; warn if the recipe turns off a fused kernel that is faster."""
    recipe, fused_allowed = context.recipe.optimizer, not context.recipe.reproducible
    why_not = reason_not_fused(sharded_model.model, recipe, fused_allowed)
    reason = why_not or "all trained parameters have a fused kernel"
    context.note("optimizer", {"name": recipe.name, "fused": not why_not, "reason": reason})
    context.warn(
        f"optimizer: {class_name}, not fused ({why_not})" if why_not else f"optimizer: fused {class_name}"
    )
    could_fuse = not reason_not_fused(sharded_model.model, recipe.replace(fused=True), fused_allowed)
    if not recipe.fused and could_fuse:
        num_values = sum(p.numel() for p in sharded_model.updates.values())
        warning = unfused_optimizer_warning(recipe, num_values, context.device)
        if warning:
            context.warn(warning)
