"""A job in the container image has the bits of a job outside. PACELINE_IMAGE names an image of buildah."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.session.reproducibility import MKL_VARIABLE
from tests import command_jobs

IMAGE = os.environ.get("PACELINE_IMAGE", "")
STORAGE = {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs"}
RECIPE = 'task = "sum"\nsteps = 20\nreproducible = true\n[batch]\nsize = 64\nshards = 8\n'

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (IMAGE and shutil.which("buildah")), reason="needs buildah and an image, PACELINE_IMAGE=NAME"
    ),
]


def buildah(*words: str) -> str:
    environ = {**os.environ, **STORAGE}
    ended = subprocess.run(
        ["buildah", *words], env=environ, capture_output=True, text=True, timeout=600, check=True
    )
    return ended.stdout.strip()


def sha256_of(output: str) -> str:
    return output.rpartition("state sha256: ")[2].split()[0]


@pytest.mark.capability("O4")
def test_a_job_of_two_processes_in_the_image_has_the_hash_of_one_outside(tmp_path: Path) -> None:
    """The job runs as a user that is not root, in a folder of the host."""
    command_jobs.prepare(tmp_path, "")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    words = ("train", "recipe.toml", "-n", "2", "--set")
    # The variable of these tests is not in the container, and bits depend on it.
    with command_jobs.start(tmp_path, *words, 'run_dir="outside"', **{MKL_VARIABLE: ""}) as command:
        outside = "".join(text or "" for text in command.communicate(timeout=200))
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(0o777)
    container = buildah("from", IMAGE)
    try:
        run = ("run", "--network=host", "-v", f"{tmp_path}:/job", container, "--", "sh", "-c")
        inside = buildah(*run, f"id -u; cd /job && exec paceline {' '.join(words)} 'run_dir=\"inside\"'")
    finally:
        buildah("rm", container)
    assert inside.split()[0] == "1000"
    assert sha256_of(inside) == sha256_of(outside)
