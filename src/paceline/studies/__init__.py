"""What runs under different settings have in common: the axes of a sweep, its rows, and what they show.

Pure: folders are read, nothing is started; the command `paceline sweep` does that. Imports no torch.
"""

from paceline.studies.axes import Axis, Cell, cells_of, parse_axis
from paceline.studies.critical_batch import CriticalBatch, find_critical_batch
from paceline.studies.measured import Measured, Target, read_run
from paceline.studies.plot import render_plot
from paceline.studies.summary import Row, Summary, summarize
from paceline.studies.table import render_table

__all__ = [
    "Axis",
    "Cell",
    "CriticalBatch",
    "Measured",
    "Row",
    "Summary",
    "Target",
    "cells_of",
    "find_critical_batch",
    "parse_axis",
    "read_run",
    "render_plot",
    "render_table",
    "summarize",
]
