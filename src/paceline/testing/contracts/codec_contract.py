"""The contract of codecs: encoded sizes, error bounds, purity, and values that are not finite."""

from __future__ import annotations

from abc import ABC, abstractmethod

import pytest
import torch
from torch import Tensor

from paceline.comm.codecs.codec_protocol import Codec, CodecKeys
from paceline.comm.workspace import Workspace

KEYS = CodecKeys(11, 12)
_SIZES = (1, 2, 255, 256, 257, 5000)


class CodecContract(ABC):
    """Tests of a codec, which maps rows of values to rows of bytes and back.

    Attributes:
        relative_error: largest error of a decoded value, relative to the largest magnitude of its row.
        draws: whether the codec draws random numbers for each value.
    """

    relative_error: float
    draws: bool = False

    @abstractmethod
    def codec(self) -> Codec:
        """Return a new codec."""

    def decoded(self, x: Tensor) -> Tensor:
        """Return x after encoding and decoding."""
        codec, out = self.codec(), torch.full_like(x, 7.0)
        codec.decode(codec.encode(x, KEYS, Workspace()), out, KEYS, Workspace())
        return out

    def test_the_bytes_are_those_of_the_closed_form(self) -> None:
        codec = self.codec()
        for num_values in _SIZES:
            payload = codec.encode(torch.randn(3, num_values), KEYS, Workspace())
            assert payload.dtype == torch.uint8 and payload.shape[0] == 3
            width = codec.num_bytes(num_values)
            assert payload.shape[1] <= width if codec.ragged else payload.shape[1] == width, num_values

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_error_is_within_its_bound(self, dtype: torch.dtype) -> None:
        for num_values in _SIZES:
            x = torch.randn(3, num_values, dtype=dtype) * torch.tensor([[1e-6], [1.0], [1e6]], dtype=dtype)
            bound = self.relative_error * x.abs().amax(1, keepdim=True)
            assert bool(((self.decoded(x) - x).abs() <= bound * (1 + 1e-5)).all()), num_values

    def test_zeros_stay_zeros(self) -> None:
        assert not self.decoded(torch.zeros(2, 300)).any()

    def test_rows_do_not_touch_each_other(self) -> None:
        x = torch.randn(2, 300)
        if self.draws:  # a row draws other random numbers if it is the second one
            assert not self.decoded(torch.cat([x[:1], 0 * x[1:]]))[1].any()
            return
        alone = torch.cat([self.decoded(x[:1]), self.decoded(x[1:])])
        assert torch.equal(self.decoded(x), alone)

    def test_rows_are_decoded_one_by_one_as_together(self) -> None:
        codec, x = self.codec(), torch.randn(3, 301)
        payload, whole, row = codec.encode(x, KEYS, Workspace()), torch.empty_like(x), torch.empty(1, 301)
        codec.decode(payload, whole, KEYS, Workspace())
        codec.decode(payload[1:2], row, KEYS, Workspace())
        assert torch.equal(row[0], whole[1])

    def test_a_row_in_stretches_is_as_many_bytes_and_the_same_values(self) -> None:
        codec = self.codec()
        x, step = torch.randn(2, 5 * max(codec.block, 100) + 3), 2 * codec.block
        parts = [x[:, k : k + step] for k in range(0, x.shape[1], step)] if step else [x]
        num_bytes = sum(codec.encode(part, KEYS, Workspace()).shape[1] for part in parts)
        assert num_bytes == codec.encode(x, KEYS, Workspace()).shape[1]
        if not self.draws:
            assert torch.equal(torch.cat([self.decoded(part) for part in parts], 1), self.decoded(x))

    def test_encoding_is_a_pure_function(self) -> None:
        x, codec = torch.randn(2, 777), self.codec()
        before = x.clone()
        assert torch.equal(codec.encode(x, KEYS, Workspace()), codec.encode(x, KEYS, Workspace()))
        assert torch.equal(x, before)

    def test_what_lay_in_the_workspace_is_nothing_to_it(self) -> None:
        codec, used = self.codec(), Workspace()
        for num_values in (900, 777):
            x, out = torch.randn(2, num_values), torch.empty(2, num_values)
            payload = codec.encode(x, KEYS, used)
            assert torch.equal(payload, codec.encode(x, KEYS, Workspace()))
            sent = payload.clone()
            codec.decode(sent, out, KEYS, used)
            whole = torch.empty_like(out)
            codec.decode(sent, whole, KEYS, Workspace())
            assert torch.equal(out, whole)

    @pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
    def test_what_is_not_finite_is_seen_on_the_other_side(self, bad: float) -> None:
        x = torch.randn(1, 600)
        x[0, 300] = bad
        assert not bool(torch.isfinite(self.decoded(x)).all())
