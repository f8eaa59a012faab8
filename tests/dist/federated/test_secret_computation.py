"""Secret computations whose parties are processes: sums, a comparison, and training on shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import DataError
from paceline.federated.crypto import (
    Party,
    SharedArithmetic,
    comparator_circuit,
    decode_fixed,
    encode_fixed,
    run_evaluator,
    run_garbler,
    run_parties,
    serve_dealer,
)
from paceline.federated.crypto.shared_training import (
    predict_scores,
    share_rows,
    train_logistic_regression,
)
from paceline.studies.privacy_spectrum import load_breast_cancer

STEPS, LR = 40, 2.0


def with_ones(rows: Tensor) -> Tensor:
    return torch.cat([rows, torch.ones(len(rows), 1, dtype=torch.float64)], 1)


def compute(party: Party, number: int, numbers: Tensor, rows: Tensor, targets: Tensor) -> Any:
    """Add and compare what two parties have, and fit their rows together; the third deals."""
    if party.rank == 2:
        return serve_dealer(party)
    arithmetic = SharedArithmetic(party, 2)
    parts = [arithmetic.share(owner, numbers if owner == party.rank else None) for owner in (0, 1)]
    total = arithmetic.open(parts[0] + parts[1])
    compare = run_garbler if party.rank == 0 else run_evaluator
    is_less = compare(party, 1 - party.rank, comparator_circuit(8), number)
    before = party.sent_bytes
    x, y = share_rows(arithmetic, with_ones(rows)), share_rows(arithmetic, targets[:, None].double())
    weights = train_logistic_regression(arithmetic, x, y, steps=STEPS, lr=LR)
    scores = arithmetic.reveal(predict_scores(arithmetic, x, weights), 0)
    opened = decode_fixed(arithmetic.open(weights))
    arithmetic.end()
    return total, is_less, opened, scores, party.sent_bytes - before


@pytest.mark.capability("R1", "R4", "R6", "R7")
def test_processes_add_compare_and_fit_what_each_keeps_for_itself() -> None:
    task = load_breast_cancer()
    draw = torch.Generator().manual_seed(0)
    numbers = [torch.cat([torch.tensor([n]), torch.randn(99, generator=draw)]) for n in (5.0, 3.0)]
    encoded = [encode_fixed(one) for one in numbers]
    parts = task.parts(2)
    arguments = [(n, own, *part) for n, own, part in zip((5, 3), encoded, parts, strict=True)]
    results = run_parties(compute, [*arguments, (0, None, None, None)], deadline_seconds=300.0)
    total, is_less, weights, scores, sent = results[0]
    assert torch.equal(total, encoded[0] + encoded[1]) and decode_fixed(total)[0] == 8.0
    assert is_less == 0 and results[1][1] == 0 and results[1][3] is None

    # The plain fit has the true sigmoid.
    x, y = with_ones(torch.cat([part[0] for part in parts])), torch.cat([part[1] for part in parts])
    plain = torch.zeros(31, 1, dtype=torch.float64)
    for _ in range(STEPS):
        plain -= LR / len(x) * x.T @ (torch.sigmoid(x @ plain) - y[:, None])
    same = (scores[:, 0] > 0) == (x @ plain > 0)[:, 0]
    assert same.double().mean() >= 0.99
    held_out = with_ones(task.held_out_rows)
    accuracies = [
        ((held_out @ w > 0)[:, 0] == task.held_out_targets.bool()).double().mean() for w in (weights, plain)
    ]
    assert abs(accuracies[0] - accuracies[1]) <= 0.01 and accuracies[0] > 0.9
    # Of the bytes of a step, most are the 480 values that each of six openings has.
    assert 40 * 480 * 8 * 6 < sent < 2 * 40 * 480 * 8 * 6 and results[2] > sent


def fail(party: Party) -> None:
    if party.rank == 1:
        raise DataError("a party with bad rows", next_step="look at them")
    party.receive(1)


def test_the_error_of_a_party_is_that_of_all() -> None:
    with pytest.raises(DataError, match="a party with bad rows"):
        run_parties(fail, [(), (), ()], deadline_seconds=240.0)
