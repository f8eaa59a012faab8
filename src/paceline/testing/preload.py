"""What the ranks of `run_ranks` find imported: the fork server of multiprocessing imports this module."""

from contextlib import suppress

from paceline.errors import MissingExtraError
from paceline.launch.preload import preload
from paceline.tasks.digits import read_digits

preload(("cloudpickle", "pytest", "sklearn.datasets", "paceline.testing.contracts"))
with suppress(MissingExtraError):
    read_digits()  # a rank finds them parsed
