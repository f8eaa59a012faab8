"""The test kit: real rank processes on one machine, contract suites, planted faults, and a fixture that finds
leaks.

For tests only; the rest of the package does not import it. Importing this module imports neither torch nor
pytest.
"""

from paceline.testing.rank_processes import RanksFailed, run_ranks

__all__ = ["RanksFailed", "run_ranks"]
