"""What a run is: task, data order, optimizer, numerics and strategy, as frozen values without torch.

Invariant: a Recipe that exists is complete and consistent, so nothing that reads one checks it again; a key
that the rest of the recipe would ignore is an error. `to_toml` writes all values that a run uses, and
`load_recipe` reads the text back as an equal Recipe. What depends on the machine (device, world size) is
decided later, except for `num_micro_batches`: a number that the recipe names, and every number of a
reproducible run, does not depend on the number of processes, and one that is left out follows from them.
"""

from __future__ import annotations

from datetime import date, time
from functools import singledispatch
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import Field, ValidationInfo, field_validator

from paceline.recipe.constraints import RATE_LOWERING_NEEDS, RATE_SCHEDULE_NEEDS, REPRODUCIBLE_NEEDS
from paceline.recipe.federated_recipe import FederatedRecipe
from paceline.recipe.log_recipe import LogRecipe
from paceline.recipe.optimizer_recipe import OptimizerRecipe
from paceline.recipe.private_recipe import PrivateRecipe
from paceline.recipe.rl_recipe import EPOCHS_NEEDS, STEPS_NEEDS, TASK_NEEDS, RLRecipe
from paceline.recipe.schedule_recipe import ScheduleRecipe
from paceline.recipe.sparsity_recipe import SparsityRecipe
from paceline.recipe.strategy import Strategy
from paceline.recipe.support import fill_replicas, num_sharers
from paceline.recipe.tables import (
    AverageRecipe,
    BatchRecipe,
    CheckpointRecipe,
    DebugRecipe,
    ElasticRecipe,
    EvaluateRecipe,
    HealthRecipe,
    LoaderRecipe,
    MemoryRecipe,
    OuterRecipe,
    PrecisionRecipe,
    RuntimeRecipe,
    SecurityRecipe,
    ServeRecipe,
)
from paceline.recipe.toml_text import toml_key, toml_value
from paceline.recipe.validation import FieldNeed, NeedScope, RecipeTable, value_error


@singledispatch
def copy_plain(value: Any, key: str) -> Any:
    """Copy an option of a task, which may hold only what TOML can, so that a run can write its recipe.

    The result shares nothing mutable with `value`. Subclasses become the plain type and tuples become lists,
    so a task gets the same values from Python and from a file.

    Args:
        value: strings, bools, numbers, dates, and lists, tuples and dicts of these.
        key: of the value, for the message.
    Raises:
        PydanticCustomError: TOML cannot hold the value.
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
        _check_name(name, key): copy_plain(item, f"{key}.{toml_key(str(name))}")
        for name, item in value.items()
    }


def _check_name(name: Any, key: str) -> str:
    if not isinstance(name, str):
        raise value_error(f"expected strings as keys, found {name!r} in {key}")
    return name


_LARGEST_SEED = 2**63 - 1
_TableT = TypeVar("_TableT", bound=RecipeTable)


def _with_default(table: _TableT, key: str, value: Any) -> _TableT:
    """Return a table with another value of a key that was left out."""
    if key in table.model_fields_set:
        return table
    copy = table.model_copy()
    copy.__dict__[key] = value  # not as an update, after which the key would count as written
    return copy


class Recipe(RecipeTable):
    """Everything that decides a run.

    Raises:
        RecipeError: a key is wrong, or contradicts another one; names every one of them.
    """

    checked_scopes: ClassVar[tuple[NeedScope, ...]] = ("table", "recipe")

    task: Annotated[str, *TASK_NEEDS] = Field(
        default="",
        min_length=1,
        description='a task by name ("byte-gpt", "digits", "rl", "sum"), "file.py:name" or "package:name"',
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the task's function"
    )
    seed: int = Field(default=1, ge=0, le=_LARGEST_SEED, description="the key of every random number")
    # Before the length of the run, which follows from it.
    rl: RLRecipe = Field(
        default_factory=RLRecipe, description="environments and the learner of reinforcement learning"
    )
    steps: Annotated[int | None, *STEPS_NEEDS] = Field(
        default=None, ge=1, description="updates to train; or give epochs, or rl.total_steps"
    )
    epochs: Annotated[float | None, *EPOCHS_NEEDS] = Field(
        default=None, gt=0, validate_default=True, description="passes over the data to train; or give steps"
    )
    reproducible: Annotated[bool, *REPRODUCIBLE_NEEDS] = Field(
        default=False, description="the same bits on any number of processes and lanes, or an error"
    )
    hash_every: int = Field(
        default=0, ge=0, description="updates between hashes of the state, compared over all ranks; 0: none"
    )
    on_divergence: Annotated[
        Literal["warn", "stop"],
        FieldNeed(
            lambda recipe: recipe.hash_every or recipe.reproducible,
            "with hash_every or reproducible",
            "and neither is set",
            keys=("hash_every", "reproducible"),
        ),
    ] = Field(default="stop", description="what to do when ranks that should be equal are not")
    run_dir: str | None = Field(
        default=None, min_length=1, description="output folder; left out: new in runs/"
    )
    init_from: str | None = Field(
        default=None,
        min_length=1,
        description="first weights: a safetensors file, a folder of them or a URL; left out: random by seed",
    )
    batch: BatchRecipe = Field(default_factory=BatchRecipe, description="the global batch")
    optimizer: OptimizerRecipe = Field(default_factory=OptimizerRecipe, description="the update rule")
    schedule: Annotated[ScheduleRecipe, *RATE_SCHEDULE_NEEDS] = Field(
        default_factory=ScheduleRecipe, description="the rate over time"
    )
    sparsity: SparsityRecipe = Field(
        default_factory=SparsityRecipe, description="masks that set the smallest weights to zero"
    )
    precision: PrecisionRecipe = Field(default_factory=PrecisionRecipe, description="number formats")
    memory: MemoryRecipe = Field(default_factory=MemoryRecipe, description="memory against time")
    loader: LoaderRecipe = Field(default_factory=LoaderRecipe, description="how samples are loaded")
    evaluate: EvaluateRecipe = Field(default_factory=EvaluateRecipe, description="held-out evaluation")
    checkpoint: CheckpointRecipe = Field(default_factory=CheckpointRecipe, description="when state is saved")
    average: AverageRecipe = Field(
        default_factory=AverageRecipe, description="a moving average of the weights"
    )
    serve: ServeRecipe = Field(
        default_factory=ServeRecipe, description="how text is generated from the model"
    )
    health: Annotated[HealthRecipe, *RATE_LOWERING_NEEDS] = Field(
        default_factory=HealthRecipe, description="the reaction to bad numbers"
    )
    elastic: ElasticRecipe = Field(
        default_factory=ElasticRecipe, description="the reaction to the loss of a process"
    )
    log: LogRecipe = Field(default_factory=LogRecipe, description="what is logged")
    strategy: Strategy = Field(default_factory=Strategy, description="how the work is distributed")
    tensor: Annotated[
        dict[str, str],
        FieldNeed(
            lambda facts: facts.num_tensor_ranks > 1,
            "where the strategy has tensor",
            "no tensors are split: the strategy has no tensor",
            scope="session",
        ),
    ] = Field(
        default_factory=dict,
        description="how tensor=N splits layers, by a pattern of module names; adds to the task's plan",
    )
    federated: FederatedRecipe = Field(
        default_factory=FederatedRecipe, description="the clients of federated, and their local training"
    )
    private: PrivateRecipe = Field(
        default_factory=PrivateRecipe, description="clip and noise of sums, and their privacy budget"
    )
    outer: OuterRecipe = Field(
        default_factory=OuterRecipe, description="the outer optimizer of diloco and federated"
    )
    security: SecurityRecipe = Field(default_factory=SecurityRecipe, description="encryption")
    runtime: RuntimeRecipe = Field(default_factory=RuntimeRecipe, description="devices and processes")
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
        if "rl" not in info.data or info.data["rl"].total_steps:  # the length follows from it, or it is wrong
            return epochs
        if steps is None and epochs is None:
            raise value_error(
                "expected steps or epochs, found neither",
                "set the length of the run: steps = 1000 for updates, or epochs = 10 for passes over data",
            )
        if steps is not None and epochs is not None:
            raise value_error(
                f"expected steps or epochs, found both: steps = {steps}, epochs = {epochs}",
                "remove one of them",
            )
        return epochs

    def _fill_defaults(self) -> None:
        of_clients = self.strategy.sync_spec.trains_clients
        self.__dict__["outer"] = self.outer.for_rounds(of_clients=of_clients)
        if self.rl.total_steps:
            self._fill_length_of_environments()

    def _fill_length_of_environments(self) -> None:
        """Fill in the length and the batch of a run with environments, and defaults of small networks."""
        if self.steps is None and self.epochs is None:
            self.__dict__["steps"] = self.rl.num_updates
        # Where minibatches do not divide the rows, that is reported.
        if self.rl.algorithm == "dqn" or self.rl.num_rows % self.rl.ppo.minibatches == 0:
            self.__dict__["batch"] = _with_default(self.batch, "size", self.rl.minibatch_rows)
        self.__dict__["precision"] = _with_default(self.precision, "compute", "fp32")
        # Threads inside of an operation only slow down the small networks of policies.
        self.__dict__["runtime"] = _with_default(self.runtime, "threads", 1)

    def with_strategy(self, strategy: Strategy) -> Recipe:
        """Return this recipe for one phase of its run, without a check: keys of other phases stay."""
        return self.model_copy(update={"strategy": strategy})

    @property
    def is_ordered(self) -> bool:
        """Return whether gradients of shards are summed in one fixed tree, each by one thread."""
        return self.reproducible or self.strategy.lanes > 1


def to_toml(recipe: Recipe) -> str:
    """Write the resolved recipe: all fields, including defaults, except those that are None."""
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
"""Micro-batches of a reproducible run that names no number: the same on any number of processes."""
MICRO_BATCHES_PER_STAGE = 4
"""Micro-batches of each stage of a pipeline: with S stages, (S - 1) / (4 S + S - 1) of the time is idle."""


class SharerLimit(NamedTuple):
    """The number of ranks and lanes that can share a batch, and the key from which it follows."""

    sharers: int
    limit_key: str


def num_micro_batches(recipe: Recipe, processes: int) -> int:
    """Return the number of micro-batches of a full batch, over all ranks.

    Args:
        recipe: of the run.
        processes: of the job.
    """
    batch, strategy = recipe.batch, fill_replicas(recipe.strategy, processes)
    if strategy.sync_spec.trains_clients:
        return recipe.federated.num_positions
    if batch.shards is not None:
        return batch.shards
    if recipe.reproducible:
        return min(REPRODUCIBLE_MICRO_BATCHES, batch.size)
    if batch.accumulation is not None:
        return min(batch.size, num_sharers(strategy) * batch.accumulation)
    # A pipeline needs several micro-batches per stage to be busy, as far as there are samples for them.
    wanted = MICRO_BATCHES_PER_STAGE * strategy.pipeline if strategy.pipeline > 1 else 1
    per_rank = max(1, min(wanted, batch.size // num_sharers(strategy)))
    return min(batch.size, num_sharers(strategy) * per_rank)


def max_sharers(recipe: Recipe) -> SharerLimit:
    """Return how many ranks and lanes have work in every batch."""
    batch = recipe.batch
    if recipe.strategy.sync_spec.trains_clients:
        groups = " / federated.vectorize" if recipe.federated.vectorize else ""
        return SharerLimit(recipe.federated.num_groups, f"federated.cohort{groups}")
    if batch.shards is not None:
        return SharerLimit(batch.shards, "batch.shards")
    if recipe.reproducible:
        return SharerLimit(
            min(REPRODUCIBLE_MICRO_BATCHES, batch.size), "batch.shards (by default, with reproducible)"
        )
    if batch.accumulation is not None:
        return SharerLimit(batch.size // batch.accumulation, "batch.size / batch.accumulation")
    return SharerLimit(batch.size, "batch.size")
