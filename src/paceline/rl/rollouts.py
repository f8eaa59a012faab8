"""Rollouts: the rows of an iteration, made by all ranks with the present weights.

Each rank steps a contiguous block of groups. A group computes its policy in one fixed shape, so its rows do
not depend on the rank that has it. The rows are gathered in the order of the groups, after which every rank
has all of them: values after a step, advantages and their normalization are computed over all rows.

Invariant: rows are a function of (weights, recipe, iteration, open episodes), on any number of ranks. The
open episodes are state: their numbers and the actions taken in them, from which they are replayed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.data.work import split_evenly
from paceline.models.training_mode import evaluating
from paceline.recipe.recipe import Recipe
from paceline.recipe.rl_recipe import RLRecipe
from paceline.rl.actors import DIFFERS, REPEATS, UNKNOWN, Actors, GroupPlayer, OpenGroup, RankActors
from paceline.rl.environments import MakeEnvironment, SpaceShapes, repeats_episodes
from paceline.rl.group_rollout import GroupColumns, PolicyForward, under_learner
from paceline.rl.normalizers import Normalizers
from paceline.rl.policy import ActionDistribution, keyed_uniforms
from paceline.rl.policy_versions import PolicyVersions
from paceline.rl.returns import gae, next_values, normalized, vtrace
from paceline.session.session import Session
from paceline.state.slot import ExtraState, SlotIndex, TensorPiece, TensorSlot

_RECENT_EPISODES = 100


class Rows(NamedTuple):
    """Rows of an iteration, or of a micro-batch; every field has one entry for each row.

    Args:
        observation: before the step, float32 [N, ...]; normalized where the recipe says so, as rewards are.
        action: int64 [N], or float32 [N, D].
        log_prob: logarithm of the probability with which the actor took it, float32 [N]; of an older actor:
            that of the learner before its first update with these rows.
        reward: float32 [N].
        value: of the observation, of the same policy, float32 [N].
        advantage: generalized advantage estimate, or of an older actor that of V-trace, normalized over the
            iteration, float32 [N].
        target: of the value: the estimate before it was normalized, plus the value, float32 [N].
        version: updates of the weights with which the row was made, int64 [N].
    """

    observation: Tensor
    action: Tensor
    log_prob: Tensor
    reward: Tensor
    value: Tensor
    advantage: Tensor
    target: Tensor
    version: Tensor

    def sha256(self) -> str:
        """Return a hash of all rows."""
        digest = hashlib.sha256()
        for column in self:
            digest.update(column.contiguous().numpy().tobytes())
        return digest.hexdigest()


def empty_rows(num_rows: int, spaces: SpaceShapes) -> TensorDataset:
    """Return the data set of an iteration; until the first rollout its rows only have the right shapes."""
    draws = torch.Generator().manual_seed(0)
    columns = [torch.randn(num_rows, generator=draws) for _ in range(5)]
    shape = (num_rows, *spaces.action_shape)
    action = torch.zeros(shape, dtype=torch.int64 if spaces.num_actions else torch.float32)
    observation = torch.randn(num_rows, *spaces.observation, generator=draws)
    return TensorDataset(observation, action, *columns, torch.zeros(num_rows, dtype=torch.int64))


@dataclass
class RolloutRecord:
    """What an iteration did, for its event; equal on all ranks but for the seconds."""

    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    num_terminated: int = 0
    num_truncated: int = 0
    version: int = 0
    sha256: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    ages: dict[int, int] = field(default_factory=dict)

    def __add__(self, later: RolloutRecord) -> RolloutRecord:
        """Return the record of this iteration and of the one that followed, with the hash of the latter."""
        return RolloutRecord(
            self.returns + later.returns,
            self.lengths + later.lengths,
            self.num_terminated + later.num_terminated,
            self.num_truncated + later.num_truncated,
            later.version,
            later.sha256,
            {name: seconds + later.seconds[name] for name, seconds in self.seconds.items()},
            dict(Counter(self.ages) + Counter(later.ages)),
        )


class OpenEpisodes(ExtraState):
    """The state of all environments between two iterations, and the rows of the present one; on every rank.

    Args:
        num_envs: E.
        spaces: of each environment.
        rows: those of the present iteration, written in place; None: they are kept elsewhere.
    Attributes:
        number: of the present episode of each environment, int64 [E].
        actions: those taken in it, by environment.
        total: its return so far, float64 [E].
        observation: the present one, float32 [E, ...].
        recent: returns of the last episodes.
        repeats: whether the environment repeats an episode.
        iteration: of the rows; -1: there are none yet.
        is_restored: the state was loaded, so the environments do not stand where it says.
    """

    def __init__(self, num_envs: int, spaces: SpaceShapes, rows: Rows | None) -> None:
        self._spaces = spaces
        self._columns: Mapping[str, Tensor] = rows._asdict() if rows is not None else {}
        self.number = np.zeros(num_envs, dtype=np.int64)
        self.actions: list[list[Any]] = [[] for _ in range(num_envs)]
        self.total = np.zeros(num_envs)
        self.observation = np.zeros((num_envs, *spaces.observation), dtype=np.float32)
        self.recent: list[float] = []
        self.repeats, self.is_restored, self.iteration = UNKNOWN, False, -1

    @property
    def rows(self) -> Rows:
        """The rows of the present iteration, where they are kept here."""
        return Rows(**self._columns)

    def follow(self, groups: Sequence[GroupColumns]) -> RolloutRecord:
        """Follow the episodes through the rows of an iteration, in the order of the groups."""
        record = RolloutRecord()
        for group, columns in enumerate(groups):
            self.follow_group(group, columns, record)
        self.recent = [*self.recent, *record.returns][-_RECENT_EPISODES:]
        return record

    def follow_group(self, group: int, columns: GroupColumns, record: RolloutRecord | None = None) -> None:
        """Follow the episodes of a group through its rows; add those that end to a record."""
        size, ended = columns.reward.shape[1], columns.terminated | columns.truncated
        for index in range(size):
            self._follow_environment(group * size + index, index, columns, ended, record or RolloutRecord())
        self.observation[group * size : (group + 1) * size] = columns.after[0]

    def open_group(self, group: int, size: int) -> OpenGroup:
        """Return where the open episodes of a group of some environments stand."""
        members = slice(group * size, (group + 1) * size)
        return OpenGroup(
            self.number[members].tolist(),
            self.actions[members],
            self.observation[members],
            self.repeats,
            self.is_restored,
        )

    def copy_from(self, other: OpenEpisodes) -> None:
        """Stand where others stand; rows and recent returns are not copied."""
        self.number, self.total = other.number.copy(), other.total.copy()
        self.observation, self.actions = other.observation.copy(), [[*taken] for taken in other.actions]
        self.repeats, self.is_restored = other.repeats, other.is_restored

    def _follow_environment(
        self,
        environment: int,
        index: int,
        columns: GroupColumns,
        ended: NDArray[np.bool_],
        record: RolloutRecord,
    ) -> None:
        begin, actions, reward = 0, self.actions[environment], columns.reward[:, index]
        for step in np.flatnonzero(ended[:, index]).tolist():
            record.returns.append(self.total[environment] + float(reward[begin : step + 1].sum()))
            record.lengths.append(len(actions) + step + 1 - begin)
            is_terminated = bool(columns.terminated[step, index])
            record.num_terminated += is_terminated
            record.num_truncated += not is_terminated
            self.number[environment] += 1
            self.total[environment], begin = 0.0, step + 1
            actions.clear()
        self.total[environment] += float(reward[begin:].sum())
        actions += list(columns.action[begin:, index])

    def pieces(self) -> list[TensorPiece]:
        """Return the open episodes and the rows, as tensors that all ranks hold."""
        taken = [action for actions in self.actions for action in actions]
        kind = np.int64 if self._spaces.num_actions else np.float32
        actions = np.array(taken, dtype=kind).reshape(len(taken), *self._spaces.action_shape)
        tensors = {
            "episode": torch.from_numpy(self.number.copy()),
            "length": torch.tensor([len(actions) for actions in self.actions]),
            "actions": torch.from_numpy(actions),
            "return": torch.from_numpy(self.total.copy()),
            "observation": torch.from_numpy(self.observation.copy()),
            "recent": torch.tensor(self.recent, dtype=torch.float64),
            "repeats": torch.tensor([self.repeats]),
            "iteration": torch.tensor([self.iteration]),
            **{f"rows/{name}": column for name, column in self._columns.items()},
        }
        # A tensor without values has no box that a rank could hold.
        return [
            TensorPiece(TensorSlot.whole(name, value), value)
            for name, value in tensors.items()
            if value.numel()
        ]

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        return dict.fromkeys(shapes, ())

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `pieces` returned; a state of weights alone has none of it."""
        if "episode" not in tensors:
            return
        self.number, self.total = tensors["episode"].numpy().copy(), tensors["return"].numpy().copy()
        self.observation = tensors["observation"].numpy().copy()
        self.recent = tensors["recent"].tolist() if "recent" in tensors else []
        self.repeats, self.is_restored = int(tensors["repeats"]), True
        self.iteration = int(tensors["iteration"])
        lengths = tensors["length"].tolist()
        taken = list(tensors["actions"].numpy().copy()) if "actions" in tensors else []
        ends = np.cumsum(lengths).tolist()
        self.actions = [taken[end - length : end] for length, end in zip(lengths, ends, strict=True)]
        for name, column in self._columns.items():
            column.copy_(tensors[f"rows/{name}"])


class Rollouts:
    """The environments of one rank, and the rows that all ranks make together.

    Args:
        recipe: of the run.
        make: makes an environment.
        spaces: of each environment.
        actions: the distribution of its actions.
        rows: those of an iteration, which the loader reads; written in place. None: they are kept elsewhere.
        network: the model, of which older versions are copies.
    Attributes:
        actors: make the rows.
        player: the environments of this process.
        versions: the weights with which iterations are played.
        extra_states: what a checkpoint has of it, by name.
    """

    def __init__(
        self,
        recipe: Recipe,
        make: MakeEnvironment,
        spaces: SpaceShapes,
        actions: ActionDistribution,
        rows: Rows | None,
        network: nn.Module,
    ) -> None:
        self.recipe, self.make, self.spaces, self.actions = recipe, make, spaces, actions
        self.episodes = OpenEpisodes(recipe.rl.envs, spaces, rows)
        self.normalizers = Normalizers(recipe.rl, spaces.observation)
        self.versions = PolicyVersions(recipe.rl.age, network, self.normalizers)
        self.extra_states: dict[str, ExtraState] = {
            "rl": self.episodes,
            "normalizers": self.normalizers,
            "policies": self.versions,
        }
        self.player = self.new_player()
        self.actors: Actors = RankActors(self)
        self._acting = self.normalizers

    def new_player(self) -> GroupPlayer:
        """Return a player without groups."""
        return GroupPlayer(self.recipe, self.make, self.spaces, self.actions, self.noise)

    @property
    def settings(self) -> RLRecipe:
        """The table `[rl]`."""
        return self.recipe.rl

    def group_block(self, rank: int, num_ranks: int) -> range:
        """Return the groups of a rank; none for some if there are more ranks than groups."""
        return split_evenly(self.settings.shards, num_ranks, rank)

    def before_step(self, session: Session) -> RolloutRecord | None:
        """Make the rows of the iteration of the session's step, if they are not made yet; collective."""
        iteration = self.settings.iteration_of(session.state.step)
        # Not only at its first step, which a roll-back may have skipped.
        return self.collect(session, iteration) if self.episodes.iteration != iteration else None

    def collect(self, session: Session, iteration: int) -> RolloutRecord:
        """Let the actors make the rows of an iteration; collective; see `Actors.collect`."""
        present = self.versions.publish(
            self.settings.iteration_of(session.state.step), session.state.num_updates, session.complete()
        )
        groups, seconds = self.actors.collect(session, iteration, present)
        session.wait_for_save()  # a save in the background may still read the rows that are replaced
        self.episodes.iteration = iteration
        record, version = self.episodes.follow(groups), self.versions.of(iteration)
        record.version, record.seconds, self._acting = version.updates, seconds, version.normalizers
        record.ages = {max(0, iteration - version.iteration): self.settings.num_rows}
        ended = [columns.terminated | columns.truncated for columns in groups]
        self.normalizers.follow_rewards([columns.reward for columns in groups], ended)
        try:
            self._write_rows(groups, session, record)
        finally:  # rows that are written stay so where a rank is lost after that
            self.normalizers.follow_observations([columns.observation for columns in groups])
            self.versions.forget(iteration)
        return record

    def under_learner(
        self, groups: list[GroupColumns], iteration: int, session: Session
    ) -> list[GroupColumns]:
        """Return the rows of an older policy with values and log-probabilities of the learner."""
        if not self.settings.corrects_age:
            return groups
        model, device = session.complete(), session.runner.sharded_model.device
        forward = PolicyForward(model, device, self.versions.of(iteration).normalizers)
        with evaluating(model), torch.no_grad():
            return [under_learner(columns, forward, self.actions) for columns in groups]

    def close(self) -> None:
        """End the actors, and close the environments of this rank."""
        self.actors.close()

    def new_episodes(self) -> OpenEpisodes:
        """Return episodes that have not begun, without rows."""
        return OpenEpisodes(self.settings.envs, self.spaces, None)

    def noise(self, environments: range, steps: range) -> NDArray[np.float64]:
        """Return the noise of the actions of some environments in some of their steps."""
        return self.actions.noise(self.draw(environments, steps))

    def draw(self, environments: range, steps: range) -> NDArray[np.float64]:
        """Return the uniform numbers of the actions of some environments in some of their steps."""
        return keyed_uniforms(self.recipe.seed, "action", environments, steps, self.actions.num_uniforms)

    def repeats_episodes(self) -> str:
        """Play an episode twice; return as text whether both were equal."""
        return str(repeats_episodes(self.make, self.spaces, self.recipe.seed))

    def note_repeats(self, result: str, session: Session) -> None:
        """Keep whether an environment repeats an episode; empty: it is assumed."""
        self.episodes.repeats = DIFFERS if result == "False" else REPEATS
        if self.episodes.repeats == DIFFERS:
            session.session_base.context.warn(
                "warning: the environment played an episode twice with the same reset and actions, and the"
                " results differ: a resumed run begins new episodes, and rows depend on the number of ranks."
            )

    def warn_of_new_episodes(self, session: Session) -> None:
        """Warn that open episodes could not be replayed."""
        session.session_base.context.warn(
            "warning: open episodes cannot be replayed in this environment, so new ones have begun; the"
            " rest of the run is not the one that would have been without the interruption."
        )

    def _write_rows(self, groups: Sequence[GroupColumns], session: Session, record: RolloutRecord) -> None:
        """Compute values after each step and advantages over all rows, and write the rows in place."""
        columns = GroupColumns(*(np.stack(parts) for parts in zip(*groups, strict=True)))  # (V, T, G, ...)

        def by_time(x: NDArray[Any]) -> NDArray[Any]:
            return x.swapaxes(0, 1).reshape(x.shape[1], -1)  # (T, E)

        value, ended = by_time(columns.value), by_time(columns.terminated | columns.truncated)
        after = next_values(
            value,
            by_time(columns.last)[0],
            by_time(columns.final),
            by_time(columns.terminated),
            by_time(columns.truncated),
        )
        ppo = self.settings.ppo
        reward = self.normalizers.rewards(columns.reward)
        inputs = by_time(reward), value, after, ended
        if self.settings.corrects_age:
            advantage = vtrace(*inputs, by_time(columns.importance), ppo.gamma, ppo.gae)
        else:
            advantage = gae(*inputs, ppo.gamma, ppo.gae)
        target = advantage + value

        def by_group(x: NDArray[np.float64]) -> NDArray[np.float64]:
            steps, size = self.settings.steps, self.settings.group_size
            return x.reshape(steps, -1, size).swapaxes(0, 1)  # (V, T, G)

        written = {
            **{name: getattr(columns, name) for name in ("action", "log_prob", "value")},
            "observation": self._acting.observations(columns.observation),
            "reward": reward,
            "advantage": by_group(self.normalize(advantage)),
            "target": by_group(target),
        }
        rows = self.episodes.rows
        for name, x in written.items():
            column = cast("Tensor", getattr(rows, name))
            column.copy_(torch.from_numpy(np.ascontiguousarray(x)).reshape(column.shape))
        rows.version.fill_(record.version)
        record.sha256 = rows.sha256()

    def normalize(self, advantage: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the advantages of all rows of an iteration, [T, E], with mean 0 and deviation 1."""
        return normalized(advantage)


def mean_or_nan(values: Sequence[float]) -> float:
    """Return the mean; NaN if there are no values."""
    return float(np.mean(values)) if len(values) else float("nan")
