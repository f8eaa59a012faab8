"""Resolve every extra in a fresh environment and write the pins to constraints.txt.

Invariant: the file holds names and public versions only, one per line and sorted: no local version suffix
(`+cpu`), no path, no address. It pins what this platform resolved to; packages that only another platform
needs stay free there. It installs nothing: pip resolves with `--dry-run`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HEADER = """\
# What `make` installs, exactly. `make constraints` writes this file; edit pyproject.toml, not this.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write constraints.txt; returns pip's exit status."""
    parser = argparse.ArgumentParser(description="regenerate constraints.txt")
    parser.add_argument("--torch", required=True, help="the release of torch to pin, for example 2.13.0")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    chosen = parser.parse_args(arguments)
    project = tomllib.loads((chosen.root / "pyproject.toml").read_text("utf-8"))["project"]
    with tempfile.TemporaryDirectory(prefix="constraints-") as folder:
        report = Path(folder) / "report.json"
        status = resolve(chosen.root, plan_requirements(project, chosen.torch), report)
        if status == 0:
            installs = json.loads(report.read_text("utf-8"))["install"]
            text = render_constraints(installs, without=project["name"])
            (chosen.root / "constraints.txt").write_text(text, "utf-8")
    return status


def plan_requirements(project: Mapping[str, Any], torch: str) -> list[str]:
    """The requirements to resolve: torch by its release, then this project with every extra.

    Naming torch on its own keeps pip on that release, and prefers a local build of it (CPU) if there is one.
    """
    extras = ",".join(sorted(project["optional-dependencies"]))
    return [f"torch=={torch}", f".[{extras}]"]


def resolve(root: Path, requirements: Sequence[str], report: Path) -> int:
    """Let pip resolve in a new environment and write its report; returns pip's exit status."""
    with tempfile.TemporaryDirectory(prefix="constraints-venv-") as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / ("Scripts" if os.name == "nt" else "bin") / "python"
        command = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--dry-run"]
        command += ["--ignore-installed", "--report", str(report), *requirements]
        return subprocess.run(command, cwd=root, check=False).returncode


def render_constraints(installs: Sequence[Mapping[str, Any]], *, without: str) -> str:
    """The text of constraints.txt for the `install` list of a pip report, without this project itself."""
    pins = {
        _normalise(item["metadata"]["name"]): item["metadata"]["version"].partition("+")[0]
        for item in installs
        if _normalise(item["metadata"]["name"]) != _normalise(without)
    }
    return HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()))


def _normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
