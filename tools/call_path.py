"""Count the files and calls of one training step: `python tools/call_path.py` prints a table.

A newcomer follows a step file by file, so the number of files that a plain step enters is a measure of how
readable the training loop is. The step is the third of a small run, when every buffer exists; calls of
functions of the package are counted on the training thread of rank 0. Building a session is counted apart.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import paceline
from paceline.recipe import load_recipe
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session

PACKAGE = str(Path(paceline.__file__).parent)
RECIPE = """
task = "digits"
steps = 4
[options]
model = "mlp"
hidden = [64]
[batch]
size = 32
shards = 2
[optimizer]
name = "adamw"
lr = 1e-3
"""
CASES = {"1 process": (1, ""), "2 processes": (2, "replicas=2"), "2 with ZeRO-3": (2, "shard=2 zero=3")}


@dataclass
class CallPath:
    """The calls of functions of the package, by file."""

    calls: Counter[str] = field(default_factory=Counter)

    def record(self, run: Callable[[], Any]) -> Any:
        """Run a function and count the calls in it, on this thread and on those that it starts."""
        sys.setprofile(self._count)
        threading.setprofile(self._count)
        try:
            return run()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE) and frame.f_code.co_name != "<module>":
            self.calls[name.removeprefix(PACKAGE + "/")] += 1

    def summary(self) -> dict[str, int]:
        """Return the number of files and of calls."""
        return {"files": len(self.calls), "calls": sum(self.calls.values())}


def count_calls(cluster: Any, recipe_file: str, strategy: str) -> dict[str, Any]:
    """Build a session and run three steps as one rank; return what building it and the third step entered."""
    recipe = load_recipe(Path(recipe_file), [], strategy or None)
    building, step = CallPath(), CallPath()
    session = building.record(lambda: build_test_session(cluster, recipe))
    rounds = session.rounds()
    next(rounds)
    next(rounds)
    step.record(lambda: next(rounds))
    session.close()
    return {"build": building.calls, "step": step.calls}


def measure() -> dict[str, dict[str, Counter[str]]]:
    """Return the calls by file of rank 0, for each case: those of building a session and those of a step."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "recipe.toml")
        recipe.write_text(RECIPE)
        return {
            name: run_ranks(count_calls, ranks, str(recipe), strategy)[0]
            for name, (ranks, strategy) in CASES.items()
        }


def main() -> None:
    """Print files and calls of every case, or the calls of each file."""
    parser = argparse.ArgumentParser(description="files and calls of a training step")
    parser.add_argument("--files", action="store_true", help="list the files with their calls")
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args()
    measured = measure()
    if chosen.json:
        print(json.dumps(measured))
        return
    print(f"{'':16} {'step files':>11} {'calls':>7} {'build files':>12} {'calls':>7}")
    for name, paths in measured.items():
        counts = [n for part in ("step", "build") for n in (len(paths[part]), sum(paths[part].values()))]
        print(f"{name:16} {counts[0]:11} {counts[1]:7} {counts[2]:12} {counts[3]:7}")
        if chosen.files:
            for part in ("step", "build"):
                print(*(f"    {part} {n:5} {file}" for file, n in sorted(paths[part].items())), sep="\n")


if __name__ == "__main__":
    main()
