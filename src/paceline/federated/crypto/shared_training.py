"""Training on shares: logistic regression and a net with one hidden layer, of which no party sees data or
weights.

The functions are the program of one computing party; all of them run it together, with a dealer. What is
known to all: the shapes, the number of steps, the rates and the order of the batches. Weights stay shares
until they are opened. Rows must be scaled (`scale_rows`): the cubic sigmoid is meant for |z| below 8, and
on standardised rows, where |z| reaches 26, it diverges, in plain floats as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.federated.crypto.ring_shares import MaskedShare, SharedArithmetic, encode_fixed

# Kim et al. 2018, Logistic regression model training based on the approximate homomorphic encryption,
# BMC Medical Genomics 11: least squares on [-8, 8].
SIGMOID_LINEAR, SIGMOID_CUBIC = 0.15012, -0.001593


def scale_rows(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Scale each column from [low, high] to [-1/2, 1/2], cut values beyond, and append a column of ones.

    Args:
        x: [N, D].
        low, high: [D], over the training rows.
    Returns:
        float64 [N, D + 1].
    """
    spread = (high - low).clamp_min(1e-12)
    scaled = ((x.double() - low) / spread - 0.5).clamp(-0.5, 0.5)
    return torch.cat([scaled, torch.ones(len(x), 1, dtype=torch.float64)], 1)


def share_rows(arithmetic: SharedArithmetic, own: Tensor) -> Tensor:
    """Share the rows of every computing party, in the order of the parties.

    Args:
        own: the rows of this party, float [N_rank, D].
    Returns:
        This party's share of all rows, int64 [N, D].
    """
    ranks = range(arithmetic.num_computing)
    rank = arithmetic.party.rank
    return torch.cat([arithmetic.share(r, encode_fixed(own) if r == rank else None) for r in ranks])


def train_logistic_regression(
    arithmetic: SharedArithmetic, rows: Tensor, targets: Tensor, *, steps: int, lr: float
) -> Tensor:
    """Train with full batches and the cubic approximation of the sigmoid.

    Args:
        rows: share of [N, D], scaled.
        targets: share of [N, 1], 0 or 1.
    Returns:
        Share of the weights, int64 [D, 1].
    """
    x = arithmetic.mask(rows)
    weights = torch.zeros(rows.shape[1], 1, dtype=torch.int64)
    for _ in range(steps):
        masked_weights = arithmetic.mask(weights)
        z = arithmetic.mask(arithmetic.multiply(x, masked_weights, "x@y"))
        square = arithmetic.multiply(z, z)
        linear = encode_fixed(torch.tensor(SIGMOID_LINEAR))
        slope = arithmetic.mask(arithmetic.add_public(arithmetic.scale(square, SIGMOID_CUBIC), linear))
        half = encode_fixed(torch.tensor(0.5))
        predicted = arithmetic.add_public(arithmetic.multiply(z, slope), half)
        residual = arithmetic.mask(predicted - targets)
        gradient = arithmetic.multiply(x, residual, "x.T@y")
        weights = weights - arithmetic.scale(gradient, lr / len(rows))
        arithmetic.forget([masked_weights, z, slope, residual])
    arithmetic.forget([x])
    return weights


def predict_scores(arithmetic: SharedArithmetic, rows: Tensor, weights: Tensor) -> Tensor:
    """Return a share of rows @ weights, int64 [N, C]: for classes that one party is to learn."""
    x, w = arithmetic.mask(rows), arithmetic.mask(weights)
    scores = arithmetic.multiply(x, w, "x@y")
    arithmetic.forget([x, w])
    return scores


@dataclass(frozen=True)
class SquareNet:
    """Shares of a net with one hidden layer and the square as its activation.

    Args:
        hidden: int64 [D, H].
        output: int64 [H, C].
        bias: int64 [1, C].
    """

    hidden: Tensor
    output: Tensor
    bias: Tensor

    @classmethod
    def share(cls, arithmetic: SharedArithmetic, shape: tuple[int, int, int], seed: int) -> SquareNet:
        """Share initial weights that party 0 draws.

        Args:
            shape: inputs D with the column of ones, hidden units H, classes C.
        """
        weights: list[Tensor | None] = [None, None, None]
        if arithmetic.party.rank == 0:
            draw, (inputs, units, classes) = torch.Generator().manual_seed(seed), shape
            hidden = torch.randn(inputs, units, generator=draw, dtype=torch.float64) * inputs**-0.5
            output = torch.randn(units, classes, generator=draw, dtype=torch.float64) * 0.5 * units**-0.5
            bias = torch.zeros(1, classes)
            weights = [encode_fixed(one) for one in (hidden, output, bias)]
        return cls(*[arithmetic.share(0, one) for one in weights])

    def predict(self, arithmetic: SharedArithmetic, rows: Tensor) -> Tensor:
        """Return a share of the scores of each class, int64 [N, C]."""
        x, hidden = arithmetic.mask(rows), arithmetic.mask(self.hidden)
        z = arithmetic.mask(arithmetic.multiply(x, hidden, "x@y"))
        scores = predict_scores(arithmetic, arithmetic.multiply(z, z), self.output) + self.bias
        arithmetic.forget([x, hidden, z])
        return scores

    def train_step(
        self, arithmetic: SharedArithmetic, x: MaskedShare, targets: Tensor, lr: float
    ) -> SquareNet:
        """Return the net after one step of SGD on half the squared error.

        Args:
            x: batch [N, D], masked; it can be used again.
            targets: share of [N, C], one-hot.
        """
        multiply, mask = arithmetic.multiply, arithmetic.mask
        hidden, output = mask(self.hidden), mask(self.output)
        z = mask(multiply(x, hidden, "x@y"))
        activation = mask(multiply(z, z))
        scores = multiply(activation, output, "x@y") + self.bias
        error = mask(scores - targets)
        # The derivative of the square is 2 z.
        backward = mask(2 * multiply(error, output, "x@y.T"))
        hidden_error = mask(multiply(z, backward))
        rate = lr / len(targets)
        stepped = SquareNet(
            self.hidden - arithmetic.scale(multiply(x, hidden_error, "x.T@y"), rate),
            self.output - arithmetic.scale(multiply(activation, error, "x.T@y"), rate),
            self.bias - arithmetic.scale(error.share.sum(0, keepdim=True), rate),
        )
        arithmetic.forget([hidden, output, z, activation, error, backward, hidden_error])
        return stepped


def train_square_net(
    arithmetic: SharedArithmetic,
    net: SquareNet,
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    epochs: int,
    lr: float,
) -> SquareNet:
    """Train for some passes over the batches, always in the same order.

    Args:
        batches: shares of rows [N, D] and one-hot targets [N, C].
    """
    # The difference to the mask is opened once for all passes.
    masked = [(arithmetic.mask(rows), targets) for rows, targets in batches]
    for _ in range(epochs):
        for x, targets in masked:
            net = net.train_step(arithmetic, x, targets, lr)
    arithmetic.forget([x for x, _ in masked])
    return net
