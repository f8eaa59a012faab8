"""What halves save and cost on this processor: fp16 and bf16 beside fp32, in time and in memory.

Three sessions of the same job take turns in one process; of each the least processor time of its blocks says
what it takes where others run too. Memory is counted, not sampled: what one micro-batch keeps from its
forward for its backward, and what stays between two steps; it is the same on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.loops import paceline_side
from benchmarks.measure import Series, take_turns
from benchmarks.report import Options, Report, Table, blocks, present, series_data
from benchmarks.subjects import Subject, byte_gpt, digits
from paceline.job.cluster import Cluster
from paceline.session import Session, build_session

PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Kept:
    """Bytes.

    Args:
        forward: that the forward of a step's largest micro-batch keeps for its backward, beside parameters.
        state: of parameters, gradients and moments.
    """

    forward: int
    state: int


def session_of(subject: Subject, compute: str) -> Session:
    """The job in one number format, on this process."""
    changed = subject.changed(precision=subject.recipe.precision.replace(compute=compute))
    return build_session(changed.recipe, changed.fresh(), Cluster.single(), torch.device("cpu"))


def kept_by(session: Session) -> Kept:
    """What a session keeps in the step after its first update."""
    rounds = session.rounds()
    while not next(rounds).applied:
        """In fp16 the scale of the loss is found first."""
    held = {p.untyped_storage().data_ptr() for p in session.runner.sharded_model.model.parameters()}
    alive: dict[int, int] = {}
    most = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal most
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            alive[storage.data_ptr()] = storage.nbytes()
        most = max(most, sum(alive.values()))
        return tensor

    def use(tensor: Tensor) -> Tensor:
        alive.clear()  # backward has begun: what comes next belongs to another micro-batch
        return tensor

    with saved_tensors_hooks(keep, use):
        next(rounds)
    rounds.close()
    moments = [t for state in session.state.optimizer.state.values() for t in state.values()]
    trained = [p for p in session.runner.sharded_model.model.parameters() if p.requires_grad]
    grads = [p.grad for p in trained if p.grad is not None]
    return Kept(most, sum(t.nbytes for t in (*trained, *grads, *moments) if isinstance(t, Tensor)))


def subjects(quick: bool) -> dict[str, Subject]:
    """The jobs."""
    return {
        "digits, ConvNet": digits("convnet", quick=quick),
        "byte-gpt": byte_gpt(quick=quick, precision="fp32"),
    }


def time_table(title: str, found: Sequence[Series], samples: int) -> Table:
    """Every number format beside the first, by processor time."""
    least = [min(series.cpu_seconds) for series in found]
    rows = [
        (
            series.name,
            f"{1e3 * own:.1f}",
            f"{own / least[0]:.2f}",
            f"{1e3 * series.median_seconds:.1f}",
            f"{samples / own:,.0f}",
            f"{series.losses[0]:.4f} > {series.losses[-1]:.4f}",
        )
        for series, own in zip(found, least, strict=True)
    ]
    columns = (
        "format", "processor ms a step", "of fp32", "wall ms, median", "samples a processor second",
        "first > last loss",
    )  # fmt: skip
    return Table(title, columns, rows)


def memory_table(title: str, kept: Sequence[Kept]) -> Table:
    """Every number format beside the first."""
    rows = [
        (
            name,
            f"{one.forward / 2**20:.2f}",
            f"{one.forward / kept[0].forward:.2f}",
            f"{one.state / 2**20:.2f}",
        )
        for name, one in zip(PRECISIONS, kept, strict=True)
    ]
    return Table(
        title, ("format", "kept for backward MiB", "of fp32", "parameters, gradients, moments MiB"), rows
    )


def measure(options: Options) -> Report:
    """Both jobs."""
    torch.set_num_threads(1)
    tables, data = list[Table](), {}
    repeats, steps = (2, 1) if options.quick else (7, 1)
    for name, subject in subjects(options.quick).items():
        sides = [
            paceline_side(
                compute,
                subject.changed(precision=subject.recipe.precision.replace(compute=compute)),
                Cluster.single(),
                1,
            )
            for compute in PRECISIONS
        ]
        found: Sequence[Series] = take_turns(sides, repeats=repeats, steps=steps, warmup=2)
        kept = [kept_by(session_of(subject, compute)) for compute in PRECISIONS]
        samples = subject.recipe.batch.size
        tables += [
            time_table(f"{name}: time, 1 process, 1 thread ({blocks(found)})", found, samples),
            memory_table(f"{name}: memory, counted", kept),
        ]
        data[name] = {"series": series_data(found), "kept": [asdict(one) for one in kept]}
    return Report("What fp16 and bf16 save and cost beside fp32, on a processor.", tables, {"jobs": data})


if __name__ == "__main__":
    present(measure, __doc__ or "")
