"""A link profile: measured latency and bandwidth between ranks, as a file that later sessions read.

A link model has a time alpha for each round and beta for each byte that a rank sends, so
`LinkModel.seconds(cost)` of a `CollectiveCost` predicts the time of a collective. Invariant: a profile that
was loaded is equal to the one that was saved; a file of another format is refused. The file is JSON:

    {"format": 2, "world": 4, "hosts": [name of the host of each rank],
     "pairs": [{"source": 0, "target": 1, "line": LINE}, ...], "all_reduce": LINE,
     "routes": {"native": LINE, "ring": LINE, ...}}
    LINE: {"alpha_seconds", "beta_seconds_per_byte", "residual",
           "points": [[sent bytes of a rank, rounds, seconds], ...]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.comm.collective_cost import CollectiveCost
from paceline.errors import DataError

_FORMAT_VERSION = 2


@dataclass(frozen=True)
class LinkSample:
    """A measurement of one size: bytes that a rank sends, rounds, and the median of the seconds."""

    sent_bytes: float
    rounds: int
    seconds: float


@dataclass(frozen=True)
class LinkModel:
    """A fitted link: seconds = rounds * alpha + sent bytes * beta.

    Args:
        alpha_seconds: seconds of each round.
        beta_seconds_per_byte: seconds of each byte that a rank sends.
        residual: root of the mean square of the relative errors of the fit.
        points: the measurements.
    """

    alpha_seconds: float
    beta_seconds_per_byte: float
    residual: float
    points: tuple[LinkSample, ...]

    @property
    def bits_per_second(self) -> float:
        """Bandwidth; infinite if no size was large enough to show one."""
        return 8 / self.beta_seconds_per_byte if self.beta_seconds_per_byte > 0 else float("inf")

    def seconds(self, cost: CollectiveCost) -> float:
        """Return the predicted time of an operation with this cost on this link."""
        return cost.rounds * self.alpha_seconds + cost.sent_bytes * self.beta_seconds_per_byte


@dataclass(frozen=True)
class RankPair:
    """The link from one rank to another."""

    source: int
    target: int
    line: LinkModel


@dataclass(frozen=True)
class LinkProfile:
    """The measured links of a job.

    Args:
        hosts: the name of the host of each rank.
        pairs: every ordered pair.
        all_reduce: model of the whole world; its points count what a rank sends and the rounds of the ring.
        routes: model of an all_reduce of the whole world by route; points count the critical path.
    """

    hosts: tuple[str, ...]
    pairs: tuple[RankPair, ...]
    all_reduce: LinkModel
    routes: Mapping[str, LinkModel] = field(default_factory=dict)

    def record(self) -> dict[str, object]:
        """Return the content of the file as plain values."""
        record: dict[str, object] = {
            "format": _FORMAT_VERSION,
            "world": len(self.hosts),
            "hosts": list(self.hosts),
        }
        record |= {
            "pairs": [_pair_record(pair) for pair in self.pairs],
            "all_reduce": _model_record(self.all_reduce),
        }
        return record | {"routes": {route: _model_record(line) for route, line in self.routes.items()}}

    def save(self, path: Path) -> None:
        """Write the file, all or nothing."""
        # A reader never sees half of a file: the rename is atomic.
        hidden = path.with_name(path.name + ".writing")
        hidden.write_text(json.dumps(self.record(), indent=1) + "\n", encoding="utf-8")
        hidden.rename(path)

    @classmethod
    def load(cls, path: Path) -> LinkProfile:
        """Read what `save` wrote.

        Raises:
            DataError: the file does not exist, is damaged, or has another format.
        """
        try:
            return cls.read(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"not a link profile: {error}",
                where=str(path),
                next_step="paceline bench link --out FILE",
            ) from error

    @classmethod
    def read(cls, record: dict[str, Any]) -> LinkProfile:
        """Return the inverse of `record`.

        Raises:
            ValueError, KeyError, TypeError: it is no profile.
        """
        if record["format"] != _FORMAT_VERSION:
            raise ValueError(f"format {record['format']}, expected {_FORMAT_VERSION}")
        pairs = tuple(RankPair(p["source"], p["target"], _parse_model(p["line"])) for p in record["pairs"])
        routes = {route: _parse_model(line) for route, line in record["routes"].items()}
        return cls(tuple(record["hosts"]), pairs, _parse_model(record["all_reduce"]), routes)


def _pair_record(pair: RankPair) -> dict[str, object]:
    return {"source": pair.source, "target": pair.target, "line": _model_record(pair.line)}


def _model_record(line: LinkModel) -> dict[str, object]:
    points = [[p.sent_bytes, p.rounds, p.seconds] for p in line.points]
    return {**asdict(line), "points": points}


def _parse_model(record: dict[str, Any]) -> LinkModel:
    numbers = {name: value for name, value in record.items() if name != "points"}
    return LinkModel(**numbers, points=tuple(LinkSample(*point) for point in record["points"]))


def fit_link_model(points: Sequence[LinkSample]) -> LinkModel:
    """Fit alpha and beta with the least sum of squared relative errors; both at least 0.

    Source: Hockney 1994, The communication challenge for MPP, Parallel Computing 20 (the model); the errors
        are relative because sizes span four orders of magnitude.
    """
    # Minimise sum ((r a + s b) / t - 1)^2: the normal equations of two unknowns.
    rounds = [point.rounds / point.seconds for point in points]
    sent = [point.sent_bytes / point.seconds for point in points]
    rr, ss = sum(x * x for x in rounds), sum(x * x for x in sent)
    rs = sum(x * y for x, y in zip(rounds, sent, strict=True))
    r1, s1 = sum(rounds), sum(sent)
    # Zero if all sizes have one ratio of rounds to bytes: then alpha alone is fitted.
    determinant = rr * ss - rs * rs
    alpha = (r1 * ss - s1 * rs) / determinant if determinant > 0 else r1 / rr
    beta = (s1 * rr - r1 * rs) / determinant if determinant > 0 else 0.0
    # A negative parameter makes no sense: fit the other one alone.
    if alpha < 0:
        alpha, beta = 0.0, s1 / ss
    elif beta < 0:
        alpha, beta = r1 / rr, 0.0
    errors = [x * alpha + y * beta - 1 for x, y in zip(rounds, sent, strict=True)]
    return LinkModel(alpha, beta, (sum(e * e for e in errors) / len(errors)) ** 0.5, tuple(points))
