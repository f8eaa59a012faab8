"""Column and row parallel linear layers: a pair of them costs one sum in forward and one in backward.

The first of a pair is cut by its outputs (columns), the second by its inputs (rows); what lies between them
works on a part of the features.
Source: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm import Collective
from paceline.layout.tensor.become import become
from paceline.layout.tensor.exchange import Entrance, put_together
from paceline.layout.tensor.logits import CutLogits
from paceline.layout.tensor.vocabulary import Vocabulary
from paceline.spans import Span, own_part


@dataclass(frozen=True)
class Dims:
    """Along which dimensions of its weight a linear layer's features lie."""

    outputs: int
    inputs: int


def dims_of_linear(module: nn.Module) -> Dims | None:
    """None: it is no linear layer. Transformers' `Conv1D` is one with its weight the other way round."""
    if isinstance(module, nn.Linear):
        return Dims(0, 1)
    return Dims(1, 0) if type(module).__name__.endswith("Conv1D") and hasattr(module, "nf") else None


def features_of(layer: nn.Module, side: str) -> int:
    """How many "inputs" or "outputs" a linear layer has."""
    weight: Any = layer.weight
    return int(weight.shape[getattr(dims_of_linear(layer), side)])


@dataclass(frozen=True)
class LinearCut:
    """One linear layer, and what each rank has of it.

    Args:
        name, layer: of the model.
        word: "column", "row", "gathered", or "vocabulary": a column whose outputs are logits.
        spans: of the features that are cut, by rank.
        is_repeated: a column whose tensors are whole on every rank, which uses its span of them: others use
            it too, and its gradients are to be summed over all.
    """

    name: str
    layer: nn.Module
    word: str
    spans: Sequence[Span]
    is_repeated: bool = False

    @property
    def dim(self) -> int:
        """Of the weight, along which it is cut."""
        dims = dims_of_linear(self.layer)
        assert dims is not None
        return dims.inputs if self.word == "row" else dims.outputs

    @property
    def tensors(self) -> Mapping[str, int]:
        """Its tensors that are cut, and the dimension of each."""
        found = {"weight": self.dim}
        has_bias = getattr(self.layer, "bias", None) is not None
        return found | {"bias": 0} if has_bias and self.word != "row" else found


def make_column(cut: LinearCut, entrance: Entrance, rank: int) -> None:
    """Let a layer that is cut by outputs give a part of the outputs of whole inputs."""
    dim, span = cut.dim, cut.spans[rank]

    def forward(self: Any, x: Tensor) -> Tensor:
        weight = own_part(self.weight, dim, span)
        bias = None if self.bias is None else own_part(self.bias, 0, span)
        return F.linear(entrance(x), weight.T if dim else weight, bias)

    become(cut.layer, "Column", forward)


def make_gathered(cut: LinearCut, entrance: Entrance, collective: Collective) -> None:
    """Let a layer that is cut by outputs give all of them, of any shape [..., features].

    Wire: one all_gather of the outputs in forward, one sum of the gradient of the inputs in backward.
    """
    make_column(cut, entrance, collective.group.rank)
    column = type(cut.layer).forward

    def forward(self: Any, x: Tensor) -> Tensor:
        return put_together(column(self, x), cut.spans, collective, cut.name)

    become(cut.layer, "Gathered", forward)


def make_head(cut: LinearCut, entrance: Entrance, vocabulary: Vocabulary) -> None:
    """Let an output layer that is cut by tokens give a part of the logits."""
    make_column(cut, entrance, vocabulary.collective.group.rank)
    column = type(cut.layer).forward

    def forward(self: Any, x: Tensor) -> CutLogits:
        return CutLogits(column(self, x), vocabulary)

    become(cut.layer, "Logits", forward)


def make_row(cut: LinearCut, leaves: Callable[[Tensor], Tensor], rank: int) -> None:
    """Let a layer that is cut by inputs give whole outputs of a part of the inputs."""
    dim, span = cut.dim, cut.spans[rank]

    def forward(self: Any, x: Tensor) -> Tensor:
        weight = own_part(self.weight, dim, span)
        y = leaves(F.linear(x, weight if dim else weight.T))
        return y if self.bias is None else y + self.bias.to(y.dtype)  # as one process adds it: in halves

    become(cut.layer, "Row", forward)
