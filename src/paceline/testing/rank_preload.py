"""The imports of the fork server of `run_ranks`, which every rank inherits."""

from contextlib import suppress

from paceline.errors import MissingExtraError
from paceline.launch.fork_server_preload import import_modules
from paceline.tasks.digits import read_digits

import_modules(("cloudpickle", "pytest", "paceline.testing.contracts"))
with suppress(MissingExtraError):
    read_digits()  # ranks inherit the parsed data
