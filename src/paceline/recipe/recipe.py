"""Values that a task takes as options: only what TOML can hold, so that a run can write its recipe down.

Invariant: the result shares nothing mutable with what was given; subclasses become the plain type and tuples
become lists, so that Python and a file give a task the same values.

What a run is: task, data order, optimizer, numerics and strategy, as frozen values without torch.

Invariant: a Recipe that exists is complete and free of contradiction, so nothing that reads one checks it
again; an option that the rest of the recipe would ignore is an error. What depends on the machine (device,
world size) is decided later.

A recipe as TOML, with every value that a run uses.

Invariant: `load_recipe` reads the text back as an equal Recipe.

Into how many micro-batches a batch is cut, where the recipe leaves it open. Pure.

Invariant: a number that the recipe names, and every number of a reproducible run, does not depend on the
number of processes. One that is left out follows from them: equal shares, one micro-batch a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date, time
from functools import singledispatch
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, ValidationInfo, field_validator

from paceline.recipe.constraints import (
    CROSS_TABLE_NEEDS,
    lane_conflicts,
    reproducible_conflicts,
    sync_batchnorm_conflicts,
)
from paceline.recipe.strategy import Strategy
from paceline.recipe.strategy_text import switch_conflicts
from paceline.recipe.support import fill_replicas, num_sharers
from paceline.recipe.tables import (
    AverageRecipe,
    BatchRecipe,
    CheckpointRecipe,
    DebugRecipe,
    HealthRecipe,
    LogRecipe,
    MemoryRecipe,
    OptimizerRecipe,
    ScheduleRecipe,
    SecurityRecipe,
)
from paceline.recipe.toml_text import toml_key, toml_value
from paceline.recipe.validation import FieldNeed, KeyConflict, RecipeTable, value_error


@singledispatch
def copy_plain(value: Any, key: str) -> Any:
    """Copy a value.

    Args:
        value: strings, bools, numbers, dates, and lists, tuples and dicts of these.
        key: where the value stands, for the message.
    Raises:
        PydanticCustomError: TOML cannot hold it.
    """
    raise value_error(f"expected values that TOML can hold, found {type(value).__name__} at {key}")


@copy_plain.register
def _plain_bool(value: bool, key: str) -> bool:
    return value


@copy_plain.register
def _plain_int(value: int, key: str) -> int:
    return int(value)


@copy_plain.register
def _plain_float(value: float, key: str) -> float:
    return float(value)


@copy_plain.register
def _plain_text(value: str, key: str) -> str:
    return str.__str__(value)


@copy_plain.register(date)
@copy_plain.register(time)
def _plain_date(value: date | time, key: str) -> date | time:
    return value


@copy_plain.register(list)
@copy_plain.register(tuple)
def _plain_list(value: list[Any] | tuple[Any, ...], key: str) -> list[Any]:
    return [copy_plain(item, f"{key}[{index}]") for index, item in enumerate(value)]


@copy_plain.register
def _plain_table(value: dict, key: str) -> dict[str, Any]:
    return {
        _name(name, key): copy_plain(item, f"{key}.{toml_key(str(name))}") for name, item in value.items()
    }


def _name(name: Any, key: str) -> str:
    if not isinstance(name, str):
        raise value_error(f"expected strings as keys, found {name!r} in {key}")
    return name


_LARGEST_SEED = 2**63 - 1


_NEEDS_FP16 = FieldNeed(
    ("compute",), lambda table: table.compute == "fp16", 'with compute = "fp16"', 'found "{t.compute}"'
)


class PrecisionRecipe(RecipeTable):
    """The number format of forward and backward; parameters and the update stay fp32."""

    needs: ClassVar[Mapping[str, FieldNeed]] = {"init_scale": _NEEDS_FP16, "growth_steps": _NEEDS_FP16}

    compute: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto", description="format of the activations; auto: bf16 where every rank is faster in it"
    )
    init_scale: float = Field(default=65536.0, gt=0, description="first factor of the loss (fp16)")
    growth_steps: int = Field(
        default=200, ge=1, description="finite updates before the factor doubles (fp16)"
    )


class LoaderRecipe(RecipeTable):
    """How samples are fetched; nothing here changes which, or in what order."""

    needs: ClassVar[Mapping[str, FieldNeed]] = {
        "prefetch": FieldNeed(("workers",), lambda table: table.workers, "with workers", "found 0"),
    }

    workers: int = Field(default=0, ge=0, description="loader processes per rank; 0: in the training process")
    prefetch: int = Field(
        default=2, ge=1, description="micro-batches that are loaded ahead of the one in use"
    )
    cache_bytes: int = Field(
        default=0, ge=0, description="bytes of collated micro-batches kept in memory per rank"
    )


class EvaluateRecipe(RecipeTable):
    """The evaluation on held-out samples."""

    needs: ClassVar[Mapping[str, FieldNeed]] = {
        "patience": FieldNeed(
            ("every_steps",), lambda table: table.every_steps, "with every_steps", "which is not set"
        ),
    }

    every_steps: int = Field(default=0, ge=0, description="updates between evaluations; 0: only at the end")
    batch: int = Field(default=64, ge=1, description="samples per forward")
    max_samples: int = Field(default=0, ge=0, description="held-out samples that are used; 0: all")
    metric: str = Field(
        default="loss", min_length=1, description="what is best goes by it: loss, or a metric"
    )
    better: Literal["lower", "higher"] = Field(default="lower", description="which value of it is better")
    patience: int = Field(
        default=0,
        ge=0,
        description="evaluations without a better one until the run ends; 0: it goes on",
    )


class OuterRecipe(RecipeTable):
    """The outer optimizer of replicas that train alone and meet at times (diloco)."""

    lr: float = Field(default=0.7, gt=0, description="share of the mean movement that is taken")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="Nesterov momentum of the movements")
    fragments: int = Field(default=1, ge=1, description="parts of the parameters, which travel in turn")
    delay_steps: int = Field(default=0, ge=0, description="steps that go on while one is on its way")
    mixing: float = Field(
        default=0.0, ge=0, lt=1, description="share of what a replica has that stays when one arrives"
    )


class RuntimeRecipe(RecipeTable):
    """Where and how the processes run; the result does not depend on it beyond rounding."""

    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: NVIDIA GPUs if present")
    threads: int = Field(
        default=0, ge=0, description="intra-op threads per process; 0: the cores shared among local processes"
    )
    compile: bool = Field(default=False, description="compile the model with torch.compile")
    deadline_seconds: float = Field(default=120.0, gt=0, description="seconds that any wait may take")
    setup_deadline_seconds: float = Field(
        default=1800.0,
        gt=0,
        description="seconds until every rank has started, and until all have built task and session",
    )
    bucket_bytes: int = Field(default=16 * 2**20, ge=1, description="bytes of gradients sent together")
    bucket_latency: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="most share of latency in the sum of a bucket; left out: bucket_bytes as they are",
    )
    link_profile: str | None = Field(
        default=None,
        min_length=1,
        description="file of `paceline bench link --out`, for route=auto and bucket_latency; left out: links"
        " are measured",
    )


class Recipe(RecipeTable):
    """Everything that decides a run.

    Raises:
        RecipeError: see `RecipeTable`.
    """

    needs: ClassVar[Mapping[str, FieldNeed]] = CROSS_TABLE_NEEDS

    task: str = Field(
        default="",
        min_length=1,
        description='a task by name ("byte-gpt", "digits", "sum"), "file.py:name" or "package:name"',
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the task's function"
    )
    seed: int = Field(default=1, ge=0, le=_LARGEST_SEED, description="every random number is keyed by it")
    steps: int | None = Field(default=None, ge=1, description="updates to train; or give epochs")
    epochs: float | None = Field(
        default=None, gt=0, validate_default=True, description="passes over the data to train; or give steps"
    )
    reproducible: bool = Field(
        default=False, description="the same bits on any number of processes and lanes, or an error"
    )
    hash_every: int = Field(
        default=0, ge=0, description="updates between hashes of the state, compared over all ranks; 0: none"
    )
    on_divergence: Literal["warn", "stop"] = Field(
        default="stop", description="what to do when ranks that should be equal are not"
    )
    run_dir: str | None = Field(
        default=None, min_length=1, description="output folder; left out: new in runs/"
    )
    init_from: str | None = Field(
        default=None,
        min_length=1,
        description="first weights: a safetensors file or a folder of them, or a URL; left out: by the seed",
    )
    batch: BatchRecipe = Field(default_factory=BatchRecipe, description="the global batch")
    optimizer: OptimizerRecipe = Field(default_factory=OptimizerRecipe, description="the update rule")
    schedule: ScheduleRecipe = Field(default_factory=ScheduleRecipe, description="the rate over time")
    precision: PrecisionRecipe = Field(default_factory=PrecisionRecipe, description="number formats")
    memory: MemoryRecipe = Field(default_factory=MemoryRecipe, description="what is given for less memory")
    loader: LoaderRecipe = Field(default_factory=LoaderRecipe, description="how samples are fetched")
    evaluate: EvaluateRecipe = Field(default_factory=EvaluateRecipe, description="held-out evaluation")
    checkpoint: CheckpointRecipe = Field(default_factory=CheckpointRecipe, description="when state is saved")
    average: AverageRecipe = Field(
        default_factory=AverageRecipe, description="a moving average of the weights"
    )
    health: HealthRecipe = Field(default_factory=HealthRecipe, description="what is done about bad numbers")
    log: LogRecipe = Field(default_factory=LogRecipe, description="what is written down")
    strategy: Strategy = Field(default_factory=Strategy, description="how the work is distributed")
    tensor: dict[str, str] = Field(
        default_factory=dict,
        description="how tensor=N cuts layers, by a pattern of module names; adds to the task's plan",
    )
    outer: OuterRecipe = Field(default_factory=OuterRecipe, description="the outer optimizer of diloco")
    security: SecurityRecipe = Field(default_factory=SecurityRecipe, description="who may listen")
    runtime: RuntimeRecipe = Field(default_factory=RuntimeRecipe, description="where and how it runs")
    debug: DebugRecipe = Field(default_factory=DebugRecipe, description="checks that cost time")

    @field_validator("options", mode="before")
    @classmethod
    def _hold_plain_values(cls, options: Any) -> Any:
        return copy_plain(options, "options")

    @field_validator("epochs")
    @classmethod
    def _end_exactly_once(cls, epochs: float | None, info: ValidationInfo) -> float | None:
        if "steps" not in info.data:  # steps is wrong itself, and that is reported
            return epochs
        steps = info.data["steps"]
        if steps is None and epochs is None:
            raise value_error("expected steps or epochs, found neither")
        if steps is not None and epochs is not None:
            raise value_error(f"expected steps or epochs, found both: steps = {steps}, epochs = {epochs}")
        return epochs

    def conflicts(self) -> Iterator[KeyConflict]:
        """What cannot keep its bits, take one forward of all samples, or switch to another rule."""
        threads, compiles = self.runtime.threads, self.runtime.compile
        if self.reproducible:
            yield from reproducible_conflicts(self.strategy, self.batch, threads, compiles=compiles)
        elif self.is_ordered:
            yield from lane_conflicts(threads, compiles=compiles)
        if compiles and self.memory.recompute == "segments":
            yield KeyConflict(
                ("memory.recompute", "runtime.compile"),
                'expected "blocks" with runtime.compile: a traced graph knows no blocks',
            )
        yield from switch_conflicts(
            self.strategy.sync,
            self.strategy.rules,
            names_slow=self.health.straggler_factor is not None,
            reads_ahead=self.loader.workers > 0,
        )
        if self.batch.sync_batchnorm:
            yield from sync_batchnorm_conflicts(
                self.batch,
                self.strategy,
                reproducible=self.reproducible,
                recomputes=self.memory.recomputes,
                compiles=compiles,
            )

    def under(self, strategy: Strategy) -> Recipe:
        """This one in a phase of its run; what only other phases read stays."""
        return self.model_copy(update={"strategy": strategy})

    @property
    def is_ordered(self) -> bool:
        """Whether gradients of shards are added in one fixed tree, by one thread each."""
        return self.reproducible or self.strategy.lanes > 1


def to_toml(recipe: Recipe) -> str:
    """Write the resolved recipe: all fields, defaults too, except those that are None."""
    values = {name: value for name, value in recipe.model_dump().items() if value not in (None, {})}
    plain = {name: value for name, value in values.items() if not isinstance(value, dict)}
    blocks = [_toml_pairs(plain)]
    blocks += [f"[{name}]\n{_toml_pairs(value)}" for name, value in values.items() if isinstance(value, dict)]
    return "\n".join(blocks)


def _toml_pairs(values: dict[str, object]) -> str:
    return "".join(
        f"{toml_key(name)} = {toml_value(value)}\n" for name, value in values.items() if value is not None
    )


REPRODUCIBLE_MICRO_BATCHES = 8
"""Micro-batches of a reproducible run that names no number: alike on any number of processes."""
MICRO_BATCHES_PER_STAGE = 4
"""Micro-batches of each stage of a pipeline: with S stages, (S - 1) / (4 S + S - 1) of the time is idle."""


class SharerLimit(NamedTuple):
    """How many ranks and lanes may share a batch, and the keys from which that follows."""

    sharers: int
    called: str


def num_micro_batches(recipe: Recipe, processes: int) -> int:
    """The micro-batches of a full batch, over all ranks.

    Args:
        processes: in the job.
    """
    batch, strategy = recipe.batch, fill_replicas(recipe.strategy, processes)
    if batch.shards is not None:
        return batch.shards
    if recipe.reproducible:
        return min(REPRODUCIBLE_MICRO_BATCHES, batch.size)
    if batch.accumulation is not None:
        return min(batch.size, num_sharers(strategy) * batch.accumulation)
    return min(batch.size, num_sharers(strategy) * _micro_batches_per_rank(strategy, batch.size))


def _micro_batches_per_rank(strategy: Strategy, size: int) -> int:
    """Of each rank: one; with stages as many as keep them busy."""
    wanted = MICRO_BATCHES_PER_STAGE * strategy.pipeline if strategy.pipeline > 1 else 1
    return max(1, min(wanted, size // num_sharers(strategy)))


def max_sharers(recipe: Recipe) -> SharerLimit:
    """How many ranks and lanes find work in every batch."""
    batch = recipe.batch
    if batch.shards is not None:
        return SharerLimit(batch.shards, "batch.shards")
    if recipe.reproducible:
        return SharerLimit(
            min(REPRODUCIBLE_MICRO_BATCHES, batch.size), "batch.shards (by default, with reproducible)"
        )
    if batch.accumulation is not None:
        return SharerLimit(batch.size // batch.accumulation, "batch.size / batch.accumulation")
    return SharerLimit(batch.size, "batch.size")
