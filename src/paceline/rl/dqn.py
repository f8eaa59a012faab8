"""Deep Q-learning: double estimates, a target network, returns of n steps, and a store to sample rows from.

The rows of an iteration go into an experience store, which ranks of one host share. Before each update every
rank draws the same keyed numbers, and reads the rows of the batch from there: they are the data of the step.

Invariant: the batch of a step is a function of (seed, step, rows, priorities), on any number of ranks. Rows,
priorities and the target network are state.
Source: Mnih et al. 2015, Human-level Control through Deep Reinforcement Learning; van Hasselt et al. 2016,
arXiv:1509.06461, equation 4; Schaul et al. 2016, arXiv:1511.05952, Algorithm 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.comm.routes.host_links import connect_single_host_group
from paceline.comm.routes.shared_memory import SharedMemoryCollective
from paceline.errors import CommunicationError, TaskError
from paceline.models.training_mode import evaluating
from paceline.recipe.recipe import Recipe
from paceline.recipe.rl_recipe import DQNRecipe
from paceline.rl.environments import MakeEnvironment, SpaceShapes
from paceline.rl.experience_store import ExperienceStore, Numbers, SumTree
from paceline.rl.group_rollout import GroupColumns
from paceline.rl.policy import Categorical, PolicyOutput, keyed_uniforms
from paceline.rl.ppo import RowsLoss
from paceline.rl.rollouts import RolloutRecord, Rollouts
from paceline.session.session import Session
from paceline.state.slot import SlotIndex, TensorPiece, TensorSlot
from paceline.task import Loss

_SMALLEST_PRIORITY = 1e-6


class Transitions(NamedTuple):
    """Rows of an update of DQN; every field has one entry for each row.

    Args:
        observation: before the step, float32 [N, ...].
        action: int64 [N].
        reward: discounted sum over the n steps, or over those up to the end of the episode, float32 [N].
        discount: of the value after them: gamma to the power of their number; 0 if the episode terminated.
        after: the observation after them, float32 [N, ...].
        weight: importance of the row, at most 1, float32 [N].
        number: of the row, counted over the run, int64 [N].
    """

    observation: Tensor
    action: Tensor
    reward: Tensor
    discount: Tensor
    after: Tensor
    weight: Tensor
    number: Tensor


def empty_transitions(num_rows: int, spaces: SpaceShapes) -> TensorDataset:
    """Return the data set of an update; until the first one its rows only have the right shapes."""
    draws = torch.Generator().manual_seed(0)
    observation, after = (torch.randn(num_rows, *spaces.observation, generator=draws) for _ in range(2))
    reward, discount, weight = (torch.rand(num_rows, generator=draws) for _ in range(3))
    zeros = torch.zeros(num_rows, dtype=torch.int64)
    return TensorDataset(observation, zeros, reward, discount, after, weight, zeros.clone())


class PendingErrors(NamedTuple):
    """The errors of the rows of a step, which become priorities once it is done.

    Args:
        step: that step; -1: they are applied.
        number: of the rows, int64 [B].
        error: absolute, float64 [B].
    """

    step: int
    number: Numbers
    error: NDArray[np.float64]


class QNetwork(nn.Module):
    """A network that returns the value of each action; the value of an observation is the largest of them.

    Args:
        values: returns [N, A] for observations [N, ...].
    """

    def __init__(self, values: nn.Module) -> None:
        super().__init__()
        self.values = values

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of all actions [N, A], and the largest of each row [N]."""
        output = self.values(observation)
        return output, output.max(1).values


class EpsilonGreedy(Categorical):
    """The action of the largest value, or with probability epsilon any of them.

    Args:
        num_actions: A.
        epsilon: where none is given: that of the end of the run.
    """

    def __init__(self, num_actions: int, epsilon: float) -> None:
        super().__init__(num_actions)
        self.num_uniforms, self._num_actions, self._epsilon = 2, num_actions, epsilon

    def noise(self, uniforms: NDArray[np.float64], epsilon: float | None = None) -> NDArray[np.float64]:
        """Return [T, N, A]: infinity for an action that is taken whatever its value, and 0 elsewhere."""
        is_random = uniforms[..., 0] < (self._epsilon if epsilon is None else epsilon)
        chosen = (uniforms[..., 1] * self._num_actions).astype(np.int64)
        taken = chosen[..., None] == np.arange(self._num_actions)
        return np.where(is_random[..., None] & taken, np.inf, 0.0)

    def sample(self, output: PolicyOutput, noise: NDArray[np.float64] | None) -> NDArray[Any]:
        values = output.numpy()
        return (values if noise is None else values + noise).argmax(1)


def values_and_goals(model: nn.Module, target: nn.Module, rows: Transitions) -> tuple[Tensor, Tensor]:
    """Return the values of the actions taken, and their goals, float32 [N] each; the goals have no gradient.

    The present network chooses the next action, and the target network values it.
    """
    values, _ = model(torch.cat([rows.observation, rows.after]))
    present, following = values.chunk(2)
    taken = present.gather(1, rows.action[:, None]).squeeze(1)
    with torch.no_grad():
        best = following.argmax(1, keepdim=True)
        after = target(rows.after)[0].gather(1, best).squeeze(1)
        return taken, rows.reward + rows.discount * after


def dqn_loss(target: nn.Module) -> RowsLoss:
    """Return the loss of double DQN: Huber's, weighted by the importance of rows.

    Args:
        target: the target network.
    """

    def loss(model: nn.Module, rows: Any) -> Loss:
        taken, goal = values_and_goals(model, target, rows)
        total = (rows.weight * F.smooth_l1_loss(taken, goal, reduction="none")).sum()
        error = (taken - goal).detach().abs().sum()
        return Loss(total, len(taken), {"q": taken.detach().sum(), "td_error": error})

    return loss


class Replay(Rollouts):
    """The environments of one rank, the store of their rows, and the batch of each update.

    Args:
        recipe: of the run.
        make: makes an environment.
        spaces: of each environment.
        network: the Q-network, of which the target network is a copy.
        data: the rows of an update, which the loader reads; written in place.
    Attributes:
        num_rows: rows of the run so far, on all ranks.
        target: the target network.
    """

    def __init__(
        self,
        recipe: Recipe,
        make: MakeEnvironment,
        spaces: SpaceShapes,
        network: nn.Module,
        data: TensorDataset,
    ) -> None:
        if not spaces.num_actions:
            raise TaskError(
                "DQN needs discrete actions, and those of the environment are a box",
                where="rl.algorithm",
                next_step='set rl.algorithm = "ppo"',
            )
        self.dqn: DQNRecipe = recipe.rl.dqn
        super().__init__(
            recipe, make, spaces, EpsilonGreedy(spaces.num_actions, self.dqn.epsilon), None, network
        )
        self.batch = Transitions(*data.tensors)
        self.target = deepcopy(network).requires_grad_(False).eval()
        self._row = np.dtype(
            [
                ("observation", np.float32, spaces.observation),
                ("after", np.float32, spaces.observation),
                ("action", np.int64),
                ("reward", np.float64),
                ("terminated", np.bool_),
                ("truncated", np.bool_),
            ]
        )
        self.num_rows, self._shares = 0, False
        self._store: ExperienceStore | None = None
        self._tree, self._largest = SumTree(self.dqn.capacity), 1.0
        self._pending = PendingErrors(-1, np.empty(0, dtype=np.int64), np.empty(0))
        self._loaded: NDArray[Any] | None = None
        self.extra_states["replay"] = self

    @property
    def num_kept(self) -> int:
        """Return the rows that are in the store."""
        return min(self.num_rows, self.dqn.capacity)

    def before_step(self, session: Session) -> RolloutRecord | None:
        """Make the rows of the iterations that are due, and draw the batch of the step; collective."""
        step, records = session.state.step, list[RolloutRecord]()
        if self._store is None or self._loaded is not None:
            self._open_store(session)
        self._apply_errors(step)
        while self.episodes.iteration < self.settings.iteration_of(step):
            records.append(self.collect(session, self.episodes.iteration + 1))
        if step % self.dqn.target_every == 0:
            self.target.load_state_dict(session.complete().state_dict())
        self._draw_batch(step)
        if self.dqn.priority:
            self._pending = self._find_errors(session)
        return sum(records[1:], records[0]) if records else None

    # -- the rows

    def noise(self, environments: range, steps: range) -> NDArray[np.float64]:
        """Return the noise of actions, whose probability of a random one falls over the run."""
        rows = steps.start * self.settings.envs
        part = rows / max(1.0, self.dqn.epsilon_fraction * self.settings.total_steps)
        epsilon = 1.0 if rows < self.dqn.start else max(self.dqn.epsilon, 1 - part * (1 - self.dqn.epsilon))
        actions = cast("EpsilonGreedy", self.actions)
        return actions.noise(self.draw(environments, steps), epsilon)

    def _write_rows(self, groups: Sequence[GroupColumns], session: Session, record: RolloutRecord) -> None:
        """Write the rows of this rank's groups, or of all groups where no other rank writes here."""
        settings, world, first = self.settings, session.mesh.world, self.num_rows
        block = self.group_block(world.rank, world.size) if self._shares else range(settings.shards)
        record.sha256 = self._write_groups(groups, block, first)
        new = np.arange(first, first + settings.num_rows)
        self.num_rows += settings.num_rows
        if self.dqn.priority:
            self._tree.update(new % self.dqn.capacity, np.full(len(new), self._largest))
        if self._shares:
            try:
                session.sum(0.0)  # a barrier: all rows are written
            except CommunicationError:
                self._write_groups(groups, range(settings.shards), first)  # also those of a rank that is lost
                raise

    def _write_groups(self, groups: Sequence[GroupColumns], block: range, first: int) -> str:
        """Write the rows of some groups of an iteration, and return the hash of all its rows."""
        assert self._store is not None, "it is opened before the first rows"
        settings, digest = self.settings, hashlib.sha256()
        for number, columns in enumerate(groups):
            rows = np.zeros(columns.reward.shape, dtype=self._row)
            rows["observation"] = columns.observation
            following = np.concatenate([columns.observation[1:], columns.after])
            ended = columns.terminated | columns.truncated
            by_row = ended.reshape(*ended.shape, *([1] * len(self.spaces.observation)))
            rows["after"] = np.where(by_row, columns.final_observation, following)
            for name in ("action", "reward", "terminated", "truncated"):
                rows[name] = getattr(columns, name)
            digest.update(rows.tobytes())
            if number in block:
                steps = np.arange(settings.steps)[:, None] * settings.envs
                members = number * settings.group_size + np.arange(settings.group_size)
                self._store.write((first + steps + members).reshape(-1), rows.reshape(-1))
        return digest.hexdigest()

    def _draw_batch(self, step: int) -> None:
        """Draw rows with keyed numbers, and write them to the data of the step."""
        draws = keyed_uniforms(self.recipe.seed, "replay", range(1), range(step, step + 1), self.dqn.batch)
        uniforms, newest = draws.reshape(-1), self.num_rows - 1
        if not self.dqn.priority:
            numbers = newest - (uniforms * self.num_kept).astype(np.int64)
            weight = np.ones(len(numbers))
        else:
            strata = (np.arange(len(uniforms)) + uniforms) / len(uniforms)
            places = self._tree.find(strata)
            numbers = newest - (newest - places) % self.dqn.capacity
            weight = self._weights(places, step)
        reward, discount, after, first = self._n_steps(numbers)
        observation, after = map(self.normalizers.observations, (first["observation"], after))
        reward = self.normalizers.rewards(reward)
        written = (observation, first["action"], reward, discount, after, weight, numbers)
        for column, value in zip(self.batch, written, strict=True):
            column.copy_(torch.from_numpy(np.ascontiguousarray(value)))

    def _weights(self, places: Numbers, step: int) -> NDArray[np.float64]:
        """Return the importance of rows, (N P)^-beta over the largest; beta grows to 1 over the run."""
        beta = self.dqn.beta + (1 - self.dqn.beta) * step / self.settings.num_updates
        kept = self._tree.priorities[: self.num_kept]
        return (self._tree.priorities[places] / kept.min()) ** -beta

    def _n_steps(
        self, numbers: Numbers
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float32], NDArray[Any]]:
        """Return reward, discount and the observation after n steps, and the first row, of some rows.

        A row after which fewer steps are in the store, or in its episode, has those.
        """
        assert self._store is not None, "it is opened before the first rows"
        rows = first = self._store.require(numbers)
        reward, discount = rows["reward"].copy(), np.full(len(rows), self.dqn.gamma)
        after, open_rows = rows["after"].copy(), ~(rows["terminated"] | rows["truncated"])
        is_terminated = rows["terminated"].copy()
        for k in range(1, self.dqn.n_step):
            following = numbers + k * self.settings.envs
            chosen = np.flatnonzero(open_rows & (following < self.num_rows))
            rows = self._store.require(following[chosen])
            reward[chosen] += self.dqn.gamma**k * rows["reward"]
            discount[chosen] *= self.dqn.gamma
            after[chosen], is_terminated[chosen] = rows["after"], rows["terminated"]
            open_rows[chosen] = ~(rows["terminated"] | rows["truncated"])
        return reward, np.where(is_terminated, 0.0, discount), after, first

    def _find_errors(self, session: Session) -> PendingErrors:
        """Return the errors of all rows of the batch, in one shape on every rank; collective.

        They are computed before the step and not taken from its losses: so a rank that is lost in the step
        takes none with it.
        """
        model, device = session.complete(), session.runner.sharded_model.device
        rows = Transitions(*(column.to(device) for column in self.batch))
        with evaluating(model), torch.no_grad():
            taken, goal = values_and_goals(model, self.target, rows)
        error = (taken - goal).abs().double().cpu().numpy()
        return PendingErrors(session.state.step, self.batch.number.numpy().copy(), error)

    def _apply_errors(self, step: int) -> None:
        """Set the priorities of the rows of the last step; none if the present one is repeated."""
        pending = self._pending
        if not 0 <= pending.step < step:
            return
        self._pending = pending._replace(step=-1)
        priority = (pending.error + _SMALLEST_PRIORITY) ** self.dqn.priority
        # A row that was drawn twice has the same error twice, up to the rounding of its place in the batch.
        order = np.lexsort((priority, pending.number))
        last = np.append(np.diff(pending.number[order]) != 0, True)
        chosen = order[last]
        self._tree.update(pending.number[chosen] % self.dqn.capacity, priority[chosen])
        self._largest = max(self._largest, float(priority.max()))

    def _open_store(self, session: Session) -> None:
        """Open the store in memory of this host if all ranks are on it, and write the rows of a state."""
        world, capacity = session.mesh.world, self.dqn.capacity
        memory, links = None, None
        if world.size > 1:
            links = connect_single_host_group(world, session.net)
        if links is not None:
            shared = SharedMemoryCollective(session.net, world, links)
            size = ExperienceStore.num_bytes(self._row, capacity)
            memory = shared.allocate_shared_once(size, torch.empty(0, dtype=torch.uint8)).numpy()
        self._store, self._shares = ExperienceStore(self._row, capacity, memory), links is not None
        if self._loaded is not None and (world.rank == 0 or not self._shares):
            first = self.num_rows - self.num_kept
            self._store.write(np.arange(first, self.num_rows), self._loaded)
        self._loaded = None
        self.target.to(session.runner.sharded_model.device)
        session.sum(0.0)  # a barrier: the memory of a rank that has not mapped it is kept open until then
        if links is not None:
            links.close()

    # -- state

    def pieces(self) -> list[TensorPiece]:
        """Return the rows in the order of their numbers, their priorities, and the target network."""
        tensors = {f"target/{name}": value for name, value in self.target.state_dict().items()}
        tensors["count"] = torch.tensor([self.num_rows])
        if self._loaded is not None or (self._store is not None and self.num_rows):
            rows = self._loaded if self._loaded is not None else self._kept_rows()
            tensors["rows"] = torch.from_numpy(rows.view(np.uint8).reshape(len(rows), -1).copy())
        if self.dqn.priority:
            tensors["priorities"] = torch.from_numpy(self._tree.priorities.copy())
            tensors["largest"] = torch.tensor([self._largest], dtype=torch.float64)
            tensors["pending/step"] = torch.tensor([self._pending.step])
            tensors["pending/number"] = torch.from_numpy(self._pending.number.copy())
            tensors["pending/error"] = torch.from_numpy(self._pending.error.copy())
        # A tensor without values has no box that a rank could hold.
        return [
            TensorPiece(TensorSlot.whole(name, value), value)
            for name, value in tensors.items()
            if value.numel()
        ]

    def _kept_rows(self) -> NDArray[Any]:
        assert self._store is not None, "there are rows"
        return self._store.require(np.arange(self.num_rows - self.num_kept, self.num_rows))

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        return dict.fromkeys(shapes, ())

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `pieces` returned; a state of weights alone has none of it."""
        if "count" not in tensors:
            return
        self.num_rows = int(tensors["count"])
        self.target.load_state_dict(
            {
                name.removeprefix("target/"): value
                for name, value in tensors.items()
                if name.startswith("target/")
            }
        )
        if "rows" in tensors:
            self._loaded = tensors["rows"].numpy().copy().reshape(-1).view(self._row)
        if self.dqn.priority and "priorities" in tensors:
            self._tree = SumTree(self.dqn.capacity)
            self._tree.update(np.arange(self.dqn.capacity), tensors["priorities"].numpy())
            self._largest = float(tensors["largest"])
        if "pending/number" in tensors:
            number, error = (tensors[f"pending/{name}"].numpy().copy() for name in ("number", "error"))
            self._pending = PendingErrors(int(tensors["pending/step"]), number, error)
