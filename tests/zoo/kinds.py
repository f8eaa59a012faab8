"""Kinds of models that users bring, each a small task. Only torch is imported: nothing here knows Paceline.

A kind is a function that builds model, samples and loss anew, with the same bits every time. Samples are in the
order in which they are trained, so a reference needs no order of ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

STEPS, SIZE = 4, 12
NUM_SAMPLES = STEPS * SIZE
WIDTH, CLASSES = 6, 3

LossOf = Callable[[nn.Module, Any], tuple[Tensor, float]]


@dataclass(frozen=True)
class Made:
    """What one call of a kind has made.

    Args:
        model: with its first weights.
        samples: in the order of training, `SIZE` a step.
        loss: (model, batch) to the sum of the losses and how many items it is over.
    """

    model: nn.Module
    samples: Sequence[Any]
    loss: LossOf


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Args:
        make: builds it.
        optimizer: "sgd" (with momentum), "adamw".
        tolerance: largest absolute difference that rounding explains, over `STEPS` steps.
        clip_norm: largest norm of the gradient.
        fused: the user's own optimizer has fused kernels, of SGD.
    """

    make: Callable[[], Made]
    optimizer: str = "sgd"
    tolerance: float = 2e-6
    clip_norm: float | None = 0.5
    fused: bool = False


KINDS: dict[str, Kind] = {}


def kind(**settings: Any) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Put a function into the table, under its name."""

    def keep(make: Callable[[], Made]) -> Callable[[], Made]:
        KINDS[make.__name__.replace("_", "-")] = Kind(seeded(make), **settings)
        return make

    return keep


def seeded(make: Callable[[], Made]) -> Callable[[], Made]:
    """The same weights and samples every time."""

    def again() -> Made:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return make()

    return again


def points(width: int = WIDTH) -> list[tuple[Tensor, Tensor]]:
    """Samples: values, float32 [width], and a class."""
    return [(torch.randn(width), torch.randint(CLASSES, ())) for _ in range(NUM_SAMPLES)]


def classes(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    """Cross-entropy, summed."""
    x, y = batch
    return F.cross_entropy(model(x).float(), y, reduction="sum"), len(y)


def chain(*links: nn.Module, samples: Sequence[Any] | None = None) -> Made:
    """A chain of modules with samples that suit it."""
    return Made(nn.Sequential(*links), samples or points(), classes)


def mlp(*between: nn.Module) -> Made:
    """Two layers, with something between them."""
    return chain(nn.Linear(WIDTH, 8), nn.Tanh(), *between, nn.Linear(8, CLASSES))


@kind()
def plain() -> Made:
    return mlp()


def _images() -> Made:
    samples = [(torch.randn(3, 5, 5), torch.randint(CLASSES, ())) for _ in range(NUM_SAMPLES)]
    links = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 2), nn.Flatten(), nn.Linear(20, CLASSES)]
    made = chain(*links, samples=samples)
    made.model.to(memory_format=torch.channels_last)
    return made


@kind()
def channels_last() -> Made:
    return _images()


@kind(optimizer="adamw", tolerance=2e-5)
def channels_last_adamw() -> Made:
    return _images()


@kind(fused=True)
def channels_last_fused() -> Made:
    return _images()


class Transposed(nn.Module):
    """A matrix that is stored the other way round."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(fan_in, fan_out) / 3).t())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


@kind()
def transposed() -> Made:
    return chain(Transposed(WIDTH, 8), nn.Tanh(), Transposed(8, CLASSES))


@kind()
def gradient_hook() -> Made:
    """The first row of a matrix shall not be trained."""
    made = mlp()
    mask = torch.ones(8, 1)
    mask[0] = 0.0
    made.model[0].weight.register_hook(lambda grad: grad * mask)
    return made


class Experts(nn.Module):
    """The sample names its expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(2))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        y = x.new_zeros(len(x), 8)
        for number, expert in enumerate(self.experts):
            rows = (which == number).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]))
        return self.head(y.tanh())


def _experts(which: Callable[[int], int]) -> Made:
    samples = [(x, torch.tensor(which(i)), y) for i, (x, y) in enumerate(points())]

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        x, expert, y = batch
        return F.cross_entropy(model(x, expert), y, reduction="sum"), len(y)

    return Made(Experts(), samples, loss)


@kind()
def late_expert() -> Made:
    """The second expert is used from the third step on."""
    return _experts(lambda i: int(i >= 2 * SIZE))


@kind()
def routed_experts() -> Made:
    """In every step only a few samples use the second expert: some shards have no gradient of it."""
    return _experts(lambda i: int(i % SIZE == 3))


@kind()
def layer_reused() -> Made:
    again = nn.Linear(8, 8)
    return chain(
        nn.Linear(WIDTH, 8), again, nn.Tanh(), again, nn.Tanh(), again, nn.Tanh(), nn.Linear(8, CLASSES)
    )


class Checkpointed(nn.Module):
    """Computes a block again in backward, in the older way."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=True)


@kind()
def reentrant() -> Made:
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    return chain(nn.Linear(WIDTH, 8), Checkpointed(block), nn.Linear(8, CLASSES))


class _Rests(torch.autograd.Function):
    """Gives the backward pass time, so that what was handed on before it is under way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        time.sleep(0.01)
        return grads[0]


class Rest(nn.Module):
    """The identity, slowly."""

    def forward(self, x: Tensor) -> Tensor:
        return _Rests.apply(x)


@kind()
def reentrant_reused() -> Made:
    """One block behind two checkpoints: its gradient is complete after the second only."""
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    links = [Checkpointed(block), Rest(), Checkpointed(block)]
    return chain(nn.Linear(WIDTH, 8), *links, nn.Linear(8, CLASSES))


class Rotate(nn.Module):
    """Complex parameters between real values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) / 3)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.complex64) @ self.weight
        return y.real + 3.0 * y.imag


@kind()
def complex_parameter() -> Made:
    return mlp(Rotate())


class Phase(nn.Module):
    """A complex number for each value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        return y.real + 5.0 * y.imag


@kind()
def complex_vector() -> Made:
    return mlp(Phase())


class Scale(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@kind()
def scalar_parameter() -> Made:
    return mlp(Scale())


class Prompt(nn.Module):
    """A parameter of no rows, as of a prompt of length 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum()


@kind()
def empty_parameter() -> Made:
    return mlp(Prompt())


@kind()
def one_row() -> Made:
    """Fewer rows than ranks, and nothing else."""
    samples = [(torch.randn(5), torch.randn(1)) for _ in range(NUM_SAMPLES)]
    model = nn.Linear(5, 1)

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        x, y = batch
        return (model(x) - y).square().sum(), len(y)

    return Made(model, samples, loss)


class Cast(nn.Module):
    """From one type to another."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


@kind(tolerance=2e-2)
def mixed_types() -> Made:
    """float32, then bfloat16, then float64."""
    links = [nn.Linear(WIDTH, 8), Cast(torch.bfloat16), nn.Linear(8, 8).bfloat16(), nn.Tanh()]
    return chain(*links, Cast(torch.float64), nn.Linear(8, CLASSES).double())


@kind(tolerance=2e-2)
def half_weights() -> Made:
    """bfloat16 alone."""
    links = [nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)]
    made = chain(Cast(torch.bfloat16), *links)
    made.model.bfloat16()
    return made


class Counters(nn.Module):
    """Buffers of every type, which training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("small", torch.zeros(2, dtype=torch.uint8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("exact", torch.zeros((), dtype=torch.float64))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("low", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.ones(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.seen |= True
                self.steps += 1
                self.small += 2
                self.mean.lerp_(x.mean(0), 0.1)
                self.exact += x.double().mean()
                self.phase += 1j
                self.low *= 0.5
        return x * self.mask + 0.1 * self.mean.detach()


@kind()
def buffers_of_every_type() -> Made:
    return mlp(Counters())


class CountsForwards(nn.Module):
    """Counts in evaluation as well."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return x * (1.0 + 0.1 * self.forwards)


@kind()
def counts_forwards() -> Made:
    return mlp(CountsForwards())


@kind()
def tied_weights() -> Made:
    """The last matrix is the first."""
    samples = [(torch.randint(CLASSES, (2,)), torch.randint(CLASSES, ())) for _ in range(NUM_SAMPLES)]
    first, last = nn.EmbeddingBag(CLASSES, 8, mode="sum"), nn.Linear(8, CLASSES)
    last.weight = first.weight
    return chain(first, nn.Linear(8, 8), nn.Tanh(), last, samples=samples)


class Recurrent(nn.Module):
    """A recurrent layer without its last state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def _sequences() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(4, WIDTH), torch.randint(CLASSES, ())) for _ in range(NUM_SAMPLES)]


def _recurrent(layer: Callable[..., nn.Module]) -> Made:
    """Two of them, so that a pipeline has one in each stage."""
    settings: dict[str, Any] = {"num_layers": 2, "dropout": 0.3, "batch_first": True}
    layers = [Recurrent(layer(WIDTH, 8, **settings)), Recurrent(layer(8, 8, **settings))]
    return chain(*layers, nn.Flatten(), nn.Linear(32, CLASSES), samples=_sequences())


@kind()
def lstm_dropout() -> Made:
    return _recurrent(nn.LSTM)


@kind()
def gru_dropout() -> Made:
    return _recurrent(nn.GRU)


class Attend(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


@kind()
def attention_dropout() -> Made:
    return chain(Attend(), Attend(), nn.Flatten(), nn.Linear(4 * WIDTH, CLASSES), samples=_sequences())


class FunctionalDropout(nn.Module):
    """Dropout that is no module."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3, self.training)


@kind()
def functional_dropout() -> Made:
    links = [nn.Linear(WIDTH, 8), FunctionalDropout(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
    return chain(*links, FunctionalDropout(), nn.Linear(8, CLASSES))


@kind()
def dropout_module() -> Made:
    links = [nn.Linear(WIDTH, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
    return chain(*links, nn.Dropout(0.3), nn.Linear(8, CLASSES))


@kind()
def batch_norm() -> Made:
    """Of images: with two numbers a channel every difference would be one of rounding."""
    samples = [(torch.randn(3, 5, 5), torch.randint(CLASSES, ())) for _ in range(NUM_SAMPLES)]
    links = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, CLASSES)]
    return chain(*links, samples=samples)


@kind()
def loss_closes_over_the_model() -> Made:
    """The loss takes the model from around it, not the one that it is given."""
    made = mlp()
    outer = made.model
    return Made(outer, made.samples, lambda model, batch: classes(outer, batch))


@kind()
def loss_closes_over_a_part() -> Made:
    """A penalty on a layer that the loss holds by itself."""
    made = mlp()
    layer = made.model[0]

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        total, count = classes(model, batch)
        return total + 0.05 * count * layer.weight.square().sum(), count

    return Made(made.model, made.samples, loss)


@kind()
def frozen() -> Made:
    """The first layer is not trained."""
    made = mlp()
    made.model[0].requires_grad_(False)
    return made


@kind()
def unused_parameter() -> Made:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(WIDTH, CLASSES), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    return Made(Spare(), points(), classes)


@kind()
def spectral_norm() -> Made:
    """A weight that is computed, with a buffer that every forward changes."""
    layer = parametrizations.spectral_norm(nn.Linear(8, 8))
    return mlp(layer, nn.Tanh())


@kind()
def sparse_embedding() -> Made:
    samples = [(torch.randint(20, (3,)), torch.randint(CLASSES, ())) for _ in range(NUM_SAMPLES)]
    links = [nn.Embedding(20, 4, sparse=True), nn.Flatten(), nn.Linear(12, CLASSES)]
    return chain(*links, samples=samples)


@kind(tolerance=1e-12)
def double() -> Made:
    made = mlp()
    made.model.double()
    samples = [(x.double(), y) for x, y in made.samples]

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)

    return Made(made.model, samples, loss)
