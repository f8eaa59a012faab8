"""The rules of alerts: what is compared with what, for how long, and what a user can do then.

Each rule names a metric of the catalog. The engine (`paceline.watch.alerts`) judges records by these rules,
and `paceline.watch.promql` writes the same table as alert rules of Prometheus. Invariant: a rule that can be
built can be judged and rendered. Imports no torch.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

from paceline.errors import DataError
from paceline.watch.metric_catalog import METRICS_BY_NAME, UPDATED, MetricSpec

RuleKind = Literal["threshold", "rate", "z-score", "absence", "plateau"]
Direction = Literal["above", "below"]
Severity = Literal["warning", "critical"]

NORMAL_IQR = 1.349
"""The interquartile range of a normal distribution in standard deviations."""
_KEYS = ("metric", "kind", "labels", "per", "per_labels", "above", "below", "window", "floor", "for_steps")
_MORE_KEYS = ("for_seconds", "severity", "summary", "advice", "off")


class Selector(NamedTuple):
    """The series of a metric.

    Args:
        metric: its name in the catalog.
        where: values of some of its labels; every combination of the others is a series.
    """

    metric: str
    where: Mapping[str, str] = MappingProxyType({})

    @property
    def spec(self) -> MetricSpec:
        """The metric in the catalog."""
        return METRICS_BY_NAME[self.metric]

    def __str__(self) -> str:
        labels = ",".join(f"{name}={json.dumps(value)}" for name, value in self.where.items())
        return f"{self.metric}{{{labels}}}" if labels else self.metric


@dataclass(frozen=True)
class AlertRule:
    """A rule.

    Args:
        name: words joined by hyphens.
        kind: threshold: the value itself. rate: its change per second over `window` steps. z-score: its
            distance from the median of the last `window` values, in robust standard deviations (interquartile
            range / 1.349). absence: seconds since the newest record. plateau: how much lower the median of
            the last eighth of the window is than that of its first eighth, as a fraction of the latter.
        signal: the series that are judged.
        limit: what is compared with.
        direction: on which side of the limit the rule is met.
        per: what the value is divided by: a metric of the same records.
        window: steps that rate, z-score and plateau look back; nothing fires before there are as many.
        floor: added to the standard deviation of a z-score, as a fraction of the median, so that a curve
            without noise does not fire for nothing.
        for_steps, for_seconds: how long the rule has to be met without a break.
        severity: warning or critical.
        summary: what it means, one clause.
        advice: what to do.

    Raises:
        DataError: the rule cannot be judged; says why.
    """

    name: str
    kind: RuleKind
    signal: Selector
    limit: float
    direction: Direction = "above"
    per: Selector | None = None
    window: int = 50
    floor: float = 0.0
    for_steps: int = 1
    for_seconds: float = 0.0
    severity: Severity = "warning"
    summary: str = ""
    advice: str = ""

    def __post_init__(self) -> None:
        problem = next(self._problems(), None)
        if problem is not None:
            raise DataError(
                f"the alert rule '{self.name}' {problem}",
                next_step="docs/howto/alerts.md has the keys; metrics are those that the exporter serves",
            )

    def _problems(self) -> Iterator[str]:
        for selector in filter(None, (self.signal, self.per)):
            if selector.metric not in METRICS_BY_NAME:
                yield f"names the metric '{selector.metric}', which does not exist"
            elif unknown := selector.where.keys() - {*selector.spec.labels}:
                yield f"names the label '{min(unknown)}', which {selector.metric} does not have"
        if self.kind not in get_args(RuleKind):
            yield f"is of kind '{self.kind}'; there are {', '.join(get_args(RuleKind))}"
        if self.severity not in get_args(Severity):
            yield f"has the severity '{self.severity}'; there are {', '.join(get_args(Severity))}"
        if self.window < 8 or self.for_steps < 1 or self.for_seconds < 0 or self.floor < 0:
            yield "needs window >= 8, for_steps >= 1, for_seconds >= 0 and floor >= 0"
        if self.kind == "absence" and (self.direction != "above" or self.per is not None):
            yield "is of kind absence: it has above = SECONDS and no `per`"
        elif self.kind != "absence" and not self.signal.spec.event:
            yield f"names {self.signal.metric}, which no record has; only absence can be judged by it"
        if self.per is not None and (
            self.kind != "threshold" or self.per.spec.event != self.signal.spec.event
        ):
            yield "can only have `per` if it is a threshold, and of the same records"

    def is_met(self, score: float) -> bool:
        """Return whether a score, see `kind`, is beyond the limit."""
        return score > self.limit if self.direction == "above" else score < self.limit


SHIPPED_RULES: tuple[AlertRule, ...] = (
    AlertRule(
        "loss-spike",
        "z-score",
        Selector("paceline_loss"),
        10.0,
        floor=0.05,
        for_steps=2,  # one batch of a model that fits its data can be as far from the others
        severity="critical",
        summary="the loss is far above its last values, or not finite",
        advice="lower optimizer.lr, set optimizer.clip_norm or [health], and look at the samples of the step",
    ),
    AlertRule(
        "plateau",
        "plateau",
        Selector("paceline_loss"),
        0.01,
        direction="below",
        window=400,
        for_steps=5,
        summary="the loss has stopped falling",
        advice="lower or raise optimizer.lr, or stop the run (evaluate.patience)",
    ),
    AlertRule(
        "batch-time",
        "z-score",
        Selector("paceline_step_seconds"),
        5.0,
        floor=0.1,
        for_steps=5,
        summary="rounds take much longer than before",
        advice="look at the diagnosis: it names the rank and the phase; see what else runs on its host",
    ),
    AlertRule(
        "data-wait",
        "threshold",
        Selector("paceline_phase_seconds", {"phase": "data"}),
        0.5,
        per=Selector("paceline_step_seconds"),
        for_steps=5,
        summary="rank 0 waits for data in most of a round",
        advice="raise loader.workers, keep samples in loader.cache_bytes, or read from a faster disk",
    ),
    AlertRule(
        "divergence",
        "threshold",
        Selector("paceline_copies_equal"),
        1.0,
        direction="below",
        severity="critical",
        summary="copies of the state on different ranks are not equal any more",
        advice="stop the run and resume from a checkpoint before; `paceline verify` finds the cause",
    ),
    AlertRule(
        "memory",
        "threshold",
        Selector("paceline_host_memory_bytes", {"kind": "available"}),
        0.05,
        direction="below",
        per=Selector("paceline_host_memory_bytes", {"kind": "total"}),
        for_steps=3,
        severity="critical",
        summary="the host has little memory left",
        advice="use smaller micro-batches (batch.accumulation), memory.recompute or zero=2",
    ),
    AlertRule(
        "disk",
        "threshold",
        Selector("paceline_host_folder_bytes", {"kind": "free"}),
        0.03,
        direction="below",
        per=Selector("paceline_host_folder_bytes", {"kind": "total"}),
        severity="critical",
        summary="the disk of the run folder is almost full",
        advice="remove old runs, or keep fewer checkpoints (checkpoint.keep)",
    ),
    AlertRule(
        "temperature",
        "threshold",
        Selector("paceline_host_temperature_celsius"),
        90.0,
        for_steps=3,
        summary="a sensor of the host is hot: its clock will be lowered",
        advice="check fans and air; the rank of this host becomes a straggler",
    ),
    AlertRule(
        "silence",
        "absence",
        Selector(UPDATED.name),
        600.0,
        severity="critical",
        summary="the run has written nothing for a long time",
        advice="look at its processes: py-spy dump --pid PID shows where each waits",
    ),
)


def read_rules(path: Path, shipped: Sequence[AlertRule] = SHIPPED_RULES) -> tuple[AlertRule, ...]:
    """Return the shipped rules with the changes and additions of a TOML file.

    Each table `[NAME]` is a rule. One that is shipped needs only the keys that change; `off = true` leaves it
    out.

    Raises:
        DataError: the file cannot be read, or a rule cannot be judged.
    """
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read alert rules: {error}", where=str(path), next_step="see howto/alerts"
        ) from error
    rules = {rule.name: rule for rule in shipped}
    for name, table in tables.items():
        try:
            if not isinstance(table, dict):
                raise DataError(f"'{name}' is no table", next_step=f"write [{name}] and its keys below")
            if table.get("off") is True:
                rules.pop(name, None)
            else:
                rules[name] = _rule_from_table(name, table, rules.get(name))
        except DataError as error:
            error.where = f"{path}, [{name}]"
            raise
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the alert rule '{name}' has a value of a wrong type: {error}",
                where=f"{path}, [{name}]",
                next_step="compare it with docs/howto/alerts.md",
            ) from error
    return tuple(rules.values())


def _rule_from_table(name: str, table: Mapping[str, Any], base: AlertRule | None) -> AlertRule:
    unknown = [key for key in table if key not in (*_KEYS, *_MORE_KEYS)]
    missing = [key for key in ("metric", "kind") if base is None and key not in table]
    limits = [key for key in ("above", "below") if key in table]
    if unknown or missing or len(limits) > 1 or (base is None and not limits):
        what = (
            f"has the unknown key '{unknown[0]}'"
            if unknown
            else f"lacks the key '{missing[0]}'"
            if missing
            else "needs one of `above` and `below`"
        )
        raise DataError(
            f"the alert rule '{name}' {what}", next_step=f"keys are {', '.join((*_KEYS, *_MORE_KEYS))}"
        )
    changes: dict[str, Any] = {
        key: str(table[key]) for key in ("severity", "summary", "advice") if key in table
    }
    changes |= {key: int(table[key]) for key in ("window", "for_steps") if key in table}
    changes |= {key: float(table[key]) for key in ("floor", "for_seconds") if key in table}
    if limits:
        changes |= {"limit": float(table[limits[0]]), "direction": limits[0]}
    if "kind" in table:
        changes["kind"] = str(table["kind"])
    if "metric" in table:
        changes["signal"] = Selector(str(table["metric"]), dict(table.get("labels", {})))
    if "per" in table:
        changes["per"] = Selector(str(table["per"]), dict(table.get("per_labels", {})))
    return AlertRule(name=name, **changes) if base is None else replace(base, **changes)
