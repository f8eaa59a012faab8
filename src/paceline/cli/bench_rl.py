"""`paceline bench rl`: steps per second of an environment, rollouts and learner, by number of actors.

Rollouts and learner are measured in real runs of a few iterations, whose metrics have the seconds of each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from paceline.cli import common_options
from paceline.cli.console import print_json, print_plain
from paceline.errors import WorkerError

if TYPE_CHECKING:
    from paceline.recipe.recipe import Recipe

_ENVIRONMENT_SECONDS = 2.0
_RUN_SECONDS = 600.0
_WARM_UP_ITERATIONS = 1


class ActorRates(NamedTuple):
    """Steps of environments per second of one run.

    Args:
        actors: number of processes.
        rollout: of policy, environments and the exchange of rows.
        learner: of the updates on the same rows.
        total: of both, one after another.
    """

    actors: int
    rollout: float
    learner: float
    total: float

    def efficiency(self, one: ActorRates) -> float:
        """Return the steps per second of an actor over those of one alone."""
        return self.total / (self.actors * one.total)

    @property
    def bottleneck(self) -> str:
        """Return which of both takes more time."""
        return "rollout" if self.rollout < self.learner else "learner"


def bench_rl(
    environment: Annotated[str, typer.Argument(metavar="ENV", help='A Gymnasium id, or "file.py:make".')],
    iterations: Annotated[int, typer.Option(min=2, help="Iterations of each run.")] = 6,
    actors: Annotated[int, typer.Option(min=0, help="Most actors; 0: as many as there are cores.")] = 0,
    settings: common_options.Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure steps per second of an environment, rollouts and the learner, for 1, 2, 4, ... actors."""
    from paceline.job.cpu_count import find_cores
    from paceline.recipe.recipe import Recipe, to_toml
    from paceline.recipe.recipe_loading import load_recipe

    most = actors or find_cores().number
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        path = Path(folder) / "recipe.toml"
        shared: Any = {"shards": 4}
        first: Any = {"env": _absolute(environment), "total_steps": 32 * 64}
        path.write_text(to_toml(Recipe(task="rl", rl=first, batch=shared)), encoding="utf-8")
        recipe = load_recipe(path, settings or ())
        length = [f"rl.total_steps={iterations * recipe.rl.num_rows}", *(settings or ())]
        recipe = load_recipe(path, length)
        alone, counts = measure_environment(recipe), [1]
        while 2 * counts[-1] <= min(most, recipe.rl.shards):
            counts.append(2 * counts[-1])
        rates = [_measure_run(path, length, count, Path(folder) / f"run-{count}") for count in counts]
    if as_json:
        print_json(
            {
                "env": environment,
                "environment": alone,
                "runs": [
                    {
                        **rate._asdict(),
                        "efficiency": rate.efficiency(rates[0]),
                        "bottleneck": rate.bottleneck,
                    }
                    for rate in rates
                ],
            }
        )
        return
    print_plain(f"{environment} alone, random actions, one process: {alone:,.0f} steps/s")
    print_plain("actors  rollout steps/s  learner steps/s  both steps/s  times one  efficiency  bottleneck")
    for rate in rates:
        times = rate.total / rates[0].total
        print_plain(
            f"{rate.actors:>6}  {rate.rollout:>15,.0f}  {rate.learner:>15,.0f}  {rate.total:>12,.0f}"
            f"  {times:>9.2f}  {rate.efficiency(rates[0]):>10.2f}  {rate.bottleneck}"
        )


def _absolute(environment: str) -> str:
    """Return a file of the working directory with its whole path, since the recipe lies elsewhere."""
    return str(Path.cwd() / environment) if ".py:" in environment else environment


def measure_environment(recipe: Recipe) -> float:
    """Return the steps per second of one environment of a recipe, with random actions and its resets."""
    from paceline.rl.environments import find_environment

    environment = find_environment(str(recipe.rl.env), Path.cwd())()
    environment.reset(seed=0)
    environment.action_space.seed(0)
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < _ENVIRONMENT_SECONDS:
        for _ in range(10):
            _, _, terminated, truncated, _ = environment.step(environment.action_space.sample())
            if terminated or truncated:
                environment.reset()
            steps += 1
    environment.close()
    return steps / (time.perf_counter() - began)


def _measure_run(path: Path, length: list[str], actors: int, folder: Path) -> ActorRates:
    """Train for a few iterations on some processes, and read the seconds of rollouts and updates."""
    words = ["train", str(path), "-n", str(actors), "--set", f"run_dir={folder}"]
    words += [word for setting in length for word in ("--set", setting)]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words], capture_output=True, timeout=_RUN_SECONDS, check=False
    )
    if done.returncode:
        raise WorkerError(
            f"the run on {actors} processes failed:\n{done.stderr.decode(errors='replace')[-2000:]}",
            next_step=f"run it alone: paceline {' '.join(words)}",
        )
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return read_rates(actors, [json.loads(line) for line in lines])


def read_rates(actors: int, records: list[Mapping[str, Any]]) -> ActorRates:
    """Return the rates of a run from its metrics, without its first iteration."""
    rollouts = [record for record in records if record["event"] == "rollout"]
    begin = rollouts[_WARM_UP_ITERATIONS]["step"]
    kept = rollouts[_WARM_UP_ITERATIONS:]
    rows = sum(sum(record["ages"].values()) for record in kept)
    acting = sum(sum(record["seconds"].values()) for record in kept)
    steps = [record for record in records if record["event"] == "step" and record["step"] >= begin]
    learning = sum(record["seconds"] for record in steps)
    return ActorRates(actors, rows / acting, rows / learning, rows / (acting + learning))
