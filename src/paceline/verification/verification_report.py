"""What a verification found.

A report as plain values and as words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.verification.diagnosis import ErrorDiagnosis
from paceline.verification.error_bounds import TensorComparison, first_failure


@dataclass
class VerificationReport:
    """What a verification found; equal on every rank.

    Args:
        strategy: as text.
        world: number of ranks.
        steps: steps that were compared.
        worst: by quantity and tensor, the finding whose error is largest relative to its bound.
        sha256: of the state after the last step, if it has to have the bits of the oracle.
        failure: the first finding that rounding does not explain; None: all is well.
        diagnosis: the guessed cause of the failure.
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
        """Whether every error of every step was within its bound."""
        return self.failure is None

    def add(self, findings: list[TensorComparison]) -> None:
        """Keep the worst of each tensor, and the first failure."""
        for f in findings:
            place = (f.quantity, f.tensor)
            kept = self.worst.get(place)
            if kept is None or _relative_error(f) > _relative_error(kept):
                self.worst[place] = f
        self.failure = self.failure or first_failure(findings)


def _relative_error(f: TensorComparison) -> float:
    return f.error / f.bound if f.bound else (float("inf") if f.error else 0.0)


def certificate(report: VerificationReport) -> dict[str, Any]:
    """What was compared, with which errors and bounds; JSON values only."""
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
        "class": "bitwise" if f.error == 0.0 else "exact",
        "error": min(f.error, 1e308),
        "bound": f.bound,
        "ok": f.ok,
        "step": f.step,
        "rank": f.errors.index(f.error),
    }


def conclusion_lines(report: VerificationReport) -> list[str]:
    """The result in words."""
    if report.sha256 is not None:
        return [
            f"verified: {report.steps} steps, {len(report.worst)} tensors: equal bits",
            f"state sha256: {report.sha256}",
        ]
    if report.failure is None:
        equal = sum(f.error == 0.0 for f in report.worst.values())
        return [
            f"verified: {report.steps} steps, {len(report.worst)} tensors, all within their bounds; "
            f"{equal} of them have equal bits"
        ]
    f = report.failure
    where = f"step {f.step}, update of '{f.part}'" if f.part else f"step {f.step}"
    lines = [
        f"diverges in {where}: {f.quantity} of {f.tensor}, rank {f.errors.index(f.error)}: "
        f"error {f.error:.3e}, bound {f.bound:.3e}"
    ]
    if report.diagnosis is not None:
        lines.append(f"likely cause: {report.diagnosis.cause}: {report.diagnosis.explanation}")
    return lines
