"""The capability page and the pins, on tiny trees; what no file may name; what the README and `make` show."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

import paceline
from paceline.cli.main import COMMANDS
from paceline.recipe import load_recipe
from tools import capabilities, constraints

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text("utf-8")


def write(root: Path, name: str, text: str) -> Path:
    """Write one file of a tiny project under `root`."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), "utf-8")
    return path


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
2 of 4 rows are whole, 0 are proven in part.

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
def marked(tmp_path: Path) -> Path:
    """A tiny project with four rows and one file of tests."""
    write(tmp_path, "docs/capabilities.txt", ROWS)
    write(tmp_path, "tests/unit/test_it.py", TESTS)
    return tmp_path


def test_the_page_joins_rows_and_tests(marked: Path) -> None:
    assert capabilities.main(["--root", str(marked)]) == 0
    text = (marked / "docs" / "capabilities.md").read_text("utf-8")
    assert text == capabilities.HEADER + "\n" + PAGE


CONTRACT = """\
    import pytest

    class StoreContract:
        def test_it_keeps(self): ...
        def test_it_loses_nothing(self): ...
        @pytest.mark.capability("B1", clause="a switch")
        def test_it_switches(self): ...
"""
INHERITED = """\
    import pytest
    from paceline.testing.contracts import StoreContract

    ROWS = {"a": "A1"}

    @pytest.mark.capability("A2")
    class TestDisk(StoreContract): ...

    def by_row(names):
        return [pytest.param(name, marks=pytest.mark.capability(ROWS.get(name, "B2"))) for name in names]

    @pytest.mark.parametrize("name", by_row(["a", "b"]))
    def test_by_helper(name): ...

    @pytest.mark.soak
    @pytest.mark.capability("B2", clause="in one second")
    def test_one_clause(): ...
"""


def test_inherited_tests_row_helpers_clauses_and_what_is_missing(tmp_path: Path) -> None:
    write(tmp_path, "docs/capabilities.txt", ROWS)
    write(tmp_path, "docs/open-clauses.txt", "# missing\nB2\tnot built: two servers\n")
    write(tmp_path, "src/paceline/testing/contracts/store.py", CONTRACT)
    write(tmp_path, "tests/test_store.py", INHERITED)
    assert capabilities.main(["--root", str(tmp_path)]) == 0
    text = (tmp_path / "docs" / "capabilities.md").read_text("utf-8")
    assert "3 of 4 rows are whole, 1 are proven in part." in text
    assert "**A1** Train\n  - [tests/test_store.py](../tests/test_store.py): `test_by_helper`" in text
    assert "`TestDisk` (3 tests of StoreContract)" in text
    assert "`TestDisk.test_it_switches` (a switch)" in text
    assert "**B2** Serve (in part)" in text and "  - missing: not built: two servers\n" in text
    assert "`test_by_helper`, `test_one_clause` (in one second; soak)" in text


def test_the_list_of_what_is_missing_names_rows(marked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(marked, "docs/open-clauses.txt", "A9\tnot built\n")
    assert capabilities.main(["--root", str(marked)]) == 1
    assert capsys.readouterr().err.startswith("docs/open-clauses.txt:1: ")
    known = {row.id for row in capabilities.read_rows(ROOT / "docs" / "capabilities.txt")}
    assert len(capabilities.read_missing(ROOT / "docs" / "open-clauses.txt", known)) > 10


def test_check_writes_nothing_and_fails_when_stale(marked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = marked / "docs" / "capabilities.md"
    assert capabilities.main(["--root", str(marked), "--check"]) == 1
    assert not page.exists()
    assert capabilities.main(["--root", str(marked)]) == 0
    assert capabilities.main(["--root", str(marked), "--check"]) == 0
    write(marked, "tests/test_new.py", "@pytest.mark.capability('A2')\ndef test_new(): ...\n")
    assert capabilities.main(["--root", str(marked), "--check"]) == 1
    assert "make docs" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["'A9'", "*ROWS", ""])
def test_a_mark_that_cannot_be_used_is_named(
    arguments: str, marked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(marked, "tests/test_new.py", f"\n@pytest.mark.capability({arguments})\ndef test_new(): ...\n")
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
    project: dict[str, dict[str, list[str]]] = {"optional-dependencies": {"text": [], "dev": []}}
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


def test_no_pattern_looks_into_the_folders_of_processes() -> None:
    """A glob of their files raises ProcessLookupError when a process ends while it is looked at."""
    texts = [path for folder in ("src", "tests", "tools") for path in (ROOT / folder).rglob("*.py")]
    assert len(texts) > 100
    assert [str(path) for path in texts if 'glob("[0-9]*' + "/" in path.read_text("utf-8")] == []


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


# What the command line may load


@pytest.mark.parametrize("room", ["errors", "state.keys", "recipe", "job.cluster", "launch", "federated"])
def test_a_room_of_the_command_line_does_not_load_torch(room: str) -> None:
    code = f"import sys, paceline.{room}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=240).returncode == 0


# Public names: what they say, in whatever order a script imports things


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


# What `make` installs before it runs something


def test_the_soak_installs_what_its_walk_needs(tmp_path: Path) -> None:
    """Without it the walk of a first day is skipped, and nobody sees it."""
    asked = ["make", "-n", "soak", f"VENV={tmp_path / 'fresh'}"]
    said = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True, timeout=100).stdout
    extras = (ROOT / "pyproject.toml").read_text("utf-8")
    assert "-e '.[walk]'" in said and "nbclient" in extras
    assert said.index("-e '.[dev]'") < said.index("-e '.[walk]'") < said.index("pytest --soak")


# What the README shows is what lies in the repository


@pytest.mark.parametrize("name", ["quickstart.py", "quickstart.toml"])
def test_the_example_is_the_file_that_the_tests_run(name: str) -> None:
    assert (ROOT / "examples" / name).read_text().strip() in README


def test_the_recipe_behind_the_first_screen_is_the_one_that_was_run() -> None:
    recipe = load_recipe(ROOT / "recipes" / "byte-gpt.toml")
    assert f"step {recipe.steps}/{recipe.steps}" in README
    assert recipe.strategy.replicas == 2


def test_every_command_exists() -> None:
    commands = {command.words.partition(" ")[0] for command in COMMANDS}
    shown = set(re.findall(r"^(?:\$ )?paceline (\w+)", README, re.MULTILINE))
    assert shown and shown <= commands
