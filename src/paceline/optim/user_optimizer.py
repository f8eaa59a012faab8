"""The base of an optimizer that the user writes: a rule for one group of parameters, and no more.

Invariant: whatever the rule keeps in `self.state[parameter]` and in its groups is in `state_dict()`, and so
is the number of updates, so that a resumed run continues where it stopped. `ByGroup` joins several optimizers
into one, with an update rule of its own for each group of parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import TaskError
from paceline.optim.slot_norms import SlotOptimizer


class UserOptimizer(torch.optim.Optimizer, ABC):
    """A `torch.optim.Optimizer` whose subclass gives the update rule.

        class DecayRate(UserOptimizer):
            def update(self, params, grads, step):
                rate = self.group["lr"] * self.group["decay"] ** step
                for param, grad in zip(params, grads):
                    param -= rate * grad

        Task(..., optimizer=lambda model: DecayRate(model.parameters(), lr=0.1, decay=0.99))

    Args:
        params: parameters, named parameters or groups, as any torch optimizer takes them.
        lr: base rate; the schedule of the recipe sets `group["lr"]` before every update.
        **options: further values of the rule; each is an entry of every group, and a group may differ.
    """

    def __init__(self, params: Any, lr: float, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "step": 0, **options})
        self.group: dict[str, Any] = self.param_groups[0]

    @abstractmethod
    def update(self, params: Sequence[Tensor], grads: Sequence[Tensor], step: int) -> None:
        """Change the parameters in place; called without autograd, once per group and step.

        Args:
            params: the parameters of the group that have a gradient.
            grads: their gradients, of the same shapes, already averaged, unscaled and clipped.
            step: how many updates this group has had: 0 at the first.

        `self.group` is the group that is being updated; `self.state[param]` is a dict for the rule's state of
        a parameter, and is saved.
        """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every group once.

        Raises:
            TaskError: no parameter has a gradient, so nothing would be trained.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not any(p.grad is not None for group in self.param_groups for p in group["params"]):
            raise TaskError(
                f"{type(self).__name__} was given no gradient, so this update would change nothing",
                next_step="pass the optimizer the parameters that the loss depends on",
            )
        for group in self.param_groups:
            self._update_group(group)
        return loss

    def _update_group(self, group: dict[str, Any]) -> None:
        self.group = group
        params = [p for p in group["params"] if p.grad is not None]
        if params:
            self.update(params, [p.grad for p in params], group["step"])
        # Counted without gradients as well, so that the number is equal on all ranks.
        group["step"] += 1


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

    @property
    def whole_moments(self) -> frozenset[str]:
        """Keys of state that is equal on all ranks which hold parts of a tensor."""
        return frozenset[str]().union(*(getattr(m, "whole_moments", frozenset()) for m in self.members))

    @property
    def shared_moments(self) -> frozenset[str]:
        """Keys of state that belongs to no parameter and is equal on all ranks."""
        return frozenset[str]().union(*(getattr(m, "shared_moments", frozenset()) for m in self.members))

    def begin_backward(self, scale: float, losses: Callable[[], Any] | None = None) -> None:
        """Prepare the members for the backward passes of a step."""
        # A layout or a loaded checkpoint can have replaced groups and state since the last step.
        self._gather()
        for member in self.members:
            if isinstance(member, SlotOptimizer):
                member.begin_backward(scale, losses)

    def _gather(self) -> None:
        """Share groups and state with the members; a layout may have replaced parameters of the groups."""
        for i, member in enumerate(self.members):
            member.param_groups = [group for group in self.param_groups if group[_MEMBER] == i]
            member.state = self.state

    def step(self, closure: Any = None) -> Any:
        """Update every group once, by its own rule."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # A layout or a loaded checkpoint can have replaced groups and state since the last step.
        self._gather()
        for member in self.members:
            # One with collectives also steps on a rank that has no part of its parameters.
            if isinstance(member, SlotOptimizer) or any(group["params"] for group in member.param_groups):
                member.step()
        return loss


def member_optimizers(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that an optimizer is made of; most consist of themselves only."""
    return optimizer.members if isinstance(optimizer, ByGroup) else (optimizer,)
