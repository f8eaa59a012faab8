"""The ratchets, on tiny trees: every kind of offender is found at its line, and a number only falls."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from tools import ratchets


def write(root: Path, name: str, text: str) -> Path:
    """Write one file of a tiny project under `root`."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), "utf-8")
    return path


LONG_BODY = "    x = 0\n" * 61

OFFENDERS = {
    "files over 600 lines": ("x = 0\n" * 601, 1),
    "functions over 60 lines": ("\n\ndef _f():\n" + LONG_BODY, 3),
    "docstrings that begin with a fragment": ('def _f():\n    """Whether it is so."""\n', 1),
    "type: ignore": ("x = 0\ny = 'a' + 1  # type: ignore[operator]\n", 2),
    "TODO or FIXME": ("x = 0\n# TODO: later\n", 2),
    "environment reads outside cluster.py": ("import os\nhome = os.environ['HOME']\n", 2),
    "bare or broad excepts": ("try:\n    x = 0\nexcept (ValueError, Exception):\n    x = 1\n", 3),
    "isinstance ladders": (
        "def _f(x):\n    return isinstance(x, int) or isinstance(x, str) or isinstance(x, set)\n",
        1,
    ),
    "public functions without docstring": ("class A:\n    def f(self):\n" + "        x = 0\n" * 8, 2),
    "print in src": ("x = 0\nprint(x)\n", 2),
}

INNOCENT = '''\
"""A module that talks about # TODO and # type: ignore, and does neither."""


def documented(x: object) -> str:
    """Return a name.

    A long docstring is welcome.
    """
    if isinstance(x, int) or isinstance(x, str):
        text = "print(os.environ)  # TODO"
    else:
        text = "# type: ignore"

    def nested() -> bool:
        return isinstance(x, list)

    try:
        nested()
    except ValueError:
        text = "ExceptionGroup"
    return text


def short() -> int:
    return 1
'''.replace("is welcome.", "is welcome." + "\n" * 60)


TREES = {
    "modules with one user": (
        {"a.py": "x = 0\n", "b.py": "from paceline.a import x\n", "c.py": "import paceline.b, paceline.d\n"}
        | {"d.py": "import paceline.b\n"},
        ["a.py:1", "d.py:1"],
    ),
    "class names that occur twice": (
        {
            "a.py": "class Plan:\n    pass\n",
            "b.py": "\nclass Plan:\n    pass\n",
            "c.py": "class Other:\n    pass\n",
        },
        ["a.py:1", "b.py:2"],
    ),
    "file names that occur twice": (
        {"a/x.py": "", "b/x.py": "", "b/y.py": "", "a/__init__.py": "", "b/__init__.py": ""},
        ["a/x.py:1", "b/x.py:1"],
    ),
}


def test_every_ratchet_has_an_offender() -> None:
    assert {ratchet.name for ratchet in ratchets.RATCHETS} == set(OFFENDERS) | set(TREES)


@pytest.mark.parametrize("name", TREES)
def test_offenders_of_a_tree_are_found(name: str, tmp_path: Path) -> None:
    files, places = TREES[name]
    for file, text in files.items():
        write(tmp_path, f"src/paceline/{file}", text)
    found = ratchets.find_places(ratchets.read_modules(tmp_path))
    assert [place.split(": ")[0] for place in found[name]] == [f"src/paceline/{place}" for place in places]


@pytest.mark.parametrize("name", OFFENDERS)
def test_an_offender_is_found_at_its_line(name: str, tmp_path: Path) -> None:
    text, line = OFFENDERS[name]
    write(tmp_path, "src/paceline/offender.py", text)
    found = ratchets.find_places(ratchets.read_modules(tmp_path))
    assert [place.split(": ")[0] for place in found[name]] == [f"src/paceline/offender.py:{line}"]


def test_innocent_code_is_not_counted(tmp_path: Path) -> None:
    write(tmp_path, "src/paceline/innocent.py", INNOCENT)
    found = ratchets.find_places(ratchets.read_modules(tmp_path))
    assert not any(found.values()), found


def test_cluster_may_read_the_environment(tmp_path: Path) -> None:
    text = "from os import environ\nhome = environ['HOME']\n"
    write(tmp_path, "src/paceline/job/cluster.py", text)
    write(tmp_path, "src/paceline/other.py", text)
    places = ratchets.find_places(ratchets.read_modules(tmp_path))["environment reads outside cluster.py"]
    assert places == ["src/paceline/other.py:1: environ"]


def test_a_number_that_rose_fails_and_names_the_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tools").mkdir()
    write(tmp_path, "src/paceline/a.py", "# TODO: one\n")
    assert ratchets.main(["--root", str(tmp_path), "--update"]) == 0
    assert ratchets.main(["--root", str(tmp_path)]) == 0
    write(tmp_path, "src/paceline/b.py", "x = 0\n# FIXME: two\n")
    capsys.readouterr()
    assert ratchets.main(["--root", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "rose: TODO or FIXME, from 1 to 2" in printed
    assert "src/paceline/b.py:2: # FIXME: two" in printed


def test_update_lowers_and_never_raises(tmp_path: Path) -> None:
    store = write(tmp_path, "tools/ratchets.json", '{"TODO or FIXME": 1, "print in src": 5}')
    write(tmp_path, "src/paceline/a.py", "# TODO: one\n# TODO: two\nprint(1)\n")
    assert ratchets.main(["--root", str(tmp_path), "--update"]) == 1
    stored = json.loads(store.read_text("utf-8"))
    assert stored["TODO or FIXME"] == 1
    assert stored["print in src"] == 1
