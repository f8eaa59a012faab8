"""What the ranks of `run_ranks` find imported: the fork server of multiprocessing imports this module."""

from contextlib import suppress

from paceline.errors import MissingExtraError
from paceline.launch.fork_server_preload import import_modules
from paceline.tasks.digits import read_digits

import_modules(("cloudpickle", "pytest", "sklearn.datasets", "paceline.testing.contracts"))
with suppress(MissingExtraError):
    read_digits()  # a rank finds them parsed
