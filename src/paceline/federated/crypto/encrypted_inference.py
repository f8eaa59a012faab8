"""Inference under CKKS: a server with a fitted logistic regression scores rows that it cannot read.

The client generates the keys, encrypts its rows and decrypts the scores. The server multiplies what is
encrypted by its weights, which are not encrypted. Each column of a batch is one ciphertext, with a row in
each slot, so the score is a weighted sum of ciphertexts: it needs one product with a plain number, and no
rotations, whose keys would be megabytes. A batch of 4,096 rows therefore costs as much as one row.

The server learns how many rows there are and how many columns; the client learns the scores, and from D + 1
of them it can compute the weights. The client must not return decrypted scores to the server: see
`CKKSCipher`. Both are honest but curious.
Accuracy: scores are those of floats up to about 1e-6, and up to 1.3e-7 of their size.
Source: Cheon et al. 2017, Homomorphic encryption for arithmetic of approximate numbers, ASIACRYPT.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import CommunicationError, DataError
from paceline.federated.crypto.parties import Party
from paceline.federated.crypto.secret_sums import CKKSCipher, require_tenseal

LARGEST_FEATURE = 64.0
"""In magnitude; rows of `scale_rows` are within 1/2."""
_LARGEST_SCORE = 2.0**18


class ScoringClient:
    """The side of the client: it has rows, and the only secret key.

    Args:
        party: this party.
        server: rank of the party that runs `serve_scores`.

    Raises:
        MissingExtraError: TenSEAL is not installed.
    """

    def __init__(self, party: Party, server: int) -> None:
        self._party, self._server = party, server
        self._cipher = CKKSCipher.generate()
        party.send(server, "public-key", [_to_tensor(self._cipher.public_bytes())])

    def request_scores(self, rows: Tensor) -> Tensor:
        """Return the score of each row, `rows @ weights + bias`.

        `torch.sigmoid` of a score is the probability of class 1, and class 1 is predicted above a score of 0.

        Args:
            rows: float [N, D], finite and within 64 in magnitude.
        Returns:
            float64 [N].
        Raises:
            DataError: the rows have another shape, or values that are not finite or too large.
            CommunicationError: the server is gone, or its model has another number of features.
        """
        if rows.ndim != 2 or not bool((rows.abs() <= LARGEST_FEATURE).all()):
            raise DataError(
                f"rows of shape {[*rows.shape]} are no finite [N, D] within {LARGEST_FEATURE:g} in magnitude",
                next_step="scale the rows as the model expects them",
            )
        batches = rows.double().split(CKKSCipher.num_slots) if len(rows) else ()
        scores = [self._request_batch(batch) for batch in batches]
        return torch.cat([torch.empty(0, dtype=torch.float64), *scores])

    def end(self) -> None:
        """Let the server return from `serve_scores`."""
        self._party.send(self._server, "end")

    def _request_batch(self, rows: Tensor) -> Tensor:
        columns = [_to_tensor(self._cipher.encrypt(column)) for column in rows.T]
        self._party.send(self._server, "encrypted-columns", columns, rows=len(rows))
        answer = self._party.receive(self._server, "encrypted-scores").tensors[0]
        return self._cipher.decrypt(_to_bytes(answer), len(rows))


def serve_scores(party: Party, client: int, weights: Tensor, bias: float) -> None:
    """Score encrypted rows of a client until it ends: the side of the server.

    Args:
        client: rank of the party with a `ScoringClient`.
        weights: of a fitted logistic regression, float [D].
        bias: its intercept.
    Raises:
        DataError: the weights have another shape or could give scores of 2^18 and more, or the client has
            sent its secret key.
        CommunicationError: the client is gone, or its rows have another number of features.
        MissingExtraError: TenSEAL is not installed.
    """
    largest = float(weights.double().abs().sum()) * LARGEST_FEATURE + abs(bias)
    if weights.ndim != 1 or not largest < _LARGEST_SCORE:
        raise DataError(
            f"weights of shape {[*weights.shape]} are no [D] with scores below 2^18: up to {largest:.3g}",
            next_step="fit the model to scaled rows, as scale_rows does",
        )
    require_tenseal()  # before it waits for a client
    cipher = CKKSCipher.read(_to_bytes(party.receive(client, "public-key").tensors[0]))
    while (message := party.receive(client)).kind != "end":
        if message.kind != "encrypted-columns" or len(message.tensors) != len(weights):
            raise CommunicationError(
                f"party {client} sent {len(message.tensors)} columns in '{message.kind}' to a model of"
                f" {len(weights)} features",
                next_step="send the features on which the model was fitted, in their order",
            )
        columns = [_to_bytes(column) for column in message.tensors]
        scores = cipher.add_weighted(columns, weights.double(), bias, int(message.fields["rows"]))
        party.send(client, "encrypted-scores", [_to_tensor(scores)])


def _to_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _to_bytes(data: Tensor) -> bytes:
    return data.numpy().tobytes()
