"""One recipe file, trained under every strategy by one argument."""

import json
from pathlib import Path

import pytest

from tests.commands import run

ROOT = Path(__file__).parents[2]
STRATEGIES = {
    "replicas=2 shard=2 zero=1": 4,
    "replicas=2 pipeline=2": 4,
    "replicas=1 pipeline=2 sync=pipedream": 2,
    "sync=diloco:4 codec=int8": 2,
    "servers=1 sync=server-async": 3,
    "servers=1 sync=backup:1": 4,
    "route=shared-memory": 3,
}
SLOW = (  # for `make soak`
    "replicas=2 shard=2 zero=1",
    "replicas=2 pipeline=2",
    "servers=1 sync=backup:1",
    "route=shared-memory",
)


@pytest.mark.capability("Z1")
@pytest.mark.parametrize(
    "strategy", [pytest.param(text, marks=[pytest.mark.soak] * (text in SLOW)) for text in STRATEGIES]
)
def test_the_same_recipe_trains_under_every_strategy(strategy: str, tmp_path: Path) -> None:
    settings = [
        "steps=40",
        "options.hidden=[32]",
        "epochs=",
        f"run_dir={tmp_path}",
        "evaluate.every_steps=20",
    ]
    command = ["train", str(ROOT / "recipes" / "digits.toml")]
    command += ["-n", str(STRATEGIES[strategy]), "--strategy", strategy]
    for setting in settings:
        command += ["--set", setting]
    done = run(tmp_path, *command)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    scores = [row for row in rows if row["event"] == "evaluation"]
    assert [row["step"] for row in scores][-1] == 40
    assert scores[-1]["loss"] < 2.2
    assert (tmp_path / "checkpoints" / "step-00000040").is_dir()
