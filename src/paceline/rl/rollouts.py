"""Rollouts: the rows of an iteration, made by all ranks with the present weights.

Each rank steps a contiguous block of groups. A group computes its policy in one fixed shape, so its rows do
not depend on the rank that has it. The rows are gathered in the order of the groups, after which every rank
has all of them: values after a step, advantages and their normalization are computed over all rows.

Invariant: rows are a function of (weights, recipe, iteration, open episodes), on any number of ranks. The
open episodes are state: their numbers and the actions taken in them, from which they are replayed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.comm.net import Net
from paceline.data.work import split_evenly
from paceline.errors import DivergenceError
from paceline.models.training_mode import evaluating
from paceline.recipe.recipe import Recipe
from paceline.recipe.rl_recipe import RLRecipe
from paceline.rl.environments import (
    EnvironmentGroup,
    MakeEnvironment,
    SpaceShapes,
    StepTimer,
    repeats_episodes,
)
from paceline.rl.normalizers import Normalizers
from paceline.rl.policy import ActionDistribution, PolicyOutput, keyed_uniforms
from paceline.rl.returns import gae, next_values, normalized
from paceline.session.session import Session, share_with_all
from paceline.state.slot import ExtraState, SlotIndex, TensorPiece, TensorSlot

_RECENT_EPISODES = 100
_UNKNOWN, _REPEATS, _DIFFERS = -1, 1, 0
"""Whether an environment repeats an episode, given the reset and the actions."""


class Rows(NamedTuple):
    """Rows of an iteration, or of a micro-batch; every field has one entry for each row.

    Args:
        observation: before the step, float32 [N, ...]; normalized where the recipe says so, as rewards are.
        action: int64 [N], or float32 [N, D].
        log_prob: logarithm of the probability with which the actor took it, float32 [N].
        reward: float32 [N].
        value: of the observation, as the actor computed it, float32 [N].
        advantage: generalized advantage estimate, normalized over the iteration, float32 [N].
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


class GroupColumns(NamedTuple):
    """What a group returns of an iteration: T steps of G environments."""

    observation: NDArray[np.float32]  # (T, G, ...)
    action: NDArray[Any]  # (T, G) int64, or (T, G, D) float32
    log_prob: NDArray[np.float32]  # (T, G)
    value: NDArray[np.float32]  # (T, G)
    reward: NDArray[np.float64]  # (T, G)
    terminated: NDArray[np.bool_]  # (T, G)
    truncated: NDArray[np.bool_]  # (T, G)
    final: NDArray[np.float32]  # (T, G) value of the final observation, where one was truncated
    last: NDArray[np.float32]  # (1, G) value of the observation after the last step
    after: NDArray[np.float32]  # (1, G, ...) that observation
    final_observation: NDArray[np.float32]  # (T, G, ...) where one has ended; (0, G, ...): not kept

    def to_bytes(self) -> bytes:
        """Return all columns as bytes, whose number depends on the shapes only."""
        return b"".join(np.ascontiguousarray(column).tobytes() for column in self)


def empty_columns(steps: int, size: int, spaces: SpaceShapes, *, keeps_final: bool = False) -> GroupColumns:
    """Return columns of zeros, with or without room for final observations."""
    by_step, action = (steps, size), np.int64 if spaces.num_actions else np.float32
    return GroupColumns(
        observation=np.zeros((*by_step, *spaces.observation), dtype=np.float32),
        action=np.zeros((*by_step, *spaces.action_shape), dtype=action),
        log_prob=np.zeros(by_step, dtype=np.float32),
        value=np.zeros(by_step, dtype=np.float32),
        reward=np.zeros(by_step),
        terminated=np.zeros(by_step, dtype=bool),
        truncated=np.zeros(by_step, dtype=bool),
        final=np.zeros(by_step, dtype=np.float32),
        last=np.zeros((1, size), dtype=np.float32),
        after=np.zeros((1, size, *spaces.observation), dtype=np.float32),
        final_observation=np.zeros((steps * keeps_final, size, *spaces.observation), dtype=np.float32),
    )


def read_groups(data: bytes, like: GroupColumns) -> list[GroupColumns]:
    """Return the columns of several groups, which have followed each other as bytes."""
    groups, offset = list[GroupColumns](), 0
    while offset < len(data):
        columns = []
        for column in like:
            end = offset + column.nbytes
            columns.append(np.frombuffer(data[offset:end], dtype=column.dtype).reshape(column.shape))
            offset = end
        groups.append(GroupColumns(*columns))
    return groups


class PolicyForward:
    """The forward of a policy on observations of one shape, without gradients.

    Args:
        normalizers: of the run, which are not changed.
    """

    def __init__(self, model: nn.Module, device: torch.device, normalizers: Normalizers) -> None:
        self._model, self._device, self._normalizers = model, device, normalizers

    def __call__(self, observation: NDArray[np.float32]) -> tuple[PolicyOutput, Tensor]:
        """Return the output of the policy and the values, on the CPU."""
        normalized = torch.from_numpy(self._normalizers.observations(observation))
        output, value = self._model(normalized.to(self._device))
        moved = tuple(x.cpu() for x in output) if isinstance(output, tuple) else output.cpu()
        return moved, value.cpu()


def play_group(
    group: EnvironmentGroup,
    forward: PolicyForward,
    actions: ActionDistribution,
    noise: NDArray[np.float64],
    columns: GroupColumns,
) -> None:
    """Step a group through an iteration.

    Args:
        group: continues from its present observations.
        forward: the policy.
        actions: the distribution of its actions.
        noise: of all actions, [T, G, ...].
        columns: filled.
    """
    outputs = []
    for step in range(len(noise)):
        columns.observation[step] = group.observation
        output, value = forward(group.observation)
        outputs.append(output)
        columns.value[step] = value.numpy()
        columns.action[step] = actions.sample(output, noise[step])
        terminated, truncated = columns.terminated[step], columns.truncated[step]
        final = group.step(columns.action[step], columns.reward[step], terminated, truncated)
        if final is not None and len(columns.final_observation):
            columns.final_observation[step] = final
        if final is not None and (truncated & ~terminated).any():
            # The whole group in one forward, whichever of its environments were truncated: a shape of its own
            # would have other bits.
            columns.final[step] = np.where(truncated, forward(final)[1].numpy(), 0.0)
    columns.last[0] = forward(group.observation)[1].numpy()
    columns.after[0] = group.observation
    action = torch.from_numpy(columns.action).flatten(0, 1)
    log_prob = actions.log_prob(actions.join(outputs), action)
    columns.log_prob[:] = log_prob.reshape(columns.log_prob.shape).numpy()


@dataclass
class RolloutRecord:
    """What an iteration did, for its event; equal on all ranks but for the seconds."""

    returns: list[float]
    lengths: list[int]
    num_terminated: int
    num_truncated: int
    version: int
    sha256: str
    seconds: dict[str, float]

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
        self.repeats, self.is_restored, self.iteration = _UNKNOWN, False, -1

    @property
    def rows(self) -> Rows:
        """The rows of the present iteration, where they are kept here."""
        return Rows(**self._columns)

    def follow(self, groups: Sequence[GroupColumns]) -> RolloutRecord:
        """Follow the episodes through the rows of an iteration, in the order of the groups."""
        record = RolloutRecord([], [], 0, 0, 0, "", {})
        size = groups[0].reward.shape[1]
        for group, columns in enumerate(groups):
            ended = columns.terminated | columns.truncated
            for index in range(size):
                self._follow_environment(group * size + index, index, columns, ended, record)
            self.observation[group * size : (group + 1) * size] = columns.after[0]
        self.recent = [*self.recent, *record.returns][-_RECENT_EPISODES:]
        return record

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
    Attributes:
        extra_states: what a checkpoint has of it, by name.
    """

    def __init__(
        self,
        recipe: Recipe,
        make: MakeEnvironment,
        spaces: SpaceShapes,
        actions: ActionDistribution,
        rows: Rows | None,
    ) -> None:
        self.recipe, self.make, self.spaces, self.actions = recipe, make, spaces, actions
        self.episodes = OpenEpisodes(recipe.rl.envs, spaces, rows)
        self.normalizers = Normalizers(recipe.rl, spaces.observation)
        self.extra_states: dict[str, ExtraState] = {"rl": self.episodes, "normalizers": self.normalizers}
        # The other ranks wait for a step that hangs, and should hear of it before they give up.
        self._timer = StepTimer(recipe.runtime.deadline_seconds / 2)
        self._groups: dict[int, EnvironmentGroup] = {}

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
        """Make the rows of an iteration; collective.

        Raises:
            TaskError: an environment raised, hung, or returned a value that is not finite.
            DivergenceError: ranks have acted with different weights.
        Wire: one ragged all_gather of the rows of all groups.
        """
        world = session.mesh.world
        seconds = {"policy and environments": 0.0, "exchange": 0.0}
        model, device = session.complete(), session.runner.sharded_model.device
        with self._timer.watching(), evaluating(model), torch.no_grad():
            began = time.perf_counter()
            self._prepare(session, self.group_block(world.rank, world.size))
            like = self._empty_columns()
            parts = [
                self._play(group, PolicyForward(model, device, self.normalizers), iteration)
                for group in self._groups.values()
            ]
            seconds["policy and environments"] = time.perf_counter() - began
        began = time.perf_counter()
        version = np.frombuffer(weights_hash(model), dtype=np.uint8)
        blocks = gather_blocks(np.concatenate([version, *parts]), session.net, session)
        require_same_weights([block[: len(version)].tobytes() for block in blocks], session.state.step)
        groups = [
            columns for block in blocks for columns in read_groups(block[len(version) :].tobytes(), like)
        ]
        seconds["exchange"] = time.perf_counter() - began
        session.wait_for_save()  # a save in the background may still read the rows that are replaced
        self.episodes.iteration = iteration
        record = self.episodes.follow(groups)
        record.version, record.seconds = session.state.num_updates, seconds
        ended = [columns.terminated | columns.truncated for columns in groups]
        self.normalizers.follow_rewards([columns.reward for columns in groups], ended)
        try:
            self._write_rows(groups, session, record)
        finally:  # rows that are written stay so where a rank is lost after that
            self.normalizers.follow_observations([columns.observation for columns in groups])
        return record

    def close(self) -> None:
        """Close the environments of this rank."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()

    def _play(self, group: EnvironmentGroup, forward: PolicyForward, iteration: int) -> NDArray[np.uint8]:
        settings = self.settings
        columns = self._empty_columns()
        steps = range(iteration * settings.steps, (iteration + 1) * settings.steps)
        environments = range(group.first, group.first + settings.group_size)
        play_group(group, forward, self.actions, self.noise(environments, steps), columns)
        return np.frombuffer(columns.to_bytes(), dtype=np.uint8)

    def _empty_columns(self) -> GroupColumns:
        settings = self.settings
        return empty_columns(
            settings.steps, settings.group_size, self.spaces, keeps_final=settings.algorithm == "dqn"
        )

    def noise(self, environments: range, steps: range) -> NDArray[np.float64]:
        """Return the noise of the actions of some environments in some of their steps."""
        return self.actions.noise(self.draw(environments, steps))

    def draw(self, environments: range, steps: range) -> NDArray[np.float64]:
        """Return the uniform numbers of the actions of some environments in some of their steps."""
        return keyed_uniforms(self.recipe.seed, "action", environments, steps, self.actions.num_uniforms)

    def _prepare(self, session: Session, block: range) -> None:
        """Make the environments of this rank, and bring them to where the open episodes stand."""
        episodes = self.episodes
        if episodes.repeats == _UNKNOWN:
            self._check_repeats(session)
        if self._groups and not episodes.is_restored:
            return
        self.close()
        size, renewed = self.settings.group_size, 0
        for number in block:
            group = EnvironmentGroup(number, size, self.make, self.spaces, self.recipe.seed, self._timer)
            self._groups[number] = group
            renewed += sum(self._place(group, index) for index in range(size))
        if episodes.is_restored and session.sum(float(renewed)):
            session.session_base.context.warn(
                "warning: open episodes cannot be replayed in this environment, so new ones have begun; the"
                " rest of the run is not the one that would have been without the interruption."
            )
        episodes.is_restored = False

    def _place(self, group: EnvironmentGroup, index: int) -> bool:
        """Bring an environment to its open episode; return whether it had to begin a new one instead."""
        episodes, environment = self.episodes, group.first + index
        number, actions = int(episodes.number[environment]), episodes.actions[environment]
        if not episodes.is_restored:
            group.begin(index, number)
            return False
        if episodes.repeats == _REPEATS:
            group.begin(index, number, actions)
            saved, now = episodes.observation[environment], group.observation[index]
            if np.array_equal(saved, now):
                return False
        elif not actions:
            # An environment that repeats nothing may differ in its reset, too.
            group.begin(index, number)
            return not np.array_equal(episodes.observation[environment], group.observation[index])
        group.begin(index, number + 1)
        return True

    def _check_repeats(self, session: Session) -> None:
        """Let rank 0 play an episode twice, and share whether both were equal."""
        episodes = self.episodes
        if not self.settings.check:
            episodes.repeats = _REPEATS
            return
        result = ""
        if session.is_first:
            result = str(repeats_episodes(self.make, self.spaces, self.recipe.seed))
        episodes.repeats = _REPEATS if share_with_all(session, result) == "True" else _DIFFERS
        if episodes.repeats == _DIFFERS:
            session.session_base.context.warn(
                "warning: the environment played an episode twice with the same reset and actions, and the"
                " results differ: a resumed run begins new episodes, and rows depend on the number of ranks."
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
        advantage = gae(by_time(reward), value, after, ended, ppo.gamma, ppo.gae)
        target = advantage + value

        def by_group(x: NDArray[np.float64]) -> NDArray[np.float64]:
            steps, size = self.settings.steps, self.settings.group_size
            return x.reshape(steps, -1, size).swapaxes(0, 1)  # (V, T, G)

        written = {
            **{name: getattr(columns, name) for name in ("action", "log_prob", "value")},
            "observation": self.normalizers.observations(columns.observation),
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


def weights_hash(model: nn.Module) -> bytes:
    """Return 16 bytes that depend on every bit of the parameters and buffers."""
    digest = hashlib.blake2b(digest_size=16)
    for value in model.state_dict().values():
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.digest()


def gather_blocks(block: NDArray[np.uint8], net: Net, session: Session) -> list[NDArray[np.uint8]]:
    """Return the bytes of every rank, by rank; lengths may differ."""
    device = session.runner.sharded_model.device
    gathered = net.all_gather(torch.from_numpy(block).to(device), session.mesh.world).wait()
    return [x.cpu().numpy() for x in gathered]


def require_same_weights(hashes: Sequence[bytes], step: int) -> None:
    """Raise a DivergenceError if a rank has acted with other weights than rank 0."""
    others = [rank for rank, value in enumerate(hashes) if value != hashes[0]]
    if others:
        raise DivergenceError(
            f"ranks {others} have acted with other weights than rank 0 at step {step}",
            next_step="resume from the last checkpoint; set debug.comm_checks to find what differs first",
        )


def mean_or_nan(values: Sequence[float]) -> float:
    """Return the mean; NaN if there are no values."""
    return float(np.mean(values)) if len(values) else float("nan")
