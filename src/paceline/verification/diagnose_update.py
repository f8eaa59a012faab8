"""Guess the cause when gradients, norm and rate are right, and what the optimizer made of them is not.

The oracle makes the update again as each known mistake would; the one that fits what is seen names the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.verification.diagnose import Diagnosis
from paceline.verification.reference import Reference

if TYPE_CHECKING:
    from paceline.verification.run import Verifier

_FITS = 1e-2  # relative to the change of the parameters
_OWN = ("params", "param_names", "lr", "initial_lr")


def diagnose_update(v: Verifier, update: int, reference: Reference) -> Diagnosis:
    """The mistake between the final gradient and the parameters after the step."""
    failure = v.report.failure
    if failure is not None and failure.errors[0] <= failure.bound:
        wrong = [rank for rank, error in enumerate(failure.errors) if error > failure.bound]
        text = f"rank 0 is right and {wrong} are not: they made another update, or changed something after it"
        return Diagnosis("ranks drifted apart", text)
    return _other_options(v) or _other_update(v, update, reference)


def _other_options(v: Verifier) -> Diagnosis | None:
    pairs = zip(v.session.state.optimizer.param_groups, v.oracle.optimizer.param_groups, strict=False)
    for number, (seen, right) in enumerate(pairs):
        for key in right.keys() - set(_OWN):
            if seen.get(key) != right[key]:
                text = f"'{key}' of group {number} is {seen.get(key)}, and should be {right[key]}"
                return Diagnosis("wrong optimizer options", text)
    return None


def _other_update(v: Verifier, update: int, reference: Reference) -> Diagnosis:
    names = [f"model/{n}" for n in reference.final]
    seen = _change(reference.before, v.now, names)
    for cause, text, variant in _VARIANTS:
        v.oracle_state.load(reference.before, reference.scalars)
        variant(v, update, reference)
        found = _change(reference.before, v.oracle_state.tensors(), names)
        scale = max(float(seen.norm()), float(found.norm()), 1e-300)
        if float((seen - found).norm()) <= _FITS * scale:
            return Diagnosis(cause, text)
    return Diagnosis(
        "different update", "gradients agree and the update does not: look at the optimizer's state"
    )


def _change(before: Mapping[str, Tensor], after: Mapping[str, Tensor], names: list[str]) -> Tensor:
    parts = [after[n].detach().to(torch.float64) - before[n].to(torch.float64) for n in names]
    return torch.cat([torch.view_as_real(p).reshape(-1) if p.is_complex() else p.reshape(-1) for p in parts])


def _step(v: Verifier, update: int, reference: Reference) -> None:
    for name, p in v.oracle.model.named_parameters():
        p.grad = reference.final[name].clone() if name in reference.final else None
    v.oracle.update(update)


def _twice(v: Verifier, update: int, reference: Reference) -> None:
    _step(v, update, reference)
    _step(v, update, reference)


def _from_nothing(v: Verifier, update: int, reference: Reference) -> None:
    v.oracle.optimizer.state.clear()
    _step(v, update, reference)


def _not_at_all(v: Verifier, update: int, reference: Reference) -> None:
    """The parameters stay."""


_VARIANTS: tuple[tuple[str, str, Callable[[Any, int, Reference], None]], ...] = (
    ("stepped twice", "the optimizer made its step twice", _twice),
    ("optimizer state lost", "the optimizer began with an empty state", _from_nothing),
    ("not updated", "the optimizer's step left the parameters as they were, or it was undone", _not_at_all),
)
