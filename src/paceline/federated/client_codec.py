"""The codec of federated rounds: what a client sends is its whole update, encoded alone.

A client clips its update, adds the error of its last one that was counted, encodes the sum, and keeps the new
error under its name. The server decodes it and weights it in float64, so codecs whose parts cannot be added
can be used too. Weights and buffers travel as they are.

Invariant: an encoding is a function of the seed, the round, the name of the client and its update, so it does
not depend on the rank or machine that trains the client. An error is kept only if the update was counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.codecs.codec_protocol import Codec, CodecKeys
from paceline.comm.codecs.strategy_codec import build_codec
from paceline.comm.workspace import Workspace
from paceline.recipe.recipe import Recipe
from paceline.state.keys import key


class ClientCodec:
    """Encodes updates of clients, and decodes them.

    Args:
        codec: of the strategy.
        seed: of the run.
        dtype: of the values that are encoded: float64 for a lossless codec, otherwise float32.
        keeps_errors: quantisation errors are added to the next update of the client.
    """

    def __init__(self, codec: Codec, seed: int, *, dtype: torch.dtype, keeps_errors: bool) -> None:
        self._codec, self._seed, self._workspace = codec, seed, Workspace()
        self.dtype, self.keeps_errors = dtype, keeps_errors

    @classmethod
    def of(cls, recipe: Recipe) -> ClientCodec | None:
        """Return the codec of a recipe; None: updates are sent as they are.

        Raises:
            MissingExtraError: a library that the codec needs is not installed.
        """
        codec = build_codec(recipe.strategy) if recipe.strategy.is_coded else None
        if codec is None:
            return None
        exact = all(word.spec.exact for word in recipe.strategy.codec_words)
        keeps = recipe.strategy.uses_error_feedback and not exact
        return cls(codec, recipe.seed, dtype=torch.float64 if exact else torch.float32, keeps_errors=keeps)

    def encode(
        self, update: Sequence[Tensor], round_number: int, client: str, error: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Encode the update of a client.

        Args:
            update: vectors in float64 or complex128; written to: their values become the decoded ones.
            error: of its last counted update [values]; None: it has none.
        Returns:
            The bytes to send [num_bytes], and the new error [values] if errors are kept.
        """
        values = torch.cat([_as_reals(vector) for vector in update]).to(self.dtype)
        if error is not None:
            values += error
        keys = self._keys(round_number, client)
        payload = self._codec.encode(values.unsqueeze(0), keys, self._workspace)[0].clone()
        decoded = self.decode(payload, update, round_number, client)
        return payload, values.sub_(decoded) if self.keeps_errors else None

    def decode(self, payload: Tensor, out: Sequence[Tensor], round_number: int, client: str) -> Tensor:
        """Write the values of some bytes to the vectors of an update; return them [values]."""
        reals = [_as_reals(vector) for vector in out]
        sizes = [len(vector) for vector in reals]
        values = torch.empty(sum(sizes), dtype=self.dtype, device=payload.device)
        keys = self._keys(round_number, client)
        self._codec.decode(payload.unsqueeze(0), values.unsqueeze(0), keys, self._workspace)
        torch._foreach_copy_(reals, [*values.split(sizes)])
        return values

    def fits(self, payload: Tensor, num_values: int) -> bool:
        """Return whether a tensor can be the bytes of so many values."""
        most = self._codec.num_bytes(num_values) * self.dtype.itemsize // 4
        if payload.dtype != torch.uint8 or payload.dim() != 1:
            return False
        return len(payload) <= 2 * most + 64 if self._codec.ragged else len(payload) == most

    def _keys(self, round_number: int, client: str) -> CodecKeys:
        shared = key(self._seed, "codec", round_number, client)
        return CodecKeys(shared, key(shared, 0))


def _as_reals(vector: Tensor) -> Tensor:
    """View a vector as real values, [values]."""
    return torch.view_as_real(vector).view(-1) if vector.is_complex() else vector
