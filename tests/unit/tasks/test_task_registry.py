"""Tasks by name, file and module: found, fitted to their options, built under a seed, and checked."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.errors import TaskError
from paceline.task import Task
from paceline.tasks import SHIPPED, load_task

FILE = """
from dataclasses import dataclass
import torch
from torch import nn
from paceline.task import Loss, Task
import beside_{tag}

@dataclass
class Shape:
    width: int

def loss(model, batch):
    return Loss(model(batch).square().sum(), len(batch))

def build(width: int = 3, *, bias=True):
    return Task(nn.Linear(Shape(width).width, 1, bias=bias), torch.randn(8, width), loss)

def build_tuple():
    return nn.Linear(2, 1), torch.randn(8, 2), loss

def build_given(width, seed, base_dir, cache_dir):
    data = [(seed, base_dir, cache_dir)] * width
    return nn.Linear(2, 1), data, loss

def build_badly():
    return nn.Linear(2, 1), torch.randn(8, 2)

def build_without_loss():
    return nn.Linear(2, 1), torch.randn(8, 2), "loss"

def build_nothing():
    pass

def build_and_fail():
    raise ValueError("the user's own mistake")

constant = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with a task file and a module beside it; whatever its import leaves is removed."""
    path, modules, tag = list(sys.path), set(sys.modules), tmp_path.name.replace("-", "_")
    (tmp_path / "my_task.py").write_text(FILE.format(tag=tag))
    (tmp_path / f"beside_{tag}.py").write_text("")
    (tmp_path / f"package_{tag}").mkdir()
    (tmp_path / f"package_{tag}" / "__init__.py").write_text("")
    (tmp_path / f"package_{tag}" / "task.py").write_text(FILE.format(tag=tag))
    (tmp_path / f"package_{tag}" / "broken.py").write_text("import there_is_no_such_module")
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if tag in name or "my_task" in name:
            del sys.modules[name]


def load(folder: Path, spec: str, *, seed: int = 1, **options: object) -> Task:
    return load_task(spec, options, seed, folder, folder / "cache")


def test_from_a_file_relative_to_the_recipe(folder: Path) -> None:
    task = load(folder, "my_task.py:build", width=5, bias=False)
    assert task.model.weight.shape == (1, 5)
    assert task.model.bias is None


def test_from_a_file_by_its_whole_path(folder: Path) -> None:
    assert load_task(f"{folder}/my_task.py:build", {}, 1, "/", "/").model.weight.shape == (1, 3)


def test_from_a_module_below_the_folder_of_the_recipe(folder: Path) -> None:
    package = next(folder.glob("package_*")).name
    assert load(folder, f"{package}.task:build").model.weight.shape == (1, 3)


def test_a_tuple_of_three_is_a_task(folder: Path) -> None:
    task = load(folder, "my_task.py:build_tuple")
    assert isinstance(task, Task)
    assert task.loss(task.model, task.data[:2]).count == 2


def test_what_the_run_knows_is_given_to_those_who_ask(folder: Path) -> None:
    data = load(folder, "my_task.py:build_given", seed=7, width=2).data
    assert data == [(7, folder, folder / "cache")] * 2


def test_the_seed_decides_weights_and_the_callers_stream_stays(folder: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = load(folder, "my_task.py:build", seed=1).model.weight
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(load(folder, "my_task.py:build", seed=1).model.weight, first)
    assert not torch.equal(load(folder, "my_task.py:build", seed=2).model.weight, first)


@pytest.mark.parametrize(
    ("spec", "options", "says"),
    [
        ("digit", {}, "did you mean 'digits'.*byte-gpt, digits, rl, sum"),
        ("my_task.py", {}, "no task 'my_task.py'"),
        ("my_task.py:", {}, "no task"),
        ("missing.py:build", {}, "no file .*missing.py"),
        ("my_task.py:bild", {}, "no function 'bild'; did you mean 'build'"),
        ("my_task.py:constant", {}, "no function 'constant'"),
        ("no_such_package.task:build", {}, "no module 'no_such_package.task'"),
        ("my_task.py:build", {"widht": 3}, "no option 'widht'; did you mean 'width'.*options.widht"),
        ("my_task.py:build_given", {}, "needs an option 'width'.*set options.width"),
        ("my_task.py:build_badly", {}, "returned a tuple of 2.*model, data, loss"),
        ("my_task.py:build_nothing", {}, "returned NoneType"),
        ("my_task.py:build_without_loss", {}, "loss is str"),
        ("sum", {"hiden": [3]}, None),
    ],
)
def test_mistakes_are_named(folder: Path, spec: str, options: dict[str, object], says: str | None) -> None:
    kind = TaskError if says else Exception
    with pytest.raises(kind, match=f"(?s){says or 'hiden.*hidden'}"):
        load(folder, spec, **options)


def test_mistakes_inside_the_users_code_keep_their_own_class(folder: Path) -> None:
    with pytest.raises(ValueError, match="own mistake"):
        load(folder, "my_task.py:build_and_fail")
    package = next(folder.glob("package_*")).name
    with pytest.raises(ModuleNotFoundError, match="there_is_no_such_module"):
        load(folder, f"{package}.broken:build")


def test_a_file_that_fails_to_import_is_not_half_there(folder: Path) -> None:
    (folder / "late.py").write_text("raise RuntimeError('first')")
    with pytest.raises(RuntimeError, match="first"):
        load(folder, "late.py:build")
    (folder / "late.py").write_text("raise RuntimeError('second time')")
    with pytest.raises(RuntimeError, match="second time"):
        load(folder, "late.py:build")


# Rows of environments come from a recipe: tests/parity/test_rl.py.
@pytest.mark.parametrize("name", sorted(SHIPPED.keys() - {"rl"}))
def test_shipped_tasks_build_and_give_a_loss(name: str, tmp_path: Path) -> None:
    options = {"byte-gpt": {"text": "*.txt", "context": 16, "layers": 1, "width": 32, "held_out": 0.5}}
    for i in range(2):
        (tmp_path / f"{i}.txt").write_text(f"{i} words and more words " * 20)
    task = load(tmp_path, name, **options.get(name, {}))
    assert task.initialize is not None
    task.initialize(task.model, 1)
    batch = torch.utils.data.default_collate([task.data[i] for i in range(4)])
    loss = task.loss(task.model, batch)
    loss.total.backward()
    assert loss.count == (64 if name == "byte-gpt" else 4)
    assert torch.isfinite(loss.total)
