"""Codes are really packed: the bytes of every codec are its closed form."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm.codecs import CodecKeys
from paceline.comm.codecs.bit_packing import pack, packed_bytes, unpack
from paceline.comm.codecs.low_rank import near_square_span
from paceline.comm.codecs.top_k import index_bytes
from paceline.comm.workspace import Workspace
from tests.codecs import codec_of

KEYS = CodecKeys(5, 6)


@pytest.mark.capability("H2", "H3", "H4")
@pytest.mark.parametrize(
    ("word", "closed_form"),
    [
        ("bf16", lambda n: 2 * n),
        ("fp16", lambda n: 2 * n + 4),
        ("int8", lambda n: n + 4 * -(-n // 256)),
        ("int4", lambda n: -(-n // 2) + 4 * -(-n // 256)),
        ("int2", lambda n: -(-n // 4) + 4 * -(-n // 256)),
        ("fixed:8", lambda n: n + -(-n // 4) + 4),
        ("sign", lambda n: -(-n // 8) + 4 * -(-n // 1024)),
        ("topk:0.01", lambda n: math.ceil(0.01 * n) * (4 + index_bytes(n))),
        ("topk:100", lambda n: min(n, 100) * (4 + index_bytes(n))),
        ("topk:0.01+int4", lambda n: -(-math.ceil(0.01 * n) // 2) + 4 * -(-math.ceil(0.01 * n) // 256)
                           + math.ceil(0.01 * n) * index_bytes(n)),
        ("randomk:0.01", lambda n: 1 + 4 * math.ceil(0.01 * n)),
        ("lowrank:2", lambda n: 4 * n
                      if (m := near_square_span(n)).rows * m.columns <= 2 * (m.rows + m.columns)
                      else 4 * (n - m.rows * m.columns + 2 * (m.rows + m.columns))),
    ],
)  # fmt: skip
def test_the_bytes_are_the_closed_form(word: str, closed_form: Callable[[int], int]) -> None:
    codec = codec_of(word)
    for n in (1, 3, 255, 256, 257, 1025, 65536, 70001):
        found = codec.encode(torch.randn(2, n), KEYS, Workspace()).shape
        assert found == (2, closed_form(n)) == (2, codec.num_bytes(n))


@pytest.mark.capability("H6")
def test_lossless_makes_gradients_smaller_and_noise_not_larger() -> None:
    codec, n = codec_of("lossless"), 100_000
    smooth = torch.randn(1, n) * 1e-3
    noise = torch.randint(-(2**31), 2**31 - 1, (1, n), dtype=torch.int64).to(torch.int32).view(torch.float32)
    assert codec.encode(smooth, KEYS, Workspace()).shape[1] < 0.9 * 4 * n
    assert codec.encode(noise, KEYS, Workspace()).shape[1] <= 4 * n + 32


@given(bits=st.integers(1, 16), n=st.integers(1, 300), seed=st.integers(0, 999))
@settings(max_examples=20)
@pytest.mark.capability("H2")
def test_packed_codes_come_back(bits: int, n: int, seed: int) -> None:
    codes = torch.randint(
        0, 1 << bits, (n,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32
    )
    packed = torch.full((packed_bytes(n, bits),), 255, dtype=torch.uint8)
    pack(codes, bits, packed, Workspace())
    assert torch.equal(unpack(packed, n, bits, Workspace()).to(torch.int32), codes)
