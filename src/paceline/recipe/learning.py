"""How a run learns: the batch that one update sees, the update rule, and its rate over time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from paceline.recipe.acting import Need
from paceline.recipe.expect import OneOf
from paceline.recipe.optimizer_words import OPTIMIZERS
from paceline.recipe.problems import Conflict
from paceline.recipe.specs import OptimizerSpec, known
from paceline.recipe.strict import Table


class BatchRecipe(Table):
    """The global batch: what one update sees, whatever the number of processes."""

    size: int = Field(default=32, ge=1, description="samples per update, over all replicas")
    shards: int | None = Field(
        default=None,
        ge=1,
        description="micro-batches that a batch is cut into, whoever runs them; left out: one a rank, 4 for"
        " each stage of a pipeline, 8 in all if reproducible",
    )
    accumulation: int | None = Field(
        default=None, ge=1, description="micro-batches of each rank, in place of shards"
    )
    reduction: Literal["mean", "sum"] = Field(
        default="mean", description="gradients of the mean over all counted items, or of their sum"
    )
    drop_last: bool = Field(default=False, description="leave out the smaller last batch of an epoch")
    sync_batchnorm: bool = Field(
        default=False, description="statistics of BatchNorm over all ranks of a step; one micro-batch a rank"
    )
    shuffle: bool = Field(
        default=True, description="a new keyed order each epoch; false: the order of the data"
    )

    def conflicts(self) -> Iterator[Conflict]:
        """More micro-batches than samples, or two numbers of them."""
        for name in ("shards", "accumulation"):
            if (getattr(self, name) or 0) > self.size:
                yield Conflict(
                    (name, "size"), f"expected at most batch.size = {self.size}, found {getattr(self, name)}"
                )
        if self.shards is not None and self.accumulation is not None:
            yield Conflict(
                ("accumulation", "shards"),
                f"expected one of both, found accumulation = {self.accumulation} and shards = {self.shards}:"
                " shards are those of all ranks together",
            )


def _reads(option: str) -> Need:
    readers = [spec.word for spec in OPTIMIZERS if option in spec.reads]
    return Need(
        ("name",),
        lambda table: option in table.spec.reads,
        f"with {' or '.join(readers)}",
        'found "{t.name}"',
    )


def _read_options() -> dict[str, Need]:
    options = dict.fromkeys(option for spec in OPTIMIZERS for option in spec.reads)
    return {option: _reads(option) for option in options}


def _optimizers() -> tuple[str, ...]:
    return tuple(known(OptimizerSpec))


def _is_known(word: str) -> str:
    if word not in _optimizers():
        raise ValueError(word)
    return word


class OptimizerRecipe(Table):
    """The optimizer by name; a task may bring its own instead."""

    needs: ClassVar[Mapping[str, Need]] = {
        **_read_options(),
        "decay_on": Need(
            ("weight_decay",),
            lambda table: table.weight_decay or table.l2,
            "with weight_decay or l2",
            "and both are 0",
        ),
    }

    name: Annotated[str, AfterValidator(_is_known), OneOf(_optimizers)] = Field(
        default="adamw",
        description="the update rule",
        json_schema_extra=lambda schema: schema.update(enum=[*_optimizers()]),
    )
    lr: float = Field(default=1e-3, ge=0, description="learning rate before the schedule")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.999), strict=False, description="decay of the two moments (adamw, adam, adabound)"
    )
    eps: float = Field(default=1e-8, ge=0, description="added to the denominator (all but sgd)")
    final_lr: float = Field(
        default=0.1, gt=0, description="rate of the SGD that Adam becomes, before the schedule (adabound)"
    )
    gamma: float = Field(
        default=1e-3, gt=0, description="how fast it does: about 1 / gamma updates (adabound)"
    )
    momentum: float = Field(default=0.0, ge=0, description="share of the last update kept (sgd, rmsprop)")
    nesterov: bool = Field(default=False, description="look ahead along the momentum (sgd)")
    alpha: float = Field(default=0.99, ge=0, le=1, description="decay of the squared average (rmsprop)")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled decay per unit of lr (adamw)")
    l2: float = Field(default=0.0, ge=0, description="l2 * weight added to the gradient (all but adamw)")
    decay_on: Literal["matrices", "all"] = Field(
        default="matrices", description="parameters that decay: those of two dimensions or more, or all"
    )
    clip_norm: float | None = Field(
        default=None, gt=0, description="largest norm of the whole gradient; left out: no clip"
    )
    fused: bool = Field(default=True, description="use fused kernels where they exist and keep the result")

    @property
    def spec(self) -> OptimizerSpec:
        """What is known of the update rule."""
        return known(OptimizerSpec)[self.name]

    def conflicts(self) -> Iterator[Conflict]:
        """PyTorch's own condition."""
        if self.nesterov and self.name == "sgd" and not self.momentum:
            yield Conflict(("nesterov", "momentum"), "expected momentum > 0 with nesterov, found 0")


_UNSET = "which is not set"


def _shaped(*shapes: str) -> Need:
    return Need(
        ("decay",),
        lambda table: table.decay in shapes,
        f"with decay {' or '.join(shapes)}",
        'not "{t.decay}"',
    )


class ScheduleRecipe(Table):
    """The learning rate as a function of the update, as a factor of `optimizer.lr`."""

    needs: ClassVar[Mapping[str, Need]] = {
        "final": _shaped("cosine", "linear"),
        "rate": _shaped("exponential"),
        "cycle_steps": _shaped("cosine"),
        "cycle_factor": Need(("cycle_steps",), lambda table: table.cycle_steps, "with cycle_steps", _UNSET),
        "warmup_from": Need(
            ("warmup_steps",), lambda table: table.warmup_steps, "with warmup_steps", "found 0"
        ),
        "base_batch": Need(
            ("batch_scaling",),
            lambda table: table.batch_scaling != "none",
            "with batch_scaling linear or sqrt",
            'found "none"',
        ),
    }

    decay: Literal["constant", "cosine", "exponential", "linear"] = Field(
        default="constant", description="the shape after the warm-up"
    )
    warmup_steps: int = Field(default=0, ge=0, description="updates of linear rise to the full rate")
    warmup_from: float = Field(default=0.0, ge=0, le=1, description="fraction of lr at the first update")
    final: float = Field(default=0.0, ge=0, le=1, description="fraction of lr at the end (cosine, linear)")
    rate: float = Field(default=0.0, ge=0, description="exp(-rate * t) after t updates (exponential)")
    cycle_steps: int | None = Field(
        default=None, ge=1, description="updates of the first restart cycle (cosine)"
    )
    cycle_factor: int = Field(default=1, ge=1, description="each cycle is this many times the one before")
    batch_scaling: Literal["none", "linear", "sqrt"] = Field(
        default="none", description="how lr grows with batch.size / base_batch"
    )
    base_batch: int | None = Field(default=None, ge=1, description="samples per update that lr was tuned for")

    def conflicts(self) -> Iterator[Conflict]:
        """What a schedule of this shape lacks."""
        if self.decay == "exponential" and not self.rate:
            yield Conflict(("rate", "decay"), 'expected above 0 with decay = "exponential", found 0')
        if self.batch_scaling != "none" and self.base_batch is None:
            yield Conflict(
                ("base_batch", "batch_scaling"),
                f'expected with batch_scaling = "{self.batch_scaling}", and it is not set',
            )
