"""Messages of one collective between ranks of a group, or of a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from paceline.comm.net import Net
from paceline.comm.workspace import Workspace
from paceline.mesh import Group


@dataclass(frozen=True)
class Mail:
    """What a rank sends and receives by.

    Args:
        tag: of the collective; its messages do not meet those of another.
        places: of the ranks that take part, in the group.
        rank: this rank's place among these.
        workspace: of the thread that sends and receives.
    """

    net: Net
    group: Group
    tag: int
    places: Sequence[int]
    rank: int
    workspace: Workspace

    @property
    def size(self) -> int:
        """How many take part."""
        return len(self.places)

    def among(self, ranks: Sequence[int]) -> Mail:
        """The same among some of these ranks, of which this is one."""
        return replace(self, places=[self.places[rank] for rank in ranks], rank=list(ranks).index(self.rank))

    def send(self, to: int, x: Tensor) -> None:
        """Send; what is empty is not sent."""
        if x.numel():
            self.net.send(x, self.group, self.places[to], self.tag).wait(exposed=False)

    def receive(self, source: int, out: Tensor) -> Tensor:
        """Wait for what a rank sends, and fill `out` with it."""
        if out.numel():
            self.net.receive(out, self.group, self.places[source], self.tag).wait(exposed=False)
        return out

    def exchange(self, to: int, x: Tensor, source: int, out: Tensor) -> Tensor:
        """Send to one rank while another's message arrives."""
        arriving = None
        if out.numel():
            arriving = self.net.receive(out, self.group, self.places[source], self.tag)
        self.send(to, x)
        if arriving is not None:
            arriving.wait(exposed=False)
        return out
