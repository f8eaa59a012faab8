"""The layers of a model as a plan tells of them: its blocks, and beside them whatever lies in none.

M = sum of M_i: parameters, gradients, moments and what a micro-batch keeps are sums over layers; the peak is
none, since activations go while gradients come (`paceline.plan.step_peak`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn

from paceline.parallel.placement import TensorPlacement, slot_bytes
from paceline.parallel.recompute import outermost_blocks, recomputed_blocks
from paceline.plan.activation_memory import MicroBatchFootprint
from paceline.plan.memory_plan import LayerMemory
from paceline.state.slot import trained_parameters
from paceline.task import Task

OUTSIDE_LAYERS = "(rest)"
"""What lies in no layer: parameters of the model itself, and what it does between them."""


def model_layers(task: Task, model: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """By number, name and module, none inside another; blocks have the numbers that `memory.recompute` names.

    Args:
        model: the task's, or a copy of it that was cut.
    """
    names = {module: name for name, module in model.named_modules()}
    blocks = outermost_blocks(model, task.blocks)
    found = {number: (names.get(block, str(number)), block) for number, block in blocks.items()}
    first = len(recomputed_blocks(model, task.blocks))
    others = _layers_outside_blocks(model, "", set(blocks.values()))
    return found | {first + k: other for k, other in enumerate(others)}


def _layers_outside_blocks(
    module: nn.Module, prefix: str, blocks: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if child in blocks:
            continue
        if blocks & set(child.modules()):
            yield from _layers_outside_blocks(child, f"{prefix}{name}.", blocks)
        else:
            yield prefix + name, child


def parameters_by_block(
    model: nn.Module, blocks: Iterable[nn.Module], held: Iterable[str]
) -> list[list[str]]:
    """What is gathered at a time under ZeRO 3: names of what lies in each block, in turn.

    Args:
        held: names of what a rank computes with.
    """
    names = {id(p): slot.name for slot, p in trained_parameters(model).items()}
    found, left = list[list[str]](), {*held}
    for block in blocks:
        own = [names[id(p)] for p in block.parameters() if names.get(id(p)) in left]
        left -= {*own}
        found.append(own)
    return found


def layer_memories(
    names: Mapping[int, str],
    held: Mapping[str, TensorPlacement],
    footprints: Sequence[MicroBatchFootprint],
    item_bytes: Mapping[str, int],
    kept: float,
) -> list[LayerMemory]:
    """Of one rank, in the order of their numbers; those of which it has nothing are left out.

    Args:
        names: by number.
        held: by name of a tensor, what the rank has of it.
        footprints: of its chunks.
        item_bytes: by name, of one value.
        kept: bytes of the optimizer's state for each byte of what is updated.
    """
    activations = dict.fromkeys([*names.values(), OUTSIDE_LAYERS], 0)
    for chunk in footprints:
        lives = [*(entry.live for entry in chunk.entries), chunk.kept]
        for entry, live, after in zip(chunk.entries, lives, lives[1:], strict=False):
            activations[names[entry.layer]] += after - live
        activations[OUTSIDE_LAYERS] += lives[0]
    tensors: dict[str, list[TensorPlacement]] = {name: [] for name in activations}
    for name, one in held.items():
        home = next((layer for layer in names.values() if name.startswith(f"{layer}.")), OUTSIDE_LAYERS)
        tensors[home].append(one)
    rows = (
        _layer_memory(layer, tensors[layer], size, item_bytes, kept) for layer, size in activations.items()
    )
    return [row for row in rows if row.total]


def _layer_memory(
    layer: str, held: Sequence[TensorPlacement], activations: int, item_bytes: Mapping[str, int], kept: float
) -> LayerMemory:
    updates = parameters = gradients = 0
    for one in held:
        computes = slot_bytes(one.computes, item_bytes)
        own = 0 if one.updates is None else slot_bytes(one.updates, item_bytes)
        parameters += computes if one.kept else own
        gradients += own if one.frees_gradients else computes
        updates += own
    return LayerMemory(layer, parameters, gradients, int(kept * updates), activations)
