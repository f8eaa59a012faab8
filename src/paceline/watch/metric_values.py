"""The current values of all metrics of the catalog, from the records of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from paceline.watch.metric_catalog import METRICS, MetricSpec

_MAX_KEYS = 64  # of a table: a task with thousands of metrics would fill the memory of who scrapes

_RECORD_LABELS: Mapping[str, object] = {"rank": 0, "host": ""}
"""Labels that are fields of a record, with their defaults; any other label is the key of a table."""


class MetricSample(NamedTuple):
    """A value of a metric.

    Args:
        metric: which one.
        labels: values of its labels, in the order of `metric.labels`.
        value: may be NaN or infinite.
    """

    metric: MetricSpec
    labels: tuple[str, ...]
    value: float


_BY_EVENT: Mapping[str, tuple[MetricSpec, ...]] = {
    event: tuple(metric for metric in METRICS if metric.event == event)
    for event in dict.fromkeys(metric.event for metric in METRICS)
}


class MetricValues:
    """Values by metric and labels; gauges are the newest ones, counters are sums over all records."""

    def __init__(self) -> None:
        self._values: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take records into account, in the order in which they were written."""
        for record in records:
            for metric in _BY_EVENT.get(record["event"], ()):
                values = self._values[metric.name]
                value = record.get(metric.field) if metric.field else 1.0
                if type(value) is float and not metric.labels:  # most of the millions of a long run
                    values[()] = value if metric.kind == "gauge" else values.get((), 0.0) + value
                    continue
                for labels, number in values_in(metric, record) if value is not None else ():
                    values[labels] = number if metric.kind == "gauge" else values.get(labels, 0.0) + number

    def samples(self) -> Iterator[MetricSample]:
        """Yield all values, in the order of the catalog."""
        for metric in METRICS:
            for labels, value in self._values.get(metric.name, {}).items():
                yield MetricSample(metric, labels, value)

    def value(self, name: str, *labels: str) -> float | None:
        """Return a value; None if no record has had it."""
        return self._values.get(name, {}).get(labels)


def values_in(metric: MetricSpec, record: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the labels and values of a metric in one record of its event."""
    own = tuple(
        str(record.get(name, default)) for name, default in _RECORD_LABELS.items() if name in metric.labels
    )
    if not metric.field:
        yield own, 1.0
        return
    value = record.get(metric.field)
    table: dict[tuple[str, ...], Any] = (
        {(*own, str(key)): value[key] for key in list(value)[:_MAX_KEYS]}
        if isinstance(value, Mapping)
        else {own: value}
    )
    for labels, entry in table.items():
        with suppress(TypeError, ValueError):  # absent, or not a number
            yield labels, float(entry)
