"""Run benchmarks one after another, each in a process of its own, and keep what they print.

`python -m benchmarks` runs all and writes benchmarks/results/NAME.txt; `python -m benchmarks NAME ...` some.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

NAMES = (
    "startup",
    "engines",
    "renewal",
    "step_overhead",
    "small_steps",
    "rl",
    "monitoring",
    "watch_page",
    "replicas",
    "layouts",
    "pipelines",
    "pipedream",
    "processor",
    "precision",
    "reproducible",
    "heap",
    "checkpoint",
    "loader",
    "generation",
    "serving",
    "lab",
    "stage_messages",
    "route",
    "route_choice",
    "coding",
    "wire",
    "codec_losses",
    "pipedream_losses",
    "stragglers",
    "diloco",
    "diloco_loss",
    "diloco_libraries",
    "server",
    "server_libraries",
    "federated",
    "secure_sums",
    "private",
    "tune",
    "large_batch",
)
_RESULTS = Path(__file__).resolve().parent / "results"
_DEADLINE_SECONDS = 1800.0  # the longest takes 1200 on two free cores of a machine with bf16


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named benchmarks; 1 if one failed or took too long."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(NAMES)}; none: all")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it runs; keeps no results")
    parser.add_argument("--precision", default="auto", help="of the GPT: auto, bf16 or fp32")
    chosen = parser.parse_args(arguments)
    unknown = sorted(set(chosen.names) - set(NAMES))
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}")
    failed = 0
    for name in chosen.names or NAMES:
        text = run(name, chosen.quick, chosen.precision)
        failed += text is None
        if text is not None and not chosen.quick:
            _RESULTS.mkdir(exist_ok=True)
            (_RESULTS / f"{name}.txt").write_text(text, encoding="utf-8")
    return 1 if failed else 0


def run(name: str, quick: bool, precision: str = "auto") -> str | None:
    """Run one benchmark; what it printed, or None if it failed."""
    options = [*(["--quick"] if quick else []), *(["--precision", precision] if precision != "auto" else [])]
    head = f"$ {' '.join(['python -m', f'benchmarks.{name}', *options])}"
    print(head, flush=True)
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{name}", *options],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=_DEADLINE_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as why:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        print(f"{name} was ended: {type(why).__name__}", file=sys.stderr)
        return None
    load = " ".join(f"{x:.2f}" for x in os.getloadavg())
    lines = [
        line.rstrip() for line in f"{printed}\nload average at the end (1, 5, 15 min): {load}".splitlines()
    ]
    text = "\n".join([head, *lines]) + "\n"
    print(text.partition("\n")[2], flush=True)
    return text if process.returncode == 0 else None


if __name__ == "__main__":
    raise SystemExit(main())
