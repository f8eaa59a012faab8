"""What `make` installs before it runs something."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_soak_installs_what_its_walk_needs(tmp_path: Path) -> None:
    """Without it the walk of a first day is skipped, and nobody sees it."""
    asked = ["make", "-n", "soak", f"VENV={tmp_path / 'fresh'}"]
    said = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True, timeout=100).stdout
    extras = (ROOT / "pyproject.toml").read_text("utf-8")
    assert "-e '.[walk]'" in said and "nbclient" in extras
    assert said.index("-e '.[dev]'") < said.index("-e '.[walk]'") < said.index("pytest --soak")
