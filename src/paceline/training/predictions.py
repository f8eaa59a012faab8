"""What a model says of samples, as it lies on the ranks: each sample once, in the order of the source.

A run of blocks at a time; replicas take their shares of it, and what they found goes to all ranks. What comes
from another rank is data: none of it is run.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.comm.text import gather_bytes
from paceline.data import MicroBatch, in_memory, split
from paceline.errors import DataError, StrategyError, TaskError
from paceline.task import Source, Task, sets_of
from paceline.training.feeds import build_loader
from paceline.training.session import Session

_BLOCKS_AT_A_TIME = 16  # of each replica: predictions of so many are in memory


def predictions(session: Session, source: Any, max_samples: int = 0) -> Iterator[Any]:
    """The predictions of all samples, one by one, on the host; collective: every rank takes all.

    Args:
        source: samples; see `Task.predict`.
        max_samples: the first so many; 0: all.
    Raises:
        TaskError: there was not one prediction for each sample, or it is nothing that can be sent.
        DataError: these are several sets.
        StrategyError: ranks have some positions of a sequence only.
    Wire: what is predicted, to every rank; beside what the layout sends in a forward.
    """
    names = [name for name in sets_of(source) if name]
    if names:
        raise DataError("these are several sets", next_step=f"name one of them: {', '.join(names)}")
    if session.strategy.context > 1:
        raise StrategyError(
            "ranks of a context have some positions of a sequence, and a prediction is of all",
            next_step="predict under a strategy without context, or in one process",
        )
    samples, size = in_memory("", source, session.recipe), session.recipe.evaluate.batch
    count = min(len(samples), max_samples or len(samples))
    blocks = [range(first, min(first + size, count)) for first in range(0, count, size)]
    at_a_time = _BLOCKS_AT_A_TIME * session.mesh.data.size
    for first in range(0, len(blocks), at_a_time):
        yield from _predict(session, samples, blocks[first : first + at_a_time])


def _predict(session: Session, samples: Source, blocks: Sequence[range]) -> list[Any]:
    """The predictions of some blocks; collective."""
    data = session.mesh.data
    mine = [blocks[i] for i in split(len(blocks), data.size, data.rank)]
    rows = _answers(session, samples, mine)
    if session.mesh.world.size == 1:
        return rows
    tells = session.mesh.place("tensor") == 0  # its peers have found the same
    packed = _packed(mine[0].start, rows) if rows and tells else b""
    said = gather_bytes(packed, session.mesh.world, session.net)
    shares = sorted((_unpacked(one) for one in said if one), key=_first)
    together = list(chain.from_iterable(rows for _, rows in shares))
    wanted = sum(map(len, blocks))
    if len(together) != wanted:
        raise StrategyError(
            f"{len(together)} predictions came together of {wanted} samples under '{session.strategy}'",
            next_step="predict in one process",
        )
    return together


def _answers(session: Session, samples: Source, mine: Sequence[range]) -> list[Any]:
    """What this rank finds; nothing where it has not the end of the model."""
    placed, found = session.placed, list[Any]()

    def ask(model: nn.Module, batch: Any) -> None:
        found.append(predicted(session.task, model, batch))

    loader = build_loader(session.recipe, session.task, samples, placed.holding.device)
    wanted = (MicroBatch(0, 0, np.arange(block.start, block.stop), key=0) for block in mine)
    with session.averaged(), loader.open(wanted) as stream:
        placed.answer(stream, ask)
    if not found:
        return []
    rows = (rows_of(one, len(block)) for one, block in zip(found, mine, strict=True))
    return list(chain.from_iterable(rows))


def _first(share: tuple[int, list[Any]]) -> int:
    return share[0]


def _packed(first: int, rows: list[Any]) -> bytes:
    stream = io.BytesIO()
    torch.save((first, rows), stream)
    return stream.getvalue()


def _unpacked(share: bytes) -> tuple[int, list[Any]]:
    """Raises: TaskError: there is something in it that only code could make again."""
    try:
        first, rows = torch.load(io.BytesIO(share), weights_only=True)
    except UnpicklingError as error:
        raise TaskError(
            "predictions travel between ranks, and these cannot",
            next_step="let predict return tensors, or lists and mappings of tensors, numbers and texts",
        ) from error
    return int(first), rows


def predicted(task: Task, model: torch.nn.Module, batch: Any) -> Any:
    """What the task, or its model, says of a batch.

    Raises:
        TaskError: the task does not say how, and the batch is no tensor.
    """
    if task.predict is not None:
        return task.predict(model, batch)
    if isinstance(batch, Tensor):
        return model(batch)
    raise TaskError(
        f"a batch of this task is a {type(batch).__name__}, and nothing says what of it the model is asked",
        next_step="Task(..., predict=lambda model, batch: model(batch[0]).argmax(1)), for example",
    )


def rows_of(found: Any, count: int) -> list[Any]:
    """The predictions of a batch, one for each of its `count` samples.

    Raises:
        TaskError: there are more or fewer.
    """
    if isinstance(found, Mapping):
        columns = {name: rows_of(value, count) for name, value in found.items()}
        return [{name: column[i] for name, column in columns.items()} for i in range(count)]
    rows = _unbound(found)
    if len(rows) == count:
        return rows
    shape = list(getattr(found, "shape", [type(found).__name__]))
    raise TaskError(
        f"a batch of {count} samples has the prediction {shape}, which is not one for each of them",
        next_step="let predict return a tensor [N, ...], a list of N, or a mapping of such by name",
    )


def _unbound(found: Any) -> list[Any]:
    """What a tensor, on the host, or a list holds; nothing of anything else."""
    if isinstance(found, Tensor):
        return list(found.detach().cpu().unbind()) if found.dim() else []
    return found if isinstance(found, list) else []
