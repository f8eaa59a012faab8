"""Column and row parallel linear layers: a pair of them costs one sum in forward and one in backward.

The first of a pair is split by its outputs (columns) and the second by its inputs (rows); what is between
them works on a part of the features.

Source: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm.collectives.collective_protocol import Collective
from paceline.parallel.rng_state import dropout_noise
from paceline.parallel.tensor.mappings import SharedInput, gather_from_tensor_region
from paceline.parallel.tensor.module_swap import swap_forward
from paceline.parallel.tensor.vocab_parallel import VocabParallelLogits, VocabularyPartition
from paceline.state.slot import Span, span_length, take_span


@dataclass(frozen=True)
class LinearDims:
    """Dimensions of a linear layer's weight along which its outputs and inputs are."""

    outputs: int
    inputs: int


def linear_dims(module: nn.Module) -> LinearDims | None:
    """Return the dimensions of a linear layer's weight, or None if the module is no linear layer.

    Transformers' `Conv1D` is one whose weight is transposed.
    """
    if isinstance(module, nn.Linear):
        return LinearDims(0, 1)
    return LinearDims(1, 0) if type(module).__name__.endswith("Conv1D") and hasattr(module, "nf") else None


def num_features(layer: nn.Module, side: str) -> int:
    """Return the number of "inputs" or "outputs" of a linear layer."""
    weight: Any = layer.weight
    return int(weight.shape[getattr(linear_dims(layer), side)])


@dataclass(frozen=True)
class LinearCut:
    """One linear layer, and the part of it that each rank has.

    Args:
        name, layer: of the model.
        word: "column", "row", "gathered", or "vocabulary": a column whose outputs are logits.
        spans: of the features that are split, by rank.
        is_replicated: for a column whose tensors are whole on every rank, which uses its span of them: other
            ranks use it, too, and its gradients are summed over all ranks.
    """

    name: str
    layer: nn.Module
    word: str
    spans: Sequence[Span]
    is_replicated: bool = False

    @property
    def dim(self) -> int:
        """Dimension of the weight along which it is split."""
        dims = linear_dims(self.layer)
        assert dims is not None
        return dims.inputs if self.word == "row" else dims.outputs

    @property
    def tensors(self) -> Mapping[str, int]:
        """Tensors that are split, with the dimension of each."""
        dims = {"weight": self.dim}
        has_bias = getattr(self.layer, "bias", None) is not None
        return dims | {"bias": 0} if has_bias and self.word != "row" else dims


class FeatureRegion:
    """Computation between a column and its row, in which a rank has a span of the features.

    It knows whether the model is in it, so that a dropout that is used both between the two and after them
    draws the right mask.
    """

    def __init__(self) -> None:
        self._span: Span | None = None
        self._width = 0

    def enter(self, span: Span, width: int) -> None:
        """Begin the region, with the features of a column."""
        self._span, self._width = span, width

    def leave(self) -> None:
        """End the region, at its row."""
        self._span = None

    def partial(self, x: Tensor) -> tuple[Span, int] | None:
        """Return this rank's span of the last dimension of x and the whole width; None if x is whole."""
        if self._span is None or not x.dim() or x.shape[-1] != span_length(self._span):
            return None
        return self._span, self._width


def make_split_dropout(module: nn.Dropout, region: FeatureRegion) -> None:
    """Let a dropout draw the mask of all features, of which this rank takes its own, inside a region."""

    def forward(self: nn.Dropout, x: Tensor) -> Tensor:
        part = region.partial(x) if self.training and self.p > 0.0 else None
        if part is None:
            return F.dropout(x, self.p, self.training, self.inplace)
        span, width = part
        noise = take_span(dropout_noise(x, (*x.shape[:-1], width), self.p), x.dim() - 1, span)
        return x.mul_(noise) if self.inplace else x * noise

    swap_forward(module, "Split", forward)


def make_column_linear(
    cut: LinearCut, entrance: SharedInput, rank: int, region: FeatureRegion | None = None
) -> None:
    """Let a layer that is split by outputs return a part of the outputs of whole inputs.

    Args:
        region: begins with the outputs, if a row ends it.
    """
    dim, span, width = cut.dim, cut.spans[rank], cut.spans[-1][-1]

    def forward(self: Any, x: Tensor) -> Tensor:
        if region is not None:
            region.enter(span, width)
        weight = take_span(self.weight, dim, span)
        bias = None if self.bias is None else take_span(self.bias, 0, span)
        return F.linear(entrance(x), weight.T if dim else weight, bias)

    swap_forward(cut.layer, "Column", forward)


def make_gathered_linear(cut: LinearCut, entrance: SharedInput, collective: Collective) -> None:
    """Let a layer that is split by outputs return all of them, [..., features].

    Wire: one all_gather of the outputs in forward, one sum of the gradient of the inputs in backward.
    """
    make_column_linear(cut, entrance, collective.group.rank)
    column = type(cut.layer).forward

    def forward(self: Any, x: Tensor) -> Tensor:
        return gather_from_tensor_region(column(self, x), cut.spans, collective, cut.name)

    swap_forward(cut.layer, "Gathered", forward)


def make_vocab_linear(cut: LinearCut, entrance: SharedInput, vocabulary: VocabularyPartition) -> None:
    """Let an output layer that is split by tokens return a part of the logits."""
    make_column_linear(cut, entrance, vocabulary.collective.group.rank)
    column = type(cut.layer).forward

    def forward(self: Any, x: Tensor) -> VocabParallelLogits:
        return VocabParallelLogits(column(self, x), vocabulary)

    swap_forward(cut.layer, "Logits", forward)


def make_row_linear(
    cut: LinearCut, leaves: Callable[[Tensor], Tensor], rank: int, region: FeatureRegion | None = None
) -> None:
    """Let a layer that is split by inputs return whole outputs from a part of the inputs.

    Args:
        region: ends with the inputs, if a column began it.
    """
    dim, span = cut.dim, cut.spans[rank]

    def forward(self: Any, x: Tensor) -> Tensor:
        if region is not None:
            region.leave()
        weight = take_span(self.weight, dim, span)
        y = leaves(F.linear(x, weight if dim else weight.T))
        # The bias is added after the sum and in the dtype of the output, as in one process.
        return y if self.bias is None else y + self.bias.to(y.dtype)

    swap_forward(cut.layer, "Row", forward)
