"""Launch one job as the command line would: `driver.py JSON`, the arguments of `LaunchJob`.

`grace_seconds` is that of its timeouts.
"""

import json
import sys
from pathlib import Path

from paceline.errors import PacelineError
from paceline.launch import LaunchJob, launch
from paceline.launch.shutdown import ShutdownTimeouts

arguments = json.loads(sys.argv[1])
if "log_dir" in arguments:
    arguments["log_dir"] = Path(arguments["log_dir"])
if "grace_seconds" in arguments:
    arguments["timeouts"] = ShutdownTimeouts(grace_seconds=arguments.pop("grace_seconds"))
try:
    outcome = launch(LaunchJob(**{**arguments, "command": tuple(arguments["command"])}))
except PacelineError as error:
    sys.stderr.write(f"{error}\n")
    sys.exit(error.exit_code)
sys.exit(outcome.exit_code)
