"""What a run has released with noise, and its budget: the list from which epsilon is computed.

A release is written to `privacy.jsonl` in the run folder before its noise is drawn, and is never taken back.
So the list also has what a run released after its last checkpoint and before it was killed: its noise was
drawn and is gone, and a resumed run draws other noise for the same round. A line that a crash has cut short
counts as a release. A power cut can lose lines that the system has not written yet.

Invariant: numbers of releases are never used twice in a run, and no noise and no secret is in here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from paceline.errors import CheckpointError, RecipeError, format_count
from paceline.privacy.accountant import (
    NoisyRelease,
    compute_epsilon,
    count_within,
    name_accountant,
    relation_of,
    require_accountant,
)

LEDGER = "privacy.jsonl"
"""The file of releases in a run folder."""


@dataclass(frozen=True)
class PrivacyReport:
    """What a run guarantees to each unit.

    Args:
        epsilon, delta: of all releases so far.
        unit: whose data is protected: "client" or "sample".
        relation: which data sets are neighbours.
        sampling: how units were drawn, of each kind of release.
        accountant: what has computed epsilon.
        clip_norm: largest norm of what a unit adds to a sum.
        budget: largest epsilon; 0: there is none.
        events: the releases: their fields, and how often each was made.
        without_noise: what the run shows without noise, which epsilon does not cover.
        assumptions: under which epsilon holds.
        warning: why there is no privacy; empty if there is.
    """

    epsilon: float
    delta: float
    unit: str
    relation: str
    sampling: Sequence[str]
    accountant: str
    clip_norm: float
    budget: float
    events: Sequence[Mapping[str, Any]]
    without_noise: Sequence[str]
    assumptions: Sequence[str]
    warning: str = ""


class _KnownRoom(NamedTuple):
    """How many releases of one kind the budget has room for.

    Args:
        release: the kind.
        end: number of releases of the run up to which there is room.
        is_all: there is room for no more; otherwise more were not computed.
    """

    release: NoisyRelease
    end: int
    is_all: bool

    def is_passed(self, number: int) -> bool:
        """Return whether more has to be computed after so many releases."""
        return number >= self.end and not self.is_all


class PrivacyLedger:
    """The releases of a run.

    Args:
        delta, budget, unit, clip_norm: of the recipe.
        without_noise: what the run shows without noise.
        assumptions: under which epsilon holds.
        warning: why there is no privacy; empty if there is.
    Raises:
        MissingExtraError: dp-accounting is not installed.
    """

    def __init__(
        self,
        *,
        delta: float,
        budget: float,
        unit: str,
        clip_norm: float,
        without_noise: Sequence[str] = (),
        assumptions: Sequence[str] = (),
        warning: str = "",
    ) -> None:
        require_accountant()
        self.delta, self.budget, self.unit, self.clip_norm = delta, budget, unit, clip_norm
        self.without_noise, self.assumptions = tuple(without_noise), tuple(assumptions)
        self.warning = warning
        self.releases: dict[NoisyRelease, int] = {}
        self._file: TextIO | None = None
        self._known: _KnownRoom | None = None

    # -- files and checkpoints

    def open(self, folder: Path) -> str:
        """Read the releases in a run folder, and write there from now on; for the rank that writes files.

        Returns:
            What `merge` takes, for the other ranks.
        """
        path = folder / LEDGER
        if path.exists():
            self._merge(read_releases(path))
        self._file = path.open("a", encoding="utf-8", buffering=1)
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            self._file.write("\n")
        return json.dumps(self.state_dict())

    def merge(self, text: str) -> None:
        """Take over what `open` has returned on the rank that writes files."""
        self.load_state_dict(json.loads(text))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def state_dict(self) -> Mapping[str, Any]:
        """Return unit, warning and releases."""
        return {
            "unit": self.unit,
            "warning": self.warning,
            "releases": [[*release, count] for release, count in self.releases.items()],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Add what a checkpoint has; releases that were made after it stay.

        Raises:
            CheckpointError: the saved run protected another unit.
        """
        if state_dict["unit"] != self.unit:
            raise CheckpointError(
                f"the checkpoint protects each {state_dict['unit']}, and this run each {self.unit}: their"
                " releases have no common epsilon",
                where="private.unit",
                next_step="resume with the unit of the run, or start a new one",
            )
        # Noise that was known once stays known.
        self.warning = self.warning or str(state_dict["warning"])
        self._merge({NoisyRelease(*fields): int(count) for *fields, count in state_dict["releases"]})

    def _merge(self, releases: Mapping[NoisyRelease, int]) -> None:
        for release, count in releases.items():
            self.releases[release] = max(count, self.releases.get(release, 0))
        self._known = None

    # -- the budget

    @property
    def num_releases(self) -> int:
        """Return the number of releases so far."""
        return sum(self.releases.values())

    def epsilon(self) -> float:
        """Return epsilon of the releases so far."""
        return compute_epsilon(self.releases, self.delta)

    def refuse(self, release: NoisyRelease, num_left: int) -> str:
        """Return why a release would exceed the budget; empty if it does not.

        Args:
            num_left: releases until the end of the run. Epsilon is computed for as many at once, since that
                takes up to a second.
        """
        if not self.budget or num_left <= 0:
            return ""
        if self._known is None or self._known.release != release or self._known.is_passed(self.num_releases):
            within = count_within(self.releases, release, self.delta, self.budget, num_left)
            self._known = _KnownRoom(release, self.num_releases + within, is_all=within < num_left)
        if self.num_releases < self._known.end:
            return ""
        after = compute_epsilon({**self.releases, release: self.releases.get(release, 0) + 1}, self.delta)
        return (
            f"the privacy budget is spent: epsilon is {self.epsilon():.4g} after"
            f" {format_count(self.num_releases, 'round')}, and the next one would make it {after:.4g}, above"
            f" private.budget = {self.budget:g}"
        )

    def charge(self, release: NoisyRelease, step: int) -> int:
        """Write down a release before its noise is drawn.

        Returns:
            Its number, for the name of its draws.
        Raises:
            RecipeError: it would exceed the budget.
        """
        if refusal := self.refuse(release, 1):
            raise RecipeError(
                refusal, where="private.budget", next_step="stop here, or allow a larger budget"
            )
        number = self.num_releases
        if self._file is not None:
            self._file.write(json.dumps({"step": step, **release.record()}) + "\n")
        self.releases[release] = self.releases.get(release, 0) + 1
        return number

    def report(self) -> PrivacyReport:
        """Return what the run guarantees so far."""
        return describe_releases(
            self.releases,
            delta=self.delta,
            budget=self.budget,
            unit=self.unit,
            clip_norm=self.clip_norm,
            without_noise=self.without_noise,
            assumptions=self.assumptions,
            warning=self.warning,
        )


def describe_releases(
    releases: Mapping[NoisyRelease, int],
    *,
    delta: float,
    budget: float,
    unit: str,
    clip_norm: float,
    without_noise: Sequence[str],
    assumptions: Sequence[str],
    warning: str,
) -> PrivacyReport:
    """Return what some releases guarantee; arguments as of `PrivacyLedger`."""
    return PrivacyReport(
        epsilon=compute_epsilon(releases, delta),
        delta=delta,
        unit=unit,
        relation=f"{relation_of(releases)} {unit}",
        sampling=[str(release) for release in releases],
        accountant=name_accountant(releases),
        clip_norm=clip_norm,
        budget=budget,
        events=[{**release.record(), "count": count} for release, count in releases.items()],
        without_noise=list(without_noise),
        assumptions=list(assumptions),
        warning=warning,
    )


def read_releases(path: Path) -> dict[NoisyRelease, int]:
    """Return the releases of a file; a line that was cut short counts as another one of the kind before it.

    Raises:
        CheckpointError: the file is damaged, so that nobody knows what was released.
    """
    releases, last = dict[NoisyRelease, int](), None
    for line in path.read_bytes().splitlines():
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            fields.pop("step")
            last = NoisyRelease(**fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if last is None:
                raise CheckpointError(
                    f"the list of releases is damaged: {line[:80]!r}",
                    where=str(path),
                    next_step="restore the file: without it nobody knows what the run has released",
                ) from error
        releases[last] = releases.get(last, 0) + 1
    return releases
