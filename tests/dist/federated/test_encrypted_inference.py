"""Inference under CKKS between two processes: right scores, and a server that can read nothing."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from paceline.errors import CommunicationError, DataError, MissingExtraError
from paceline.federated.crypto import Party, ScoringClient, run_parties, serve_scores
from paceline.federated.crypto.secret_sums import CKKSCipher
from paceline.studies import encrypted_scores
from paceline.studies.encrypted_scores import (
    fit_logistic_regression,
    measure_inference,
    render_inference,
)
from paceline.studies.privacy_spectrum import load_breast_cancer, load_digit_images

CLIENT, SERVER = 0, 1
needs_tenseal = pytest.mark.skipif(
    importlib.util.find_spec("tenseal") is None, reason="needs TenSEAL: pip install tenseal"
)


def public_and_secret_bytes(cipher: CKKSCipher) -> bytes:
    return bytes(cipher._context.serialize(save_secret_key=True))


def infer(party: Party, *own: Any) -> Any:
    """Return the scores or the error of each request on the client, and all that the server sees."""
    if party.rank == CLIENT:
        requests, leaks_key = own
        if leaks_key:
            cast(Any, CKKSCipher).public_bytes = public_and_secret_bytes
        client = ScoringClient(party, SERVER)
        results: list[Tensor | str] = []
        for rows in requests:
            try:
                results.append(client.request_scores(rows))
            except DataError as error:
                results.append(str(error))
        client.end()
        return results
    seen: list[bytes] = []
    receive, send = party.receive, party.send

    def receive_and_keep(sender: int, kind: str = "") -> Any:
        message = receive(sender, kind)
        seen.extend(tensor.numpy().tobytes() for tensor in message.tensors)
        return message

    def send_and_keep(to: int, kind: str, tensors: Any = (), **fields: Any) -> None:
        seen.extend(tensor.numpy().tobytes() for tensor in tensors)
        send(to, kind, tensors, **fields)

    cast(Any, party).receive, cast(Any, party).send = receive_and_keep, send_and_keep
    weights, bias, reads_any_context = own
    if reads_any_context:
        import tenseal

        cast(Any, CKKSCipher).read = classmethod(lambda cls, data: cls(tenseal.context_from(data)))
    serve_scores(party, CLIENT, weights, bias)
    return seen


def run(
    requests: list[Tensor], weights: Tensor, bias: float, leaks_key: bool = False, reads_any: bool = False
) -> tuple[list[Any], list[bytes]]:
    arguments = [(requests, leaks_key), (weights, bias, reads_any)]
    scores, seen = run_parties(infer, arguments, deadline_seconds=300.0)
    return scores, seen


def decrypted_by_server(seen: list[bytes]) -> list[Tensor]:
    """Return what the holder of the context that arrived first can decrypt of everything after it."""
    import tenseal

    context, found = tenseal.context_from(seen[0]), []
    for data in seen[1:]:
        try:
            found.append(torch.tensor(tenseal.ckks_vector_from(context, data).decrypt()))
        except ValueError as error:
            assert "doesn't hold a secret_key" in str(error)
    return found


@needs_tenseal
@pytest.mark.capability("R7", clause="inference under CKKS, where TenSEAL is installed")
def test_decrypted_scores_are_those_of_plain_rows_and_the_server_reads_nothing() -> None:
    task = load_breast_cancer()
    weights, bias = fit_logistic_regression(task.rows, task.targets)
    rows, plain = task.held_out_rows, task.held_out_rows @ weights + bias
    scores, seen = run([rows, rows[:1], rows[:0]], weights, bias)
    assert [len(one) for one in scores] == [len(rows), 1, 0] and scores[0].dtype is torch.float64
    assert (scores[0] - plain).abs().max() < 1e-4 and (scores[1] - plain[:1]).abs().max() < 1e-4
    assert torch.equal(scores[0] > 0, plain > 0)
    assert ((scores[0] > 0) == task.held_out_targets.bool()).double().mean() > 0.95
    # A context, two times 30 columns, and two vectors of scores.
    assert len(seen) == 1 + 2 * 30 + 2 and decrypted_by_server(seen) == []
    # The twin: weights in the order of other features.
    wrong, _ = run([rows], weights.roll(1), bias)
    assert (wrong[0] - plain).abs().max() > 1.0 and not torch.equal(wrong[0] > 0, plain > 0)


@needs_tenseal
@pytest.mark.capability("R7", clause="inference under CKKS, where TenSEAL is installed")
def test_a_client_that_sends_its_secret_key_is_told_so() -> None:
    rows, weights = torch.tensor([[0.25, -0.5], [0.5, 0.125]]), torch.tensor([2.0, 0.0])
    with pytest.raises(DataError, match="contains the secret key of its owner"):
        run([rows], weights, 1.0, leaks_key=True)
    # The twin: a server that does not look, which can read rows and scores.
    scores, seen = run([rows], weights, 1.0, leaks_key=True, reads_any=True)
    assert (scores[0] - torch.tensor([1.5, 2.0])).abs().max() < 1e-4
    read = torch.stack(decrypted_by_server(seen))
    assert (read - torch.tensor([[0.25, 0.5], [-0.5, 0.125], [1.5, 2.0]])).abs().max() < 1e-4


@needs_tenseal
def test_more_rows_than_slots_and_the_largest_values_are_scored() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.rand(CKKSCipher.num_slots + 3, 2, generator=draw, dtype=torch.float64) * 128 - 64
    weights = torch.tensor([4000.0, -90.0])
    scores, _ = run([rows, rows[:2] + 200, rows[:2] + torch.nan, rows[0]], weights, 100.0)
    plain = rows @ weights.double() + 100
    assert len(scores[0]) == len(rows) and ((scores[0] - plain).abs() < 1e-6 * (1 + plain.abs())).all()
    assert all("are no finite [N, D] within 64 in magnitude" in error for error in scores[1:])
    with pytest.raises(CommunicationError, match=r"sent 2 columns .* to a model of 3 features"):
        run([rows[:2]], torch.zeros(3), 0.0)


@needs_tenseal
def test_the_study_scores_one_row_and_all_of_them() -> None:
    one, whole = measure_inference(load_breast_cancer())
    assert (one.num_rows, whole.num_rows) == (1, 89) and whole.accuracy == whole.plain_accuracy > 0.95
    assert max(one.largest_error, whole.largest_error) < 1e-4 and whole.bytes_per_row < one.bytes_per_row / 80
    assert len(render_inference([one, whole])) == 4


def test_without_tenseal_it_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(
        MissingExtraError, match="CKKS is computed by TenSEAL, which is not installed"
    ) as info:
        CKKSCipher.generate()
    assert info.value.next_step == "pip install tenseal"
    with pytest.raises(MissingExtraError):
        serve_scores(cast(Any, None), CLIENT, torch.zeros(2), 0.0)
    with pytest.raises(DataError, match=r"are no \[D\] with scores below 2\^18: up to 6\.4e\+05"):
        serve_scores(cast(Any, None), CLIENT, torch.tensor([1e4, 0.0]), 0.0)
    monkeypatch.setattr(encrypted_scores.importlib.util, "find_spec", lambda name: None)
    (row,) = measure_inference(load_breast_cancer())
    assert render_inference([row])[-1] == "| breast-cancer (did not run: pip install tenseal) | | | | | | |"
    assert measure_inference(load_digit_images()) == [] == render_inference([])
