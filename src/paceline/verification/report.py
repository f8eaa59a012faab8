"""What a verification found."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.verification.compare import Finding, first_failure
from paceline.verification.diagnose import Diagnosis


@dataclass
class Report:
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
    worst: dict[tuple[str, str], Finding] = field(default_factory=dict)
    sha256: str | None = None
    failure: Finding | None = None
    diagnosis: Diagnosis | None = None

    @property
    def ok(self) -> bool:
        """Whether every error of every step was within its bound."""
        return self.failure is None

    def add(self, findings: list[Finding]) -> None:
        """Keep the worst of each tensor, and the first failure."""
        for f in findings:
            place = (f.quantity, f.tensor)
            kept = self.worst.get(place)
            if kept is None or _badness(f) > _badness(kept):
                self.worst[place] = f
        self.failure = self.failure or first_failure(findings)


def _badness(f: Finding) -> float:
    return f.error / f.bound if f.bound else (float("inf") if f.error else 0.0)
