"""The largest values of a row, each with its place; the others count as zero.

Without error feedback this loses most of a gradient for good; `comm.collectives.coded` keeps what is left out
and sends it later.
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from paceline.errors import StrategyError

_VALUE_BYTES, _PLACE_BYTES = 4, 4


class TopK:
    """Keep the k values of a row that have the largest magnitude; among equals the first.

    Args:
        share: k as a fraction of the row, rounded up, above 0 and at most 1.
    Raises:
        StrategyError: the share is none.
    Source: Aji and Heafield 2017, Sparse Communication for Distributed Gradient Descent, arXiv:1704.05021,
    section 3; Stich et al. 2018, Sparsified SGD with Memory, arXiv:1809.07599, Algorithm 1 (memory).
    """

    def __init__(self, share: float) -> None:
        if not 0.0 < share <= 1.0:
            raise StrategyError(
                f"topk:{share:g} keeps no share of the values",
                next_step="choose one above 0, as in topk:0.01",
            )
        self._share = share

    def num_kept(self, num_values: int) -> int:
        """How many values of a row are kept: k = ceil(share n)."""
        return min(num_values, ceil(self._share * num_values))

    def num_bytes(self, num_values: int) -> int:
        """8 k: a float32 value and a place of 32 bits each."""
        return (_VALUE_BYTES + _PLACE_BYTES) * self.num_kept(num_values)

    def encode(self, x: Tensor) -> Tensor:
        """See `Codec`."""
        sizes = x.abs().nan_to_num(torch.inf, torch.inf)  # what is not finite comes first, and is seen
        places = torch.sort(sizes, dim=1, descending=True, stable=True).indices[
            :, : self.num_kept(x.shape[1])
        ]
        values = x.gather(1, places).to(torch.float32)
        parts = (values, places.to(torch.int32))
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)

    def decode(self, payload: Tensor, num_values: int, dtype: torch.dtype) -> Tensor:
        """See `Codec`."""
        rows, kept = payload.shape[0], self.num_kept(num_values)
        values, places = payload.clone().split([_VALUE_BYTES * kept, _PLACE_BYTES * kept], 1)
        out = torch.zeros(rows, num_values, dtype=dtype, device=payload.device)
        found = values.contiguous().view(torch.float32).to(dtype)
        return out.scatter_(1, places.contiguous().view(torch.int32).to(torch.int64), found)
