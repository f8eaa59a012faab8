"""The test kit that ships: real processes on one machine, and fixtures that catch what a test leaves behind.

Invariant: importing it imports neither torch nor pytest; it is for tests, and nothing else imports it.
"""

from paceline.testing.rank_processes import RanksFailed, run_ranks

__all__ = ["RanksFailed", "run_ranks"]
