"""Properties of every codec over random tensors: zeros, infinities, one value, denormals, any length and
range.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm import Codec
from paceline.comm.codecs import CodecKeys
from paceline.comm.codecs.top_k import select_largest
from paceline.comm.workspace import Workspace
from tests.codecs import codec_of

KEYS = CodecKeys(5, 6)
_TINY = torch.finfo(torch.float32).tiny
_BLOCK = 256


def decoded(codec: Codec, x: Tensor, keys: CodecKeys = KEYS) -> Tensor:
    out = torch.full_like(x, torch.nan)
    codec.decode(codec.encode(x, keys, Workspace()), out, keys, Workspace())
    return out


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    """[1 to 3, 1 to 700], float32 or float64, of any range; with zeros, equal values and denormals among
    them.
    """
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 700))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(shape, generator=g) * 10.0 ** draw(st.integers(-44, 37))
    kind = draw(st.sampled_from(["plain", "zeros", "all zeros", "one value", "denormals", "one large"]))
    if kind == "zeros":
        x[torch.rand(shape, generator=g) < 0.7] = 0
    elif kind == "all zeros":
        x.zero_()
    elif kind == "one value":
        x.fill_(float(x[0, 0]))
    elif kind == "denormals":
        x = x.sign() * 1e-42
    elif kind == "one large":
        x[0, 0] = 3.4e38
    return x


def block_tops(x: Tensor) -> Tensor:
    """The largest magnitude of the block of every value."""
    return torch.cat([part.abs().amax(1, keepdim=True).expand_as(part) for part in x.split(_BLOCK, 1)], 1)


@pytest.mark.capability("H1")
@pytest.mark.parametrize("bits", [8, 4, 2])
@given(x=rows())
@settings(max_examples=20)
def test_nearest_codes_are_off_by_half_a_step_at_most(bits: int, x: Tensor) -> None:
    steps = (block_tops(x) / (2 ** (bits - 1) - 1)).clamp_min(_TINY)
    found = decoded(codec_of(f"int{bits}"), x)
    assert bool(((found - x).abs() <= steps * (0.5 + 1e-5)).all())
    for row in found:
        for block in row.split(_BLOCK):
            assert len(block.unique()) <= 2**bits


@pytest.mark.capability("H1")
@pytest.mark.parametrize("bits", [8, 4, 2])
@given(x=rows(), own=st.integers(0, 2**60))
@settings(max_examples=20)
def test_stochastic_codes_are_off_by_a_step_at_most(bits: int, x: Tensor, own: int) -> None:
    steps = (block_tops(x) / (2 ** (bits - 1) - 1)).clamp_min(_TINY)
    found = decoded(codec_of(f"int{bits}:stochastic"), x, CodecKeys(0, own))
    assert bool(((found - x).abs() <= steps * (1 + 1e-5)).all())


@pytest.mark.capability("H1")
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_stochastic_codes_are_right_on_average(bits: int) -> None:
    """The mean of 10,000 draws of 256 values; nearest codes of the same values are not."""
    x = torch.linspace(-1.0, 1.0, 256).view(1, -1)
    draws = 10_000
    many = x.expand(draws, -1).contiguous()
    found = decoded(codec_of(f"int{bits}:stochastic"), many)
    sigma = 0.5 / (2 ** (bits - 1) - 1) / math.sqrt(draws)
    off = (found.double().mean(0) - x[0]).abs()
    assert float(off.max()) <= 4.5 * sigma  # of 256 values, each within 3 sigma nearly always
    assert float((off <= 3 * sigma).double().mean()) > 0.98
    assert float((decoded(codec_of(f"int{bits}"), x)[0] - x[0]).abs().max()) > 10 * sigma


def test_draws_are_functions_of_their_key() -> None:
    codec, x = codec_of("int4:stochastic"), torch.randn(2, 3000)
    assert torch.equal(
        codec.encode(x, CodecKeys(0, 1), Workspace()), codec.encode(x, CodecKeys(9, 1), Workspace())
    )
    assert not torch.equal(
        codec.encode(x, CodecKeys(0, 1), Workspace()), codec.encode(x, CodecKeys(0, 2), Workspace())
    )
    codec = codec_of("randomk:0.1")
    assert torch.equal(
        codec.encode(x, CodecKeys(3, 1), Workspace()), codec.encode(x, CodecKeys(3, 2), Workspace())
    )
    assert not torch.equal(
        codec.encode(x, CodecKeys(3, 1), Workspace()), codec.encode(x, CodecKeys(4, 1), Workspace())
    )


@pytest.mark.capability("H1")
@given(x=rows(), bits=st.integers(1, 14))
@settings(max_examples=20)
def test_fixed_steps_are_the_formula(x: Tensor, bits: int) -> None:
    """round(g / D) D, D = 2**-b, on g / max|g|."""
    tops = x.abs().amax(1, keepdim=True)
    if bool(((tops > 0) & (tops < _TINY)).any()):
        return
    right = torch.where(tops > 0, torch.round(x / tops * 2**bits) / 2**bits * tops, 0.0)
    assert torch.equal(decoded(codec_of(f"fixed:{bits}"), x).nan_to_num(), right.nan_to_num())


@pytest.mark.capability("H7")
@given(x=rows())
@settings(max_examples=20)
def test_halves_do_not_overflow_and_are_within_their_bound(x: Tensor) -> None:
    tops = x.abs().amax(1, keepdim=True)
    for word, relative, of_top in (("bf16", 2.0**-8, 0.0), ("fp16", 2.0**-11, 2.0**-39)):
        found = decoded(codec_of(word), x)
        assert bool(found.isfinite().all())
        assert bool(((found - x).abs() <= x.abs() * relative + tops * of_top + 1e-40).all())


@pytest.mark.capability("H3")
@given(x=rows(), share=st.sampled_from(["0.01", "0.3", "1.0", "1", "50"]))
@settings(max_examples=20)
def test_exactly_k_values_are_kept_and_ties_go_by_index(x: Tensor, share: str) -> None:
    """Against a full stable sort."""
    found = decoded(codec_of(f"topk:{share}"), x)
    n = x.shape[1]
    kept = min(n, int(share)) if share.isdecimal() else min(n, math.ceil(float(share) * n))
    places = torch.sort(x.abs(), dim=1, descending=True, stable=True).indices[:, :kept]
    right = torch.zeros_like(x).scatter_(1, places, x.gather(1, places))
    assert torch.equal(found, right)


@pytest.mark.capability("H3")
@pytest.mark.parametrize(
    "kind", ["plain", "ties", "mostly zeros", "all zeros", "one value", "nan", "two halves"]
)
def test_the_largest_of_a_long_row_are_found_without_sorting_it(kind: str) -> None:
    n, kept = 100_000, 1000
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, generator=g)
    if kind == "ties":
        x = x.mul(3).round()
    elif kind == "mostly zeros":
        x[torch.rand(n, generator=g) > 0.002] = 0
    elif kind == "all zeros":
        x.zero_()
    elif kind == "one value":
        x.fill_(-2.5)
    elif kind == "nan":
        x[77_777] = torch.nan
    elif kind == "two halves":
        x[::12] *= 1e6  # the sample sees none of these, or too many
    right = torch.sort(x.abs().nan_to_num(torch.inf), descending=True, stable=True).indices[:kept]
    found = torch.empty(kept, dtype=torch.int64)
    select_largest(x, kept, found, Workspace())
    assert torch.equal(found, right.sort().values)


@pytest.mark.capability("H6")
@given(x=rows(), bad=st.sampled_from([None, math.inf, -math.inf, math.nan, -0.0]), wide=st.booleans())
@settings(max_examples=20)
def test_lossless_gives_every_bit_back(x: Tensor, bad: float | None, wide: bool) -> None:
    x = x.double() if wide else x
    if bad is not None:
        x[0, -1] = bad
    codec = codec_of("lossless")
    payload = codec.encode(x, KEYS, Workspace())
    found = torch.empty_like(x)
    codec.decode(
        torch.nn.functional.pad(payload, (0, 5)), found, KEYS, Workspace()
    )  # as another rank's longer rows make it
    assert torch.equal(found.view(torch.uint8), x.view(torch.uint8))
    assert payload.shape[1] <= x[0].nbytes + 8 * x.element_size()


@given(x=rows())
@settings(max_examples=20)
def test_signs_and_low_rank_lose_less_than_they_are_given(x: Tensor) -> None:
    """||x - C(x)|| <= ||x||: so error feedback does not grow."""
    for word in ("sign", "lowrank:1", "topk:0.1", "randomk:0.1", "topk:0.2+int2"):
        wide = x.clamp(-1e15, 1e15)  # squares of larger values are no float32
        found = decoded(codec_of(word), wide).double()
        wide = wide.double()
        assert float((found - wide).norm()) <= float(wide.norm()) * (1 + 1e-4) + 1e-36


@pytest.mark.parametrize(
    "word",
    [
        "bf16",
        "fp16",
        "int8",
        "int4",
        "int2",
        "int4:stochastic",
        "fixed:8",
        "sign",
        "topk:0.01",
        "randomk:0.01",
        "lowrank:1",
        "topk:0.01+int4",
        "lossless",
    ],
)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_seen(word: str, bad: float) -> None:
    """Also in a long row, in a later stretch of it."""
    x = torch.randn(1, 70_000)
    x[0, 69_000] = bad
    assert not bool(decoded(codec_of(word), x).isfinite().all())
