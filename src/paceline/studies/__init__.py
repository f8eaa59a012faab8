"""Studies of several runs: sweeps over recipe keys, comparisons of strategies, and comparisons of codecs.

Sweeps and comparisons only read run folders, without torch; `paceline sweep` and `paceline compare` start the
runs. `codec_report` trains by itself and imports torch.
"""

from paceline.studies.critical_batch import CriticalBatch, find_critical_batch
from paceline.studies.sweep_cells import SweepAxis, SweepCell, build_cells, parse_axis
from paceline.studies.sweep_plot import render_plot
from paceline.studies.sweep_summary import (
    MetricTarget,
    RunMeasurements,
    SweepRow,
    SweepSummary,
    read_measurements,
    recommend,
    render_table,
    summarize_sweep,
)

__all__ = [
    "CriticalBatch",
    "MetricTarget",
    "RunMeasurements",
    "SweepAxis",
    "SweepCell",
    "SweepRow",
    "SweepSummary",
    "build_cells",
    "find_critical_batch",
    "parse_axis",
    "read_measurements",
    "recommend",
    "render_plot",
    "render_table",
    "summarize_sweep",
]
