"""Ray Tune chooses, Paceline trains: `pip install "ray[tune]"`, then `python examples/ray_tune.py`.

Each trial is an ordinary run of two processes in a folder of its own: `paceline report` and `paceline verify`
accept it. What Ray Tune proposes depends on the order in which its trials end; `paceline tune` proposes the
same trials with any number of workers.
"""

import sys
from pathlib import Path

import ray
from ray import tune

import paceline

RUNS = Path("ray-tune-runs").resolve()


def train(values: dict[str, float]) -> None:
    """Train with the values of one trial, and report the loss on held-out images."""
    recipe = paceline.Recipe(task="digits", epochs=2, optimizer={"lr": values["lr"]})
    folder = RUNS / f"lr-{values['lr']:.6f}"
    result = paceline.train(recipe.replace(run_dir=str(folder)), processes=2)
    tune.report({"loss": result.evaluation.loss})


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    search = {"lr": tune.loguniform(1e-4, 1e-1)}
    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    config = tune.TuneConfig(metric="loss", mode="min", num_samples=trials, max_concurrent_trials=1)
    best = tune.Tuner(train, param_space=search, tune_config=config).fit().get_best_result()
    print(f"best: lr {best.config['lr']:.6f}  loss {best.metrics['loss']:.4f}")
