"""Why nothing moves in a job: the status lines and the positions of all ranks, compared. Pure.

Every rank shows what it does, the collective that it waits for, and how many calls of each group it has
launched (`paceline.observe.rank_activity`). All members of a group launch the same calls in the same order,
so a rank that has launched fewer calls than another one waits for is missing from that call. These relations
form a graph. What is at its end, and what that rank does, is the cause; a cycle is a mismatch of the order.

Invariant: nothing is concluded from times. A rank that computes is called slow, and never a cause that ends
the job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from paceline.errors import format_count
from paceline.observe.rank_activity import BETWEEN_STEPS, LEFT_INSIDE_STEP, LEFT_LOOP, GroupCall

HangKind = Literal[
    "lost",
    "stopped",
    "uneven loop",
    "left step",
    "shapes",
    "operations",
    "order",
    "loader",
    "checkpoint",
    "missing",
    "link",
    "slow",
]

_EQUAL_BYTES = ("all_reduce", "reduce_scatter", "barrier", "broadcast")
"""Collectives in which all ranks pass in equally many bytes."""
_MESSAGE = re.compile(r"(?:send to|receive from) rank (\d+)")

_CAUSES: Mapping[HangKind, tuple[str, str]] = {
    "lost": (
        "its process has ended, and the connection to it has not been closed",
        "look at the end of its log; --resume RUN continues from the last checkpoint",
    ),
    "stopped": (
        "a signal has stopped its process (SIGSTOP, Ctrl-Z, a debugger, a frozen control group)",
        "send it SIGCONT, or find out what has stopped it",
    ),
    "uneven loop": (
        "its loop has ended earlier than those of the others, as with fewer batches on this rank",
        "let every rank take the same number of steps: break by a value that is equal on all ranks",
    ),
    "left step": (
        "its loop was left inside of a step: an exception that was caught on this rank alone, or a break",
        "do not catch exceptions around a step; let the rank fail, and the job ends with its traceback",
    ),
    "shapes": (
        "the ranks pass in tensors of different sizes",
        "give the tensor the same shape on every rank, or use all_gather for rows of different lengths",
    ),
    "operations": (
        "the ranks have called different operations: a branch that not all ranks take",
        "call the same collectives in the same order on every rank of the group",
    ),
    "order": (
        "the ranks use their groups in different orders, so each waits for the other",
        "use the groups in one order on every rank",
    ),
    "loader": (
        "its loader delivers no sample: a file system that does not answer, or a worker that waits",
        "look at what it reads; set loader.workers = 0 to see the place in the training process",
    ),
    "checkpoint": (
        "it cannot write its part of the checkpoint: a full, slow or unreachable file system",
        "look at the folder of the checkpoints on its host (df, dmesg)",
    ),
    "missing": (
        "it waits in code of its own before that call, or takes a branch without it",
        "look at the line above; every rank of a group has to make every call",
    ),
    "link": (
        "all ranks have made the call, and its bytes do not arrive: a blocked or lost link",
        "check the network between the hosts (firewall, cable, MTU); paceline doctor --hosts measures it",
    ),
    "slow": ("it computes: this step takes longer than the ones before", "wait, or look at paceline profile"),
}

CERTAIN_KINDS = ("uneven loop", "left step", "shapes", "operations", "order")
"""Kinds after which no step can end any more, whatever is waited for."""


@dataclass(frozen=True)
class RankSituation:
    """The operation of a rank at the moment at which nothing moves.

    Args:
        rank, step: its global rank, and the index of its step.
        operation: the operation of its status line.
        seconds: how long it has been in it.
        group, call, num_bytes: of the call that it waits for, see `RankOperation`.
        calls: latest call of each group.
        process: state of its process; "unknown" on another host.
        is_computing: its process uses a core.
        position: the lines where it is; empty if they are not known.
        host: name of its host.
    """

    rank: int
    step: int
    operation: str
    seconds: float
    group: str = ""
    call: int = 0
    num_bytes: int = 0
    calls: Mapping[str, GroupCall] = field(default_factory=dict)
    process: Literal["running", "stopped", "ended", "unknown"] = "running"
    is_computing: bool = False
    position: str = ""
    host: str = ""

    @property
    def waits(self) -> bool:
        """Return whether it waits for other ranks."""
        return bool(self.group)


@dataclass(frozen=True)
class HangExplanation:
    """Why nothing moves.

    Args:
        kind: the kind of cause.
        ranks: global ranks that cause it; empty if no rank does.
        text: a paragraph for the user.
        is_certain: no step can end any more, so that waiting is of no use.
    """

    kind: HangKind
    ranks: tuple[int, ...]
    text: str
    is_certain: bool


def explain_hang(ranks: Sequence[RankSituation], left: Sequence[int] = ()) -> HangExplanation:
    """Compare the situations of all ranks, and return why nothing moves.

    Args:
        ranks: those that show what they do, at least one.
        left: global ranks of the job that have ended their run.
    """
    kind, causes = _find_cause(ranks, left)
    cause, next_step = _CAUSES[kind]
    waiting = [one for one in ranks if one.waits and one not in causes]
    sentences = [_describe_causes(kind, causes, waiting, left), _describe_waits(waiting, causes)]
    text = " ".join(sentence for sentence in sentences if sentence)
    names = tuple(one.rank for one in causes) or (tuple(left) if kind == "uneven loop" else ())
    return HangExplanation(
        kind, names, f"{text} Likely cause: {cause}. Next: {next_step}.", kind in CERTAIN_KINDS
    )


def _find_cause(ranks: Sequence[RankSituation], left: Sequence[int]) -> tuple[HangKind, list[RankSituation]]:
    """Return the kind, and the ranks that cause it."""
    for kind, process in (("lost", "ended"), ("stopped", "stopped")):
        found = [one for one in ranks if one.process == process]
        if found:
            return ("lost" if kind == "lost" else "stopped"), found
    inside = [one for one in ranks if one.operation.startswith(LEFT_INSIDE_STEP)]
    outside = [one for one in ranks if one.operation.startswith(LEFT_LOOP) and one not in inside]
    if inside and len(inside) < len(ranks):
        return "left step", inside
    if outside and len(outside) < len(ranks):
        return "uneven loop", outside
    busy = [one for one in ranks if not one.waits]
    if not busy and left:
        return "uneven loop", []
    mismatch = _find_mismatch(ranks)
    if mismatch is not None:
        return mismatch
    if busy:
        wanted = _ends_of_waits(ranks) or busy
        # A rank that waits for nobody and computes is slow, whatever else is true.
        idle = [one for one in wanted if not one.is_computing]
        return _kind_of_busy(idle) if idle else ("slow", wanted)
    cycle = _find_cycle(ranks)
    return ("order", cycle) if cycle else ("link", [])


def _kind_of_busy(idle: list[RankSituation]) -> tuple[HangKind, list[RankSituation]]:
    for kind, word in (("checkpoint", "checkpoint"), ("loader", "data")):
        found = [one for one in idle if one.operation.startswith(word)]
        if found:
            return ("checkpoint" if kind == "checkpoint" else "loader"), found
    return "missing", idle


def _find_mismatch(ranks: Sequence[RankSituation]) -> tuple[HangKind, list[RankSituation]] | None:
    """Return the ranks whose latest call of a group has the same number as that of others and is another."""
    for group in sorted({one.group for one in ranks if one.waits}):
        members = [one for one in ranks if group in one.calls]
        numbers = {one.calls[group].number for one in members}
        # Only one of them has to wait: another can have launched the call and do something else meanwhile.
        if len(numbers) != 1 or len(members) < 2:
            continue
        odd = _minority(members, [one.calls[group].op for one in members])
        if odd:
            return "operations", odd
        if members[0].calls[group].op in _EQUAL_BYTES:
            odd = _minority(members, [one.calls[group].num_bytes for one in members])
            if odd:
                return "shapes", odd
    return None


def _minority(members: Sequence[RankSituation], values: Sequence[object]) -> list[RankSituation]:
    """Return the members whose value is not the most frequent one; of two, the later one."""
    usual = max(values, key=values.count)
    return [one for one, value in zip(members, values, strict=True) if value != usual]


def _missing_from(one: RankSituation, ranks: Sequence[RankSituation]) -> list[RankSituation]:
    """Return the ranks that this one waits for."""
    message = _MESSAGE.search(one.operation)
    if message is not None:
        return [other for other in ranks if other.rank == int(message[1])]
    return [
        other
        for other in ranks
        if other is not one and one.group in other.calls and other.calls[one.group].number < one.call
    ]


def _ends_of_waits(ranks: Sequence[RankSituation]) -> list[RankSituation]:
    """Return the ranks that others wait for, directly or not, and that wait for nobody."""
    found = {other.rank: other for one in ranks if one.waits for other in _missing_from(one, ranks)}
    return [found[rank] for rank in sorted(found) if not found[rank].waits]


def _find_cycle(ranks: Sequence[RankSituation]) -> list[RankSituation]:
    """Return ranks of which each waits for the next one, and the last for the first; empty without any."""
    for start in ranks:
        path = [start]
        while following := _missing_from(path[-1], ranks):
            if following[0] in path:
                return path[path.index(following[0]) :]
            path.append(following[0])
    return []


def _describe_causes(
    kind: HangKind,
    causes: Sequence[RankSituation],
    waiting: Sequence[RankSituation],
    left: Sequence[int],
) -> str:
    if not causes:
        return (
            f"{_name_ranks(left)} {'has' if len(left) == 1 else 'have'} ended."
            if kind == "uneven loop"
            else ""
        )
    if kind in ("shapes", "operations", "order"):
        return " ".join(
            f"rank {one.rank} {_describe_call(one, _compared_group(one, waiting))}{_place(one)}."
            for one in causes
        )
    missing = ""
    if waiting:
        first = waiting[0]
        where = f"'{first.group}'"
        number = f"call {first.call} of group {where}" if first.call else f"a message of group {where}"
        missing = f" is missing from {_operation_word(first)}, {number};"
        if len(causes) > 1:
            missing = missing.replace(" is ", " are ", 1)
    names, doing = _name_ranks([one.rank for one in causes]), causes[0]
    state = {"lost": "its process has ended", "stopped": "its process is stopped"}.get(kind, "")
    host = f" (host {doing.host})" if any(one.host != doing.host for one in waiting) else ""
    it = "it has" if len(causes) == 1 else "they have"
    where = f"in {doing.operation} of step {doing.step}"
    if doing.operation == BETWEEN_STEPS:
        where = f"between two steps, after step {doing.step},"
    if doing.operation.startswith(LEFT_LOOP):
        where = f"{doing.operation}, in step {doing.step},"
    words = f"{it} been {where} for {doing.seconds:.1f} s{_place(doing)}"
    return f"{names}{host}{missing} {state + ', ' if state else ''}{words}."


def _compared_group(one: RankSituation, waiting: Sequence[RankSituation]) -> str:
    return one.group or next((other.group for other in waiting if other.group in one.calls), "")


def _describe_call(one: RankSituation, group: str) -> str:
    call = one.calls.get(group)
    if call is None:
        return f"is in {one.operation} of step {one.step} for {one.seconds:.1f} s"
    number = one.call or call.number
    size = f" of {format_count(call.num_bytes, 'byte')}" if call.num_bytes else ""
    verb = "waits in" if one.waits else "has launched"
    since = f"in step {one.step} for {one.seconds:.1f} s"
    return f"{verb} {call.op}{size}, call {number} of group '{group}', {since}"


def _describe_waits(waiting: Sequence[RankSituation], causes: Sequence[RankSituation]) -> str:
    """Return what the other ranks wait for, those with one wait together."""
    together: dict[tuple[str, str, int, int], list[RankSituation]] = {}
    for one in waiting:
        together.setdefault((one.operation, one.group, one.call, one.num_bytes), []).append(one)
    sentences = []
    for (_, group, call, num_bytes), ranks in together.items():
        number = f", call {call} of group '{group}'" if call else ""
        size = f" ({format_count(num_bytes, 'byte')})" if num_bytes else ""
        verb = "waits" if len(ranks) == 1 else "wait"
        seconds = max(one.seconds for one in ranks)
        sentences.append(
            f"{_name_ranks([one.rank for one in ranks])} {verb} for {ranks[0].operation}{number}{size} of"
            f" step {ranks[0].step}, for {seconds:.1f} s{'' if causes else _place(ranks[0])}."
        )
    return " ".join(sentences)


def _operation_word(one: RankSituation) -> str:
    call = one.calls.get(one.group)
    return call.op if call is not None and call.number == one.call else one.operation.partition(",")[0]


def _place(one: RankSituation) -> str:
    return f", at {one.position}" if one.position else ""


def _name_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
