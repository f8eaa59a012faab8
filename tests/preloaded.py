"""What commands and workers of the suite find in memory: the fork server of the suite imports this module."""

from contextlib import suppress
from importlib import import_module

from paceline.cli.main import COMMANDS
from paceline.errors import MissingExtraError
from paceline.tasks.digits import read_digits

_LATER = ("comparison_runs", "study_runs", "relaunch", "resume")
_SHOWN = ("rich.console", "rich.progress", "rich.table", "rich.live")

for name in (*(f"paceline.cli.{one}" for one in _LATER), *_SHOWN):
    import_module(name)
for command in COMMANDS:
    import_module(f"paceline.cli.{command.home.partition(':')[0]}")
with suppress(MissingExtraError):
    read_digits()  # they are parsed
