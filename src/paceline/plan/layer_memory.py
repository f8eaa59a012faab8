"""Memory by layer: the blocks of a model, and the modules outside of blocks; pure.

Parameters, gradients, moments and kept activations of a rank are sums over its layers. The peak is no such
sum, since activations are freed while gradients grow (`step_peak`).
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
"""Name of the rest: parameters of the model itself, and operations between layers."""


def model_layers(task: Task, model: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """Return name and module of each layer by number; blocks have the numbers of `memory.recompute`.

    Args:
        model: the model of the task, or a partitioned copy of it.
    """
    names = {module: name for name, module in model.named_modules()}
    blocks = outermost_blocks(model, task.blocks)
    layers = {number: (names.get(block, str(number)), block) for number, block in blocks.items()}
    first = len(recomputed_blocks(model, task.blocks))
    others = _layers_outside_blocks(model, "", set(blocks.values()))
    return layers | {first + k: other for k, other in enumerate(others)}


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
    """Return the names of the parameters in each block, which ZeRO 3 gathers together.

    Args:
        held: names of the tensors with which a rank computes.
    """
    names = {id(p): slot.name for slot, p in trained_parameters(model).items()}
    names_by_block, unassigned = list[list[str]](), {*held}
    for block in blocks:
        block_names = [names[id(p)] for p in block.parameters() if names.get(id(p)) in unassigned]
        # A parameter of several blocks is gathered with the first, as in `ParameterGatherer`.
        unassigned -= {*block_names}
        names_by_block.append(block_names)
    return names_by_block


def layer_memories(
    names: Mapping[int, str],
    held: Mapping[str, TensorPlacement],
    footprints: Sequence[MicroBatchFootprint],
    item_bytes: Mapping[str, int],
    state_ratio: float,
) -> list[LayerMemory]:
    """Return the memory of the layers of a rank in ascending order, without those of which it has nothing.

    Args:
        names: names of the layers by number.
        held: placement of each tensor on the rank, by name.
        footprints: footprints of the chunks of the rank.
        item_bytes: bytes of one value, by name.
        state_ratio: bytes of the optimizer's state per byte of a parameter.
    """
    activations = dict.fromkeys([*names.values(), OUTSIDE_LAYERS], 0)
    for chunk in footprints:
        lives = [*(entry.live for entry in chunk.entries), chunk.kept]
        for entry, live, after in zip(chunk.entries, lives, lives[1:], strict=False):
            activations[names[entry.layer]] += after - live
        activations[OUTSIDE_LAYERS] += lives[0]
    tensors: dict[str, list[TensorPlacement]] = {name: [] for name in activations}
    for name, placement in held.items():
        home = next((layer for layer in names.values() if name.startswith(f"{layer}.")), OUTSIDE_LAYERS)
        tensors[home].append(placement)
    rows = (
        _layer_memory(layer, tensors[layer], size, item_bytes, state_ratio)
        for layer, size in activations.items()
    )
    return [row for row in rows if row.total]


def _layer_memory(
    layer: str,
    placements: Sequence[TensorPlacement],
    activations: int,
    item_bytes: Mapping[str, int],
    state_ratio: float,
) -> LayerMemory:
    updates = parameters = gradients = 0
    for placement in placements:
        computed_bytes = slot_bytes(placement.computes, item_bytes)
        updated_bytes = 0 if placement.updates is None else slot_bytes(placement.updates, item_bytes)
        parameters += computed_bytes if placement.kept else updated_bytes
        gradients += updated_bytes if placement.frees_gradients else computed_bytes
        updates += updated_bytes
    return LayerMemory(layer, parameters, gradients, int(state_ratio * updates), activations)
