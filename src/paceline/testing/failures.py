"""What `run_ranks` raises: every rank's failure in full, the likely cause first."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.launch.outcome import Failure, conclude


class RanksFailed(Exception):
    """Some ranks of a `run_ranks` raised, died, or were stuck at the deadline.

    Args:
        failures: in any order; kept with the likely cause first. `kind` is "error" (raised), "connection"
            (raised because another rank was gone), "signal" (died) or "stopped" (was stuck).
    """

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = conclude(failures).failures
        super().__init__("\n".join(_render(failure) for failure in self.failures))

    def of(self, global_rank: int) -> Failure:
        """The failure of one rank.

        Raises:
            LookupError: that rank did not fail.
        """
        for failure in self.failures:
            if failure.global_rank == global_rank:
                return failure
        raise LookupError(f"rank {global_rank} did not fail")


def _render(failure: Failure) -> str:
    lines = [f"rank {failure.global_rank} {failure.headline}", *failure.details.splitlines()]
    return "\n    ".join(lines)
