"""What a rule keeps on a rank, as it says itself: closed forms in bytes, before a run is started. Pure.

The word of a rule names a function (`SyncSpec.memory`) that is asked for each rank. It does not say what
every step takes under any rule: the model, the optimizer's state, gradients, and what micro-batches keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.layout.placement import Held
from paceline.layout.sizes import Sizes
from paceline.recipe import Recipe
from paceline.schedule import Table


@dataclass(frozen=True)
class Asked:
    """Of which rank a rule is asked.

    Args:
        recipe: under this rule alone; its strategy has its replicas filled in.
        held: by name, what the rank holds of trained tensors; `item_bytes` of one value of each.
        sizes: bytes of that.
        state: bytes of the optimizer's state, and of the average of the weights.
        frozen, buffers: bytes of its parameters that are not trained, and of the buffers that it saves.
        rank, processes: its number, and how many there are.
        stage: of a pipeline; 0 where there is none.
        stretch: the most steps from one moment at which the rule has to be at rest to the next.
        micro_batches: of a step, on this rank.
    """

    recipe: Recipe
    held: Mapping[str, Held]
    item_bytes: Mapping[str, int]
    sizes: Sizes
    state: int
    frozen: int
    buffers: int
    rank: int
    processes: int
    stage: int
    stretch: int
    micro_batches: int


class Pass(NamedTuple):
    """A micro-batch, forward or backward through a stage of a pipeline that is never flushed.

    Args:
        is_forward: or else backward.
        copies: bytes of the stage's weights meanwhile, beside the parameters.
        sums: how many times the gradients of the stage are there before it.
        done: micro-batches of the step that have gone backward, and whose inputs and outputs are kept.
        ends: whether the stage updates after it.
    """

    is_forward: bool
    copies: int
    sums: int = 0
    done: int = 0
    ends: bool = False


@dataclass(frozen=True)
class RuleMemory:
    """Bytes that a rule keeps on a rank.

    Args:
        copies: of weights, that stay.
        state: beside what the optimizer keeps, that stays.
        saved: of that, what belongs to the state of the run.
        wire: buffers, that stay.
        messages: of a channel, the most that may wait here, or have come: how many do is a matter of time.
        running: copies of weights while micro-batches run, and until the next ones.
        agreement: that ranks take for themselves while they agree; 0: they take nothing.
        at_pushes: gradients beside those that were there, while pushes are made, or added up.
        pushes: what of the messages may be there then.
        sharers: ranks in whose memory the parameters lie once.
        trains, updates: whether the rank runs micro-batches, and whether it updates.
        passes: what goes through a stage that is never flushed; nothing: a step follows its schedule.
        sent: messages of a micro-batch that such a stage keeps, each way, where a backend carries them.
        flow: what goes through such a stage, where memory of the host carries messages; of each operation
            there are so many `together`. None: the schedule.
    """

    copies: int = 0
    state: int = 0
    saved: int = 0
    wire: int = 0
    messages: int = 0
    running: int = 0
    agreement: int = 0
    at_pushes: int = 0
    pushes: int = 0
    sharers: int = 1
    trains: bool = True
    updates: bool = True
    passes: Sequence[Pass] = ()
    sent: int = 0
    flow: Table | None = None
    together: int = 1
