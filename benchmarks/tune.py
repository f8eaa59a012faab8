"""Searches: what the coordinator costs, what samplers find, and what halving saves on digits.

The coordinator is measured with a function in place of trainings, after a thousand trials, next to Optuna's
own `ask` and `tell` in memory. Standard functions have 40 trials in batches of four. Halving trains the
digits, once with rungs and once to the end, on the same proposals. The start of a trial is from its lease to
its first step, next to a process for each trial that asks Optuna and trains with plain PyTorch. A study of
digits runs with one, two and three workers.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import paceline
from benchmarks.report import Options, Report, Table, present
from paceline.recipe import Recipe
from paceline.search import plan_study, summarize_study
from paceline.search.samplers import DistinctProposals, Observation, build_sampler
from paceline.search.space import Dimension, Space, StudyPlan

_TRIALS, _BATCH = 40, 4
_BRANIN = (5.1 / (4 * math.pi**2), 5 / math.pi, 1 / (8 * math.pi))


def _branin(x: Sequence[float]) -> float:
    a, b = x
    return (b - _BRANIN[0] * a * a + _BRANIN[1] * a - 6) ** 2 + 10 * (1 - _BRANIN[2]) * math.cos(a) + 10


def _ackley(x: Sequence[float]) -> float:
    mean_square = statistics.fmean(v * v for v in x)
    mean_cosine = statistics.fmean(math.cos(2 * math.pi * v) for v in x)
    return 20 - 20 * math.exp(-0.2 * math.sqrt(mean_square)) + math.e - math.exp(mean_cosine)


def _rosenbrock(x: Sequence[float]) -> float:
    return sum(100 * (b - a * a) ** 2 + (1 - a) ** 2 for a, b in pairwise(x))


def _sphere(x: Sequence[float]) -> float:
    return sum((v - 1) ** 2 for v in x)


def _styblinski(x: Sequence[float]) -> float:
    return sum(v**4 - 16 * v * v + 5 * v for v in x) / 2 + 39.16617 * len(x)


FUNCTIONS: Mapping[str, tuple[Callable[[Sequence[float]], float], float, Sequence[tuple[float, float]]]] = {
    "Branin": (_branin, 0.397887, [(-5.0, 10.0), (0.0, 15.0)]),
    "Ackley, 2 dimensions": (_ackley, 0.0, [(-5.0, 5.0)] * 2),
    "Rosenbrock, 2": (_rosenbrock, 0.0, [(-2.0, 2.0)] * 2),
    "sphere, 4": (_sphere, 0.0, [(-5.0, 5.0)] * 4),
    "Styblinski-Tang, 3": (_styblinski, 0.0, [(-5.0, 5.0)] * 3),
}
"""Function, minimum and bounds by name."""


def regret(name: str, search: str, seed: int, trials: int = _TRIALS) -> float:
    """Return the best value of a search minus the minimum."""
    function, minimum, bounds = FUNCTIONS[name]
    space = Space(tuple(Dimension(f"x{i}", "range", low, high) for i, (low, high) in enumerate(bounds)))
    plan = plan_study(
        {
            "study": {"objective": "value", "search": search, "seed": seed},
            "space": {"optimizer.lr": {"log": [0.1, 1.0]}},
        }
    )
    sampler = DistinctProposals(space, build_sampler(StudyPlan(plan.file, plan.objective, space, {})), seed)
    best = math.inf
    for first in range(0, trials, _BATCH):
        results = []
        for number, params in enumerate(sampler.propose(first, _BATCH), first):
            value = function(list(params.values()))
            best = min(best, value)
            results.append(Observation(number, params, "complete", value))
        sampler.observe(results)
    return best - minimum


def measure_functions(searches: Sequence[str], seeds: int) -> tuple[Table, dict[str, Any]]:
    """Compare median regrets with those of random search, paired by function and seed."""
    from scipy.stats import wilcoxon

    found = {
        search: {name: [regret(name, search, seed) for seed in range(1, seeds + 1)] for name in FUNCTIONS}
        for search in ("random", *searches)
    }
    rows = [
        [name, *(f"{statistics.median(found[search][name]):.4g}" for search in found)] for name in FUNCTIONS
    ]
    remarks = []
    for search in searches:
        pairs = [
            (math.log10(a + 1e-12), math.log10(b + 1e-12))
            for name in FUNCTIONS
            for a, b in zip(found[search][name], found["random"][name], strict=True)
        ]
        test = wilcoxon(*zip(*pairs, strict=True), alternative="less")
        remarks.append(f"{search} below random: p = {test.pvalue:.2g} (Wilcoxon, {len(pairs)} pairs)")
    title = f"median regret after {_TRIALS} trials in batches of {_BATCH}, {seeds} seeds"
    return Table(title, ["function", *found], rows, remarks), {"regret": found}


_SPACE = {
    "optimizer.lr": {"log": [1e-4, 1e-1]},
    "optimizer.weight_decay": {"range": [0.0, 0.1]},
    "batch.size": {"choice": [32, 64, 128]},
}


def measure_coordinator(before: int, counted: int) -> tuple[Table, dict[str, Any]]:
    """Measure the CPU time of a trial, from proposal to the observed result, after many trials."""
    marks: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        paceline.tune(
            Recipe(task="digits", steps=10),
            {"study": {"objective": "value", "search": "tpe"}, "space": _SPACE},
            objective=lambda recipe: math.log10(recipe.optimizer.lr) ** 2,
            trials=before + counted,
            out=folder,
            log=lambda line: marks.append(time.process_time()),
        )
    ours = 1e3 * (marks[-1] - marks[before - 1]) / counted
    peer = _optuna_alone(before, counted)
    rows = [["paceline tune, log on disk", f"{ours:.2f}"], ["Optuna in memory", f"{peer:.2f}"]]
    title = f"CPU ms per trial after {before} trials, TPE, {len(_SPACE)} keys"
    return Table(title, ["", "ms"], rows), {"coordinator_ms": ours, "optuna_ms": peer}


def _optuna_alone(before: int, counted: int) -> float:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1))
    kinds = optuna.distributions
    space = {
        "lr": kinds.FloatDistribution(1e-4, 1e-1, log=True),
        "weight_decay": kinds.FloatDistribution(0.0, 0.1),
        "size": kinds.CategoricalDistribution([32, 64, 128]),
    }
    begin = 0.0
    for number in range((before + counted) // _BATCH):
        if number == before // _BATCH:
            begin = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trials = [study.ask(space) for _ in range(_BATCH)]
        for trial in trials:
            study.tell(trial, math.log10(trial.params["lr"]) ** 2)
    return 1e3 * (time.process_time() - begin) / counted


def measure_halving(seeds: int, trials: int, epochs: int) -> tuple[Table, dict[str, Any]]:
    """Train the digits with halving and to the end, and compare samples and the best value."""
    rows, data = [], []
    for seed in range(1, seeds + 1):
        found = {}
        for rule in ("none", "halving"):
            stop = {"rule": rule, "first": "epochs:1", "keep": 0.25} if rule == "halving" else {"rule": rule}
            with tempfile.TemporaryDirectory() as folder:
                study = paceline.tune(
                    Recipe(task="digits", epochs=epochs, options={"hidden": [32]}, seed=seed),
                    {
                        "study": {
                            "objective": "validation loss",
                            "search": "random",
                            "proposals": 8,
                            "seed": seed,
                        },
                        "stop": stop,
                        "space": {
                            "optimizer.lr": {"log": [1e-4, 1e-1]},
                            "batch.size": {"choice": [32, 64, 128]},
                        },
                    },
                    trials=trials,
                    workers=2,
                    out=folder,
                )
                best = study.best
                found[rule] = (best.value if best else math.nan, summarize_study(study).saved or 0.0)
        whole, halved = found["none"][0], found["halving"][0]
        factor = 1 / (1 - found["halving"][1])
        rows.append([str(seed), f"{whole:.4g}", f"{halved:.4g}", f"{factor:.2f}"])
        data.append({"seed": seed, "whole": whole, "halving": halved, "factor": factor})
    columns = ["seed", "best, to the end", "best, halving", "times less samples"]
    return Table(f"digits, {trials} trials of {epochs} epochs", columns, rows), {"halving": data}


_ONE_STEP = """
import sys, time
import torch
from sklearn.datasets import load_digits
pixels, classes = load_digits(return_X_y=True)
x, y = torch.tensor(pixels[:32] / 16, dtype=torch.float32), torch.tensor(classes[:32])
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
torch.nn.functional.cross_entropy(model(x), y).backward()
optimizer.step()
print(time.time())
"""


def _study_of_digits(
    folder: Path, trials: int, workers: int, epochs: int, proposals: int
) -> tuple[float, list[Any]]:
    """Run a study; returns its seconds, and its trials."""
    begin = time.perf_counter()
    study = paceline.tune(
        Recipe(task="digits", epochs=epochs),
        {
            "study": {"objective": "validation loss", "search": "random", "proposals": proposals},
            "space": {"optimizer.lr": {"log": [1e-4, 1e-1]}, "batch.size": {"choice": [32, 64]}},
        },
        trials=trials,
        workers=workers,
        out=folder,
    )
    return time.perf_counter() - begin, [[trial.params, trial.value] for trial in study.trials]


def _seconds_to_first_step(study: Path) -> list[float]:
    """Return the seconds from the lease of each trial to its first step."""
    found = []
    for line in (study / "leases.jsonl").read_text().splitlines():
        lease = json.loads(line)
        if lease["event"] != "lease":
            continue
        records = map(json.loads, (study / lease["run"] / "metrics.jsonl").read_text().splitlines())
        found.append(next(one["time"] for one in records if one["event"] == "step") - lease["at"])
    return found


def measure_start(trials: int) -> tuple[Table, dict[str, Any]]:
    """Measure how long a trial takes from its lease to its first step, beside a process for each trial."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        _study_of_digits(Path(folder), trials, 1, 1, 1)
        ours = _seconds_to_first_step(Path(folder))
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    peer = []
    for _ in range(trials):
        begin = time.time()
        rate = study.ask().suggest_float("lr", 1e-4, 1e-1, log=True)
        done = subprocess.run(
            [sys.executable, "-c", _ONE_STEP, str(rate)],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        peer.append(float(done.stdout) - begin)
    rows = [
        [name, f"{statistics.median(values):.2f}", f"{min(values):.2f}", f"{max(values):.2f}"]
        for name, values in (("paceline tune", ours), ("Optuna, one process per trial", peer))
    ]
    title = f"seconds to the first step of a trial of the digits, {trials} trials"
    return Table(title, ["", "median", "least", "most"], rows), {"start": {"ours": ours, "optuna": peer}}


def measure_workers(trials: int, epochs: int) -> tuple[Table, dict[str, Any]]:
    """Run one study with one, two and three workers, and compare its trials and its time."""
    rows, data = [], []
    lists = []
    for workers in (1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            seconds, found = _study_of_digits(Path(folder), trials, workers, epochs, 8)
        lists.append(found)
        data.append({"workers": workers, "seconds": seconds, "equal": found == lists[0]})
        ratio = data[0]["seconds"] / seconds
        equal = "yes" if found == lists[0] else "NO"
        rows.append([str(workers), f"{seconds:.1f}", f"{ratio:.2f}", equal])
    columns = ["workers", "seconds", "of one worker", "equal trials and values"]
    return Table(f"digits, {trials} trials of {epochs} epochs, proposals = 8", columns, rows), {
        "workers": data
    }


def measure(options: Options) -> Report:
    """Measure all five."""
    quick = options.quick
    parts = [
        measure_start(3 if quick else 10),
        measure_workers(*((4, 1) if quick else (32, 8))),
        measure_coordinator(*((20, 20) if quick else (1000, 100))),
        measure_functions(("tpe",) if quick else ("tpe", "gp"), 2 if quick else 10),
        measure_halving(*((1, 8, 2) if quick else (5, 16, 16))),
    ]
    data = {name: value for _, values in parts for name, value in values.items()}
    question = "What does a study cost, what do its searches find, and what does halving save?"
    return Report(question, [table for table, _ in parts], data)


if __name__ == "__main__":
    present(measure, __doc__ or "")
