"""What a run is: task, data order, optimizer, numerics and strategy, as frozen values without torch.

Invariant: a Recipe that exists is complete and free of contradiction, so nothing that reads one checks it
again; an option that the rest of the recipe would ignore is an error. What depends on the machine (device,
world size) is decided later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from paceline.recipe.lasting import CheckpointRecipe
from paceline.recipe.plain import plain
from paceline.recipe.problems import Conflict, refused
from paceline.recipe.strategy import Strategy
from paceline.recipe.strict import Table

_LARGEST_SEED = 2**63 - 1


class BatchRecipe(Table):
    """The global batch: what one update sees, whatever the number of processes."""

    size: int = Field(default=32, ge=1, description="samples per update, over all replicas")
    shards: int = Field(
        default=8, ge=1, description="virtual shards that a batch is cut into; the most replicas that can run"
    )
    reduction: Literal["mean", "sum"] = Field(
        default="mean", description="gradients of the mean over all counted items, or of their sum"
    )
    drop_last: bool = Field(default=False, description="leave out the smaller last batch of an epoch")
    shuffle: bool = Field(
        default=True, description="a new keyed order each epoch; false: the order of the data"
    )

    def conflicts(self) -> Iterator[Conflict]:
        if self.shards > self.size:
            yield Conflict(
                ("shards", "size"), f"expected at most batch.size = {self.size}, found {self.shards}"
            )


_OPTIMIZER_READS = {  # which options an optimizer reads beside those that all read
    "adamw": ("betas", "eps", "weight_decay"),
    "adam": ("betas", "eps", "l2"),
    "sgd": ("momentum", "nesterov", "l2"),
    "rmsprop": ("alpha", "eps", "momentum", "l2"),
}
_ALL_READ = ("name", "lr", "decay_on", "clip_norm", "fused")


class OptimizerRecipe(Table):
    """The optimizer by name; a task may bring its own instead."""

    name: Literal["adamw", "adam", "sgd", "rmsprop"] = Field(default="adamw", description="the update rule")
    lr: float = Field(default=1e-3, ge=0, description="learning rate before the schedule")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.999), strict=False, description="decay of the two moments (adamw, adam)"
    )
    eps: float = Field(default=1e-8, ge=0, description="added to the denominator (adamw, adam, rmsprop)")
    momentum: float = Field(default=0.0, ge=0, description="share of the last update kept (sgd, rmsprop)")
    nesterov: bool = Field(default=False, description="look ahead along the momentum (sgd)")
    alpha: float = Field(default=0.99, ge=0, le=1, description="decay of the squared average (rmsprop)")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled decay per unit of lr (adamw)")
    l2: float = Field(default=0.0, ge=0, description="l2 * weight added to the gradient (adam, sgd, rmsprop)")
    decay_on: Literal["matrices", "all"] = Field(
        default="matrices", description="parameters that decay: those of two dimensions or more, or all"
    )
    clip_norm: float | None = Field(
        default=None, gt=0, description="largest norm of the whole gradient; left out: no clip"
    )
    fused: bool = Field(default=True, description="use fused kernels where they exist and keep the result")

    def conflicts(self) -> Iterator[Conflict]:
        """Options that an optimizer of this name would ignore."""
        reads = (*_ALL_READ, *_OPTIMIZER_READS[self.name])
        for name, field in type(self).model_fields.items():
            if name not in reads and getattr(self, name) != field.default:
                readers = ", ".join(other for other, options in _OPTIMIZER_READS.items() if name in options)
                yield Conflict(
                    (name, "name"), f'not an option of "{self.name}", expected only with {readers}'
                )
        if self.nesterov and self.name == "sgd" and not self.momentum:
            yield Conflict(("nesterov", "momentum"), "expected momentum > 0 with nesterov, found 0")


class ScheduleRecipe(Table):
    """The learning rate as a function of the update, as a factor of `optimizer.lr`."""

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
        """Options that a schedule of this shape would ignore, or that it lacks."""
        if self.final and self.decay not in ("cosine", "linear"):
            yield Conflict(("final", "decay"), f'expected only with cosine or linear, not "{self.decay}"')
        if (self.rate > 0) != (self.decay == "exponential"):
            found = f'{self.rate} with decay = "{self.decay}"'
            yield Conflict(
                ("rate", "decay"), f"expected above 0 with exponential and 0 otherwise, found {found}"
            )
        if self.cycle_steps and self.decay != "cosine":
            yield Conflict(("cycle_steps", "decay"), f'expected only with cosine, not "{self.decay}"')
        if self.cycle_factor > 1 and not self.cycle_steps:
            yield Conflict(
                ("cycle_factor", "cycle_steps"), "expected only with cycle_steps, which is not set"
            )
        if self.warmup_from and not self.warmup_steps:
            yield Conflict(("warmup_from", "warmup_steps"), "expected only with warmup_steps > 0, found 0")
        if (self.base_batch is None) != (self.batch_scaling == "none"):
            found = f'{self.base_batch} with batch_scaling = "{self.batch_scaling}"'
            yield Conflict(
                ("base_batch", "batch_scaling"),
                f'expected together with batch_scaling "linear" or "sqrt", found {found}',
            )


class PrecisionRecipe(Table):
    """The number format of forward and backward; parameters and the update stay fp32."""

    compute: Literal["fp32", "bf16", "fp16"] = Field(default="fp32", description="format of the activations")
    init_scale: float = Field(default=65536.0, gt=0, description="first factor of the loss (fp16)")
    growth_steps: int = Field(
        default=200, ge=1, description="finite updates before the factor doubles (fp16)"
    )


class MemoryRecipe(Table):
    """What is given for less memory."""

    recompute: Literal["none", "blocks"] = Field(
        default="none", description="activations that backward computes again: none, or those inside blocks"
    )


class LoaderRecipe(Table):
    """How samples are fetched; nothing here changes which, or in what order."""

    workers: int = Field(default=0, ge=0, description="loader processes per rank; 0: in the training process")
    prefetch: int = Field(default=2, ge=1, description="units that are loaded ahead of the one in use")
    cache_bytes: int = Field(default=0, ge=0, description="bytes of collated units kept in memory per rank")


class EvaluateRecipe(Table):
    """The evaluation on held-out samples."""

    every_steps: int = Field(default=0, ge=0, description="updates between evaluations; 0: only at the end")
    batch: int = Field(default=64, ge=1, description="samples per forward")
    max_samples: int = Field(default=0, ge=0, description="held-out samples that are used; 0: all")


class OuterRecipe(Table):
    """The outer optimizer of replicas that train alone and meet at times (diloco)."""

    lr: float = Field(default=0.7, gt=0, description="share of the mean movement that is taken")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="Nesterov momentum of the movements")


class RuntimeRecipe(Table):
    """Where and how the processes run; the result does not depend on it beyond rounding."""

    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: NVIDIA GPUs if present")
    threads: int = Field(
        default=0, ge=0, description="intra-op threads per process; 0: the cores shared among local processes"
    )
    compile: bool = Field(default=False, description="compile the model with torch.compile")
    deadline_seconds: float = Field(default=120.0, gt=0, description="seconds that any wait may take")
    bucket_bytes: int = Field(default=16 * 2**20, ge=1, description="bytes of gradients sent together")


class Recipe(Table):
    """Everything that decides a run.

    Raises:
        RecipeError: see `Table`.
    """

    task: str = Field(
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
    run_dir: str | None = Field(
        default=None, min_length=1, description="output folder; left out: new in runs/"
    )
    init_from: str | None = Field(
        default=None,
        min_length=1,
        description="first weights: a safetensors file, or a folder of them; left out: by the seed",
    )
    batch: BatchRecipe = Field(default_factory=BatchRecipe, description="the global batch")
    optimizer: OptimizerRecipe = Field(default_factory=OptimizerRecipe, description="the update rule")
    schedule: ScheduleRecipe = Field(default_factory=ScheduleRecipe, description="the rate over time")
    precision: PrecisionRecipe = Field(default_factory=PrecisionRecipe, description="number formats")
    memory: MemoryRecipe = Field(default_factory=MemoryRecipe, description="what is given for less memory")
    loader: LoaderRecipe = Field(default_factory=LoaderRecipe, description="how samples are fetched")
    evaluate: EvaluateRecipe = Field(default_factory=EvaluateRecipe, description="held-out evaluation")
    checkpoint: CheckpointRecipe = Field(default_factory=CheckpointRecipe, description="when state is saved")
    strategy: Strategy = Field(default_factory=Strategy, description="how the work is distributed")
    outer: OuterRecipe = Field(default_factory=OuterRecipe, description="the outer optimizer of diloco")
    runtime: RuntimeRecipe = Field(default_factory=RuntimeRecipe, description="where and how it runs")

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
