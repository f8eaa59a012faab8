"""The folder of a run, read: what happened in it as numbers, as words and as a page. Imports no torch."""

from paceline.report.compared import Listed, render_compared
from paceline.report.facts import Facts, facts
from paceline.report.folder import checked_run, find_runs
from paceline.report.page import render, write_report
from paceline.report.read import Run, read_run
from paceline.report.summary import summary

__all__ = [
    "Facts",
    "Listed",
    "Run",
    "checked_run",
    "facts",
    "find_runs",
    "read_run",
    "render",
    "render_compared",
    "summary",
    "write_report",
]
