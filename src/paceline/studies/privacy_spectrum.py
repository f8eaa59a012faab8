"""The privacy study: one federated task in six ways, each party a process, with what it costs and what it
hides.

Plain, masked, Shamir, Paillier and CKKS sums train the same model by FedAvg: only how updates are added
differs, and `n_k * delta` and `n_k` go through the same sum. Training on shares has two owners of data and
a dealer, and a model of its own: logistic regression, or a net with the square as activation. Next to them,
two clients compare a number in a garbled circuit. Bytes are those of all parties together, with headers.

No way of adding hides what the sum itself reveals: see `gradient_inversion`.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import DataError, MissingExtraError
from paceline.federated.crypto.garbled_circuit import comparator_circuit, run_evaluator, run_garbler
from paceline.federated.crypto.parties import Party, run_parties
from paceline.federated.crypto.ring_shares import (
    SharedArithmetic,
    encode_fixed,
    serve_dealer,
)
from paceline.federated.crypto.secret_sums import WAYS
from paceline.federated.crypto.shared_training import (
    SquareNet,
    predict_scores,
    scale_rows,
    share_rows,
    train_logistic_regression,
    train_square_net,
)
from paceline.models.mlp import MLP
from paceline.state.keys import key
from paceline.studies.gradient_inversion import InversionPoint, render_inversion
from paceline.tasks.digits import load_digits

_SERVER = 0
_COMPARED_BITS = 32


@dataclass(frozen=True)
class SpectrumTask:
    """A task that is trained in six ways.

    Args:
        name: for the table.
        rows, targets: training data, float64 [N, D] in [-1/2, 1/2], and int64 [N].
        held_out_rows, held_out_targets: data for the accuracy.
        hidden: units of the hidden layer, or none: logistic regression.
        lr, batch: of a client.
        shared_lr, shared_passes: of training on shares; logistic regression has full batches.
    """

    name: str
    rows: Tensor
    targets: Tensor
    held_out_rows: Tensor
    held_out_targets: Tensor
    hidden: tuple[int, ...]
    lr: float
    batch: int
    shared_lr: float
    shared_passes: int

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the sizes of inputs, hidden layer and classes."""
        return self.rows.shape[1], *self.hidden, int(self.targets.max()) + 1

    def parts(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return the data of each client: every count-th row."""
        return [(self.rows[k::count], self.targets[k::count]) for k in range(count)]


def load_breast_cancer() -> SpectrumTask:
    """Return the 569 samples of breast-cancer, of which a hash of the index holds out a sixth.

    Columns are scaled by their range over the training rows, on which the clients must have agreed.

    Raises:
        MissingExtraError: scikit-learn, which brings them, is not installed.
    """
    try:
        from sklearn.datasets import load_breast_cancer as load
    except ImportError as error:
        raise MissingExtraError(
            "breast-cancer is a data set of scikit-learn, which is not installed",
            next_step="pip install 'paceline[digits]'",
        ) from error
    rows, targets = (torch.from_numpy(array) for array in load(return_X_y=True))
    is_held_out = torch.tensor([key("breast-cancer", "held out", i) % 6 == 0 for i in range(len(rows))])
    train = rows[~is_held_out]
    scaled = scale_rows(rows, train.min(0).values, train.max(0).values)[:, :-1]
    return SpectrumTask(
        "breast-cancer",
        scaled[~is_held_out],
        targets[~is_held_out],
        scaled[is_held_out],
        targets[is_held_out],
        (),
        lr=0.5,
        batch=10,
        shared_lr=2.0,
        shared_passes=40,
    )


def load_digit_images() -> SpectrumTask:
    """Return the 1,797 digits, split as in the task `digits`."""
    (rows, targets), (held_rows, held_targets) = (data.tensors for data in load_digits())
    return SpectrumTask(
        "digits",
        rows.double() - 0.5,
        targets,
        held_rows.double() - 0.5,
        held_targets,
        (32,),
        lr=0.1,
        batch=10,
        shared_lr=0.4,
        shared_passes=10,
    )


TASKS: Mapping[str, Callable[[], SpectrumTask]] = {
    "breast-cancer": load_breast_cancer,
    "digits": load_digit_images,
}


@dataclass(frozen=True)
class SpectrumRow:
    """One row of the table.

    Args:
        task, way: names.
        accuracy: on held-out data; None: the way trains nothing, or did not run.
        num_bytes: sent by all parties.
        seconds: wall time from the start of the first round.
        cpu_seconds: of all parties.
        sees: what each party learns.
        assumes: what must hold for that.
        note: why it did not run, or what differs.
    """

    task: str
    way: str
    accuracy: float | None
    num_bytes: int
    seconds: float
    cpu_seconds: float
    sees: str
    assumes: str
    note: str = ""


def run_spectrum(
    task: SpectrumTask, *, clients: int, rounds: int, report: Callable[[str], None] = lambda line: None
) -> list[SpectrumRow]:
    """Train a task in every way that is installed, and compare a number in a garbled circuit.

    Args:
        clients: three or more.
        rounds: of FedAvg, one local epoch each.
        report: receives a line for the user before each way.
    Raises:
        DataError: fewer than three clients.
    """
    if clients < 3:
        raise DataError(f"{clients} clients cannot hide in a sum", next_step="use three or more")
    rows = []
    for name, way in WAYS.items():
        report(f"{task.name}: {name}")
        if way.module and importlib.util.find_spec(way.module) is None:
            note = f"not run: pip install {way.module}"
            rows.append(SpectrumRow(task.name, name, None, 0, 0.0, 0.0, way.sees, way.assumes, note))
        else:
            rows.append(run_way(task, name, clients=clients, rounds=rounds))
    report(f"{task.name}: shares")
    rows.append(run_on_shares(task))
    report(f"{task.name}: garbled comparison")
    rows.append(compare_garbled(task))
    return rows


def run_way(task: SpectrumTask, name: str, *, clients: int, rounds: int) -> SpectrumRow:
    """Train a task by FedAvg with one way of adding updates, the server and each client a process."""
    held_out = (task.held_out_rows, task.held_out_targets)
    settings = (name, task.widths, rounds, task.lr, task.batch)
    arguments = [(*settings, part) for part in (held_out, *task.parts(clients))]
    return _measure(task.name, name, _run_federated, arguments, WAYS[name].sees, WAYS[name].assumes)


def run_on_shares(task: SpectrumTask) -> SpectrumRow:
    """Train a task on shares: two owners with half of the rows each, and a dealer."""
    arguments = [(task, *part) for part in task.parts(2)]
    return _measure(
        task.name,
        "shares",
        _run_shared,
        [*arguments, (None, None, None)],
        "nobody: data, weights or the sum; the first owner: scores of its held-out rows",
        "the dealer is trusted; the two owners do not collude",
        "logistic regression with a cubic sigmoid" if not task.hidden else "square activation, squared error",
    )


def compare_garbled(task: SpectrumTask) -> SpectrumRow:
    """Let two clients learn which of them has the larger mean, and nothing else."""
    values = [(round((1 + rows.mean().item()) * 2**20),) for rows, _ in task.parts(2)]
    return _measure(
        task.name,
        "garbled comparison",
        _run_comparison,
        values,
        "both: which of two numbers of 32 bits is larger",
        "both follow the protocol",
        "compares one number, trains nothing",
    )


def _measure(
    task: str,
    way: str,
    function: Callable[..., Any],
    arguments: Sequence[Sequence[Any]],
    sees: str,
    assumes: str,
    note: str = "",
) -> SpectrumRow:
    results = run_parties(_measured, [(function, own) for own in arguments], deadline_seconds=3600.0)
    values, num_bytes, seconds, cpu_seconds = zip(*results, strict=True)
    return SpectrumRow(
        task, way, values[0], sum(num_bytes), max(seconds), sum(cpu_seconds), sees, assumes, note
    )


def _measured(
    party: Party, function: Callable[..., Any], own: Sequence[Any]
) -> tuple[Any, int, float, float]:
    """Return what a party's function returns, its bytes, its seconds and its CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    value = function(party, *own)
    return value, party.sent_bytes, time.perf_counter() - wall, time.process_time() - cpu


def _run_federated(
    party: Party,
    way: str,
    widths: tuple[int, ...],
    rounds: int,
    lr: float,
    batch: int,
    data: tuple[Tensor, Tensor],
) -> float | None:
    """Run the server (party 0), which returns the accuracy, or a client."""
    torch.manual_seed(0)
    model, adding = MLP(widths[0], widths[1:-1], widths[-1]), WAYS[way].build(party)
    rows, targets = data[0].float(), data[1]
    for _ in range(rounds):
        if party.rank == _SERVER:
            weights = nn.utils.parameters_to_vector(model.parameters()).detach()
            for client in party.others:
                party.send(client, "weights", [weights])
            total = adding.collect(len(weights) + 1)
            weights = (weights.double() + total[:-1] / total[-1]).float()
            nn.utils.vector_to_parameters(weights, model.parameters())
        else:
            weights = party.receive(_SERVER, "weights").tensors[0]
            # The parameters become views of this vector, and training changes them in place.
            nn.utils.vector_to_parameters(weights.clone(), model.parameters())
            train_epoch(model, rows, targets, lr=lr, batch=batch)
            delta = nn.utils.parameters_to_vector(model.parameters()).detach() - weights
            count = torch.tensor([float(len(rows))], dtype=torch.float64)
            adding.contribute(torch.cat([delta.double() * count, count]))
    if party.rank != _SERVER:
        return None
    return float((model(rows).argmax(1) == targets).double().mean())


def train_epoch(model: nn.Module, rows: Tensor, targets: Tensor, *, lr: float, batch: int) -> None:
    """Pass over the rows once with plain SGD on the mean cross-entropy."""
    for x, y in zip(rows.split(batch), targets.split(batch), strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(lr * gradient)


def _run_shared(party: Party, task: SpectrumTask | None, rows: Tensor, targets: Tensor) -> float | None:
    """Run one owner of data, of which the first returns the accuracy, or the dealer."""
    if task is None:
        serve_dealer(party)
        return None
    arithmetic, is_linear = SharedArithmetic(party, 2), not task.hidden
    inputs, labels = share_rows(arithmetic, _with_ones(rows)), _label_columns(targets, is_linear)
    shared_labels = share_rows(arithmetic, labels)
    held_out = encode_fixed(_with_ones(task.held_out_rows)) if party.rank == 0 else None
    if is_linear:
        weights = train_logistic_regression(
            arithmetic, inputs, shared_labels, steps=task.shared_passes, lr=task.shared_lr
        )
        scores = predict_scores(arithmetic, arithmetic.share(0, held_out), weights)
    else:
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
        batches = [(inputs[part], shared_labels[part]) for part in order.split(10 * task.batch)]
        net = SquareNet.share(arithmetic, (inputs.shape[1], task.hidden[0], labels.shape[1]), seed=0)
        net = train_square_net(arithmetic, net, batches, epochs=task.shared_passes, lr=task.shared_lr)
        scores = net.predict(arithmetic, arithmetic.share(0, held_out))
    opened = arithmetic.reveal(scores, 0)
    arithmetic.end()
    if opened is None:
        return None
    predicted = (opened[:, 0] > 0).long() if is_linear else opened.argmax(1)
    return float((predicted == task.held_out_targets).double().mean())


def _run_comparison(party: Party, value: int) -> None:
    run = run_garbler if party.rank == 0 else run_evaluator
    run(party, 1 - party.rank, comparator_circuit(_COMPARED_BITS), value)


def _with_ones(rows: Tensor) -> Tensor:
    return torch.cat([rows.double(), torch.ones(len(rows), 1, dtype=torch.float64)], 1)


def _label_columns(targets: Tensor, is_linear: bool) -> Tensor:
    return targets[:, None].double() if is_linear else F.one_hot(targets, 10).double()


def render_privacy(rows: Sequence[SpectrumRow], points: Sequence[InversionPoint]) -> list[str]:
    """Return the table of the ways and that of the attack, in Markdown."""
    lines = ["| task | way | accuracy | MB | s | CPU s | what each party sees | what it assumes |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in rows:
        accuracy = "" if row.accuracy is None else f"{row.accuracy:.3f}"
        spent = [f"{row.num_bytes / 1e6:.3g}", f"{row.seconds:.3g}", f"{row.cpu_seconds:.3g}"]
        cells = spent if row.num_bytes else ["", "", ""]
        way = f"{row.way} ({row.note})" if row.note else row.way
        lines.append(
            f"| {row.task} | {way} | {accuracy} | {' | '.join(cells)} | {row.sees} | {row.assumes} |"
        )
    return [*lines, "", *render_inversion(points)]
