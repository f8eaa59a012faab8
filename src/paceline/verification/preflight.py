"""Checks of the task before anything is trained: is it the same on all ranks, and is it repeatable?

Every rank builds its own oracle and runs the shards of the first step. Models, batches and losses are
compared as hashes and numbers, within a rank and between ranks. A difference is a mistake of the user's code
that no strategy could make right.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from paceline.comm.group_collectives import all_gather_texts
from paceline.comm.net import Net
from paceline.data.work import MicroBatch
from paceline.job.mesh import RankGroup
from paceline.verification.diagnosis import ErrorDiagnosis
from paceline.verification.error_bounds import TensorComparison
from paceline.verification.oracle import (
    Oracle,
    generators_seeded,
    loss_without_gradients,
    plain_norm,
    read_micro_batch,
)

_FORK_SECONDS = 20.0


def repeats_in_fork(probe: Callable[[], str]) -> bool:
    """Return whether a fork of this process gets the result that this process gets.

    A result that depends on the number of earlier calls is equal in both; one that depends on the clock or on
    random numbers of the system is not. Also true if the fork does not answer in time.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, probe().encode())
        finally:
            # Skips atexit handlers and open files, which belong to the parent.
            os._exit(0)
    os.close(writing)
    try:
        ready, _, _ = select.select([reading], [], [], _FORK_SECONDS)
        answer = os.read(reading, 65536).decode() if ready else ""
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return not answer or answer == probe()


TaskFacts = Mapping[str, Any]
TaskFault = tuple[TensorComparison, ErrorDiagnosis]
_PLAIN = (str, bytes, int, float, bool, type(None))
# CPUs of different kinds round differently.
_HOST_TOLERANCE = 1e-3


def check_task(oracle: Oracle, group: RankGroup, net: Net) -> TaskFault | None:
    """Return the first fault of the task, if there is one; collective, equal on every rank.

    Wire: one all_gather of a few hundred bytes, and some for every tensor and shard.
    """
    with generators_seeded(0):
        facts = all_gather_texts(json.dumps(collect_task_facts(oracle)), group, net)
    return find_task_fault([json.loads(text) for text in facts])


def collect_task_facts(oracle: Oracle) -> dict[str, Any]:
    """Return hashes and numbers of what this rank has built, reads and computes, as JSON values."""
    micro_batches = oracle.work.micro_batches(0)
    data, repeated_data = (
        [sha_of_batch(read_micro_batch(oracle.task, micro_batch)) for micro_batch in micro_batches]
        for _ in range(2)
    )
    facts: dict[str, Any] = {
        "model": {n: sha_of_batch(t) for n, t in oracle.model.state_dict().items() if isinstance(t, Tensor)},
        "length": len(oracle.task.data),
        "data": data,
        "reads alike": data == repeated_data,
    }
    first, second = (_numbers(oracle, micro_batches[:1]) for _ in range(2))
    after = {n: sha_of_batch(p) for n, p in oracle.model.named_parameters()}
    changed = [n for n in after if after[n] != facts["model"][n]]
    facts |= {"loss": first, "computes alike": first == second, "changes": changed}
    if not (facts["reads alike"] and facts["computes alike"]):
        facts["counts calls"] = repeats_in_fork(lambda: _probe(oracle, micro_batches[0]))
    return facts


def find_task_fault(facts: Sequence[TaskFacts]) -> TaskFault | None:
    """Return the first fault that the facts of all ranks show; pure."""
    checks = (_different_models, _changes_weights, _not_repeated, _different_data, _depends_on_rank)
    return next((fault for check in checks if (fault := check(facts)) is not None), None)


def _different_models(facts: Sequence[TaskFacts]) -> TaskFault | None:
    names = list(dict.fromkeys(name for f in facts for name in f["model"]))
    for name in names:
        wrong = [f["model"].get(name) != facts[0]["model"].get(name) for f in facts]
        if any(wrong):
            text = (
                f"ranks build different values of '{name}', so a seed, a file or the rank decides what is"
                " trained (training starts from rank 0's): build the model from the seed of the run alone"
            )
            return _task_fault("initial value", name, wrong, "ranks built different models", text)
    return None


def _changes_weights(facts: Sequence[TaskFacts]) -> TaskFault | None:
    wrong = [bool(f.get("changes")) for f in facts]
    if not any(wrong):
        return None
    name = next(f["changes"][0] for f in facts if f.get("changes"))
    text = f"forward or backward changes '{name}': every rank would change its own copy, outside the update"
    return _task_fault("update", name, wrong, "stepped beside the update", text)


def _not_repeated(facts: Sequence[TaskFacts]) -> TaskFault | None:
    for key, what, name in (
        ("reads alike", "reading the same shard twice gives different batches", "shard 0 of the data"),
        (
            "computes alike",
            "running the same shard twice from the same weights and seeds gives different losses",
            "loss",
        ),
    ):
        wrong = [not f[key] for f in facts]
        if any(wrong):
            counts = all(f.get("counts calls", True) for f in facts)
            cause = "depends on the number of calls" if counts else "the task is not deterministic"
            advice = (
                "it depends on earlier calls, through a counter, a generator or a cache that is no buffer"
                if counts
                else "it uses the clock or a generator that is not seeded, or threads race"
            )
            return _task_fault("task", name, wrong, cause, f"{what}: {advice}")
    return None


def _different_data(facts: Sequence[TaskFacts]) -> TaskFault | None:
    wrong = [f["length"] != facts[0]["length"] for f in facts]
    if any(wrong):
        text = "the length of the data differs between ranks; give every rank all of the data"
        return _task_fault("task", "length of the data", wrong, "ranks read different data", text)
    for shard in range(len(facts[0]["data"])):
        wrong = [f["data"][shard] != facts[0]["data"][shard] for f in facts]
        if any(wrong):
            text = f"shard {shard} of step 0 differs between ranks: data must not depend on the rank"
            return _task_fault("task", f"shard {shard} of the data", wrong, "ranks read different data", text)
    return None


def _depends_on_rank(facts: Sequence[TaskFacts]) -> TaskFault | None:
    wrong = [not _agree(f["loss"], facts[0]["loss"]) for f in facts]
    if not any(wrong):
        return None
    text = (
        "the same shard with the same weights and seeds gives different losses on different ranks: model or"
        " loss depend on the rank, the environment or the host"
    )
    return _task_fault("task", "loss", wrong, "depends on the rank", text)


def _task_fault(quantity: str, name: str, wrong: Sequence[bool], cause: str, text: str) -> TaskFault:
    return TensorComparison(-1, quantity, name, tuple(map(float, wrong)), 0.0), ErrorDiagnosis(cause, text)


def _agree(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(
        abs(x - y) <= _HOST_TOLERANCE * max(abs(x), abs(y)) or x == y for x, y in zip(a, b, strict=True)
    )


def _numbers(oracle: Oracle, micro_batches: tuple[MicroBatch, ...]) -> list[float]:
    """Return loss, count and norm of the gradient of the first shard, with NaN as -1."""
    shard = next(iter(list(oracle.shards(micro_batches))))
    numbers = [shard.total, shard.count, plain_norm(shard.gradients.values())]
    # NaN differs from itself, so two equal results would not compare as equal.
    return [x if x == x else -1.0 for x in numbers]


def _probe(oracle: Oracle, micro_batch: MicroBatch) -> str:
    """Read and run a micro-batch once; return the hash of its batch and the loss."""
    with generators_seeded(micro_batch.key):
        oracle.enter_training(oracle.model)
        before = oracle.buffers()
        loss = loss_without_gradients(oracle.task, oracle.model, oracle.load(micro_batch))
        oracle.set_buffers(before)
        return f"{sha_of_batch(read_micro_batch(oracle.task, micro_batch))} {float(loss.total)!r}"


def sha_of_batch(value: Any) -> str:
    """Return a hash of a batch in any nesting of containers, 16 hexadecimal digits."""
    leaves, shape = tree_flatten(value)
    digest = hashlib.sha256(str(shape).encode())
    for leaf in leaves:
        digest.update(_bytes_of(leaf))
    return digest.hexdigest()[:16]


def _bytes_of(leaf: Any) -> bytes:
    """Return the values of a tensor or array, the `repr` of a plain value, and nothing for other objects."""
    if isinstance(leaf, Tensor):
        dense = leaf.detach().cpu().contiguous() if leaf.layout == torch.strided else torch.zeros(0)
        values = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        return f"{tuple(leaf.shape)}{leaf.dtype}".encode() + values
    if isinstance(leaf, np.ndarray):
        return leaf.tobytes()
    return repr(leaf).encode() if type(leaf) in _PLAIN else b""
