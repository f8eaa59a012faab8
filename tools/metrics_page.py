"""Write docs/reference/metrics.md: what lies in a run folder, and the schema of metrics.jsonl as tables.

Invariant: the tables are `paceline.observe.metrics_schema`, which runs are held against; a test compares the page
with what is rendered here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from paceline.observe.metrics_schema import COMMON_FIELDS, EVENT_SCHEMAS, SCHEMA_VERSION

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "metrics.md"
_HEAD = f"""\
# The folder of a run, and its metrics

`make docs` writes this page from `paceline.observe.metrics_schema`; the tests hold real runs against the same tables.

A run writes everything into one folder: `run_dir` of the recipe, or a new one under `runs/`.

| file | what it is |
|---|---|
| `recipe.toml` | what was asked for, every key; without `run_dir`, so that a copy can be trained elsewhere |
| `metrics.jsonl` | one record a line, see below; full files are `metrics.0001.jsonl` and so on |
| `log.txt` | the same for people: time in UTC, level, event; steps are thinned out to one every ten seconds |
| `checkpoints/` | saved states |
| `certificate.json` | what `paceline verify RUN` found |
| `report.html` | the run as one page; `paceline report RUN` writes it anew, `paceline report A B` compares |

`log.level` of the recipe is the lowest level that is written, `log.rotate_bytes` the size at which a new
file begins. Nothing of `metrics.jsonl` is ever deleted; `log.txt` keeps three old files. Above
`info` there are no steps, so that such a run cannot be drawn.

## Schema {SCHEMA_VERSION}

Every line is one JSON object. Numbers that are not finite are the strings `"nan"`, `"inf"` and `"-inf"`,
because JSON has none. A resumed run continues its file: a step that was done again stands there twice, and
the later one counts. A crash can cut the last line short; the next start ends it, so that it spoils no other.

What differs from rank to rank is in `ranks` records. Ranks keep their numbers and send them to rank 0 every
twenty rounds, so a step has no collective for it.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD, "### In every record\n", _table(COMMON_FIELDS)]
    for name, event in EVENT_SCHEMAS.items():
        spoken = ", shown on the terminal" if event.spoken else ""
        parts += [f"### `{name}`\n", f"Level `{event.level}`{spoken}.\n", _table(event.fields)]
    return "\n".join(parts)


def _table(fields: Mapping[str, str]) -> str:
    rows = [(name, *text.split(": ", 1)) for name, text in fields.items()]
    lines = [f"| `{name}` | {kind} | {meaning} |" for name, kind, meaning in rows]
    return "\n".join(["| field | type | meaning |", "|---|---|---|", *lines, ""])


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
