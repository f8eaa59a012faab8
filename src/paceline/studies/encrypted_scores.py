"""What inference under CKKS costs, as part of the privacy study: two processes, and scores to compare with.

The server fits a logistic regression to the training rows, in plain; the client has the held-out rows.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.federated.crypto.encrypted_inference import ScoringClient, serve_scores
from paceline.federated.crypto.parties import Party, run_parties
from paceline.studies.privacy_spectrum import SpectrumTask

_CLIENT, _SERVER = 0, 1
_STEPS, _LR = 400, 2.0


@dataclass(frozen=True)
class InferenceRow:
    """One row of the table of inference.

    Args:
        task: name.
        num_rows: scored in one batch.
        seconds_per_row: from rows to decrypted scores, without the keys.
        bytes_per_row: sent by both parties for them, with headers.
        key_seconds, key_bytes: of generating and sending the keys, once for a client.
        largest_error: of a decrypted score.
        accuracy, plain_accuracy: of predictions from decrypted and from plain scores.
        note: why it did not run; all numbers are 0 then.
    """

    task: str
    num_rows: int = 0
    seconds_per_row: float = 0.0
    bytes_per_row: float = 0.0
    key_seconds: float = 0.0
    key_bytes: int = 0
    largest_error: float = 0.0
    accuracy: float = 0.0
    plain_accuracy: float = 0.0
    note: str = ""


def fit_logistic_regression(rows: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    """Fit a logistic regression by 400 steps of gradient descent with full batches, in plain.

    Args:
        rows: float64 [N, D] in [-1/2, 1/2].
        targets: [N], 0 or 1.
    Returns:
        Weights, float64 [D], and the bias.
    """
    x = torch.cat([rows.double(), torch.ones(len(rows), 1, dtype=torch.float64)], 1)
    weights = torch.zeros(x.shape[1], dtype=torch.float64)
    for _ in range(_STEPS):
        weights -= _LR / len(x) * x.T @ (torch.sigmoid(x @ weights) - targets)
    return weights[:-1], float(weights[-1])


def measure_inference(task: SpectrumTask) -> list[InferenceRow]:
    """Score one held-out row, and all of them in one batch; or return why not.

    Args:
        task: of two classes; another one has no row.
    """
    if task.hidden or task.widths[-1] != 2:
        return []
    if importlib.util.find_spec("tenseal") is None:
        return [InferenceRow(task.name, note="did not run: pip install tenseal")]
    weights, bias = fit_logistic_regression(task.rows, task.targets)
    rows, targets = task.held_out_rows, task.held_out_targets
    found = []
    for count in (1, len(rows)):
        arguments = [(rows[:count],), (weights, bias)]
        client, sent_by_server = run_parties(_run_inference, arguments, deadline_seconds=600.0)
        scores, key_seconds, key_bytes, seconds, num_bytes = client
        plain = rows[:count] @ weights + bias
        found.append(
            InferenceRow(
                task.name,
                count,
                seconds / count,
                (num_bytes + sent_by_server) / count,
                key_seconds,
                key_bytes,
                float((scores - plain).abs().max()),
                _accuracy(scores, targets[:count]),
                _accuracy(plain, targets[:count]),
            )
        )
    return found


def _run_inference(party: Party, *own: Tensor | float) -> tuple[Tensor, float, int, float, int] | int:
    """Run the client, which returns scores and costs, or the server, which returns its bytes."""
    if party.rank == _SERVER:
        weights, bias = own
        assert isinstance(weights, Tensor)
        serve_scores(party, _CLIENT, weights, float(bias))
        return party.sent_bytes
    (rows,) = own
    assert isinstance(rows, Tensor)
    began = time.perf_counter()
    client = ScoringClient(party, _SERVER)
    keyed, key_bytes = time.perf_counter(), party.sent_bytes
    scores = client.request_scores(rows)
    ended = time.perf_counter()
    client.end()
    return scores, keyed - began, key_bytes, ended - keyed, party.sent_bytes - key_bytes


def _accuracy(scores: Tensor, targets: Tensor) -> float:
    return float(((scores > 0).long() == targets).double().mean())


def render_inference(rows: Sequence[InferenceRow]) -> list[str]:
    """Return the table of inference in Markdown; empty without rows."""
    if not rows:
        return []
    head = (
        "inference under CKKS | s a row | KB a row | keys, once | largest error of a score | accuracy | plain"
    )
    lines = [f"| {head} |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        if row.note:
            lines.append(f"| {row.task} ({row.note}) | | | | | | |")
            continue
        spent = f"{row.seconds_per_row:.3g} | {row.bytes_per_row / 1e3:.4g}"
        keys = f"{row.key_seconds:.2g} s, {row.key_bytes / 1e3:.3g} KB"
        accuracy = f"{row.accuracy:.3f} | {row.plain_accuracy:.3f}"
        name = f"{row.task}, {row.num_rows} in a batch"
        lines.append(f"| {name} | {spent} | {keys} | {row.largest_error:.2g} | {accuracy} |")
    return lines
