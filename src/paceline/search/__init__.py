"""Hyperparameter search: a study whose trials do not depend on how many workers ran it.

A trial is an ordinary run in a folder of its own, a study is an append-only log, and proposals come in
batches. The number of workers, on this machine or on others, decides only how long a batch takes.
"""

from paceline.search.remote_workers import ExecutorRequest, WorkerEntrance, serve_leases
from paceline.search.space import StudyPlan, plan_study, read_study_file
from paceline.search.study import Study, StudyRequest, open_study, run_study
from paceline.search.study_log import Trial
from paceline.search.study_report import StudySummary, render_study, render_study_page, summarize_study
from paceline.search.study_runner import StudyStopped

__all__ = [
    "ExecutorRequest",
    "Study",
    "StudyPlan",
    "StudyRequest",
    "StudyStopped",
    "StudySummary",
    "Trial",
    "WorkerEntrance",
    "open_study",
    "plan_study",
    "read_study_file",
    "render_study",
    "render_study_page",
    "run_study",
    "serve_leases",
    "summarize_study",
]
