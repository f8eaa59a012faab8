"""PPO on CartPole-v1: steps of environments per CPU second, next to a loop like CleanRL's and to peers.

All have the settings of CleanRL: 8 environments, 128 steps, 4 epochs of 4 minibatches, networks of 64 x 64,
one thread. Peers that are not installed are left out. Each runs in turn, and the best of three is kept.
Then numbers and ages of actors, with an environment whose step takes longer; `--actors`: only these.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from paceline.recipe import Recipe
from paceline.recipe.recipe import to_toml
from paceline.session.train_rank import train

ENVS, STEPS, EPOCHS, MINIBATCHES = 8, 128, 4, 4
TURNS = 3
MICROSECONDS = 200
SLOWER = 5
ENVIRONMENT = """
import os, time
import gymnasium

class Slow(gymnasium.Wrapper):
    is_slow = os.environ.get("RANK") == os.environ["SLOW"]
    seconds = float(os.environ["STEP_SECONDS"]) * (5 if is_slow else 1)

    def step(self, action):
        if os.environ["HOW"] == "waits":
            time.sleep(self.seconds)
        else:
            end = time.thread_time() + self.seconds
            while time.thread_time() < end:
                pass
        return self.env.step(action)

def make():
    return Slow(gymnasium.make("CartPole-v1", disable_env_checker=True))
"""


def main() -> int:
    """Compare libraries, and then actors."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--actors", action="store_true")
    options = parser.parse_args()
    if not options.actors:
        compare_libraries(2 if options.quick else 16)
    compare_actors(4 if options.quick else 24)
    return 0


def compare_libraries(iterations: int) -> None:
    """Print a line for each library."""
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


def compare_actors(iterations: int) -> None:
    """Print a line for each number and age of actors, with an environment whose step takes longer."""
    print(f"\nCartPole-v1 with {MICROSECONDS} us more for each step: it waits, as for a simulator elsewhere,")
    print("or it computes. 32 environments in 8 groups, 32 steps. Steps per second of wall time:")
    for how in ("waits", "computes"):
        one, two = (actor_rate(iterations, number, "", how, epochs=2)[0] for number in ("1", "2"))
        print(
            f"every rank acts and learns, a step that {how:8}: 1 rank {one:>6,.0f}, 2 ranks {two:>6,.0f},"
            f" {two / one:.2f} times",
            flush=True,
        )
    base = 0.0
    for age in (0, 1, 2):
        steps, recent = actor_rate(iterations, "3", "servers=1 sync=actors", "waits", age=age, slow="1")
        base = base or steps
        print(
            f"rank 0 learns, two actors, one {SLOWER} times slower, age = {age}: {steps:>6,.0f}, "
            f" {steps / base:.2f} times, return {recent:.1f}",
            flush=True,
        )


def actor_rate(
    iterations: int,
    processes: str,
    strategy: str,
    how: str,
    *,
    epochs: int = 10,
    age: int = 0,
    slow: str = "",
) -> tuple[float, float]:
    """Return the steps per second of a run, and the mean return of its last episodes."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "slow.py").write_text(ENVIRONMENT)
        rl: dict[str, Any] = {
            "env": "slow.py:make",
            "envs": 32,
            "shards": 8,
            "steps": 32,
            "total_steps": iterations * 32 * 32,
            "age": age,
            "check": False,
            "ppo": {"epochs": epochs, "minibatches": 4},
        }
        chosen = Recipe(
            task="rl", rl=rl, batch={"shards": 2}, optimizer={"name": "adam", "lr": 1e-3}, run_dir="run"
        )
        (home / "recipe.toml").write_text(to_toml(chosen))
        command = [sys.executable, "-m", "paceline", "train", "recipe.toml", "-n", processes]
        command += ["--strategy", strategy] if strategy else []
        variables = {"HOW": how, "STEP_SECONDS": str(MICROSECONDS * 1e-6), "SLOW": slow}
        done = subprocess.run(
            command, cwd=home, env=os.environ | variables, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        lines = (home / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    per_iteration = epochs * 4
    steps = [r for r in records if r["event"] == "step" and r["step"] + 1 >= 2 * per_iteration]
    rows = (steps[-1]["step"] - steps[0]["step"]) * 1024 / per_iteration
    recent = [r["recent_return"] for r in records if r["event"] == "rollout"][-1]
    return rows / (steps[-1]["time"] - steps[0]["time"]), recent


if __name__ == "__main__":
    sys.exit(main())
