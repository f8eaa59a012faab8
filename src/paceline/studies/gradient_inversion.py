"""Gradient inversion: which inputs a server recovers from an update, or from a sum of updates, by a formula.

With a ReLU network, the gradient of row i of the first layer is the sum over samples of d_i x, and that of
its bias the sum of d_i. A unit that is active for one sample alone gives this sample exactly: the quotient
of both. So a sum over clients is no protection: a wide layer has units for one sample in many. What helps
is a bound on each update (clip) and noise.

Source: Phong et al. 2018, Privacy-Preserving Deep Learning via Additively Homomorphic Encryption, section
3; Boenisch et al. 2023, When the Curious Abandon Honesty, section 4 (extraction from passive ReLU layers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import MissingExtraError
from paceline.models.mlp import MLP
from paceline.privacy.accountant import NoisyRelease, compute_epsilon
from paceline.tasks.digits import load_digits

DELTA = 1e-5
"""Delta of the epsilons of the curve."""
TOLERANCE = 0.01
"""Relative error below which an input counts as recovered."""
_HIDDEN, _CLASSES = 256, 10
_LR = 0.1


@dataclass(frozen=True)
class InversionCase:
    """One point of the curve.

    Args:
        clients: in the sum; 1 is the update of one client alone.
        batch: samples of each client.
        local_steps: steps of SGD with its whole batch.
        clip_norm: largest norm of an update; 0: not clipped.
        noise: standard deviation of Gaussian noise on the sum, as a multiple of `clip_norm`.
    """

    clients: int = 1
    batch: int = 1
    local_steps: int = 1
    clip_norm: float = 0.0
    noise: float = 0.0


CURVE: Sequence[tuple[str, Sequence[InversionCase]]] = (
    ("clients", [InversionCase(clients=n) for n in (1, 2, 5, 10, 20, 50)]),
    ("batch", [InversionCase(batch=n) for n in (1, 2, 5, 10, 20, 50)]),
    ("local_steps", [InversionCase(local_steps=n) for n in (1, 2, 5, 10, 20)]),
    ("clip_norm", [InversionCase(clip_norm=c) for c in (0.0, 10.0, 1.0, 0.1)]),
    ("noise", [InversionCase(clip_norm=1.0, noise=s) for s in (0.0, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0)]),
)
"""What is varied, with its points; else it is one client, one digit, one step, no clip and no noise."""


@dataclass(frozen=True)
class InversionPoint:
    """A measured point.

    Args:
        axis: what is varied.
        case: the point.
        num_recovered, num_inputs: over all repetitions.
    """

    axis: str
    case: InversionCase
    num_recovered: int
    num_inputs: int

    @property
    def fraction(self) -> float:
        """Return the fraction of inputs that were recovered."""
        return self.num_recovered / self.num_inputs

    @property
    def epsilon(self) -> float | None:
        """Return epsilon of one such sum at `DELTA`, for a client; None without noise or accountant."""
        if not self.case.noise:
            return None
        try:
            return compute_epsilon({NoisyRelease(self.case.noise, "all"): 1}, DELTA)
        except MissingExtraError:
            return None


def measure_curve(num_inputs: int = 50) -> list[InversionPoint]:
    """Attack sums of updates of digits, with fresh weights.

    Args:
        num_inputs: digits that are attacked at each point, at least.
    """
    images, targets = load_digits()[0].tensors
    points = []
    for axis, cases in CURVE:
        for case in cases:
            size = case.clients * case.batch
            counts = [
                count_recovered(images[start : start + size], targets[start : start + size], case, seed=start)
                for start in range(0, num_inputs, size)
            ]
            points.append(InversionPoint(axis, case, sum(counts), len(counts) * size))
    return points


def count_recovered(images: Tensor, targets: Tensor, case: InversionCase, *, seed: int) -> int:
    """Return how many inputs the server recovers from the sum of the clients' updates.

    Args:
        images: [clients * batch, D], in order of the clients.
        targets: int64 of the same length.
        seed: of weights and noise.
    """
    torch.manual_seed(seed)
    model = MLP(images.shape[1], [_HIDDEN], _CLASSES)
    weight, bias, *_ = model.parameters()
    data = zip(images.split(case.batch), targets.split(case.batch), strict=True)
    total = torch.stack([train_client(model, x, y, case) for x, y in data]).sum(0)
    total = total + case.noise * case.clip_norm * torch.randn(total.shape)
    first = total[: weight.numel()].view_as(weight), total[weight.numel() :][: bias.numel()]
    return int(is_recovered(invert_first_layer(*first), images).sum())


def train_client(model: nn.Module, images: Tensor, targets: Tensor, case: InversionCase) -> Tensor:
    """Return the update of a client, [parameters], after its local steps, clipped."""
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(case.local_steps):
        tracked = {name: p.requires_grad_() for name, p in parameters.items()}
        loss = F.cross_entropy(torch.func.functional_call(model, tracked, (images,)), targets)
        gradients = torch.autograd.grad(loss, list(tracked.values()))
        steps = zip(tracked.items(), gradients, strict=True)
        parameters = {name: (p - _LR * gradient).detach() for (name, p), gradient in steps}
    update = torch.cat([(parameters[n] - p.detach()).flatten() for n, p in model.named_parameters()])
    norm = update.norm()
    return update * (case.clip_norm / norm).clamp(max=1.0) if case.clip_norm else update


def invert_first_layer(weight: Tensor, bias: Tensor) -> Tensor:
    """Return a candidate for each unit that the update has changed, [units, D].

    Args:
        weight: the update of the first layer's weight, [H, D].
        bias: that of its bias, [H].
    """
    changed = bias != 0
    return weight[changed] / bias[changed, None]


def is_recovered(candidates: Tensor, images: Tensor) -> Tensor:
    """Return for each image whether a candidate is within 1 % of it, bool [N]."""
    if not len(candidates):
        return torch.zeros(len(images), dtype=torch.bool)
    # The faster formula of `cdist` with a matrix product cancels where both are close.
    distances = torch.cdist(images, candidates, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.min(1).values <= TOLERANCE * images.norm(dim=1)


def render_inversion(points: Sequence[InversionPoint]) -> list[str]:
    """Return the curve as a table in Markdown, with one line for each axis."""
    lines = ["| varied | recovered, of all inputs |", "|---|---|"]
    for axis in dict.fromkeys(point.axis for point in points):
        cells = [
            f"{getattr(point.case, axis):g}: {point.fraction:.0%}" for point in points if point.axis == axis
        ]
        lines.append(f"| {axis} | {', '.join(cells)} |")
    epsilons = [f"{p.case.noise:g}: {p.epsilon:.3g}" for p in points if p.axis == "noise" and p.epsilon]
    if epsilons:
        lines.append(f"| epsilon of one sum with this noise, delta {DELTA:g} | {', '.join(epsilons)} |")
    return lines
