"""Several optimizers as one: another update rule for each group of parameters."""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import TaskError

_MEMBER = "member"


class ByGroup(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` whose groups are those of others, each updated by the one that it came from.

        def optimizers(model):
            return ByGroup(
                torch.optim.AdamW(model.blocks.parameters(), lr=1e-3),
                torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9),
            )

        Task(..., optimizer=optimizers)

    The schedule multiplies the rate of every group, and a norm is clipped over all. It goes under every
    strategy that suits each of the optimizers; a rank updates its parts of what each group has.

    Args:
        *members: optimizers without state; their groups are this one's from now on.
    Raises:
        TaskError: a parameter is in two of them, or there is none.
    """

    def __init__(self, *members: torch.optim.Optimizer) -> None:
        groups = [(i, group) for i, member in enumerate(members) for group in member.param_groups]
        parameters = [p for _, group in groups for p in group["params"]]
        if not parameters or len(set(parameters)) != len(parameters):
            raise TaskError(
                "each parameter is updated by one optimizer, and "
                + ("there is none" if not parameters else "one is in the groups of two"),
                next_step="give each of the optimizers parameters of its own",
            )
        for i, group in groups:
            group[_MEMBER] = i
        super().__init__([group for _, group in groups], {})
        self.members = members
        self._gather()

    def _gather(self) -> None:
        """Groups and state are kept here; a layout may have given groups other parameters."""
        for i, member in enumerate(self.members):
            member.param_groups = [group for group in self.param_groups if group[_MEMBER] == i]
            member.state = self.state

    def step(self, closure: Any = None) -> Any:
        """Update every group once, by its own rule."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._gather()
        for member in self.members:
            if any(group["params"] for group in member.param_groups):
                member.step()
        return loss


def members_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that one is made of; most are one."""
    return optimizer.members if isinstance(optimizer, ByGroup) else (optimizer,)
