"""A message in one part has the tensors that were sent, and says where they are."""

from __future__ import annotations

import random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.parallel.pipeline.p2p_message import (
    HEADER_BYTES,
    MessageHeader,
    message_parts,
    next_first_part_bytes,
    parse_first_part,
)
from paceline.parallel.rng_state import RngStates, seed_micro_batch

TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex128)
tensors = st.lists(
    st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 5), max_size=3)), min_size=0, max_size=14
)


@settings(max_examples=60)
@given(tensors, st.floats(allow_nan=False), st.integers(0, 10**6), st.sampled_from([512, 1024, 4096, 2**20]))
def test_the_parts_of_a_message_are_what_was_sent(
    kinds: list[tuple[torch.dtype, list[int]]], note: float, key: int, size: int
) -> None:
    sent = [torch.arange(3.0).sum().to(dtype).expand(shape) for dtype, shape in kinds]
    header = MessageHeader.of(sent, note, key, 3)
    first, *rest = message_parts(header, sent, size)
    words, missing = parse_first_part(first)
    if missing:
        words += rest[0].view(torch.int64).tolist()
    found = MessageHeader.read(words)
    assert (found.note, found.key, found.attempt) == (note, key, 3)
    assert [(dtype, tuple(shape)) for dtype, shape in kinds] == list(found.kinds)
    assert found.fits(len(first)) == (not rest)
    whole = found.tensors_in(first) if not rest else [torch.empty(0)] * 0
    assert all(torch.equal(a, b) for a, b in zip(whole, sent, strict=False))
    assert [part.numel() for part in rest] == ([missing, *found.sizes] if rest else [])


def test_a_part_is_as_long_as_the_message_before_unless_that_was_large() -> None:
    small, large = torch.ones(100), torch.ones(2**14)
    assert next_first_part_bytes(MessageHeader.of([small], 0.0, 1, 0)) == HEADER_BYTES + 448
    assert next_first_part_bytes(MessageHeader.of([large], 0.0, 1, 0)) == HEADER_BYTES
    many = MessageHeader.of([torch.ones(1)] * 40, 0.0, 1, 0)
    assert next_first_part_bytes(many) == HEADER_BYTES  # its description takes more than the first part has


def taken(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """What arrives of tensors that go in one part."""
    header = MessageHeader.of(tensors, 1.0, 0, 0)
    (part,) = message_parts(header, tensors, header.num_bytes)
    return header.copy_tensors_from(part)


def drawn() -> list[float]:
    """Numbers of all three generators; normal ones come in pairs, of which one waits for the next call."""
    return [float(torch.rand(())), random.gauss(0, 1), np.random.normal(), random.random(), np.random.rand()]


def test_all_generators_go_on_from_states_that_came_behind_other_tensors() -> None:
    before = RngStates.current()
    for number_drawn in range(3):
        seed_micro_batch(7, torch.device("cpu"), ())
        for _ in range(number_drawn):
            drawn()
        _, message = taken(torch.ones(100), RngStates.current().to_bytes())
        right = drawn()
        RngStates.from_bytes(message).restore()
        assert drawn() == right
    before.restore()


def test_one_tensor_may_be_changed_in_place_while_backward_needs_another() -> None:
    x, mask = taken(torch.arange(3.0), torch.ones(3, dtype=torch.int64))
    squares = x.requires_grad_().square()
    mask.zero_()
    squares.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, 2 * torch.arange(3.0))
