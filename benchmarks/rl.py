"""PPO on CartPole-v1: steps of environments per CPU second, next to a loop like CleanRL's and to peers.

All have the settings of CleanRL: 8 environments, 128 steps, 4 epochs of 4 minibatches, networks of 64 x 64,
one thread. Peers that are not installed are left out. Each runs in turn, and the best of three is kept.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from paceline.recipe import Recipe
from paceline.session.train_rank import train

ENVS, STEPS, EPOCHS, MINIBATCHES = 8, 128, 4, 4
TURNS = 3


def main() -> int:
    """Print a line for each library."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    iterations = 2 if parser.parse_args().quick else 16
    torch.set_num_threads(1)
    runs: dict[str, Callable[[int], None]] = {
        "Paceline": paceline,
        "Paceline, reproducible": lambda n: paceline(n, reproducible=True),
        "a loop like CleanRL's": plain_loop,
    }
    try:
        import stable_baselines3  # noqa: F401
    except ImportError:
        print("Stable-Baselines3 is not installed, so it is left out")
    else:
        runs["Stable-Baselines3"] = stable_baselines
    best: dict[str, float] = {}
    for _ in range(1 if iterations == 2 else TURNS):
        for name, run in runs.items():
            best[name] = max(best.get(name, 0.0), rate(run, iterations))
    reference = best["a loop like CleanRL's"]
    print(f"{'':24}  steps per CPU second  times the loop")
    for name, steps in best.items():
        print(f"{name:24}  {steps:>20,.0f}  {steps / reference:>14.2f}")
    return 0


def rate(run: Callable[[int], None], iterations: int) -> float:
    """Return the steps per CPU second of some iterations, without the start: two lengths are compared."""

    def seconds(count: int) -> float:
        began = time.process_time()
        run(count)
        return time.process_time() - began

    short = seconds(1)
    return iterations * ENVS * STEPS / (seconds(iterations + 1) - short)


def paceline(iterations: int, *, reproducible: bool = False) -> None:
    """Train with Paceline in this process."""
    with tempfile.TemporaryDirectory() as folder:
        train(
            Recipe(
                task="rl",
                reproducible=reproducible,
                rl={
                    "env": "CartPole-v1",
                    "envs": ENVS,
                    "shards": 2,
                    "steps": STEPS,
                    "total_steps": iterations * ENVS * STEPS,
                    "check": False,
                    "ppo": {"epochs": EPOCHS, "minibatches": MINIBATCHES, "gamma": 0.99, "gae": 0.95},
                },
                batch={"shards": 2 if reproducible else 1},
                optimizer={"name": "adam", "lr": 2.5e-4, "eps": 1e-5, "clip_norm": 0.5},
                run_dir=str(Path(folder) / "run"),
            )
        )


def plain_loop(iterations: int) -> None:
    """Train as CleanRL's ppo.py does, with its vectorized environments and its distributions."""
    environments = gymnasium.vector.SyncVectorEnv(
        [lambda: gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))] * ENVS
    )
    actor, critic = network(2, 0.01), network(1, 1.0)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=2.5e-4, eps=1e-5)
    seen, done = torch.Tensor(environments.reset(seed=1)[0]), torch.zeros(ENVS)
    for _ in range(iterations):
        rows = [torch.zeros(STEPS, ENVS, *shape) for shape in ((4,), (), (), (), (), ())]
        observations, actions, log_probs, rewards, dones, values = rows
        for step in range(STEPS):
            observations[step], dones[step] = seen, done
            with torch.no_grad():
                policy = Categorical(logits=actor(seen))
                action = policy.sample()
                values[step] = critic(seen).flatten()
            actions[step], log_probs[step] = action, policy.log_prob(action)
            after, reward, terminated, truncated, _ = environments.step(action.numpy())
            rewards[step] = torch.tensor(reward)
            seen, done = torch.Tensor(after), torch.Tensor(np.logical_or(terminated, truncated))
        with torch.no_grad():
            advantages, last, following = torch.zeros_like(rewards), 0.0, critic(seen).flatten()
            for step in reversed(range(STEPS)):
                goes_on = 1.0 - (done if step == STEPS - 1 else dones[step + 1])
                error = rewards[step] + 0.99 * following * goes_on - values[step]
                advantages[step] = last = error + 0.99 * 0.95 * goes_on * last
                following = values[step]
        flat = [x.reshape(-1, *x.shape[2:]) for x in (*rows, advantages, advantages + values)]
        learn(actor, critic, parameters, optimizer, flat)
    environments.close()


def learn(
    actor: nn.Module,
    critic: nn.Module,
    parameters: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    flat: list[torch.Tensor],
) -> None:
    """Make the updates of an iteration."""
    observations, actions, log_probs, _, _, values, advantages, returns = flat
    indices = np.arange(ENVS * STEPS)
    for _ in range(EPOCHS):
        np.random.shuffle(indices)
        for part in np.split(indices, MINIBATCHES):
            policy = Categorical(logits=actor(observations[part]))
            ratio = (policy.log_prob(actions[part]) - log_probs[part]).exp()
            with torch.no_grad():
                ((ratio - 1) - ratio.log()).mean()
                ((ratio - 1).abs() > 0.2).float().mean().item()
            advantage = advantages[part]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            policy_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
            value = critic(observations[part]).flatten()
            clipped = values[part] + (value - values[part]).clamp(-0.2, 0.2)
            errors = torch.max((value - returns[part]) ** 2, (clipped - returns[part]) ** 2)
            loss = policy_loss - 0.01 * policy.entropy().mean() + 0.25 * errors.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()


def network(num_outputs: int, gain: float) -> nn.Sequential:
    """Return a network of 64 x 64 with tanh."""
    layers = [nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, num_outputs)]
    for layer, scale in zip(layers, (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def stable_baselines(iterations: int) -> None:
    """Train with Stable-Baselines3 and the same settings."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    environments = make_vec_env("CartPole-v1", n_envs=ENVS)
    size = ENVS * STEPS // MINIBATCHES
    model = PPO("MlpPolicy", environments, n_steps=STEPS, batch_size=size, n_epochs=EPOCHS, device="cpu")
    model.learn(iterations * ENVS * STEPS)


if __name__ == "__main__":
    sys.exit(main())
