"""What gradients take that leave with every micro-batch: the scatters of a run, on tensors without memory.

No scatter is there before its rank waits for it, and all ranks run the same, so what is found is the most.
Where ranks run different numbers of micro-batches they know less of each other, and a closed form says what
may be under way (`paceline.comm.reduction.Pace`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from paceline.comm import Handle, Net
from paceline.comm.collectives.collective import Arriving
from paceline.comm.reduction import Pace, Scatterer, Ways
from paceline.comm.reduction.blocks import UNDER_WAY, moving, scatterer_name
from paceline.comm.reduction.pace import most_behind
from paceline.comm.workspace import Workspace
from paceline.layout.sizes import bytes_of
from paceline.mesh import Group
from paceline.plan.buckets import Laid, moved_together, without_memory
from paceline.plan.ranks import SendsNothing
from paceline.plan.reduced import Reduced
from paceline.slot import Slot

_ROUNDS = 2  # of micro-batches, after which all have found what memory stays


class Scattered(NamedTuple):
    """Bytes.

    Args:
        stay: from step to step.
        under_way: beside them, while micro-batches run: for the first and for later ones, bytes by those of
            the gradients that are complete, ascending.
        learning: the same at the end of the first backward, where all gradients leave at a time.
        gathered: that stay beside them, for parameters that come after an update.
    """

    stay: int
    under_way: Sequence[Sequence[tuple[int, int]]]
    learning: int
    gathered: int


def scattered(of: Reduced) -> Scattered:
    """What the scatters of a rank take, if it has any, and the gathers after an update by Gloo."""
    group, memory = Group("shard", tuple(range(of.recipe.strategy.shard)), 0), Workspace()
    path = _Path(of, group)
    if not of.leaves_often:
        for _ in _in_turns(of, memory):
            continue
        stay = memory.num_bytes
        for _ in _gathered(of, memory):
            continue
        return Scattered(stay, [_at_once(of)], 0, memory.num_bytes - stay)
    rank = _Rank(of, path, memory)
    under_way = rank.run()
    stays = [*rank.blocks, *path.came]
    come = [*_gathered(of, memory)]
    most = max((found for one in under_way for _, found in one), default=0)
    if of.blocks and not of.is_even:
        most = _behind(of)
    if not (of.blocks and of.is_even):  # backends, or other chunks of a stage, keep it longer
        under_way = [[(0, most)]]
    learning = _learning(of) if of.blocks else most
    stay, gathered = _bytes(stays), _bytes([*stays, *come]) - _bytes(stays)
    return Scattered(stay + sum(path.lies.values()), under_way, learning, gathered)


class _Path(SendsNothing):
    """Scatters of one rank; what they bring is there once somebody waits.

    Attributes:
        lies: bytes that lie in memory that ranks share, by key.
        came: memory that stays, in which others' values come.
    """

    def __init__(self, of: Reduced, group: Group) -> None:
        super().__init__(group, Net(1.0))
        self._of, self.lies, self.came = of, dict[str, int](), list[Tensor]()

    def reduce_scatter(self, x: Tensor, key: str, arriving: Arriving = None) -> Handle:
        """See `Collective`."""
        if self._of.in_memory:
            self.lies[key] = max(x.nbytes, self.lies.get(key, 0))
        elif self._of.arriving == "given" and arriving is not None and not self._of.blocks:
            self.came.append(arriving())
        return Handle(lambda deadline_seconds, exposed: x[self.group.rank])


class _Rank:
    """A rank that runs micro-batches, all ranks with it.

    Args:
        of: what it scatters; `path`, `memory`: see `Ways`.
    """

    def __init__(self, of: Reduced, path: _Path, memory: Workspace) -> None:
        self._of, self._pace = of, Pace(of.behind) if of.blocks else None
        self._home = {name: number for number, block in enumerate(of.blocks) for name in block}
        self._rows: dict[Scatterer, int] = {}
        self._by_name: dict[str, tuple[Scatterer, Slot]] = {}
        ways = Ways(path, SendsNothing(path.group, path.net), path.group, path.net, self._pace, memory)
        for number, laid in enumerate(of.often):
            tensors = without_memory(laid.members, of.item_bytes)
            parts = {one.computes: one.parts for one in laid.members}
            most, name = of.recipe.runtime.bucket_bytes, scatterer_name(number)
            one = Scatterer(tensors, parts, ways, most, name=name)
            self._rows[one] = max(x.rows[0].nbytes for x in laid.buffers)  # of what a scatter brings
            self._by_name |= {slot.name: (one, slot) for slot in tensors}

    @property
    def blocks(self) -> list[Tensor]:
        """Memory of buckets that stays."""
        return [x for one in self._rows for x in one.blocks.kept]

    def run(self) -> list[list[tuple[int, int]]]:
        """By micro-batch, after each gradient, bytes of those and what is under way in memory that goes."""
        found = []
        for _ in range(min(_ROUNDS, self._of.most_micro_batches) if self._rows else 0):
            done, one = 0, [(0, self._now())]
            for num_bytes in self._ready():
                done += num_bytes
                one.append((done, self._now()))
            found.append(one)
        return found

    def _now(self) -> int:
        found = 0
        for one in self._rows:
            found += one.blocks.passing_bytes
            found += int(self._of.passing * one.launches.num_bytes) + self._of.takes_row * self._rows[one]
        return found

    def _ready(self) -> Iterator[int]:
        """Bytes of each gradient of a micro-batch once it is handed on; blocks are gathered before theirs."""
        order = _in_order([name for name in self._of.completes if name in self._by_name], [*self._by_name])
        told, brought = self._tell(), set[int]()
        for name in order:
            block = self._home.get(name)
            if block is not None and block not in brought:
                brought.add(block)
                told = self._hear(told if len(brought) > 1 else self._tell())
            one, slot = self._by_name[name]
            one.ready(slot, None)
            yield bytes_of(slot, self._of.item_bytes)
        self._hear(self._tell())

    def _tell(self) -> list[float]:
        return [] if self._pace is None else self._pace.told()

    def _hear(self, told: list[float]) -> list[float]:
        """Of all, which is what this rank has told; returns what it tells then."""
        if self._pace is not None:
            self._pace.hear(told, is_idle=False)
        return self._tell()


def _in_order(completes: list[str], names: list[str]) -> list[str]:
    """As they are handed on: those that are complete at once; then the rest, the last first."""
    times = Counter(completes)
    once = [name for name in completes if times[name] == 1]
    return once + [name for name in reversed(names) if times[name] != 1]


def _in_turns(of: Reduced, memory: Workspace) -> Iterator[Tensor]:
    """Memory in which others' rows come, where buckets are scattered once a step."""
    for number, one in enumerate(of.laid_apart):
        (num_rows, width), dtype = one.rows.shape, one.rows.dtype
        for turn in range(min(UNDER_WAY, number + 1)):
            yield memory.take(moving(turn), (num_rows - 1, width), dtype, one.rows.device)


def _at_once(of: Reduced) -> list[tuple[int, int]]:
    """These scatters where their path takes memory for itself; see `Scattered.under_way`."""
    buckets = of.laid_apart if of.arriving == "apart" else []
    sizes, done, found = [one.flat.nbytes + one.rows[0].nbytes for one in buckets], 0, [(0, 0)]
    for number, bucket in enumerate(buckets):  # none leaves before those before it are complete
        done += sum(bytes_of(slot, of.item_bytes) for slot in bucket.slots)
        found.append((done, sum(sizes[max(0, number + 1 - UNDER_WAY) : number + 1])))
    return found if len(of.reductions) == 1 else [(0, 0), (1, sum(sorted(sizes)[-UNDER_WAY:]))]


def _gathered(of: Reduced, memory: Workspace) -> Iterator[Tensor]:
    """Memory through which parameters come, by turns."""
    shapes = moved_together(of.held, of.item_bytes, of.recipe.runtime.bucket_bytes)
    for number, one in enumerate(shapes):
        flat, name = one.flat, moving(number % UNDER_WAY)
        yield memory.take(name, flat.shape, flat.dtype, flat.device)


def _behind(of: Reduced) -> int:
    """Of buckets that may be on their way, one that is being filled in, and what arrives for each."""
    return _learning(of) + sum(_most_in_a_row(of, laid) for laid in of.often)


def _learning(of: Reduced) -> int:
    """As many buckets may be on their way as at any time; they have taken the place of the gradients."""
    arriving = int(of.passing * sum(_most_in_a_row(of, one) for one in of.often))
    rows = of.takes_row * sum(max(x.rows[0].nbytes for x in one.buffers) for one in of.often)
    return arriving + rows + sum(max(x.flat.nbytes for x in one.buffers) for one in of.often)


def _most_in_a_row(of: Reduced, laid: Laid) -> int:
    """Bytes of as many buckets as may be on their way."""
    sizes = [one.flat.nbytes for one in laid.buffers]
    most = min(most_behind(sizes, of.behind), len(sizes))
    return max(sum((sizes + sizes)[first : first + most]) for first in range(len(sizes)))


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of their memory, which several may lie in."""
    memory = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(memory.values())
