"""Write docs/reference/metrics.md: what lies in a run folder, and the schema of metrics.jsonl as tables.

Invariant: the tables come from `paceline.observe.metrics_schema`, against which tests check real runs; a test
compares the page with the text that is rendered here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from paceline.observe.metrics_schema import COMMON_FIELDS, EVENT_SCHEMAS, SCHEMA_VERSION

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "metrics.md"
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
| `profile/` | a Chrome trace for each rank, with `runtime.profile` |
| `trace/` | spans of each rank, with `log.trace` or after `paceline trace RUN --steps 10:13` |
| `activity/` | the current operation of each rank, while it runs |
| `report.html` | the run as one page; `paceline report RUN` rewrites it, `paceline report A B` compares |

In the table `[log]` of a recipe, `level` is the lowest level that is written, `rotate_bytes` the size at
which a new file begins, and `sinks` the list of destinations ([write your own](../howto/sinks.md)). No part
of `metrics.jsonl` is ever deleted; `log.txt` keeps three old files. A run with a level above `info` has no
steps, so its report has no curves.

## Schema {SCHEMA_VERSION}

Every line is one JSON object. Numbers that are not finite are the strings `"nan"`, `"inf"` and `"-inf"`,
because JSON has no such numbers. A resumed run continues its file: a step that was taken again is there
twice, and the later one counts. A crash can cut the last line short; the next start ends it, so that it
does not spoil another.

Measurements that differ between ranks are in `ranks` records. Ranks keep them and send them to rank 0 every
twenty rounds, so a step needs no collective for them.
"""


def page() -> str:
    """Return the whole page."""
    parts = [_HEAD, "### In every record\n", _table(COMMON_FIELDS)]
    for name, event in EVENT_SCHEMAS.items():
        shown = ", shown on the terminal" if event.on_terminal else ""
        parts += [f"### `{name}`\n", f"Level `{event.level}`{shown}.\n", _table(event.fields)]
    return "\n".join(parts)


def _table(fields: Mapping[str, str]) -> str:
    rows = [(name, *text.split(": ", 1)) for name, text in fields.items()]
    lines = [f"| `{name}` | {kind} | {meaning} |" for name, kind, meaning in rows]
    return "\n".join(["| field | type | meaning |", "|---|---|---|", *lines, ""])


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
