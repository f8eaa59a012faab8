"""Tensor plans: how modules are split, by patterns of their names.

Three steps. `resolve_tensor_plan` finds the modules that a plan names and refuses plans that compute
something else. `plan_tensor_cuts` and `plan_tensor_transform` are pure: they decide what each rank holds.
`apply_tensor_cuts` changes the modules in place, after their tensors have been split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from paceline.comm.collectives.collective_protocol import Collective
from paceline.errors import StrategyError, TaskError
from paceline.models.dropout import KeyedDropout
from paceline.models.tensor_plans import tensor_plan_of
from paceline.parallel.pipeline.model_chain import module_chain
from paceline.parallel.placement import TensorTransform, even_span
from paceline.parallel.sharded_model import ModelPartition, ShardedModel, refuse_compile
from paceline.parallel.tensor.attention_heads import AttentionCut, cut_heads
from paceline.parallel.tensor.mappings import SharedInput, copy_to_tensor_region, reduce_from_tensor_region
from paceline.parallel.tensor.module_swap import override_attributes, register_undo
from paceline.parallel.tensor.parallel_linear import (
    FeatureRegion,
    LinearCut,
    linear_dims,
    make_column_linear,
    make_gathered_linear,
    make_row_linear,
    make_split_dropout,
    make_vocab_linear,
    num_features,
)
from paceline.parallel.tensor.sequence_parallel import (
    PositionPartition,
    gather_positions,
    make_gathering_attention,
    make_sequence_parallel_block,
    reduce_scatter_positions,
    require_positionwise,
)
from paceline.parallel.tensor.vocab_parallel import (
    VocabularyPartition,
    make_vocab_embedding,
    refuse_unsupported_embedding,
)
from paceline.recipe.toml_text import closest_word
from paceline.state.slot import Span
from paceline.task import Task

if TYPE_CHECKING:
    from paceline.parallel.session_context import SessionContext, TaskMaterial

TENSOR_PLAN_WORDS = ("column", "row", "gathered", "split", "heads", "vocabulary", "sequence", "whole")
WordByPattern = Mapping[str, str]


@dataclass(frozen=True)
class TensorPlanEntry:
    """One module of a plan, and its word.

    Args:
        word: "column" or "row" for a linear layer; "gathered" for a column without a row, whose outputs are
            gathered; "split" for a `KeyedDropout` between the two, on a part of the features of the column
            before it, and for every `nn.Dropout` around a column, which finds out itself where it is;
            "heads" for an attention, with all its projections; "vocabulary" for an embedding or an output
            layer, by tokens; "sequence" for a block, by positions wherever it is not split by features.
    """

    name: str
    module: nn.Module
    word: str


def resolve_tensor_plan(plan: WordByPattern, model: nn.Module) -> list[TensorPlanEntry]:
    """Return the modules that a plan names, in the order of the model.

    Args:
        plan: words by pattern; a pattern matches a whole name, or the end of one after a dot. If several
            match, the last one counts.
    Raises:
        StrategyError: there is no plan.
        TaskError: a pattern matches nothing, or a module that cannot be split in this way, or the plan leaves
            out what it must split.
    """
    if not plan:
        raise StrategyError(
            f"tensor splits large layers, but there is no plan for {type(model).__name__}",
            next_step='add tensor = { "*.up" = "column", "*.down" = "row" } to the recipe, or pass'
            " Task(tensor=...), or leave out tensor",
        )
    modules = dict(model.named_modules())
    words: dict[str, str] = {}
    for pattern, word in plan.items():
        fitting = [name for name in modules if _matches(name, pattern)]
        if word not in TENSOR_PLAN_WORDS:
            raise _plan_error(
                pattern,
                word,
                f"must be one of {', '.join(TENSOR_PLAN_WORDS)}{_suggest_word(word, TENSOR_PLAN_WORDS)}",
            )
        if not fitting:
            raise _plan_error(
                pattern,
                word,
                f"matches no module of {type(model).__name__}{_suggest_module(pattern, modules)}",
            )
        words |= dict.fromkeys(fitting, word)
    entries = [
        TensorPlanEntry(n, m, words[n]) for n, m in modules.items() if words.get(n, "whole") != "whole"
    ]
    for entry in entries:
        _require_kind(entry)
    for children in _linear_siblings(model, words):
        _require_pairs(children)
    parents = {entry.name.rpartition(".")[0] for entry in entries if entry.word == "column"}
    planned = {entry.name for entry in entries}
    return [
        TensorPlanEntry(name, module, words[name] if name in planned else "split")
        for name, module in modules.items()
        if name in planned or (_is_plain_dropout(module) and _enclosing(name, parents) is not None)
    ]


def _is_plain_dropout(module: nn.Module) -> bool:
    return type(module) is nn.Dropout


def _enclosing(name: str, parents: Iterable[str]) -> str | None:
    """Return the innermost of some modules that contains the module of a name, or None."""
    around = [parent for parent in parents if not parent or name.startswith(f"{parent}.")]
    return max(around, key=len, default=None)


def _matches(name: str, pattern: str) -> bool:
    pattern_parts, name_parts = pattern.split("."), name.split(".")
    if not name or len(pattern_parts) > len(name_parts):
        return False
    return all(map(fnmatchcase, name_parts[-len(pattern_parts) :], pattern_parts))


def _plan_error(pattern: str, word: str, reason: str) -> TaskError:
    return TaskError(
        f"the tensor plan's '{pattern}' = '{word}' {reason}",
        next_step="name modules as in model.named_modules(); * matches anything between two dots, and a"
        " pattern may begin after a dot",
    )


def _suggest_word(word: str, words: tuple[str, ...]) -> str:
    closest = closest_word(word, words)
    return f"; did you mean '{closest}'?" if closest else ""


def _suggest_module(pattern: str, modules: Mapping[str, nn.Module]) -> str:
    """Suggest a module for a misspelled pattern; names and patterns are compared without their numbers."""
    spelled = {
        ".".join("*" if name_part.isdecimal() else name_part for name_part in name.split("."))
        for name in modules
    }
    depth = pattern.count(".") + 1
    ends = {".".join(name.split(".")[-depth:]) for name in spelled if name}
    closest = closest_word(pattern, sorted(ends | spelled))
    return f"; the nearest is '{closest}'" if closest else ""


def _require_kind(entry: TensorPlanEntry) -> None:
    """Raise TaskError if the module is not of the kind that its word is for."""
    linear = linear_dims(entry.module) is not None
    tokens = linear or isinstance(entry.module, nn.Embedding)
    keyed = isinstance(entry.module, KeyedDropout) or _is_plain_dropout(entry.module)
    fits = {"column": linear, "row": linear, "gathered": linear, "split": keyed, "vocabulary": tokens}
    if not fits.get(entry.word, True):
        raise TaskError(
            f"the tensor plan says {entry.word} for '{entry.name}', which is a {type(entry.module).__name__}",
            next_step="column, row and gathered are for linear layers, split is for dropout, heads for"
            " attention, vocabulary for embeddings and output layers",
        )


def _linear_siblings(model: nn.Module, words: Mapping[str, str]) -> Iterator[list[TensorPlanEntry]]:
    """Yield linear layers with the same parent and their words, in order, except those of attention."""
    by_parent: dict[str, list[TensorPlanEntry]] = {}
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        is_separate = words.get(parent) == "heads" or words.get(name) in ("vocabulary", "gathered")
        if linear_dims(module) is not None and not is_separate:
            by_parent.setdefault(parent, []).append(TensorPlanEntry(name, module, words.get(name, "whole")))
    for parent, children in by_parent.items():
        if any(child.word != "whole" for child in children):
            in_turn = isinstance(model.get_submodule(parent), nn.Sequential | nn.ModuleList)
            # Only containers run their children in order; elsewhere rows are taken to be last.
            yield children if in_turn else sorted(children, key=lambda child: child.word == "row")


def _require_pairs(children: list[TensorPlanEntry]) -> None:
    """Raise TaskError if a column has no row, a row no column, or a whole layer is between the two."""
    column = ""
    for child in children:
        if child.word == "whole" and column:
            raise TaskError(
                f"the linear layer '{child.name}' is not split but follows '{column}', of whose outputs a"
                " rank has only a part",
                next_step=f'add "{child.name}" = "row" to the tensor plan, or leave out "{column}"',
            )
        if child.word == "row" and not column:
            raise TaskError(
                f"the tensor plan says row for '{child.name}', but there is no column before it",
                next_step="a row needs the part of the features that a column returns: plan both",
            )
        if child.word != "whole":
            column = child.name if child.word == "column" else ""
    if column:
        raise TaskError(
            f"the tensor plan says column for '{column}', but there is no row after it",
            next_step="plan the layer after it as row",
        )


@dataclass(frozen=True)
class DropoutCut:
    """Dropout between a column and a row, which sees a part of the features.

    Args:
        spans: of the features, by rank.
        width: number of all features.
    """

    module: KeyedDropout
    spans: Sequence[Span]
    width: int


@dataclass(frozen=True)
class RegionDropout:
    """PyTorch's dropout near a column and its row; the region decides whether it sees a part of the features.

    Args:
        parent: name of the module that contains the column.
    """

    module: nn.Dropout
    parent: str


@dataclass(frozen=True)
class EmbeddingCut:
    """Embedding, and the tokens of each rank."""

    name: str
    layer: nn.Embedding
    spans: Sequence[Span]
    is_replicated = False

    @property
    def tensors(self) -> Mapping[str, int]:
        """Tensors that are split, with the dimension of each."""
        return {"weight": 0}


@dataclass(frozen=True)
class TensorCuts:
    """All splits of a model by a plan."""

    linears: Sequence[LinearCut]
    attentions: Sequence[AttentionCut]
    dropouts: Sequence[DropoutCut]
    region_dropouts: Sequence[RegionDropout]
    embeddings: Sequence[EmbeddingCut]
    blocks: Sequence[TensorPlanEntry]
    degree: int

    @property
    def layers(self) -> list[LinearCut | EmbeddingCut]:
        """Layers with tensors of their own."""
        return [*self.linears, *self.embeddings]


def plan_tensor_cuts(entries: Sequence[TensorPlanEntry], degree: int) -> TensorCuts:
    """Return how each planned module is split; pure.

    Raises:
        TaskError: an attention cannot be split by heads.
    """
    linears: list[LinearCut] = []
    attentions: list[AttentionCut] = []
    dropouts: list[DropoutCut] = []
    embeddings: list[EmbeddingCut] = []
    region_dropouts = _region_dropouts(entries)
    handled = {id(dropout.module) for dropout in region_dropouts}
    for entry in (e for e in entries if e.word != "sequence" and id(e.module) not in handled):
        if entry.word == "heads":
            attentions.append(cut_heads(entry.name, entry.module, degree))
            linears += attentions[-1].linears
        elif isinstance(entry.module, KeyedDropout):
            spans = linears[-1].spans
            dropouts.append(DropoutCut(entry.module, spans, spans[-1][-1]))
        elif isinstance(entry.module, nn.Embedding):
            refuse_unsupported_embedding(entry.name, entry.module)
            spans = _even_spans(entry.module.num_embeddings, degree)
            embeddings.append(EmbeddingCut(entry.name, entry.module, spans))
        else:
            features = num_features(entry.module, "inputs" if entry.word == "row" else "outputs")
            linears.append(LinearCut(entry.name, entry.module, entry.word, _even_spans(features, degree)))
    blocks = [entry for entry in entries if entry.word == "sequence"]
    for block in blocks:
        _refuse_gathered(block.name, linears)
        require_positionwise(block.name, block.module, {id(cut.layer) for cut in linears})
    return TensorCuts(linears, attentions, dropouts, region_dropouts, embeddings, blocks, degree)


def _region_dropouts(entries: Sequence[TensorPlanEntry]) -> list[RegionDropout]:
    parents = {entry.name.rpartition(".")[0] for entry in entries if entry.word == "column"}
    return [
        RegionDropout(entry.module, _enclosing(entry.name, parents) or "")
        for entry in entries
        if isinstance(entry.module, nn.Dropout)
    ]


def _refuse_gathered(block: str, linears: Sequence[LinearCut]) -> None:
    """Raise TaskError if a gathered layer is in a block that is split by positions.

    Its inputs would be only a part of the positions.
    """
    for cut in linears:
        if cut.word == "gathered" and cut.name.startswith(f"{block}."):
            raise TaskError(
                f"the tensor plan gathers the outputs of '{cut.name}' but splits '{block}' by positions",
                next_step=f"plan '{cut.name}' as whole, or as column with a row after it",
            )


def _even_spans(size: int, degree: int) -> list[Span]:
    return [even_span(size, degree, rank) for rank in range(degree)]


def _require_tied_alike(cuts: TensorCuts, model: nn.Module) -> None:
    """Raise TaskError unless modules that share a tensor split it alike."""
    known: dict[int, tuple[str, int, Sequence[Span]]] = {}
    planned: dict[tuple[int, str], tuple[int, Sequence[Span]]] = {}
    for cut in cuts.layers:
        for key, dim in cut.tensors.items():
            known[id(getattr(cut.layer, key))] = (cut.name, dim, cut.spans)
            planned[id(cut.layer), key] = (dim, cut.spans)
    for name, module in model.named_modules():
        for key, p in module.named_parameters(recurse=False):
            if id(p) in known and planned.get((id(module), key)) != known[id(p)][1:]:
                raise TaskError(
                    f"'{name}' shares its {key} with '{known[id(p)][0]}', which the tensor plan splits",
                    next_step=f"split '{name}' in the same way (both as vocabulary), or leave both whole",
                )


def plan_tensor_transform(cuts: TensorCuts, model: nn.Module) -> TensorTransform:
    """Return the placement transform of a plan; tied tensors are known by their first name."""
    first = {id(p): name for name, p in model.named_parameters()}
    dims: dict[str, int] = {}
    spans: dict[str, Sequence[Span]] = {}
    summed: set[str] = set()
    _require_tied_alike(cuts, model)
    for cut in cuts.layers:
        for key, dim in cut.tensors.items():
            name = first[id(getattr(cut.layer, key))]
            if cut.is_replicated:
                summed.add(name)
            else:
                dims[name], spans[name] = dim, cut.spans
    for block in cuts.blocks:
        # Each rank computes with its positions only, so the gradients of whole tensors are partial.
        summed |= {first[id(p)] for p in block.module.parameters() if p.requires_grad} - dims.keys()
    return TensorTransform(dims, cuts.degree, spans, frozenset(summed))


def apply_tensor_cuts(cuts: TensorCuts, collective: Collective, *, apart: bool = False) -> None:
    """Let every module that is split run with its part.

    Args:
        apart: every block that is split by positions returns all of them, as stages send them on.
    """
    rank, positions = collective.group.rank, PositionPartition(collective)
    regions = {dropout.parent: FeatureRegion() for dropout in cuts.region_dropouts}
    _make_columns(cuts, collective, positions, regions)
    for cut in cuts.linears:
        if cut.word == "row":
            leaves = _output_mapping(cuts, cut.name, collective, positions)
            make_row_linear(cut, leaves, rank, regions.get(cut.name.rpartition(".")[0]))
    for region_dropout in cuts.region_dropouts:
        make_split_dropout(region_dropout.module, regions[region_dropout.parent])
    for embedding in cuts.embeddings:
        make_vocab_embedding(
            embedding.layer, VocabularyPartition(embedding.spans, collective, embedding.name)
        )
    for attention in cuts.attentions:
        override_attributes(attention.module, attention.numbers[rank])
        if _is_sequence_parallel(cuts, attention.name):
            make_gathering_attention(attention.module, positions, attention.name)
    for dropout in cuts.dropouts:
        span = dropout.spans[rank]
        dropout.module.take_part((span[0], span[-1]), dropout.width)
        register_undo(dropout.module, KeyedDropout.take_all)
    for blocks in [[block] for block in cuts.blocks] if apart else _consecutive_blocks(cuts.blocks):
        _make_consecutive_blocks(cuts, blocks, positions)


def _make_columns(
    cuts: TensorCuts,
    collective: Collective,
    positions: PositionPartition,
    regions: Mapping[str, FeatureRegion],
) -> None:
    """Replace the forwards of columns; columns with the same parent share their input."""
    for cut in (cut for cut in cuts.linears if cut.word == "gathered"):
        make_gathered_linear(
            cut,
            SharedInput(partial(copy_to_tensor_region, collective=collective, key=cut.name), 1),
            collective,
        )
    columns = [cut for cut in cuts.linears if cut.word not in ("row", "gathered")]
    parents = [cut.name.rpartition(".")[0] for cut in columns]
    entrances: dict[str, SharedInput] = {}
    for cut, parent in zip(columns, parents, strict=True):
        enters = _input_mapping(cuts, parent, collective, positions)
        entrance = entrances.setdefault(parent, SharedInput(enters, parents.count(parent)))
        _make_column(cut, entrance, collective, regions.get(parent))


def _make_column(
    cut: LinearCut, entrance: SharedInput, collective: Collective, region: FeatureRegion | None
) -> None:
    if cut.word == "column":
        make_column_linear(cut, entrance, collective.group.rank, region)
    else:
        make_vocab_linear(cut, entrance, VocabularyPartition(cut.spans, collective, cut.name))


def _input_mapping(
    cuts: TensorCuts, parent: str, collective: Collective, positions: PositionPartition
) -> Callable[[Tensor], Tensor]:
    """Return the mapping that makes the input of a column whole on all ranks."""
    if not _is_sequence_parallel(cuts, parent):
        return partial(copy_to_tensor_region, collective=collective, key=parent or "model")
    if any(attention.name == parent for attention in cuts.attentions):
        # The attention gathers once for all of its projections.
        return lambda x: x
    return partial(gather_positions, positions=positions, key=parent)


def _output_mapping(
    cuts: TensorCuts, name: str, collective: Collective, positions: PositionPartition
) -> Callable[[Tensor], Tensor]:
    """Return the mapping that sums the outputs of a row."""
    if _is_sequence_parallel(cuts, name):
        return partial(reduce_scatter_positions, positions=positions, key=name)
    return partial(reduce_from_tensor_region, collective=collective, key=name)


def _is_sequence_parallel(cuts: TensorCuts, name: str) -> bool:
    """Return whether a module is inside a block that is split by positions."""
    return any(f"{name}.".startswith(f"{block.name}.") for block in cuts.blocks)


def _consecutive_blocks(blocks: Sequence[TensorPlanEntry]) -> list[list[TensorPlanEntry]]:
    """Group blocks that follow each other: nothing between them needs all positions."""
    groups: list[list[TensorPlanEntry]] = []
    for block in blocks:
        previous = groups[-1][-1] if groups else None
        if previous is not None and _next_name(previous.name) == block.name:
            groups[-1].append(block)
        else:
            groups.append([block])
    return groups


def _next_name(name: str) -> str:
    parent, dot, last = name.rpartition(".")
    return f"{parent}{dot}{int(last) + 1}" if last.isdecimal() else ""


def _make_consecutive_blocks(
    cuts: TensorCuts, blocks: Sequence[TensorPlanEntry], positions: PositionPartition
) -> None:
    between = {id(dropout.module) for dropout in cuts.dropouts}
    for block in blocks:
        first, last = block is blocks[0], block is blocks[-1]
        make_sequence_parallel_block(block.module, positions, block.name, first=first, last=last)
        for module in block.module.modules():
            if isinstance(module, KeyedDropout) and id(module) not in between:
                _key_dropout_by_position(module, positions)


def _key_dropout_by_position(module: KeyedDropout, positions: PositionPartition) -> None:
    module.take_positions(positions)
    register_undo(module, KeyedDropout.take_all)


def partition_tensors(context: SessionContext, material: TaskMaterial) -> ModelPartition:
    """Return the partition of tensor=N: large layers, by the plan of the task, its model and the recipe.

    Raises:
        StrategyError: there is no plan, or the model is compiled.
        TaskError: the plan does not fit the model.
    """
    refuse_compile(context, "tensor")
    group, model = context.mesh.axes["tensor"], material.model
    cuts = plan_tensor_cuts(
        resolve_tensor_plan(tensor_plan_for(context, material.task, model), model), group.size
    )
    has_stages = context.mesh.axes["pipeline"].size > 1
    if has_stages:
        _require_run_whole(cuts.blocks, module_chain(material.task, model))

    def prepare(sharded_model: ShardedModel) -> ShardedModel:
        apply_tensor_cuts(cuts, context.exact_collective(group), apart=has_stages)
        return sharded_model

    return ModelPartition(plan_tensor_transform(cuts, model), prepare=prepare)


def _require_run_whole(blocks: Sequence[TensorPlanEntry], links: Sequence[nn.Module]) -> None:
    """Require that the chain of stages calls the blocks that are split by positions as a whole.

    Such a block splits its input where it is called.

    Raises:
        StrategyError: the chain calls parts of a block.
    """
    called = {id(module) for link in links for module in link.modules()}
    for block in blocks:
        if id(block.module) not in called:
            raise StrategyError(
                f"the tensor plan splits '{block.name}' by positions, but the pipeline runs it in parts",
                next_step="let Task(stages=...) return the whole block, or leave 'sequence' out of the plan",
            )


def tensor_plan_for(context: SessionContext, task: Task, model: nn.Module) -> Mapping[str, str]:
    """Return the tensor plan of a model, as words by pattern; the recipe overrides the task."""
    return {**(task.tensor or tensor_plan_of(model)), **context.recipe.tensor}
