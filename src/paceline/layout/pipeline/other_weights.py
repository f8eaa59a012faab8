"""A chunk of a model with other weights than its parameters, such as those of some updates before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class OtherWeights:
    """Puts tensors into the places of a chunk's parameters, which are looked for once.

    The modules see what `torch.func.functional_call` shows them: a shared parameter at all its places.

    Args:
        chunk: its modules keep their parameters, whose values may change.
    """

    def __init__(self, chunk: nn.Module) -> None:
        self.parameters = dict(chunk.named_parameters())
        names = {id(p): name for name, p in self.parameters.items()}
        self._places: list[tuple[dict[str, Any], str, str]] = [
            (module._parameters, own, names[id(p)])
            for module in chunk.modules()
            for own, p in module._parameters.items()
            if p is not None
        ]

    @contextmanager
    def within(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """A block in which the modules have these.

        Args:
            weights: of all parameters, by their names in the chunk.
        """
        held = [(place, own, place[own]) for place, own, _ in self._places]
        try:
            for place, own, name in self._places:
                place[own] = weights[name]
            yield
        finally:
            for place, own, p in held:
                place[own] = p
