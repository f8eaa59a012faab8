"""Recipes from files: what is wrong is named with key, file and line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RecipeError
from paceline.recipe import BatchRecipe, OptimizerRecipe, Recipe, Strategy, load_recipe
from paceline.recipe.recipe_loading import RecipeFile
from paceline.recipe.registry.optimizer_specs import OPTIMIZER_SPECS

Write = Callable[[str], Path]
OPTIMIZERS = ", ".join(f'"{spec.word}"' for spec in OPTIMIZER_SPECS)
GOOD = """task = "digits"
steps = 20
strategy = "ddp"

[batch]
size = 16

[optimizer]
lr = 0.1
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_recipe(text: str) -> Path:
        path = tmp_path / "digits.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_recipe


def test_a_file_is_the_same_as_the_objects(write: Write) -> None:
    expected = Recipe(task="digits", steps=20, batch=BatchRecipe(size=16), optimizer=OptimizerRecipe(lr=0.1))
    assert load_recipe(write(GOOD)) == expected
    assert load_recipe(str(write("\ufeff" + GOOD.replace("\n", "\r\n")))) == expected


def test_a_file_that_is_loaded_several_times_keeps_nothing_of_earlier_overrides(write: Write) -> None:
    path = write('task = "digits"\nsteps = 5\n[optimizer]\nlr = 0.1\n[options]\nhidden = [8]\n')
    file = RecipeFile(path)
    for overrides in (["optimizer.lr=0.5", "options.hidden=[4]"], ["epochs=2", "batch.size=4"], []):
        assert file.load(overrides, "replicas=2") == load_recipe(path, overrides, "replicas=2")
        assert file.load(overrides) == load_recipe(path, overrides)


def test_a_strategy_is_text_or_a_table(write: Write) -> None:
    text = load_recipe(write('task = "sum"\nsteps = 1\nstrategy = "replicas=2 codec=int8"\n'))
    table = load_recipe(write('task = "sum"\nsteps = 1\n[strategy]\nreplicas = 2\ncodec = "int8"\n'))
    assert text.strategy == table.strategy == Strategy(replicas=2, codec="int8")
    everyone = load_recipe(write('task = "sum"\nsteps = 1\n[strategy]\nreplicas = "all"\n'))
    assert everyone.strategy == Strategy()


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('stepz = 1\ntask = "x"\nsteps = 1', 1, "stepz: unknown key, found 1; did you mean steps?"),
        ('task = "x"\nsteps = "ten"', 2, 'steps: expected an integer >= 1, found "ten"'),
        (
            'task = "x"\nsteps = 1\n[optimizer]\nname = "sdg"',
            4,
            f'optimizer.name: expected one of {OPTIMIZERS}, found "sdg"; did you mean "sgd"?',
        ),
        (
            'task = "x"\nsteps = 1\noptimizer.betas = [\n  0.9,\n  1.0,\n]',
            5,
            "optimizer.betas[1]: expected a finite number >= 0 and < 1, found 1.0",
        ),
        (
            'task = "x"\nsteps = 1\nbatch = {size = 8, shard = 2}',
            3,
            "batch.shard: unknown key, found 2; did you mean batch.shards?",
        ),
        (
            'task = "x"\nsteps = 1\n\n[btach]\nsize = 3',
            4,
            "btach: unknown key, found a table; did you mean batch?",
        ),
        ('task = "x"\nsteps = 1\nbatch = 5', 3, "batch: expected a table, found 5"),
        (
            'task = "x"\nsteps = 1\n[batch]\nshards = 64',
            4,
            "batch.shards: expected at most batch.size = 32, found 64",
        ),
        (
            'task = "x"\nsteps = 1\n[optimizer]\nweight_decay = 0.1\nname = "adam"',
            4,
            "optimizer.weight_decay: expected only with adamw, sgd, nadam, radam, lamb, lars, adafactor,"
            ' muon or kfac, found "adam"',
        ),
        (
            'task = "x"\nsteps = 1\nepochs = 2',
            3,
            "epochs: expected steps or epochs, found both: steps = 1, epochs = 2.0",
        ),
        (
            'task = "x"\nsteps = 1\nstrategy = "replica=2"',
            3,
            "strategy.replica: unknown key, found 2; did you mean strategy.replicas?",
        ),
        (
            'task = "x"\nsteps = 1\n[strategy]\nzero = 9',
            4,
            "strategy.zero: expected an integer >= 0 and <= 3, found 9",
        ),
    ],
)
def test_an_error_names_key_file_and_line(write: Write, text: str, line: int, message: str) -> None:
    path = write(text)
    error = refuse(path)
    assert (error.what, error.where) == (message, f"{path}, line {line}")
    assert error.next_step


def test_what_is_missing_names_the_file(write: Write) -> None:
    path = write("seed = 1\n")
    assert refuse(path).what.splitlines() == [
        "2 errors:",
        f"  {path}: task: expected a string that is not empty, but it is missing",
        f"  {path}: epochs: expected steps or epochs, found neither",
    ]


def test_all_errors_come_in_one_message_each_with_its_line(write: Write) -> None:
    path = write('task = "x"\nsteps = 1e3\n[optimizer]\nlr = "fast"\n[btach]\n[schedule]\nrate = 0.5\n')
    assert refuse(path, "seed=x").what.splitlines() == [
        "5 errors:",
        '  --set seed=x: seed: expected an integer >= 0 and <= 9223372036854775807, found "x"',
        f"  {path}, line 2: steps: expected an integer >= 1, found 1000.0; write 1000",
        f'  {path}, line 4: optimizer.lr: expected a finite number >= 0, found "fast"',
        f'  {path}, line 7: schedule.rate: expected only with decay exponential, not "constant"',
        f"  {path}, line 5: btach: unknown key, found a table; did you mean batch?",
    ]


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("steps = 1\ntask = digits\n", 2, "not TOML: Invalid value, in: task = digits"),
        ('task = "x"\n[batch\nsize = 1\n', 2, "not TOML: "),
        ('task = "x"\ntask = "y"\n', 2, "not TOML: Cannot"),
        ('task = "x"\nrate = [1,\n', 2, "not TOML: "),
        ("task", 1, "not TOML: "),
    ],
)
def test_a_syntax_error_names_file_and_line(write: Write, text: str, line: int, what: str) -> None:
    path = write(text)
    error = refuse(path)
    assert error.where == f"{path}, line {line}"
    assert error.what.startswith(what)
    assert "quotes" in error.next_step


def test_a_file_that_cannot_be_read(tmp_path: Path, write: Write) -> None:
    write(GOOD)
    error = refuse(tmp_path / "digit.toml")
    assert error.where == str(tmp_path / "digit.toml")
    assert error.next_step == f"did you mean {tmp_path / 'digits.toml'}?"
    assert "cannot read" in refuse(tmp_path).what
    assert "cannot read" in refuse(tmp_path / "no" / "such.toml").what
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"task = '\xff'")
    assert refuse(binary).where == f"{binary}, byte 8"


@pytest.mark.parametrize(
    "text, overrides, expected",
    [
        ("epochs = 3", ["steps=20"], {"steps": 20, "epochs": None}),
        ("steps = 3", ["epochs=2"], {"steps": None, "epochs": 2.0}),
        ("steps = 3", ["epochs=2", "steps=7"], {"steps": 7, "epochs": None}),
        ("epochs = 3", ["epochs=", "steps=7"], {"steps": 7, "epochs": None}),
        (
            'steps = 3\n[schedule]\ndecay = "exponential"\nrate = 0.1',
            ["schedule.decay=linear", "schedule.final=0.5"],
            {"schedule": {"decay": "linear", "final": 0.5}},
        ),
    ],
)
def test_what_is_typed_replaces_what_it_excludes(
    tmp_path: Path, text: str, overrides: list[str], expected: dict[str, object]
) -> None:
    path = tmp_path / "a.toml"
    path.write_text(f'task = "digits"\n{text}\n')
    base = {"task": "digits", "steps": 3}
    assert load_recipe(path, overrides) == Recipe(**(base | expected))


@pytest.mark.parametrize(
    ("text", "typed", "names"),
    [
        ('[optimizer]\nname = "adam"', "optimizer.weight_decay=0.1", "optimizer.weight_decay"),
        ("[batch]\nsize = 4\nshards = 2", "batch.shards=8", "batch.shards"),
        ("reproducible = true", "strategy.sync=local:4", "strategy"),
        ('[strategy]\nsync = "local:4"', "reproducible=true", "strategy"),
    ],
)
def test_what_is_typed_never_takes_out_what_would_act(
    tmp_path: Path, text: str, typed: str, names: str
) -> None:
    """It would train something else without a word."""
    path = tmp_path / "a.toml"
    path.write_text(f'task = "digits"\nsteps = 3\n{text}\n')
    with pytest.raises(RecipeError, match=f"^{names}: expected"):
        load_recipe(path, [typed])


def test_what_is_typed_and_cannot_go_together_is_still_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('task = "digits"\nsteps = 3\n[batch]\nshards = 6\n')
    with pytest.raises(RecipeError, match="expected only with adamw, adam, adabound"):
        load_recipe(path, ["optimizer.name=sgd", "optimizer.betas=[0.8, 0.9]"])
    with pytest.raises(RecipeError, match=r"at most batch\.size"):
        load_recipe(path, ["batch.size=4", "batch.shards=6"])
    path.write_text('task = "digits"\nsteps = 3\nepochs = 4\n')
    with pytest.raises(RecipeError, match="found both"):
        load_recipe(path)


def refuse(path: Path, *overrides: str, strategy: str | None = None) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides, strategy)
    return caught.value


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("optimizer.lr=3e-4", ("optimizer", "lr"), 3e-4),
        ("optimizer.lr = 1", ("optimizer", "lr"), 1.0),
        ("optimizer.betas=[0.5, 0.6]", ("optimizer", "betas"), (0.5, 0.6)),
        ("optimizer.clip_norm=1.0", ("optimizer", "clip_norm"), 1.0),
        ("batch.shuffle=false", ("batch", "shuffle"), False),
        ("batch={size=9}", ("batch", "size"), 9),
        ("task=my_file.py:build", ("task",), "my_file.py:build"),
        ('task="sum"', ("task",), "sum"),
        ("run_dir=runs/a=b", ("run_dir",), "runs/a=b"),
        ("strategy=replicas=2 codec=bf16", ("strategy",), Strategy(replicas=2, codec="bf16")),
        ("strategy.replicas=2", ("strategy", "replicas"), 2),
        ("steps=", ("steps",), None),
        ("batch.size=", ("batch", "size"), 32),
        ("options.files=a/*.txt", ("options",), {"files": "a/*.txt"}),
        ("options.deep.x=[1, 2]", ("options",), {"deep": {"x": [1, 2]}}),
        ('options."a b"=1', ("options",), {"a b": 1}),
        ('options.word="True"', ("options",), {"word": "True"}),
        ("options.version=1.2.3", ("options",), {"version": "1.2.3"}),
        ("options.gone=", ("options",), {}),
    ],
)
def test_an_override_is_toml_or_a_bare_word(
    write: Write, override: str, path: tuple[str, ...], value: Any
) -> None:
    overrides = [override, "epochs=1"] if override == "steps=" else [override]
    found: Any = load_recipe(write(GOOD), overrides)
    for part in path:
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_a_later_override_wins_and_the_rest_stays(write: Write) -> None:
    recipe = load_recipe(write(GOOD), ["optimizer.lr=1.0", "optimizer.lr=2.0", "optimizer.eps=1e-6"])
    assert (recipe.optimizer.lr, recipe.optimizer.eps, recipe.batch.size) == (2.0, 1e-6, 16)


def test_the_strategy_argument_replaces_the_strategy_of_the_file(write: Write) -> None:
    path = write('task = "x"\nsteps = 1\n[strategy]\nzero = 1\n')
    assert load_recipe(path, strategy="replicas=2").strategy == Strategy(replicas=2)
    assert load_recipe(path, ["strategy.replicas=3"], "fsdp").strategy == Strategy(
        replicas=3, shard=2, zero=3, fills="shard"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=fast", 'optimizer.lr: expected a finite number >= 0, found "fast"'),
        ("optimizer.lrr=1", "optimizer.lrr: unknown key, found 1; did you mean optimizer.lr?"),
        ("optimizr.lr=1", "optimizr: unknown key, found a table; did you mean optimizer?"),
        ("optimizer.lrr=", "optimizer.lrr: unknown key; did you mean optimizer.lr?"),
        ("optimizer.lr.x=1", "optimizer.lr.x: expected optimizer.lr to be a table, found 0.1"),
        ("batch.shards=64", "batch.shards: expected at most batch.size = 16, found 64"),
        ("batch.shuffle=False", "batch.shuffle: expected a TOML value, found False; write false"),
        (
            "optimizer.clip_norm=None",
            "optimizer.clip_norm: expected a TOML value, found None; "
            "write nothing after the equals sign, for the default",
        ),
        ("options.x=.5", "options.x: expected a TOML value, found .5"),
        ("options.x=[1", "options.x: expected a TOML value, found [1"),
        ("steps", 'steps: expected KEY=VALUE, found "steps"'),
        ("steps 2=3", '"steps 2": unknown key, found 3; did you mean steps?'),
        ("strategy=dpp", 'strategy: unknown preset "dpp"; did you mean "ddp"?'),
        ("strategy.shard=0", "strategy.shard: expected an integer >= 1, found 0"),
    ],
)
def test_a_wrong_override_is_named_instead_of_a_line(write: Write, override: str, message: str) -> None:
    error = refuse(write(GOOD), override)
    assert (error.what, error.where) == (message, f"--set {override}")
    assert error.next_step


def test_a_wrong_strategy_argument_is_named(write: Write) -> None:
    error = refuse(write(GOOD), strategy="replicas=2 shrad=2")
    assert error.what == "strategy.shrad: unknown key, found 2; did you mean strategy.shard?"
    assert error.where == '--strategy "replicas=2 shrad=2"'


def test_an_override_cannot_carry_a_second_statement(write: Write) -> None:
    assert load_recipe(write(GOOD), ["run_dir=1\nseed=7"]).seed == 1


def test_an_override_can_remove_a_wrong_key_of_the_file(write: Write) -> None:
    assert load_recipe(write("stepz = 1\n" + GOOD), ["stepz="]).steps == 20


def test_a_script_in_place_of_a_recipe_is_an_error_that_says_how_to_run_it(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("import paceline\n")
    error = refuse(path)
    assert "is Python, but a recipe is a TOML file" in error.what
    assert f"paceline run -n 2 {path}" in error.next_step and 'task = "model.py:build"' in error.next_step
