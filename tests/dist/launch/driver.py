"""Launch one job as the command line would: `driver.py JSON`, the arguments of `LaunchJob`."""

import json
import sys
from pathlib import Path

from paceline.errors import PacelineError
from paceline.launch import LaunchJob, launch

arguments = json.loads(sys.argv[1])
if "log_dir" in arguments:
    arguments["log_dir"] = Path(arguments["log_dir"])
try:
    outcome = launch(LaunchJob(**{**arguments, "command": tuple(arguments["command"])}))
except PacelineError as error:
    sys.stderr.write(f"{error}\n")
    sys.exit(error.exit_code)
sys.exit(outcome.exit_code)
