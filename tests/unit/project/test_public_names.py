"""The public names are what they say, in whatever order a script imports things."""

import subprocess
import sys
from types import ModuleType

import pytest

import paceline


@pytest.mark.parametrize("name", [name for name in paceline.__all__ if name != "__version__"])
def test_every_public_name_can_be_imported_and_is_no_module(name: str) -> None:
    assert not isinstance(getattr(paceline, name), ModuleType)
    assert name in dir(paceline)


def test_verbs_stay_functions_after_their_rooms_were_imported() -> None:
    code = (
        "import paceline.session.fit_loop, paceline.verification.verifier, paceline.session.evaluation;"
        "import paceline;"
        "print(*[callable(getattr(paceline, n)) for n in ('train', 'verify', 'evaluate', 'join')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.split() == ["True"] * 4


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match="it has ByGroup, Callback, Cluster, Loss"):
        paceline.teach
