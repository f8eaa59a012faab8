"""Reports of runs, from their folders: numbers, sentences and an HTML page. Imports no torch."""

from paceline.report.html_page import ComparisonTable, render_comparison_page, render_page, write_report
from paceline.report.run_facts import RunFacts, collect_facts
from paceline.report.run_files import find_runs, resolve_run_folder
from paceline.report.run_reader import RecordedRun, read_run
from paceline.report.summary_sentences import summarize_run

__all__ = [
    "ComparisonTable",
    "RecordedRun",
    "RunFacts",
    "collect_facts",
    "find_runs",
    "read_run",
    "render_comparison_page",
    "render_page",
    "resolve_run_folder",
    "summarize_run",
    "write_report",
]
