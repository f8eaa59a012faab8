"""A vocabulary cut by rows: embeddings look up their own tokens, and the sum over ranks has all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm import Collective
from paceline.errors import TaskError
from paceline.layout.tensor.become import become
from paceline.layout.tensor.exchange import leave
from paceline.spans import Span, own_part


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary, and the part of it that this rank has.

    Args:
        spans: of the tokens, by rank, one run each.
        collective: over the tensor ranks.
        key: names its buffers.
    """

    spans: Sequence[Span]
    collective: Collective
    key: str

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return self.spans[-1][-1]

    @property
    def own(self) -> tuple[int, int]:
        """First token of this rank, and the one after its last."""
        first, last = self.spans[self.collective.group.rank]
        return first, last

    def place(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Where tokens lie in this rank's part (0 for those of others), and which are others'.

        Raises:
            IndexError: one is none of the vocabulary.
        """
        if tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= self.size):
            raise IndexError(f"a token is not in the vocabulary of {self.size}")
        first, last = self.own
        others = (tokens < first) | (tokens >= last)
        return (tokens - first).masked_fill(others, 0), others


def make_embedding(module: nn.Embedding, vocabulary: Vocabulary) -> None:
    """Let an embedding that is cut by rows look up its own tokens; the sum over ranks has all."""

    def forward(self: nn.Embedding, tokens: Tensor) -> Tensor:
        weight = own_part(self.weight, 0, vocabulary.own)
        places, others = vocabulary.place(tokens)
        first, last = vocabulary.own
        padding = self.padding_idx
        own_padding = padding - first if padding is not None and first <= padding < last else None
        found = F.embedding(places, weight, own_padding).masked_fill(others.unsqueeze(-1), 0.0)
        return leave(found, vocabulary.collective, vocabulary.key)

    become(module, "Cut", forward)


def refuse_odd_embedding(name: str, module: nn.Embedding) -> None:
    """Raises: TaskError: its gradient or its rows depend on all tokens of a batch in other ways."""
    odd = [key for key in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, key)]
    if odd:
        raise TaskError(
            f"the tensor plan cuts the embedding '{name}', and it has {odd[0]}",
            next_step=f"leave out {odd[0]}, or leave '{name}' out of the tensor plan",
        )
