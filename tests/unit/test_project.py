"""The tools that guard the project, on tiny trees; and what no file of this project may name."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_tool(name: str) -> ModuleType:
    """Import tools/<name>.py, which is a script and not part of a package."""
    spec = importlib.util.spec_from_file_location(f"paceline_tools_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


ratchets = load_tool("ratchets")
capabilities = load_tool("capabilities")
constraints = load_tool("constraints")

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write one file of a tiny project under `tmp_path`."""

    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), "utf-8")
        return path

    return write_file


# Ratchets

LONG_BODY = "    x = 0\n" * 26

OFFENDERS = {
    "files over 250 lines": ("x = 0\n" * 251, 1),
    "files over 400 lines": ("x = 0\n" * 401, 1),
    "functions over 25 lines": ("\n\ndef _f():\n" + LONG_BODY, 3),
    "functions over 60 lines": ("def _f():\n" + LONG_BODY * 3, 1),
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
'''


def test_every_ratchet_has_an_offender() -> None:
    assert {ratchet.name for ratchet in ratchets.RATCHETS} == set(OFFENDERS)


@pytest.mark.parametrize("name", OFFENDERS)
def test_an_offender_is_found_at_its_line(name: str, write: Write, tmp_path: Path) -> None:
    text, line = OFFENDERS[name]
    write("src/paceline/offender.py", text)
    found = ratchets.find_places(ratchets.read_modules(tmp_path))
    assert [place.split(": ")[0] for place in found[name]] == [f"src/paceline/offender.py:{line}"]


def test_innocent_code_is_not_counted(write: Write, tmp_path: Path) -> None:
    write("src/paceline/innocent.py", INNOCENT)
    found = ratchets.find_places(ratchets.read_modules(tmp_path))
    assert not any(found.values()), found


def test_cluster_may_read_the_environment(write: Write, tmp_path: Path) -> None:
    text = "from os import environ\nhome = environ['HOME']\n"
    write("src/paceline/cluster.py", text)
    write("src/paceline/other.py", text)
    places = ratchets.find_places(ratchets.read_modules(tmp_path))["environment reads outside cluster.py"]
    assert places == ["src/paceline/other.py:1: environ"]


def test_a_number_that_rose_fails_and_names_the_place(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tools").mkdir()
    write("src/paceline/a.py", "# TODO: one\n")
    assert ratchets.main(["--root", str(tmp_path), "--update"]) == 0
    assert ratchets.main(["--root", str(tmp_path)]) == 0
    write("src/paceline/b.py", "x = 0\n# FIXME: two\n")
    capsys.readouterr()
    assert ratchets.main(["--root", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "rose: TODO or FIXME, from 1 to 2" in printed
    assert "src/paceline/b.py:2: # FIXME: two" in printed


def test_update_lowers_and_never_raises(write: Write, tmp_path: Path) -> None:
    store = write("tools/ratchets.json", '{"TODO or FIXME": 1, "print in src": 5}')
    write("src/paceline/a.py", "# TODO: one\n# TODO: two\nprint(1)\n")
    assert ratchets.main(["--root", str(tmp_path), "--update"]) == 1
    stored = json.loads(store.read_text("utf-8"))
    assert stored["TODO or FIXME"] == 1
    assert stored["print in src"] == 1


# Capabilities

ROWS = "# id, name, group\nA1\tTrain\tFirst\nA2\tReplicate\tFirst\nB1\tSwitch\tSecond\nB2\tServe\tSecond\n"

TESTS = """\
    import pytest

    pytestmark = [pytest.mark.capability("A1")]


    @pytest.mark.gpu
    @pytest.mark.capability("B1")
    def test_plain(): ...


    class TestGroup:
        @pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.capability("B1"))])
        def test_method(self, n): ...


    @pytest.mark.capability("A2")
    def not_a_test(): ...
"""

PAGE = """\
2 of 4 rows have a test.

## First

- **A1** Train
  - [tests/unit/test_it.py](../tests/unit/test_it.py): `TestGroup.test_method`, `test_plain` (gpu)

## Second

- **B1** Switch
  - [tests/unit/test_it.py](../tests/unit/test_it.py): `TestGroup.test_method`, `test_plain` (gpu)

## Rows without a test yet

### First

- A2 Replicate

### Second

- B2 Serve
"""


@pytest.fixture
def marked(write: Write, tmp_path: Path) -> Path:
    """A tiny project with four rows and one file of tests."""
    write("docs/capabilities.txt", ROWS)
    write("tests/unit/test_it.py", TESTS)
    return tmp_path


def test_the_page_joins_rows_and_tests(marked: Path) -> None:
    assert capabilities.main(["--root", str(marked)]) == 0
    text = (marked / "docs" / "capabilities.md").read_text("utf-8")
    assert text == capabilities.HEADER + "\n" + PAGE


def test_check_writes_nothing_and_fails_when_stale(
    marked: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    page = marked / "docs" / "capabilities.md"
    assert capabilities.main(["--root", str(marked), "--check"]) == 1
    assert not page.exists()
    assert capabilities.main(["--root", str(marked)]) == 0
    assert capabilities.main(["--root", str(marked), "--check"]) == 0
    write("tests/test_new.py", "@pytest.mark.capability('A2')\ndef test_new(): ...\n")
    assert capabilities.main(["--root", str(marked), "--check"]) == 1
    assert "make docs" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["'A9'", "*ROWS", ""])
def test_a_mark_that_cannot_be_used_is_named(
    arguments: str, marked: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write("tests/test_new.py", f"\n@pytest.mark.capability({arguments})\ndef test_new(): ...\n")
    assert capabilities.main(["--root", str(marked)]) == 1
    assert capsys.readouterr().err.startswith("tests/test_new.py:2: ")


def test_the_list_has_each_row_once() -> None:
    rows = capabilities.read_rows(ROOT / "docs" / "capabilities.txt")
    assert len(rows) == len({row.id for row in rows}) == 268
    assert all(re.fullmatch(r"[A-Z]\d+", row.id) and row.name and row.group for row in rows)


# Constraints


def test_pins_are_public_versions_in_order() -> None:
    installs = [
        {"metadata": {"name": name, "version": version}, "download_info": {"url": "file:///somewhere"}}
        for name, version in [("torch", "2.13.0+cpu"), ("paceline", "0.1.0"), ("Jinja2", "3.1")]
    ]
    text = constraints.render_constraints(installs, without="paceline")
    assert text == constraints.HEADER + "jinja2==3.1\ntorch==2.13.0\n"


def test_torch_is_named_with_its_release() -> None:
    project = {"optional-dependencies": {"text": [], "dev": []}}
    assert constraints.plan_requirements(project, "2.13.0") == ["torch==2.13.0", ".[dev,text]"]


def test_the_constraints_file_is_names_and_versions() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert pins and all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin) for pin in pins), pins
    assert "torch==2.13.0" in pins


# What no file may name

MACHINE_PATHS = ("/" + "work/", "/" + "root/", "/opt/" + "wheels", "/opt/" + "pypi", "/tmp/" + "bash_jobs")
REGISTRY_HOSTS = ("pypi" + ".org", "python" + "hosted.org", "download.pytorch" + ".org")
FORBIDDEN = re.compile(
    "|".join(
        [rf"(?<![\w.)}}\]-]){re.escape(path)}" for path in MACHINE_PATHS] + [*map(re.escape, REGISTRY_HOSTS)]
    )
)


def find_forbidden(text: str) -> list[str]:
    """The lines that name a path of one machine or the host of a package registry, with line numbers."""
    return [f"{n}: {line}" for n, line in enumerate(text.splitlines(), 1) if FORBIDDEN.search(line)]


@pytest.mark.parametrize("name", [*MACHINE_PATHS, *REGISTRY_HOSTS])
def test_a_forbidden_name_is_found(name: str) -> None:
    assert find_forbidden(f"fine\nsee '{name}' there") == [f"2: see '{name}' there"]
    assert find_forbidden(f"a relative/folder{name}") == (
        [] if name in MACHINE_PATHS else [f"1: a relative/folder{name}"]
    )
    assert find_forbidden(f"see {name.replace('/', '|').replace('.', '-')}") == []


def test_no_file_names_a_machine_path_or_a_registry() -> None:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout to know which files belong to the project")
    command = [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    assert ROOT / "pyproject.toml" in paths
    offenders = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in paths
        for line in find_forbidden(path.read_bytes().decode("utf-8", "replace"))
    ]
    assert not offenders, "\n".join(offenders)
