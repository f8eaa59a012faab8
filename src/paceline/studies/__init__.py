"""What runs under different settings have in common: the axes of a sweep, its rows, and what they show.

Pure: folders are read, nothing is started; the command `paceline sweep` does that. Imports no torch.
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
    "render_plot",
    "render_table",
    "summarize_sweep",
]
