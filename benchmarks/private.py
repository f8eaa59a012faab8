"""DP-SGD of the digits by Paceline (`private.unit = "sample"`) and by Opacus: speed, accuracy, epsilon.

One thread. Both draw Poisson batches, clip the gradient of each sample, add noise to the sum, divide it by
the expected batch, and step with plain SGD.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks.measure import Series, Side, compare, take_turns
from benchmarks.opacus_peer import MODES, OpacusRun, epsilons_of_opacus
from benchmarks.report import Options, Report, Table, blocks, present, series_data
from paceline.job.cluster import Cluster
from paceline.models import MLP
from paceline.privacy.accountant import NoisyRelease, name_accountant, to_event
from paceline.recipe import Recipe
from paceline.session import build_session
from paceline.session.private_training import open_ledger
from paceline.task import Loss, Task
from paceline.tasks.digits import load_digits

SAMPLES, EXPECTED, NOISE, CLIP, RATE, DELTA = 1440, 144, 1.5, 1.0, 0.5, 1e-5
"""Opacus's probability is one over the number of batches, so the expected batch divides the samples."""
STEPS = 300
_FEW_NOISE = 1e-6


def build_mlp() -> nn.Module:
    """MLP 64-128-10."""
    return MLP(64, (128,), 10)


def build_convolutions() -> nn.Module:
    """Three convolutions of 16, 32 and 32 channels with GroupNorm, 17 thousand parameters."""
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
    for inputs, outputs in ((1, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if inputs == 16 else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP 64-128-10": build_mlp,
    "three convolutions with GroupNorm": build_convolutions,
}


def task_of(build: Callable[[], nn.Module], seed: int) -> Task:
    """The first 1,440 training images."""
    torch.manual_seed(seed)
    tensors = load_digits()[0].tensors
    return Task(build(), TensorDataset(*[tensor[:SAMPLES] for tensor in tensors]), sum_of_losses)


def sum_of_losses(model: nn.Module, batch: Any) -> Loss:
    """The loss of the other sides, which compute no accuracy."""
    x, y = batch
    return Loss(F.cross_entropy(model(x), y, reduction="sum"), len(x))


class PacelineRun:
    """The session that `paceline train` runs, with the list of releases in a folder.

    Args:
        task: model and data.
        steps: of the run.
        noise: in clip norms.
        expected: samples of a batch on average.
    """

    def __init__(self, task: Task, steps: int, noise: float = NOISE, expected: int = EXPECTED) -> None:
        recipe = Recipe(
            task="own",
            steps=steps,
            batch={"size": expected},
            optimizer={"name": "sgd", "lr": RATE},
            private={"unit": "sample", "noise": noise, "clip_norm": CLIP, "delta": DELTA},
        )
        self._folder = tempfile.TemporaryDirectory()
        self.session = build_session(recipe, task, Cluster.single(), torch.device("cpu"))
        open_ledger(self.session, Path(self._folder.name))
        self._rounds = self.session.rounds()

    @property
    def model(self) -> nn.Module:
        return self.session.runner.sharded_model.model

    def step(self) -> float:
        """One step; the mean loss of its samples."""
        return float(next(self._rounds).loss)


def opacus_modes() -> Sequence[str]:
    """The ways of Opacus to compute gradients of samples; none if it is not installed."""
    return MODES if importlib.util.find_spec("opacus") else ()


def speed_table(options: Options, kind: str) -> tuple[Table, list[Series]]:
    """All sides by turns, with samples per second."""
    build, endless = MODELS[kind], 1_000_000
    ours = PacelineRun(task_of(build, 0), endless)
    sides = [Side("Paceline", ours.step)]
    cases = [(mode, True) for mode in opacus_modes()]
    for mode, reads_at_once in (*((mode, False) for mode in opacus_modes()[:1]), *cases):
        run = OpacusRun(task_of(build, 0), mode, reads_at_once=reads_at_once)
        loader = "rows indexed at once" if reads_at_once else "its DataLoader"
        sides.append(Side(f"Opacus, {mode}, {loader}", run.step))
    repeats, steps = (3, 2) if options.quick else (11, 20)
    found = take_turns(sides, repeats=repeats, steps=steps, warmup=3, budget_seconds=180.0)
    rows = []
    for series in found:
        compared = compare(found[0], series)
        cpu = statistics.median(series.cpu_seconds)
        ratio = f"{compared.paired.median:.2f} ({compared.paired.low:.2f} .. {compared.paired.high:.2f})"
        rows.append(
            (
                series.name,
                f"{EXPECTED / series.median_seconds:,.0f}",
                f"{EXPECTED / cpu:,.0f}",
                f"{1e3 * series.median_seconds:.1f}",
                ratio,
                f"{compared.cpu_ratio:.2f}",
            )
        )
    columns = ("side", "samples / s", "samples / CPU s", "ms a step", "Paceline / side, paired", "CPU time")
    remarks = [
        "samples are those of a batch on average; ratios below 1: Paceline takes less time",
        "noise of Paceline is from the system's entropy, that of Opacus from PyTorch's generator",
    ]
    return Table(f"{kind}, {EXPECTED} of {SAMPLES} digits ({blocks(found)})", columns, rows, remarks), found


def accuracy_of(model: nn.Module) -> float:
    """On the held-out digits."""
    x, y = load_digits()[1].tensors
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def trained(steps: int, run: PacelineRun | OpacusRun) -> float:
    """Train from the start; the held-out accuracy."""
    for _ in range(steps):
        run.step()
    return accuracy_of(run.model.eval())


def accuracy_table(options: Options, data: dict[str, Any]) -> tuple[Table, list[Any]]:
    """The MLP with three seeds of both, and the runs of the last seed, which know what they released."""
    kind, build = next(iter(MODELS.items()))
    steps, seeds = 5 if options.quick else STEPS, range(1 if options.quick else 3)
    rows, last = [], []
    for name in ("Paceline", *(["Opacus"] if opacus_modes() else [])):
        accuracies: list[float] = []
        for seed in seeds:
            task = task_of(build, seed)
            run = PacelineRun(task, steps) if name == "Paceline" else OpacusRun(task, MODES[0])
            accuracies.append(trained(steps, run))
        last.append(run)
        data[f"{kind}, {name}"] = accuracies
        each = ", ".join(f"{one:.3f}" for one in accuracies)
        rows.append((name, f"{statistics.fmean(accuracies):.3f}", each))
    title = f"{kind}: held-out accuracy after {steps} steps, noise {NOISE}, clip {CLIP}, rate {RATE}"
    return Table(title, ("side", "mean", "seeds"), rows), last


def epsilon_table(runs: Sequence[Any]) -> Table:
    """Epsilon of what both have released, by every accountant."""
    ours = runs[0].session.private.ledger
    ((release, count),) = ours.releases.items()
    event = f"{count} x {release}"
    rows = [("Paceline", event, name_accountant(ours.releases), f"{ours.epsilon():.4f}")]
    rows.append(("", event, "dp-accounting, RDP", f"{epsilon_by_moments(release, count):.4f}"))
    for run in runs[1:]:
        noise, rate, number = run.history
        event = f"{number} x Poisson, each with probability {rate:g}; noise {noise:g}"
        for accountant, epsilon in epsilons_of_opacus(run.history, DELTA).items():
            rows.append(("Opacus", event, accountant, f"{epsilon:.4f}"))
    columns = ("side", "released", "accountant", "epsilon")
    remarks = ["PLD and PRV compose the distribution of the loss; RDP is a looser bound"]
    return Table(f"Epsilon at delta {DELTA:g}", columns, rows, remarks)


def epsilon_by_moments(release: NoisyRelease, count: int) -> float:
    """Epsilon by the RDP accountant of dp-accounting."""
    from dp_accounting.rdp import RdpAccountant

    return float(RdpAccountant().compose(to_event(release, release.relation), count).get_epsilon(DELTA))


def same_rule_table() -> Table:
    """Return the distances between the weights of both after three steps with almost no noise, as a table."""
    rows = []
    for kind, build in MODELS.items():
        ours = PacelineRun(task_of(build, 0), 3, _FEW_NOISE, SAMPLES)
        theirs = OpacusRun(task_of(build, 0), MODES[0], noise=_FEW_NOISE, expected=SAMPLES)
        start = weights_of(task_of(build, 0).model)
        for _ in range(3):
            ours.step()
            theirs.step()
        found = weights_of(ours.model)
        moved, apart = (float((found - other).norm()) for other in (start, weights_of(theirs.model)))
        rows.append((kind, f"{moved:.3g}", f"{apart:.2g}"))
    columns = ("model", "moved", "apart")
    return Table(
        f"The same rule: norm of weights after three steps of all samples, noise {_FEW_NOISE:g}",
        columns,
        rows,
    )


def weights_of(model: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def measure(options: Options) -> Report:
    """Speed of both models; accuracy and epsilon; and that the rule is one."""
    torch.set_num_threads(1)
    question = "DP-SGD by Paceline and Opacus on the same digits, model, clip, noise and expected batch."
    if not opacus_modes():
        question += " Opacus is not installed: pip install opacus."
    else:
        question += f" Opacus {importlib.metadata.version('opacus')}."
    tables, data = [], {}
    for kind in MODELS:
        table, found = speed_table(options, kind)
        tables.append(table)
        data[kind] = series_data(found)
    table, runs = accuracy_table(options, data)
    tables += [table, epsilon_table(runs)]
    if opacus_modes():
        tables.append(same_rule_table())
    return Report(question, tables, data)


if __name__ == "__main__":
    present(measure, __doc__ or "")
