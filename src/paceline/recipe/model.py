"""What a run is: task, data order, optimizer, numerics and strategy, as frozen values without torch.

Invariant: a Recipe that exists is complete and free of contradiction, so nothing that reads one checks it
again; an option that the rest of the recipe would ignore is an error. What depends on the machine (device,
world size) is decided later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from paceline.recipe.acting import Need
from paceline.recipe.debug import DebugRecipe
from paceline.recipe.lasting import AverageRecipe, CheckpointRecipe, HealthRecipe
from paceline.recipe.learning import BatchRecipe, OptimizerRecipe, ScheduleRecipe
from paceline.recipe.log import LogRecipe
from paceline.recipe.memory import MemoryRecipe
from paceline.recipe.of_several_tables import OF_SEVERAL_TABLES
from paceline.recipe.phases import switch_conflicts
from paceline.recipe.plain import plain
from paceline.recipe.problems import Conflict, refused
from paceline.recipe.same_bits import lane_conflicts, same_bits_conflicts
from paceline.recipe.security import SecurityRecipe
from paceline.recipe.strategy import Strategy
from paceline.recipe.strict import Table
from paceline.recipe.whole_batch import synced_conflicts

_LARGEST_SEED = 2**63 - 1


_SCALED = Need(
    ("compute",), lambda table: table.compute == "fp16", 'with compute = "fp16"', 'found "{t.compute}"'
)


class PrecisionRecipe(Table):
    """The number format of forward and backward; parameters and the update stay fp32."""

    needs: ClassVar[Mapping[str, Need]] = {"init_scale": _SCALED, "growth_steps": _SCALED}

    compute: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto", description="format of the activations; auto: bf16 where every rank is faster in it"
    )
    init_scale: float = Field(default=65536.0, gt=0, description="first factor of the loss (fp16)")
    growth_steps: int = Field(
        default=200, ge=1, description="finite updates before the factor doubles (fp16)"
    )


class LoaderRecipe(Table):
    """How samples are fetched; nothing here changes which, or in what order."""

    needs: ClassVar[Mapping[str, Need]] = {
        "prefetch": Need(("workers",), lambda table: table.workers, "with workers", "found 0"),
    }

    workers: int = Field(default=0, ge=0, description="loader processes per rank; 0: in the training process")
    prefetch: int = Field(
        default=2, ge=1, description="micro-batches that are loaded ahead of the one in use"
    )
    cache_bytes: int = Field(
        default=0, ge=0, description="bytes of collated micro-batches kept in memory per rank"
    )


class EvaluateRecipe(Table):
    """The evaluation on held-out samples."""

    needs: ClassVar[Mapping[str, Need]] = {
        "patience": Need(
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


class OuterRecipe(Table):
    """The outer optimizer of replicas that train alone and meet at times (diloco)."""

    lr: float = Field(default=0.7, gt=0, description="share of the mean movement that is taken")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="Nesterov momentum of the movements")
    fragments: int = Field(default=1, ge=1, description="parts of the parameters, which travel in turn")
    delay_steps: int = Field(default=0, ge=0, description="steps that go on while one is on its way")
    mixing: float = Field(
        default=0.0, ge=0, lt=1, description="share of what a replica has that stays when one arrives"
    )


class RuntimeRecipe(Table):
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


class Recipe(Table):
    """Everything that decides a run.

    Raises:
        RecipeError: see `Table`.
    """

    needs: ClassVar[Mapping[str, Need]] = OF_SEVERAL_TABLES

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
        return plain(options, "options")

    @field_validator("epochs")
    @classmethod
    def _end_exactly_once(cls, epochs: float | None, info: ValidationInfo) -> float | None:
        if "steps" not in info.data:  # steps is wrong itself, and that is reported
            return epochs
        steps = info.data["steps"]
        if steps is None and epochs is None:
            raise refused("expected steps or epochs, found neither")
        if steps is not None and epochs is not None:
            raise refused(f"expected steps or epochs, found both: steps = {steps}, epochs = {epochs}")
        return epochs

    def conflicts(self) -> Iterator[Conflict]:
        """What cannot keep its bits, take one forward of all samples, or switch to another rule."""
        threads, compiles = self.runtime.threads, self.runtime.compile
        if self.reproducible:
            yield from same_bits_conflicts(self.strategy, self.batch, threads, compiles=compiles)
        elif self.is_ordered:
            yield from lane_conflicts(threads, compiles=compiles)
        if compiles and self.memory.recompute == "segments":
            yield Conflict(
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
            yield from synced_conflicts(
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
