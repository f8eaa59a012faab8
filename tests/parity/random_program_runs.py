"""Random programs, trained by a plain loop and by Paceline; the verdict of every rank on each.

The plain loop is PyTorch alone: the micro-batches of a step one after another in float64, with the random
numbers of their keys, and one update. It does not use Paceline's training step.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from paceline import Loss, Metric, Task
from paceline.errors import CommunicationError, DivergenceError, PacelineError, WorkerError
from paceline.job.cluster import Cluster
from paceline.parallel.state_hash import tensor_sha256
from paceline.recipe import Recipe
from paceline.session import Session, build
from paceline.testing import RanksFailed, run_ranks
from paceline.testing.parity import build_test_session
from tests.parity.random_optimizers import BY_NAME, OF_TASK, build_plain
from tests.parity.random_programs import LOSSES, Parts, Program, Sums, build_parts
from tests.recipes import recipe_of
from tests.zoo.plain import buffers_of, change_of, key, move, put_back

TOLERANCE = 1e-12
_NOISE_FACTOR = 1e-4
_LEAST_SCALE = 0.01  # a tensor of smaller values is compared as if its largest were that
_DEADLINE_SECONDS = 20.0
_MAX_BROKEN = 4  # groups of ranks that break, after which no other is started
_MAX_TEXT = 1500
_RAW_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
# Quoted, a term of the strategy, a number, a class, or a function that draws.
_NAME = re.compile(r"'.+'|\w=|\d|^[A-Z]\w+ |^\w+_?\w* draws ")


class End(NamedTuple):
    """The end of a run.

    Args:
        losses, metrics: means of every step.
        tensors: parameters and persistent buffers.
    """

    losses: list[float]
    metrics: list[float]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Verdict:
    """What became of a program: "equal", "refused" (with the text), or a failure in words.

    Args:
        breaks: the ranks cannot run another program, because some of them no longer answer.
    """

    kind: str
    text: str = ""
    breaks: bool = False

    @property
    def is_failure(self) -> bool:
        """Return whether it neither equals the plain loop nor is refused properly."""
        return self.kind not in ("equal", "refused")


# ---------------------------------------------------------------------- the plain loop


def train_plain(program: Program) -> End:
    """Train on one process, without Paceline."""
    parts = build_parts(program)
    model, optimizers = parts.model, build_plain(program.optimizer, parts.model, program.lr)
    losses, metrics = [], []
    trained = [p for p in model.parameters() if p.requires_grad]
    for step in range(program.steps):
        before, changes, rows = buffers_of(model), [], []
        for p in trained:
            p.grad = None
        for shard, batch in _micro_batches(program, parts, step):
            _seed(key(program.number, "unit", step, shard))
            sums = parts.loss(model, batch)
            sums.total.backward()
            rows.append((float(sums.total.detach()), sums.count, float(sums.right), sums.num_right_items))
            changes.append(change_of(model, before))
            put_back(model, before)
        move(model, before, changes)
        total, count, right, num_right_items = map(sum, zip(*rows, strict=True))
        _divide_and_clip(trained, count, program.clip_norm)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(total / count)
        metrics.append(right / num_right_items if num_right_items else float("nan"))
    return End(losses, metrics, {n: t.detach().clone() for n, t in model.state_dict().items()})


def _micro_batches(program: Program, parts: Parts, step: int) -> Iterator[tuple[int, Any]]:
    first = step % -(-program.num_samples // program.size) * program.size
    samples = parts.samples[first : first + program.size]
    for shard in range(program.shards):
        own = samples[len(samples) * shard // program.shards : len(samples) * (shard + 1) // program.shards]
        if own:
            yield shard, default_collate(own)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes milliseconds
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _divide_and_clip(trained: Sequence[nn.Parameter], count: float, largest: float | None) -> None:
    grads = [p.grad for p in trained if p.grad is not None]
    for grad in grads:
        grad.div_(count)
    norm = float(torch.stack([grad.square().sum() for grad in grads]).sum().sqrt())
    if largest is not None and norm > largest:
        for grad in grads:
            grad.mul_(largest / norm)


# ---------------------------------------------------------------------- Paceline


def recipe_for(program: Program, *, checks: bool) -> Recipe:
    """Return the recipe of a program."""
    optimizer = dict(BY_NAME[program.optimizer], lr=program.lr) if program.optimizer in BY_NAME else {}
    clip_norm = {} if program.clip_norm is None else {"clip_norm": program.clip_norm}
    return recipe_of(
        program.strategy,
        task="random",
        steps=program.steps,
        seed=program.number,
        batch={"size": program.size, "shards": program.shards, "shuffle": False},
        optimizer=optimizer | clip_norm,
        runtime={"deadline_seconds": _DEADLINE_SECONDS},
        debug={"check": checks},
    )


def build_task(program: Program) -> Task:
    """Return the task of a program."""
    parts = build_parts(program)

    def loss(model: nn.Module, batch: Any) -> Loss:
        return _as_loss(program.loss, LOSSES[program.loss](model, batch))

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return OF_TASK[program.optimizer](model, program.lr)

    return Task(
        parts.model,
        parts.samples,
        loss,
        optimizer=optimizer if program.optimizer in OF_TASK else None,
        blocks=lambda model: [*model][1:-1],
        tensor=dict(program.plan) or None,
        sequence=lambda batch, part: [part(x, 1) for x in batch],
    )


def _as_loss(word: str, sums: Sums) -> Loss:
    if word == "mean":
        # A micro-batch may have no items.
        count = max(1.0, sums.count)
        loss = Loss.mean(sums.total / count, count, right=sums.right / count)
        return loss if sums.count else Loss(sums.total, 0, {"right": 0.0})
    if word == "metric":
        return Loss(sums.total, sums.count, {"right": Metric(sums.right, sums.num_right_items)})
    return Loss(sums.total, sums.count, {"right": sums.right})


def _train(session: Session) -> End:
    losses, metrics = [], []
    for stats in session.rounds():
        losses.append(stats.loss)
        metrics.append(stats.metrics["right"])
    tensors = session.snapshot().tensors().items()
    model = {n.removeprefix("model/"): t.detach().clone() for n, t in tensors if n.startswith("model/")}
    return End(losses, metrics, model)


def _copies(session: Session) -> dict[str, str]:
    """Return the hash of everything that this rank computes with, by name and place."""
    computes = session.runner.sharded_model.computes
    return {
        f"{slot.name}{slot.index}": tensor_sha256(p.detach())
        for slot, p in computes.items()
        if p.untyped_storage().size()
    }


def run_program(cluster: Cluster, program: Program, *, checks: bool) -> tuple[Verdict, dict[str, str]]:
    """Train a program as one rank; return the verdict of this rank, and what it holds at the end."""
    session, is_built = None, False
    try:
        session = build_test_session(cluster, recipe_for(program, checks=checks), lambda: build_task(program))
        is_built = True
        end = _train(session)
        copies = _copies(session)
    except (CommunicationError, DivergenceError, WorkerError) as error:
        breaks = isinstance(error, CommunicationError)
        return Verdict(f"{type(error).__name__} instead of an end", str(error), breaks=breaks), {}
    except PacelineError as error:
        return _judge_refusal(error, is_built=is_built), {}
    except _RAW_ERRORS as error:
        return Verdict(f"raw {type(error).__name__}", f"{error}"), {}
    finally:
        if session is not None:
            with contextlib.suppress(PacelineError):
                session.close()
    # One rank compares; the others hold the same bits as it does (`_agree`).
    difference = describe_difference(train_plain(program), end) if cluster.global_rank == 0 else ""
    return Verdict("differs", difference) if difference else Verdict("equal"), copies


def _judge_refusal(error: PacelineError, *, is_built: bool) -> Verdict:
    """A refusal comes before the first step, names something, and has a next step."""
    text = str(error)
    if is_built:
        return Verdict("refused after the start", text)
    if not error.next_step or not _NAME.search(error.what):
        return Verdict("refused without a next step or a name", text)
    return Verdict("refused", text)


def describe_difference(expected: End, actual: End) -> str:
    """Return the largest difference that rounding does not explain; empty if there is none."""
    rows = [("loss", expected.losses, actual.losses), ("metric", expected.metrics, actual.metrics)]
    errors = {
        f"{name} of step {step}": _relative_error(torch.tensor(a), torch.tensor(b))
        for name, before, after in rows
        for step, (a, b) in enumerate(zip(before, after, strict=True))
    }
    missing = expected.tensors.keys() - actual.tensors.keys()
    # Of tied parameters, Paceline keeps one name.
    pointers = [name for name in missing if not _has_twin(name, expected.tensors, actual.tensors)]
    if pointers:
        return f"no tensor {pointers[0]}"
    errors |= {name: _relative_error(expected.tensors[name], t) for name, t in actual.tensors.items()}
    # The bias of a norm of keys has a gradient of rounding errors only, which adaptive optimizers enlarge.
    errors = {name: e * (_NOISE_FACTOR if name.endswith("k_norm.bias") else 1) for name, e in errors.items()}
    name, error = max(errors.items(), key=lambda item: item[1])
    return f"{name} is off by {error:.1e} of its largest value" if error > TOLERANCE else ""


def _has_twin(name: str, expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> bool:
    return any(
        other in actual and t.shape == expected[name].shape and torch.equal(t, expected[name])
        for other, t in expected.items()
    )


def _relative_error(expected: Tensor, actual: Tensor) -> float:
    if expected.shape != actual.shape:
        return float("inf")
    a, b = expected.double(), actual.double()
    if not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    a, b = a.nan_to_num(), b.nan_to_num()
    return float((a - b).abs().max()) / max(_LEAST_SCALE, float(a.abs().max())) if a.numel() else 0.0


# ---------------------------------------------------------------------- many programs in one group of ranks


def run_programs(
    cluster: Cluster, programs: Sequence[Program], folder: str, checks: bool = True
) -> list[Verdict]:
    """Run programs one after another as one rank, until the ranks can no longer go on; the same everywhere.

    Args:
        folder: a file by rank has the place of the program that it has begun.
        checks: as `debug.check`.
    """
    torch.set_num_threads(1)
    if not checks:
        build.check_tensor_plan = lambda *_: None
    verdicts: list[Verdict] = []
    for place, program in enumerate(programs):
        (Path(folder) / str(cluster.global_rank)).write_text(str(place), encoding="utf-8")
        verdicts.append(_agree(cluster, *run_program(cluster, program, checks=checks)))
        if verdicts[-1].breaks:
            break
    return verdicts


def _agree(cluster: Cluster, own: Verdict, copies: dict[str, str]) -> Verdict:
    """Return one verdict of all ranks: the first failure, or that they do not agree."""
    if cluster.world_size == 1:
        return own
    answers: list[Any] = [None] * cluster.world_size
    # As plain values: a rank has got this module by value, and cannot pickle its classes.
    torch.distributed.all_gather_object(answers, (own.kind, own.text, own.breaks, copies))
    verdicts = [Verdict(*values) for *values, _ in answers]
    failure = next((verdict for verdict in verdicts if verdict.is_failure and not verdict.breaks), None)
    failure = failure or next((verdict for verdict in verdicts if verdict.is_failure), None)
    breaks = any(verdict.breaks for verdict in verdicts)
    kinds = {verdict.kind for verdict in verdicts}
    if breaks and "refused" in kinds:
        rank = [verdict.kind for verdict in verdicts].index("refused")
        return Verdict(f"refused on rank {rank} only", verdicts[rank].text, breaks=True)
    if failure is not None:
        return Verdict(failure.kind, failure.text, breaks=breaks)
    if len(kinds) > 1:
        return Verdict("refused on some ranks only", next(v.text for v in verdicts if v.text))
    known: dict[str, str] = {}
    for *_, held in answers:
        for name, digest in held.items():
            if known.setdefault(name, digest) != digest:
                return Verdict("drifts", f"ranks hold different bits of {name}")
    return own


def judge(programs: Sequence[Program], folder: Path, *, checks: bool = True) -> dict[Program, Verdict]:
    """Run programs of one number of processes; a group of ranks that breaks is replaced by a new one."""
    verdicts: dict[Program, Verdict] = {}
    remaining, num_broken = list(programs), 0
    while remaining and num_broken < _MAX_BROKEN:
        processes = remaining[0].processes
        try:
            found = run_ranks(
                run_programs,
                processes,
                remaining,
                str(folder),
                checks,
                deadline=60 + 3.0 * len(remaining),
                group_deadline=2 * _DEADLINE_SECONDS,
            )[0]
        except RanksFailed as error:
            places = [int((folder / str(rank)).read_text(encoding="utf-8")) for rank in range(processes)]
            broken = remaining[min(places)]
            verdicts[broken] = Verdict("the ranks ended", str(error)[-_MAX_TEXT:], breaks=True)
            num_broken += 1
            # The verdicts before it were lost with the ranks.
            before = remaining[: min(places)]
            verdicts |= judge(before, folder, checks=checks)
            remaining = remaining[min(places) + 1 :]
            continue
        verdicts |= dict(zip(remaining, found, strict=False))
        remaining = remaining[len(found) :]
        num_broken += bool(found and found[-1].breaks)
    return verdicts


def report(verdicts: Mapping[Program, Verdict]) -> str:
    """Return the failures in words: what happened, and the program with its number."""
    failures = {program: verdict for program, verdict in verdicts.items() if verdict.is_failure}
    lines = [f"{len(failures)} of {len(verdicts)} programs"]
    for program, verdict in failures.items():
        lines += [
            "",
            f"draw({program.number}, {program.processes}): {verdict.kind}: {verdict.text}",
            f"  {program}",
        ]
    return "\n".join(lines)
