"""How a run learns: the batch that one update sees, the update rule, and its rate over time.

What makes a run last: checkpoints, and what is done when the numbers go wrong.

Amounts of memory as people write them: "2GiB", "512MiB", or a number of bytes. Pure.

`[memory]`: what saves memory at the price of time, and how much of it there may be.

The table `[log]`: what a run writes about itself.

The table `[debug]`: what a run looks at to find mistakes of its own code.

Who may hear what the processes of a job tell each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from paceline.recipe.registry.optimizer_specs import OPTIMIZER_SPECS
from paceline.recipe.registry.word_spec import OptimizerSpec, known_specs
from paceline.recipe.validation import (
    ExpectedText,
    FieldNeed,
    KeyConflict,
    RecipeTable,
    WordChoice,
    expected_message,
    value_error,
)


class BatchRecipe(RecipeTable):
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

    def conflicts(self) -> Iterator[KeyConflict]:
        """More micro-batches than samples, or two numbers of them."""
        for name in ("shards", "accumulation"):
            if (getattr(self, name) or 0) > self.size:
                yield KeyConflict(
                    (name, "size"), f"expected at most batch.size = {self.size}, found {getattr(self, name)}"
                )
        if self.shards is not None and self.accumulation is not None:
            yield KeyConflict(
                ("accumulation", "shards"),
                f"expected one of both, found accumulation = {self.accumulation} and shards = {self.shards}:"
                " shards are those of all ranks together",
            )


def _need_of_option(option: str) -> FieldNeed:
    readers = [spec.word for spec in OPTIMIZER_SPECS if option in spec.reads]
    return FieldNeed(
        ("name",),
        lambda table: option in table.spec.reads,
        f"with {' or '.join(readers)}",
        'found "{t.name}"',
    )


def _needs_of_options() -> dict[str, FieldNeed]:
    options = dict.fromkeys(option for spec in OPTIMIZER_SPECS for option in spec.reads)
    return {option: _need_of_option(option) for option in options}


def _optimizers() -> tuple[str, ...]:
    return tuple(known_specs(OptimizerSpec))


def _is_known(word: str) -> str:
    if word not in _optimizers():
        raise ValueError(word)
    return word


class OptimizerRecipe(RecipeTable):
    """The optimizer by name; a task may bring its own instead."""

    needs: ClassVar[Mapping[str, FieldNeed]] = {
        **_needs_of_options(),
        "decay_on": FieldNeed(
            ("weight_decay",),
            lambda table: table.weight_decay or table.l2,
            "with weight_decay or l2",
            "and both are 0",
        ),
    }

    name: Annotated[str, AfterValidator(_is_known), WordChoice(_optimizers)] = Field(
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
        return known_specs(OptimizerSpec)[self.name]

    def conflicts(self) -> Iterator[KeyConflict]:
        """PyTorch's own condition."""
        if self.nesterov and self.name == "sgd" and not self.momentum:
            yield KeyConflict(("nesterov", "momentum"), "expected momentum > 0 with nesterov, found 0")


_UNSET = "which is not set"


def _need_of_decay(*shapes: str) -> FieldNeed:
    return FieldNeed(
        ("decay",),
        lambda table: table.decay in shapes,
        f"with decay {' or '.join(shapes)}",
        'not "{t.decay}"',
    )


class ScheduleRecipe(RecipeTable):
    """The learning rate as a function of the update, as a factor of `optimizer.lr`."""

    needs: ClassVar[Mapping[str, FieldNeed]] = {
        "final": _need_of_decay("cosine", "linear"),
        "rate": _need_of_decay("exponential"),
        "cycle_steps": _need_of_decay("cosine"),
        "cycle_factor": FieldNeed(
            ("cycle_steps",), lambda table: table.cycle_steps, "with cycle_steps", _UNSET
        ),
        "warmup_from": FieldNeed(
            ("warmup_steps",), lambda table: table.warmup_steps, "with warmup_steps", "found 0"
        ),
        "base_batch": FieldNeed(
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

    def conflicts(self) -> Iterator[KeyConflict]:
        """What a schedule of this shape lacks."""
        if self.decay == "exponential" and not self.rate:
            yield KeyConflict(("rate", "decay"), 'expected above 0 with decay = "exponential", found 0')
        if self.batch_scaling != "none" and self.base_batch is None:
            yield KeyConflict(
                ("base_batch", "batch_scaling"),
                f'expected with batch_scaling = "{self.batch_scaling}", and it is not set',
            )


class CheckpointRecipe(RecipeTable):
    """When state is saved, where, and how much of it stays."""

    every_steps: int = Field(default=0, ge=0, description="updates between checkpoints; 0: only at the end")
    every_minutes: float = Field(default=0.0, ge=0, description="minutes between checkpoints; 0: steps count")
    keep: int = Field(default=2, ge=1, description="newest checkpoints that are kept")
    keep_best: int = Field(
        default=0,
        ge=0,
        description="checkpoints of the best evaluate.metric that are kept besides",
    )
    folder: str | None = Field(
        default=None,
        min_length=1,
        description="a path or a URL such as s3://bucket/folder; left out: checkpoints/ in the run folder",
    )
    mode: Literal["background", "blocking"] = Field(
        default="background", description="whether training goes on while a checkpoint is written"
    )
    grace_seconds: float = Field(
        default=30.0,
        gt=0,
        description="seconds to save and leave, once asked to stop, before processes are killed",
    )
    notice: str | None = Field(
        default=None,
        min_length=1,
        description="a file or http URL; once it is there, the machine will go: the run saves and stops",
    )
    deadline_seconds: float = Field(default=1800.0, gt=0, description="seconds that one save may take")
    full_disk_seconds: float = Field(
        default=0.0, ge=0, description="seconds that a save waits for space on a full disk; 0: the run stops"
    )


def _need_of_answer(answer: str) -> FieldNeed:
    return FieldNeed(
        ("non_finite",),
        lambda table: answer in table.answers,
        f'with "{answer}"',
        "which is not set",
    )


_NEEDS_SPIKE_FACTOR = FieldNeed(
    ("spike_factor",), lambda table: table.spike_factor is not None, "with spike_factor", "which is not set"
)


class AverageRecipe(RecipeTable):
    """A moving average of the weights, which is what is evaluated and exported where there is one."""

    decay: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of the average that stays at an update, for example 0.999; left out: no average",
    )


class HealthRecipe(RecipeTable):
    """What is done when a loss or a gradient is not finite, or when the loss jumps."""

    needs: ClassVar[Mapping[str, FieldNeed]] = {
        "spike": _NEEDS_SPIKE_FACTOR,
        "spike_window": _NEEDS_SPIKE_FACTOR,
        "max_skips": FieldNeed(
            ("non_finite",),
            lambda table: "skip" in table.answers or table.non_finite == "lower-rate",
            'with "skip", or with non_finite = "lower-rate"',
            "which is not set",
        ),
        "max_roll_backs": _need_of_answer("roll-back"),
        "rate_factor": _need_of_answer("lower-rate"),
        "max_lowerings": _need_of_answer("lower-rate"),
    }

    non_finite: Literal["stop", "skip", "roll-back", "lower-rate"] = Field(
        default="stop",
        description="at a loss or gradient that is not finite: end, leave the step out, go back, or leave it"
        " out and lower all rates",
    )
    spike_factor: float | None = Field(
        default=None,
        gt=1,
        description="a loss this many times the median of the last ones is a spike; left out: none is",
    )
    spike_window: int = Field(default=32, ge=2, description="steps whose median a loss is compared with")
    spike: Literal["stop", "skip", "roll-back", "lower-rate"] = Field(
        default="stop",
        description="at a spike: end, leave the step out, go back to the last checkpoint, or lower all rates"
        " and take the step",
    )
    max_skips: int = Field(
        default=10, ge=1, description="steps that may be left out one after another before the run ends"
    )
    max_roll_backs: int = Field(default=3, ge=1, description="times that a run may go back before it ends")
    rate_factor: float = Field(
        default=0.5, gt=0, lt=1, description='what "lower-rate" multiplies every rate with, from then on'
    )
    max_lowerings: int = Field(
        default=10, ge=1, description="times that the rates may be lowered before the run ends"
    )
    straggler_factor: float | None = Field(
        default=None,
        gt=1,
        description="a rank that takes this many times what others take is named; left out: none is",
    )

    @property
    def answers(self) -> tuple[str, str]:
        """To what is not finite, and to a spike."""
        return self.non_finite, self.spike

    @property
    def rolls_back(self) -> bool:
        """Whether the run may go back to a checkpoint."""
        return "roll-back" in self.answers

    @property
    def lowers_rates(self) -> bool:
        """Whether the run may lower its rates."""
        return "lower-rate" in self.answers


BYTES_EXPECTED = 'bytes, such as "2GiB", "512MiB", "2GB" or 4096'
_WRITTEN = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(value: Any) -> Any:
    """The number of bytes; None, which means that nothing is bounded, stays.

    KiB, MiB, GiB and TiB are powers of 1,024; kB, MB, GB and TB powers of 1,000.
    """
    if value is None or type(value) is int:
        return value
    found = _WRITTEN.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        raise value_error(expected_message(BYTES_EXPECTED, value))
    prefix = found[2].lower()
    base = 1024 if prefix.endswith("i") else 1000
    if prefix == "i":
        raise value_error(expected_message(BYTES_EXPECTED, value))
    return int(float(found[1]) * base ** _POWERS[prefix.removesuffix("i")])


_RECOMPUTE_WORDS = ("auto", "none", "blocks", "segments")
_RECOMPUTE_EXPECTED = 'one of auto, none, blocks, segments, or numbers of blocks as "0,1,4"'


def check_recompute(text: str) -> str:
    """What is computed again: a word, or numbers of blocks, ascending."""
    numbers = text.split(",")
    if text in _RECOMPUTE_WORDS:
        return text
    if not all(n.isdecimal() for n in numbers) or numbers != sorted(set(numbers), key=int):
        raise value_error(expected_message(_RECOMPUTE_EXPECTED, text, _RECOMPUTE_WORDS))
    return text


class MemoryRecipe(RecipeTable):
    """What saves memory at the price of time."""

    recompute: Annotated[str, AfterValidator(check_recompute), ExpectedText(_RECOMPUTE_EXPECTED)] = Field(
        default="auto",
        description='what backward computes again: "none", the inside of "blocks", or of those with numbers'
        ' "0,1,4", or "segments" of about sqrt(blocks) blocks, of which one input is kept: the least memory,'
        ' two more forwards. "auto": what keeps the budget in the least time, and nothing without one',
    )
    budget: Annotated[int | None, BeforeValidator(parse_bytes), ExpectedText(BYTES_EXPECTED)] = Field(
        default=None,
        ge=1,
        description='the most that a rank may need, as "2GiB": a run that needs more does not start',
    )

    @property
    def chooses(self) -> bool:
        """Whether it is left open which blocks are computed again."""
        return self.recompute == "auto" and self.budget is not None

    @property
    def recomputes(self) -> bool:
        """Whether blocks are computed again, as far as it is known."""
        return self.recompute not in ("auto", "none")


class LogRecipe(RecipeTable):
    """What is written down: `metrics.jsonl` for programs, `log.txt` for people."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="the lowest level that is written"
    )
    rotate_bytes: int = Field(
        default=64 * 2**20, ge=0, description="size at which a new file begins; 0: one file"
    )


class DebugRecipe(RecipeTable):
    """Checks that end a run when they find something, and what makes a run repeat another."""

    bytes: bool = Field(
        default=False,
        description="hold the bytes that routes send against their closed forms, in every round",
    )
    races: bool = Field(
        default=False,
        description="find who touches a tensor between the launch of a collective and its wait",
    )
    replay_arrivals: str | None = Field(
        default=None,
        min_length=1,
        description="folder of a run with a server: hear the workers in the order in which it heard them",
    )


class SecurityRecipe(RecipeTable):
    """What is encrypted. The key of a job is no part of its recipe: `--token-file`, or PACELINE_TOKEN."""

    tls: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="encrypt what nodes say in the store of the job, and the channels of a server; "
        "auto: where there are several nodes",
    )
    certificate: str | None = Field(
        default=None,
        min_length=1,
        description="folder of `paceline certificate`, on every host: who has not the same cannot call;"
        " left out: one is made at the start",
    )
