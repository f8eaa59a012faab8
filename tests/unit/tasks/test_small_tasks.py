"""The tasks `sum` and `digits` reach their thresholds with their recipes, in a plain loop of one process."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.errors import RecipeError
from paceline.models import set_micro_batch_key
from paceline.optim import build_optimizer, build_schedule
from paceline.recipe import Recipe, load_recipe
from paceline.state.keys import key
from paceline.task import Loss, Task
from paceline.tasks import load_task
from paceline.tasks.digits import add_shifts, load_digits, read_digits

RECIPES = Path(__file__).parents[3] / "recipes"


def train(recipe: Recipe, tmp_path: Path) -> Loss:
    """Train as the recipe says, one shard per batch, and evaluate all held-out samples at once."""
    task = load_task(recipe.task, recipe.options, recipe.seed, RECIPES, tmp_path)
    assert task.initialize is not None
    assert task.held_out is not None
    task.initialize(task.model, recipe.seed)
    steps_per_epoch = -(-len(task.data) // recipe.batch.size)
    steps = recipe.steps or round((recipe.epochs or 0) * steps_per_epoch)
    optimizer = build_optimizer(task.model, recipe.optimizer, fused_allowed=True)
    schedule = build_schedule(recipe.schedule, steps, recipe.batch.size)
    for step in range(steps):
        schedule.apply(optimizer, step)
        set_micro_batch_key(task.model, key(recipe.seed, step))
        loss = task.loss(task.model, pick(task, recipe, step, steps_per_epoch))
        optimizer.zero_grad()
        (loss.total / loss.count).backward()
        optimizer.step()
    task.model.eval()
    with torch.no_grad():
        return task.loss(task.model, task.held_out.tensors)


def pick(task: Task, recipe: Recipe, step: int, steps_per_epoch: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(key(recipe.seed, "epoch", step // steps_per_epoch))
    start = step % steps_per_epoch * recipe.batch.size
    indices = torch.randperm(len(task.data), generator=generator)[start : start + recipe.batch.size]
    return [tensor[indices] for tensor in task.data.tensors]


@pytest.mark.parametrize("seed", [1, 2])
def test_sum_is_learned_to_a_thousandth(seed: int, tmp_path: Path) -> None:
    loss = train(load_recipe(RECIPES / "sum.toml").replace(seed=seed), tmp_path)
    assert loss.total / loss.count < 1e-3


@pytest.mark.soak
@pytest.mark.capability("V2")
def test_the_mlp_reads_ninety_seven_of_a_hundred_held_out_digits(tmp_path: Path) -> None:
    loss = train(load_recipe(RECIPES / "digits.toml"), tmp_path)
    assert loss.count == len(load_digits()[1])
    assert loss.metrics["accuracy"] / loss.count >= 0.97


def test_the_convnet_learns_digits(tmp_path: Path) -> None:
    loss = train(load_recipe(RECIPES / "digits-convnet.toml").replace(epochs=3), tmp_path)
    assert loss.metrics["accuracy"] / loss.count >= 0.95


def test_the_images_are_those_that_scikit_learn_loads() -> None:
    from sklearn.datasets import load_digits as load_images

    pixels, classes, held_out = read_digits()
    expected, targets = load_images(return_X_y=True)
    assert np.array_equal(pixels, expected.astype(np.float32) / 16) and np.array_equal(classes, targets)
    assert pixels.dtype == np.float32 and classes.dtype == np.int64 and held_out.sum() == 299


def test_a_run_on_the_digits_does_not_import_scikit_learn() -> None:
    check = (
        "import sys; from paceline.tasks import digits; digits.build(); assert 'sklearn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=120)


def test_held_out_digits_are_never_trained_on_and_no_image_is_lost() -> None:
    data, held_out = load_digits()
    assert len(data) + len(held_out) == 1797
    assert 250 < len(held_out) < 350
    assert set(held_out.tensors[1].tolist()) == set(range(10))
    seen = {image.numpy().tobytes() for image in data.tensors[0]}
    assert not any(image.numpy().tobytes() in seen for image in held_out.tensors[0])


def test_shifts_move_by_one_pixel_and_keep_the_class() -> None:
    image = torch.zeros(8, 8)
    image[0, 3] = 1.0
    moved = add_shifts(torch.utils.data.TensorDataset(image.view(1, 64), torch.tensor([4])))
    images = moved.tensors[0].view(5, 8, 8)
    assert torch.equal(images[0], image)
    assert sorted(place.tolist() for place in images.nonzero()[:, 1:]) == [[0, 2], [0, 3], [0, 4], [1, 3]]
    assert images.sum() == 4  # the one that moved over the edge is gone
    assert moved.tensors[1].tolist() == [4] * 5


def test_training_and_held_out_samples_of_sum_differ_and_are_sums() -> None:
    task = load_task("sum", {"inputs": 3, "samples": 50, "held_out_samples": 20}, 1, ".", ".")
    x, y = task.data.tensors
    assert torch.equal(y, x.sum(1, keepdim=True))
    assert not set(x[:, 0].tolist()) & set(task.held_out.tensors[0][:, 0].tolist())


@pytest.mark.parametrize(
    ("task", "options", "says"),
    [
        ("digits", {"model": "mpl"}, "model: .*mlp"),
        ("digits", {"hidden": [8, "x"]}, "hidden: expected a list of integers"),
        ("digits", {"dropuot": 0.1}, "dropuot: unknown key.*dropout"),
        ("sum", {"inputs": 0}, "inputs: expected an integer >= 1"),
        ("byte-gpt", {"text": []}, "text: expected a string or a list of strings"),
        ("byte-gpt", {"context": 2.5}, "context: expected an integer"),
    ],
)
def test_wrong_options_are_named(task: str, options: dict[str, object], says: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=f"(?s){says}.*options."):
        load_task(task, options, 1, ".", tmp_path)
