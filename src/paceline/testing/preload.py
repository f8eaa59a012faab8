"""What the ranks of `run_ranks` find imported: the fork server of multiprocessing imports this module."""

from paceline.launch.preload import preload

preload(("cloudpickle", "pytest", "sklearn.datasets", "paceline.testing.contracts", "paceline.tasks.digits"))
