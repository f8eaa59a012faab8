"""The tables `[rl]` and `[rl.ppo]`: environments, their groups, and the learner of reinforcement learning.

The length of such a run is `total_steps` of environments. The number of updates and the size of a batch
follow from it, so `steps` and `batch.size` are left out of the recipe. Plain values without torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.recipe.validation import FieldNeed, RecipeTable

SMALLEST_GROUP = 4
"""Environments of a group from which on the rows of a forward on a CPU do not depend on its size."""

_IS_RL = FieldNeed(
    lambda table: table.total_steps,
    "with total_steps",
    "found 0",
    keys=("total_steps",),
)


def _is_learned_by(algorithm: str) -> FieldNeed:
    """Return the need of a field that only one algorithm reads."""
    return FieldNeed(
        lambda recipe: recipe.rl.total_steps and recipe.rl.algorithm == algorithm,
        f'with rl.total_steps and rl.algorithm = "{algorithm}"',
        "found {t.rl.total_steps} and {t.rl.algorithm}",
        keys=("rl.total_steps", "rl.algorithm"),
        scope="recipe",
    )


_IS_PPO, _IS_DQN = _is_learned_by("ppo"), _is_learned_by("dqn")


def _conflict(met: Any, reason: str, *keys: str, next_step: str = "", scope: Any = "table") -> FieldNeed:
    """Return a need of every value of a field."""
    return FieldNeed(
        met,
        keys=keys,
        reason=reason,
        when=lambda value: True,
        is_conflict=True,
        next_step=next_step,
        scope=scope,
    )


class PPORecipe(RecipeTable):
    """The learner of algorithm = "ppo"."""

    epochs: Annotated[int, _IS_PPO] = Field(
        default=10, ge=1, description="passes over the rows of an iteration; not those of the recipe"
    )
    minibatches: Annotated[
        int,
        _IS_PPO,
        _conflict(
            lambda recipe: (
                not recipe.rl.total_steps
                or recipe.rl.algorithm != "ppo"
                or recipe.rl.num_rows % recipe.rl.ppo.minibatches == 0
            ),
            "expected a divisor of rl.envs * rl.steps = {t.rl.num_rows}, found {t.rl.ppo.minibatches}",
            "rl.envs",
            "rl.steps",
            scope="recipe",
        ),
    ] = Field(default=4, ge=1, description="updates of a pass; their rows are in a new keyed order each time")
    clip: Annotated[float, _IS_PPO] = Field(
        default=0.2, gt=0, description="the ratio of probabilities is clipped to 1 - clip and 1 + clip"
    )
    gamma: Annotated[float, _IS_PPO] = Field(
        default=0.98, ge=0, le=1, description="discount of a step; 1: undiscounted returns"
    )
    gae: Annotated[float, _IS_PPO] = Field(
        default=0.8, ge=0, le=1, description="lambda of the generalized advantage estimates"
    )
    entropy: Annotated[float, _IS_PPO] = Field(
        default=0.0, ge=0, description="weight of the entropy of the policy in the loss"
    )
    value: Annotated[float, _IS_PPO] = Field(
        default=0.5, ge=0, description="weight of the squared error of values in the loss"
    )


class DQNRecipe(RecipeTable):
    """The learner of algorithm = "dqn"."""

    batch: Annotated[int, _IS_DQN] = Field(
        default=64, ge=1, description="rows of an update, drawn from the experience store"
    )
    updates: Annotated[int, _IS_DQN] = Field(default=128, ge=1, description="updates after an iteration")
    capacity: Annotated[
        int,
        _IS_DQN,
        _conflict(
            lambda recipe: (
                not recipe.rl.total_steps
                or recipe.rl.algorithm != "dqn"
                or recipe.rl.dqn.capacity >= recipe.rl.num_rows
            ),
            "expected at least one iteration of rl.envs * rl.steps = {t.rl.num_rows} rows, found"
            " {t.rl.dqn.capacity}",
            "rl.envs",
            "rl.steps",
            scope="recipe",
        ),
    ] = Field(default=50_000, ge=1, description="newest rows that the experience store keeps")
    start: Annotated[
        int,
        _IS_DQN,
        _conflict(
            lambda recipe: (
                not recipe.rl.total_steps
                or recipe.rl.algorithm != "dqn"
                or recipe.rl.dqn.start < recipe.rl.total_steps - recipe.rl.num_rows
            ),
            "expected fewer than rl.total_steps without one iteration, found {t.rl.dqn.start}: there would be"
            " no update",
            "rl.total_steps",
            scope="recipe",
        ),
    ] = Field(default=1_000, ge=0, description="rows before the first update; their actions are random")
    gamma: Annotated[float, _IS_DQN] = Field(default=0.99, ge=0, le=1, description="discount of a step")
    n_step: Annotated[int, _IS_DQN] = Field(
        default=3, ge=1, description="steps whose rewards count before the value of the next observation"
    )
    target_every: Annotated[int, _IS_DQN] = Field(
        default=128, ge=1, description="updates between copies of the network to the target network"
    )
    epsilon: Annotated[float, _IS_DQN] = Field(
        default=0.04, ge=0, le=1, description="probability of a random action at the end"
    )
    epsilon_fraction: Annotated[float, _IS_DQN] = Field(
        default=0.2, gt=0, le=1, description="part of the run in which it falls from 1"
    )
    priority: Annotated[float, _IS_DQN] = Field(
        default=0.0, ge=0, description="exponent of the error of a row in its priority; 0: all rows are equal"
    )
    beta: Annotated[
        float,
        FieldNeed(
            lambda table: table.priority,
            "with priority",
            "found 0",
            keys=("priority",),
        ),
    ] = Field(
        default=0.4, ge=0, le=1, description="exponent of the correction for priorities, which grows to 1"
    )


class RLRecipe(RecipeTable):
    """The environments of a reinforcement-learning run, and how they are divided into groups."""

    env: Annotated[str | None, _IS_RL] = Field(
        default=None,
        min_length=1,
        description='a Gymnasium id, or "file.py:make"; left out: that of the task',
    )
    algorithm: Annotated[
        Literal["ppo", "dqn"],
        _IS_RL,
        FieldNeed(
            lambda recipe: not recipe.strategy.sync_spec.learns_alone,
            when=lambda algorithm: algorithm == "dqn",
            keys=("strategy.sync",),
            reason='expected "ppo" with sync=actors: with DQN the ranks that act write their rows to the'
            " store of their host, and these are no ranks that learn",
            is_conflict=True,
            scope="recipe",
        ),
    ] = Field(default="ppo", description="how the policy learns: ppo, or dqn from an experience store")
    envs: Annotated[int, _IS_RL] = Field(default=32, ge=1, description="environments, over all ranks")
    shards: Annotated[
        int,
        _IS_RL,
        _conflict(
            lambda table: table.envs % table.shards == 0,
            "expected a divisor of envs = {t.envs}, found {t.shards}: all groups have the same size",
            "envs",
        ),
        FieldNeed(
            lambda recipe: (
                not (recipe.reproducible and recipe.rl.total_steps) or recipe.rl.group_size >= SMALLEST_GROUP
            ),
            keys=("rl.envs", "reproducible"),
            reason="expected at least 4 environments in a group with reproducible, found {t.rl.envs} /"
            " {t.rl.shards}: a smaller forward has other bits, so actor and learner would differ",
            when=lambda value: True,
            is_conflict=True,
            scope="recipe",
            next_step="lower rl.shards, or raise rl.envs",
        ),
    ] = Field(default=8, ge=1, description="groups of environments; at most this many ranks act")
    steps: Annotated[int, _IS_RL] = Field(
        default=64, ge=1, description="steps of each environment in an iteration"
    )
    total_steps: Annotated[
        int,
        _conflict(
            lambda table: table.total_steps == 0 or table.total_steps >= table.num_rows,
            "expected at least one iteration of envs * steps = {t.num_rows} steps, found {t.total_steps}",
            "envs",
            "steps",
        ),
        FieldNeed(
            lambda recipe: recipe.strategy.runs_every_step or recipe.strategy.sync_spec.learns_alone,
            keys=("strategy",),
            reason="expected sync=every-step without servers (every rank acts and learns), or servers=1"
            " sync=actors (rank 0 learns), found '{t.strategy}'",
            is_conflict=True,
            scope="recipe",
        ),
        FieldNeed(
            lambda recipe: recipe.loader.workers == 0 and recipe.loader.cache_bytes == 0,
            keys=("loader.workers", "loader.cache_bytes"),
            reason="expected no loader processes and no cache: the rows of an iteration are made in the run",
            change_first="loader.workers",
            is_conflict=True,
            scope="recipe",
        ),
        FieldNeed(
            lambda recipe: recipe.precision.compute == "fp32" and not recipe.runtime.compile,
            keys=("precision.compute", "runtime.compile"),
            reason='expected compute = "fp32" without runtime.compile: actors compute in float32, and the'
            " learner has to have their bits",
            change_first="precision.compute",
            is_conflict=True,
            scope="recipe",
        ),
    ] = Field(
        default=0,
        ge=0,
        description="steps of all environments in the run, of which whole iterations are made; 0: none",
    )
    age: Annotated[int, _IS_RL] = Field(
        default=0,
        ge=0,
        description="iterations that actors are behind the learner, which they play while it learns; PPO then"
        " corrects its targets with V-trace",
    )
    check: Annotated[bool, _IS_RL] = Field(
        default=True, description="play an episode twice first: only equal ones are replayed on resume"
    )
    normalize: Annotated[tuple[Literal["observations", "rewards"], ...], _IS_RL] = Field(
        default=(),
        strict=False,
        description="what is divided by its running deviation; observations also lose their mean",
    )
    ppo: PPORecipe = Field(default_factory=PPORecipe, description="the learner of ppo")
    dqn: DQNRecipe = Field(default_factory=DQNRecipe, description="the learner of dqn")

    @property
    def num_rows(self) -> int:
        """Return the rows of an iteration."""
        return self.envs * self.steps

    @property
    def gamma(self) -> float:
        """Return the discount of a step."""
        return self.dqn.gamma if self.algorithm == "dqn" else self.ppo.gamma

    @property
    def corrects_age(self) -> bool:
        """Return whether targets are corrected for the age of rows; DQN learns from rows of any age."""
        return self.age > 0 and self.algorithm == "ppo"

    @property
    def group_size(self) -> int:
        """Return the environments of a group."""
        return self.envs // self.shards

    @property
    def num_iterations(self) -> int:
        """Return the number of iterations of the run."""
        return self.total_steps // self.num_rows

    @property
    def updates_per_iteration(self) -> int:
        """Return the updates after an iteration."""
        return self.dqn.updates if self.algorithm == "dqn" else self.ppo.epochs * self.ppo.minibatches

    @property
    def first_iterations(self) -> int:
        """Return the iterations before that of the first update."""
        return self.dqn.start // self.num_rows if self.algorithm == "dqn" else 0

    def iteration_of(self, step: int) -> int:
        """Return the iteration after which an update is made."""
        return self.first_iterations + step // self.updates_per_iteration

    @property
    def num_updates(self) -> int:
        """Return the updates of the run."""
        return (self.num_iterations - self.first_iterations) * self.updates_per_iteration

    @property
    def minibatch_rows(self) -> int:
        """Return the rows of an update."""
        return self.dqn.batch if self.algorithm == "dqn" else self.num_rows // self.ppo.minibatches


TASK_NEEDS = (
    FieldNeed(
        lambda recipe: recipe.rl.total_steps,
        keys=("rl.total_steps",),
        scope="recipe",
        when=lambda task: task == "rl",
        reason='expected rl.total_steps with task = "rl", found none',
        is_conflict=True,
        change_first="rl.total_steps",
        next_step='add [rl] with env = "CartPole-v1" and total_steps = 100_000',
    ),
)
STEPS_NEEDS = (
    FieldNeed(
        lambda recipe: not recipe.rl.total_steps or recipe.steps == recipe.rl.num_updates,
        keys=("rl.total_steps",),
        scope="recipe",
        when=lambda steps: steps is not None,
        reason="expected no steps with rl.total_steps, from which {t.rl.num_updates} updates follow; found"
        " {t.steps}",
    ),
)
EPOCHS_NEEDS = (
    FieldNeed(
        lambda recipe: not recipe.rl.total_steps,
        keys=("rl.total_steps",),
        scope="recipe",
        when=lambda epochs: epochs is not None,
        reason="expected no epochs with rl.total_steps, the length; those of PPO are rl.ppo.epochs",
    ),
)
BATCH_SIZE_NEEDS = (
    FieldNeed(
        lambda recipe: (
            not recipe.rl.total_steps
            or recipe.batch.size == recipe.rl.minibatch_rows
            or (recipe.rl.algorithm == "ppo" and recipe.rl.num_rows % recipe.rl.ppo.minibatches)
        ),
        keys=("rl.total_steps",),
        scope="recipe",
        when=lambda size: True,
        reason="expected no batch.size with rl.total_steps: a minibatch has {t.rl.minibatch_rows} rows, which"
        " is rl.envs * rl.steps / rl.ppo.minibatches, or rl.dqn.batch; found {t.batch.size}",
    ),
)
