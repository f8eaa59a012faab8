"""What every codec keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod

import pytest
import torch
from torch import Tensor

from paceline.comm import Codec

_SIZES = (1, 2, 255, 256, 257, 5000)


class CodecContract(ABC):
    """Rows of values to rows of bytes and back.

    Attributes:
        relative_error: largest error of a decoded value, relative to the largest of its row.
    """

    relative_error: float

    @abstractmethod
    def codec(self) -> Codec:
        """A new codec."""

    def decoded(self, x: Tensor) -> Tensor:
        codec = self.codec()
        return codec.decode(codec.encode(x), x.shape[1], x.dtype)

    @pytest.mark.parametrize("num_values", _SIZES)
    def test_the_bytes_are_those_of_the_closed_form(self, num_values: int) -> None:
        payload = self.codec().encode(torch.randn(3, num_values))
        assert payload.dtype == torch.uint8
        assert payload.shape == (3, self.codec().num_bytes(num_values))

    @pytest.mark.parametrize("num_values", _SIZES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_error_is_within_its_bound(self, num_values: int, dtype: torch.dtype) -> None:
        x = torch.randn(3, num_values, dtype=dtype) * torch.tensor([[1e-6], [1.0], [1e6]], dtype=dtype)
        found = self.decoded(x)
        assert found.dtype == dtype and found.shape == x.shape
        bound = self.relative_error * x.abs().amax(1, keepdim=True)
        assert bool(((found - x).abs() <= bound * (1 + 1e-5)).all())

    def test_zeros_stay_zeros(self) -> None:
        assert not self.decoded(torch.zeros(2, 300)).any()

    def test_rows_do_not_touch_each_other(self) -> None:
        x = torch.randn(2, 300)
        alone = torch.cat([self.decoded(x[:1]), self.decoded(x[1:])])
        assert torch.equal(self.decoded(x), alone)

    def test_encoding_is_a_pure_function(self) -> None:
        x, codec = torch.randn(2, 777), self.codec()
        kept = x.clone()
        assert torch.equal(codec.encode(x), codec.encode(x))
        assert torch.equal(x, kept)

    @pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
    def test_what_is_not_finite_is_seen_on_the_other_side(self, bad: float) -> None:
        x = torch.randn(1, 600)
        x[0, 300] = bad
        assert not bool(torch.isfinite(self.decoded(x)).all())
