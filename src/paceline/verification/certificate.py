"""A report as plain values and as words."""

from __future__ import annotations

from typing import Any

from paceline.verification.compare import Finding
from paceline.verification.report import Report


def certificate(report: Report) -> dict[str, Any]:
    """What was compared, with which errors and bounds; JSON values only."""
    return {
        "format": 1,
        "strategy": report.strategy,
        "processes": report.world,
        "steps": report.steps,
        "ok": report.ok,
        "sha256": report.sha256,
        "failure": None if report.failure is None else _row(report.failure),
        "cause": None if report.diagnosis is None else report.diagnosis.cause,
        "explanation": None if report.diagnosis is None else report.diagnosis.explanation,
        "tensors": [_row(f) for f in report.worst.values()],
        "conclusion": "\n".join(conclusion(report)),
    }


def _row(f: Finding) -> dict[str, Any]:
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


def conclusion(report: Report) -> list[str]:
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
