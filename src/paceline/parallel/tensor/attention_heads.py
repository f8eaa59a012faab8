"""Attention split by heads: a rank has some of the heads, with their rows of queries, keys and values.

Where queries share keys and values (grouped queries), these go with the heads that use them. Where there are
fewer key heads than ranks, every rank has all of them and uses one. Modules are recognised by the names of
their layers and numbers, as nothing else says what they are; whatever is not recognised is refused.

Sources: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3; Ainslie et al. 2023, GQA,
arXiv:2305.13245.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from paceline.errors import TaskError, format_count
from paceline.parallel.placement import even_span
from paceline.parallel.tensor.parallel_linear import LinearCut, linear_dims, num_features
from paceline.state.slot import Span, join_runs

_FUSED_NAMES = ("qkv", "c_attn")
_SEPARATE_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("q_lin", "k_lin", "v_lin"),
)
_OUTPUT_NAMES = ("project", "c_proj", "o_proj", "out_proj", "out_lin", "to_out", "proj", "dense")
_NUM_HEADS_NAMES = ("heads", "num_heads", "n_head", "n_heads", "num_attention_heads")
_NUM_KV_HEADS_NAMES = ("kv_heads", "num_kv_heads", "num_key_value_heads", "n_kv_heads")
_NUM_GROUPS_NAMES = ("num_key_value_groups", "n_rep")
_WIDTH_NAMES = ("split_size", "embed_dim", "inner_dim", "all_head_size", "hidden_size", "n_embd", "dim")
_DROPOUT_NAMES = ("attn_dropout", "attention_dropout", "dropout_p")


class HeadShare(NamedTuple):
    """Heads of one rank, as [start, stop): of queries, and of keys and values."""

    queries: tuple[int, int]
    shared: tuple[int, int]


def assign_heads(heads: int, shared: int, degree: int) -> list[HeadShare]:
    """Return the heads of each rank; sizes differ by at most one head, or one group of heads.

    Args:
        heads: number of query heads.
        shared: number of key and value heads: `heads`, or a divisor of it.
        degree: number of ranks.
    """
    group = heads // shared
    if group == 1 or shared >= degree:
        spans = [even_span(shared, degree, rank) for rank in range(degree)]
        return [HeadShare((a * group, b * group), (a, b)) for a, b in spans]
    shares = []
    # Fewer key heads than ranks: several ranks share one and divide its queries.
    for kv_head in range(shared):
        first, last = even_span(degree, shared, kv_head)
        for index in range(last - first):
            a, b = even_span(group, last - first, index)
            shares.append(HeadShare((kv_head * group + a, kv_head * group + b), (kv_head, kv_head + 1)))
    return shares


@dataclass(frozen=True)
class AttentionCut:
    """One attention module and how it is split.

    Args:
        linears: of its projections.
        numbers: by rank, the attributes that its forward uses.
    """

    name: str
    module: nn.Module
    linears: Sequence[LinearCut]
    numbers: Sequence[Mapping[str, int]]


def cut_heads(name: str, module: nn.Module, degree: int) -> AttentionCut:
    """Return how an attention module is split by heads.

    Raises:
        TaskError: its projections or its number of heads are not found, it has fewer heads than ranks, or it
            drops attention weights.
    """
    _refuse_attention_dropout(name, module)
    inputs, output = _projections(name, module)
    heads, shared = _count_heads(name, module)
    if heads < degree:
        raise TaskError(
            f"'{name}' has {format_count(heads, 'attention head')} for tensor={degree}, so a rank would have"
            " none",
            next_step=f"choose tensor={heads} or less, or leave '{name}' out of the tensor plan",
        )
    shares = assign_heads(heads, shared, degree)
    plan_columns = _fused_columns if len(inputs) == 1 else _separate_columns
    columns = plan_columns(name, module, inputs, (heads, shared), shares)
    width = num_features(getattr(module, output), "inputs") // heads
    spans = [_rows([(0, share.queries)], width) for share in shares]
    row = LinearCut(_child_name(name, output), getattr(module, output), "row", spans)
    return AttentionCut(
        name, module, [*columns, row], [_local_numbers(module, heads, shared, share) for share in shares]
    )


def _fused_columns(
    name: str, module: nn.Module, inputs: Sequence[str], counts: tuple[int, int], shares: Sequence[HeadShare]
) -> Iterator[LinearCut]:
    """Yield the split of queries, keys and values in one layer: three runs of its outputs."""
    (layer_name,), (heads, shared) = inputs, counts
    width = num_features(getattr(module, layer_name), "outputs") // (heads + 2 * shared)
    starts = [0, heads * width, (heads + shared) * width]
    spans = [_rows(zip(starts, (s.queries, s.shared, s.shared), strict=True), width) for s in shares]
    yield LinearCut(_child_name(name, layer_name), getattr(module, layer_name), "column", spans)


def _separate_columns(
    name: str, module: nn.Module, inputs: Sequence[str], counts: tuple[int, int], shares: Sequence[HeadShare]
) -> Iterator[LinearCut]:
    """Yield the split of one layer each; keys and values that several ranks use are whole on all of them."""
    (heads, shared), degree = counts, len(shares)
    for layer_name, count, kind in zip(inputs, (heads, shared, shared), (0, 1, 1), strict=True):
        width = num_features(getattr(module, layer_name), "outputs") // count
        spans = [_rows([(0, share[kind])], width) for share in shares]
        is_replicated = kind == 1 and shared < min(degree, heads)
        yield LinearCut(
            _child_name(name, layer_name), getattr(module, layer_name), "column", spans, is_replicated
        )


def _child_name(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _rows(runs: Any, width: int) -> Span:
    """Return the features of heads, given for each run where it begins and which heads it has."""
    return join_runs((start + a * width, start + b * width) for start, (a, b) in runs)


def _projections(name: str, module: nn.Module) -> tuple[Sequence[str], str]:
    """Return the names of the layers of queries, keys and values (one or three), and of the output."""
    layers = [name for name, child in module.named_children() if linear_dims(child) is not None]
    choices = [*((fused,) for fused in _FUSED_NAMES), *_SEPARATE_NAMES]
    inputs = next((names for names in choices if {*names} <= {*layers}), None)
    output = next((child for child in _OUTPUT_NAMES if child in layers), None)
    if inputs is None or output is None:
        what = "queries, keys and values" if inputs is None else "output projection"
        raise TaskError(
            f"the tensor plan splits '{name}' ({type(module).__name__}) by heads, but finds no {what} among"
            f" its linear layers: {', '.join(layers) or 'it has none'}",
            next_step=f"call them {' or '.join('/'.join(names) for names in choices)}, and the output one of"
            f" {', '.join(_OUTPUT_NAMES)}; or leave it out of the plan",
        )
    return inputs, output


def _count_heads(name: str, module: nn.Module) -> tuple[int, int]:
    """Return the number of query heads, and of key and value heads."""
    config = getattr(module, "config", None)
    heads = _first_int(module, _NUM_HEADS_NAMES) or _first_int(config, _NUM_HEADS_NAMES)
    if not heads:
        raise TaskError(
            f"the tensor plan splits '{name}' by heads, but its number of heads is unknown",
            next_step=f"give the module an integer attribute named one of {', '.join(_NUM_HEADS_NAMES)}",
        )
    return heads, _first_int(module, _NUM_KV_HEADS_NAMES) or _first_int(config, _NUM_KV_HEADS_NAMES) or heads


def _first_int(owner: Any, names: Sequence[str]) -> int:
    return next((value for name in names if isinstance(value := getattr(owner, name, None), int)), 0)


def _local_numbers(module: nn.Module, heads: int, shared: int, share: HeadShare) -> dict[str, int]:
    """Return the values that a module's numbers have on a rank, of those that it has."""
    local_heads, local_kv_heads = share.queries[1] - share.queries[0], share.shared[1] - share.shared[0]
    width = vars(module).get("head_dim", 0)
    values: dict[str, int] = dict.fromkeys(_NUM_HEADS_NAMES, local_heads) | dict.fromkeys(
        _NUM_KV_HEADS_NAMES, local_kv_heads
    )
    values |= dict.fromkeys(
        _NUM_GROUPS_NAMES, local_heads // local_kv_heads if local_kv_heads else heads // shared
    )
    widths = {
        key: local_heads * width for key in _WIDTH_NAMES if width and vars(module).get(key) == heads * width
    }
    # Only attributes of the instance, as `override_attributes` writes to nothing else.
    attributes = {key: value for key, value in vars(module).items() if isinstance(value, int)}
    return {key: value for key, value in (values | widths).items() if key in attributes}


def _refuse_attention_dropout(name: str, module: nn.Module) -> None:
    """Raise TaskError if attention weights are dropped: the mask would differ from that of one process."""
    for key, value in _dropout_rates(module):
        if value > 0:
            raise TaskError(
                f"'{name}.{key}' drops attention weights with probability {value:g}, and the mask would"
                " depend on how many heads a rank has",
                next_step="set it to 0: dropout outside of attention stays as it is",
            )


def _dropout_rates(module: nn.Module) -> Iterator[tuple[str, float]]:
    for key in _DROPOUT_NAMES:
        value = getattr(module, key, 0.0)
        yield key, float(getattr(value, "p", value if isinstance(value, float) else 0.0))
