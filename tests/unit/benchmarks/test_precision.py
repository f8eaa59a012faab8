"""What halves save of memory, counted: on any machine the same."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from benchmarks.precision import PRECISIONS, Kept, kept_by, session_of
from benchmarks.subjects import digits
from paceline.parallel import MixedPrecision


def kept_in_all() -> dict[str, Kept]:
    subject = digits("convnet")
    return {compute: kept_by(session_of(subject, compute)) for compute in PRECISIONS}


@pytest.mark.capability("K1", "K2")
def test_halves_keep_little_more_than_half_for_backward_and_the_same_state() -> None:
    """Masters, gradients and moments stay floats, and so do the statistics of BatchNorm."""
    kept = kept_in_all()
    assert kept["fp16"] == kept["bf16"] and kept["fp16"].state == kept["fp32"].state
    assert 0.4 < kept["fp16"].forward / kept["fp32"].forward < 0.7


def test_a_forward_in_floats_saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation twin."""
    monkeypatch.setattr(MixedPrecision, "autocast", lambda self: nullcontext())
    kept = kept_in_all()
    assert kept["fp16"].forward == kept["fp32"].forward
