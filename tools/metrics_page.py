"""Write docs/reference/metrics.md, the schema of metrics.jsonl, and exported-metrics.md, of the exporter.

Invariant: the tables come from `paceline.observe.metrics_schema`, against which tests check real runs, and
from `paceline.watch.metric_catalog`; a test compares the pages with the texts that are rendered here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from paceline.observe.metrics_schema import COMMON_FIELDS, EVENT_SCHEMAS, SCHEMA_VERSION
from paceline.watch.metric_catalog import METRICS_BY_NAME, NOT_EXPORTED, SERVER_METRICS, MetricSpec

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "metrics.md"
EXPORTED_PAGE = PAGE.with_name("exported-metrics.md")
_HEAD = f"""\
# The folder of a run, and its metrics

`make docs` writes this page from `paceline.observe.metrics_schema`; the tests check real runs against the
same tables.

A run writes everything into one folder: `run_dir` of the recipe, or a new one in `runs/`.

| file | content |
|---|---|
| `recipe.toml` | the recipe with every key, but without `run_dir`, so that a copy can be trained elsewhere |
| `metrics.jsonl` | one record per line, see below; full files are `metrics.0001.jsonl` and so on |
| `system.jsonl` | records `process` and `system`, with `log.sample_seconds`; other hosts: `system-N.jsonl` |
| `log.txt` | the same for people: time in UTC, level, event; steps are thinned out to one every ten seconds |
| `checkpoints/` | saved states |
| `certificate.json` | result of `paceline verify RUN` |
| `profile/` | the newest `paceline profile`; with `runtime.profile` also a Chrome trace of each rank |
| `trace/` | spans of each rank, with `log.trace` or after `paceline trace RUN --steps 10:13` |
| `activity/` | the current operation of each rank, while it runs |
| `report.html` | the run as one page; `paceline report RUN` rewrites it, `paceline report A B` compares |

In the table `[log]` of a recipe, `level` is the lowest level in `log.txt`, `rotate_bytes` the size at
which a new file begins, and `sinks` the list of destinations ([write your own](../howto/sinks.md)). No part
of `metrics.jsonl` is ever deleted; `log.txt` keeps three old files. `metrics.jsonl` has everything from
`info` on at every level, because reports and trackers read it; `level = "debug"` adds the level `debug`.

## Schema {SCHEMA_VERSION}

Every line is one JSON object. Numbers that are not finite are the strings `"nan"`, `"inf"` and `"-inf"`,
because JSON has no such numbers. A resumed run continues its file: a step that was taken again is there
twice, and the later one counts. A crash can cut the last line short; the next start ends it, so that it
does not spoil another.

Measurements that differ between ranks are in `ranks` records. Ranks keep them and send them to rank 0 every
twenty rounds, so a step needs no collective for them.
"""

_EXPORTED_HEAD = """\
# Exported metrics

`make docs` writes this page from `paceline.watch.metric_catalog`. The exporter, the Grafana
dashboard ([how](../howto/watch.md#prometheus-and-grafana)) and the [alerts](../howto/alerts.md) know no other
names.

Every metric also has the label `run`, the name of the run folder. A counter is the sum over all records of
the run, those of steps that were taken again after a resume included, so it never falls. A gauge is the
newest value. A label without a number of its own, such as `phase` or `peer`, is the key of a table in the
record; at most 64 keys of a table are exported.
"""


def page() -> str:
    """Return the page of metrics.jsonl."""
    parts = [_HEAD, "### In every record\n", _table(COMMON_FIELDS)]
    for name, event in EVENT_SCHEMAS.items():
        shown = ", shown on the terminal" if event.on_terminal else ""
        parts += [f"### `{name}`\n", f"Level `{event.level}`{shown}.\n", _table(event.fields)]
    return "\n".join(parts)


def _table(fields: Mapping[str, str]) -> str:
    rows = [(name, *text.split(": ", 1)) for name, text in fields.items()]
    lines = [f"| `{name}` | {kind} | {meaning} |" for name, kind, meaning in rows]
    return "\n".join(["| field | type | meaning |", "|---|---|---|", *lines, ""])


def exported_page() -> str:
    """Return the page of the metrics that the exporter serves, and of the fields that it leaves out."""
    tables: dict[str, list[MetricSpec]] = {}
    for metric in METRICS_BY_NAME.values():
        title = f"From records `{metric.event}`" if metric.event else "Of the run as a whole"
        tables.setdefault(title, []).append(metric)
    tables["Of `paceline serve`"] = [*SERVER_METRICS]
    parts = [_EXPORTED_HEAD]
    for title, metrics in tables.items():
        parts += [f"## {title}\n", "| name | kind | unit | labels | meaning |", "|---|---|---|---|---|"]
        parts += [
            f"| `{spec.name}` | {spec.kind} | {spec.unit} | {', '.join(spec.labels)} | {spec.meaning} |"
            for spec in metrics
        ]
        parts.append("")
    parts += ["## Fields that are not exported\n", "| record | field | because |", "|---|---|---|"]
    parts += [
        f"| `{event}` | `{field}` | {reason} |"
        for event, fields in NOT_EXPORTED.items()
        for field, reason in fields.items()
    ]
    return re.sub(r"\|  (?=\|)", "| ", "\n".join(parts)) + "\n"


def pages() -> dict[Path, str]:
    """Return the text of each page by its place."""
    return {PAGE: page(), EXPORTED_PAGE: exported_page()}


if __name__ == "__main__":
    for place, text in pages().items():
        place.write_text(text, encoding="utf-8")
        sys.stdout.write(f"wrote {place}\n")
