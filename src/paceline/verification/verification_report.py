"""The report of a verification: the worst comparison of every tensor, as values, JSON and sentences.

A comparison has the class "bitwise" if all ranks have the oracle's bits, and "rounding" if they differ from
it; `ok` says whether the difference is within its bound. This module decides nothing: bounds come from
`error_bounds`, causes from `diagnosis`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.errors import format_count
from paceline.verification.diagnosis import ErrorDiagnosis
from paceline.verification.error_bounds import TensorComparison, first_failure


@dataclass
class VerificationReport:
    """The comparisons of a verification; equal on every rank.

    Args:
        strategy: the strategy as text.
        world: number of ranks.
        steps: number of steps that were compared.
        worst: the comparison with the largest error relative to its bound, by quantity and tensor.
        sha256: hash of the state after the last step, for a run that must have the bits of the oracle.
        failure: the first comparison whose error exceeds its bound; None: there is none.
        diagnosis: the likely cause of the failure.
    """

    strategy: str
    world: int
    steps: int = 0
    worst: dict[tuple[str, str], TensorComparison] = field(default_factory=dict)
    sha256: str | None = None
    failure: TensorComparison | None = None
    diagnosis: ErrorDiagnosis | None = None

    @property
    def ok(self) -> bool:
        """Return whether every error of every step was within its bound."""
        return self.failure is None

    def add(self, comparisons: list[TensorComparison]) -> None:
        """Add the comparisons of a step: keep the worst of each tensor, and the first failure."""
        for comparison in comparisons:
            name = (comparison.quantity, comparison.tensor)
            previous = self.worst.get(name)
            if previous is None or _relative_error(comparison) > _relative_error(previous):
                self.worst[name] = comparison
        self.failure = self.failure or first_failure(comparisons)


def _relative_error(comparison: TensorComparison) -> float:
    if comparison.bound:
        return comparison.error / comparison.bound
    return float("inf") if comparison.error else 0.0


def certificate(report: VerificationReport) -> dict[str, Any]:
    """Return the report as JSON values: every tensor with its error and bound, and the conclusion."""
    return {
        "format": 1,
        "strategy": report.strategy,
        "processes": report.world,
        "steps": report.steps,
        "ok": report.ok,
        "sha256": report.sha256,
        "failure": None if report.failure is None else _comparison_record(report.failure),
        "cause": None if report.diagnosis is None else report.diagnosis.cause,
        "explanation": None if report.diagnosis is None else report.diagnosis.explanation,
        "tensors": [_comparison_record(f) for f in report.worst.values()],
        "conclusion": "\n".join(conclusion_lines(report)),
    }


def _comparison_record(f: TensorComparison) -> dict[str, Any]:
    return {
        "quantity": f.quantity,
        "tensor": f.tensor,
        "part": f.part,
        "class": "bitwise" if f.error == 0.0 else "rounding",
        # JSON has no infinity, which is the error of a missing tensor.
        "error": min(f.error, 1e308),
        "bound": f.bound,
        "ok": f.ok,
        "step": f.step,
        "rank": f.errors.index(f.error),
    }


def _describe_extent(report: VerificationReport) -> str:
    return f"verified: {format_count(report.steps, 'step')}, {format_count(len(report.worst), 'tensor')}"


def conclusion_lines(report: VerificationReport) -> list[str]:
    """Return the result in sentences, one per line."""
    if report.sha256 is not None:
        return [
            f"{_describe_extent(report)}: equal bits",
            f"state sha256: {report.sha256}",
        ]
    if report.failure is None:
        equal = sum(f.error == 0.0 for f in report.worst.values())
        return [f"{_describe_extent(report)}, all within their bounds; {equal} of them have equal bits"]
    f = report.failure
    where = f"step {f.step}, update of '{f.part}'" if f.part else f"step {f.step}"
    lines = [
        f"diverges in {where}: {f.quantity} of {f.tensor}, rank {f.errors.index(f.error)}: "
        f"error {f.error:.3e}, bound {f.bound:.3e}"
    ]
    if report.diagnosis is not None:
        lines.append(f"likely cause: {report.diagnosis.cause}: {report.diagnosis.explanation}")
    return lines
