"""`generate`, `serve` and `chat` as a user calls them, and the way from weights of others to text."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import commands
from tests.serving.clients import ServerProcess

PARAMETERS = ["--max-tokens", "12", "--seed", "4"]


@pytest.mark.capability("W5", clause="speed and load time as JSON")
@pytest.mark.capability("W9", clause="the command and the server have one answer")
def test_the_command_and_the_server_have_one_answer(gpt_run: Path, server: ServerProcess) -> None:
    words = ["generate", gpt_run, "import ", "def f", *PARAMETERS, "--slots", "4"]
    done = commands.run(gpt_run.parent, *words, "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    expected = [server.complete(prompt, max_tokens=12, seed=4) for prompt in ("import ", "def f")]
    assert [a["text"] for a in record["answers"]] == [e["choices"][0]["text"] for e in expected]
    assert record["fingerprint"] == expected[0]["system_fingerprint"]
    assert record["tokens_per_second"] > 0 and record["load_seconds"] > 0
    assert "step-00000010" in record["source"]
    streamed = commands.run(gpt_run.parent, *words[:3], *words[4:])
    text = record["answers"][0]["text"]
    assert "import " + text.split("\n")[0] in streamed.stdout
    assert "tokens per second" in streamed.stderr and record["fingerprint"] in streamed.stderr


@pytest.mark.parametrize(
    "words, code, message",
    [
        (["--max-tokens", "0"], 2, "max_tokens is 0; the prompt has 1 token of a context of 128"),
        (["--temperature", "-1"], 2, "temperature is -1.0"),
        (["--temperature", "nan"], 2, "temperature is nan"),
        (["--seed", str(2**79)], 2, f"seed is {2**79}"),
        (["--context", "1000"], 2, "serve.context is 1000, and the model's context is 128"),
        (["--stop", ""], 2, "a stop string has 0 characters"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_refused_with_the_numbers(
    gpt_run: Path, words: list[str], code: int, message: str
) -> None:
    done = commands.run(gpt_run.parent, "generate", gpt_run, "a", *words)
    assert done.returncode == code and message in done.stderr.replace("\n", " "), done.stderr


@pytest.mark.capability("W3", clause="settings of the recipe")
def test_the_settings_are_those_of_the_recipe_unless_an_option_changes_them(
    gpt_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(gpt_run, run)
    text = (run / "recipe.toml").read_text("utf-8")
    assert "[serve]\nslots = 8\nchunk = 64\n" in text
    (run / "recipe.toml").write_text(text.replace("slots = 8\nchunk = 64", "slots = 3\nchunk = 16"), "utf-8")
    records = []
    for words in ([], ["--slots", "3"], ["--slots", "5", "--attention", "masked"]):
        done = commands.run(tmp_path, "generate", run, "import ", *PARAMETERS, *words, "--json")
        assert done.returncode == 0, done.stderr
        records.append(json.loads(done.stdout))
        changes = "may have other bits: slots = 5 in place of 3, attention = masked in place of by_slot"
        assert (changes in done.stderr.replace("\n", " ")) == (len(words) > 2)
    assert [(r["slots"], r["chunk"], r["attention"], r["context"]) for r in records] == [
        (3, 16, "by_slot", 128),
        (3, 16, "by_slot", 128),
        (5, 16, "masked", 128),
    ]
    prints = [record["fingerprint"] for record in records]
    assert prints[0] == prints[1] != prints[2]


def test_other_hosts_need_a_token(gpt_run: Path) -> None:
    done = commands.run(gpt_run.parent, "serve", gpt_run, "--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 2 and "so the server needs an access token" in done.stderr


def test_a_chat_without_a_template_says_so(gpt_run: Path, server: ServerProcess) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "chat", server.url],
        input="hello\n",
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "has no chat template, so it has no chats" in done.stderr


def test_slots_are_planned_before_a_model_is_served(gpt_run: Path) -> None:
    words = ["plan", "memory", gpt_run.parent / "recipe.toml", "--serve", "--slots", "16"]
    done = commands.run(gpt_run.parent, *words, "--json")
    plan = json.loads(done.stdout)
    assert plan["cache"] == 16 * 128 * 2 * 2 * 32 * 4  # slots, context, layers, keys and values, width, bytes
    assert plan["total"] == sum(plan[kind] for kind in ("weights", "cache", "masks", "logits"))
    assert "16 slots of" in commands.run(gpt_run.parent, *words).stdout


@pytest.mark.capability("W8")
def test_fine_tuning_improves_the_perplexity_and_the_tuned_model_generates(
    gpt_run: Path, tmp_path: Path
) -> None:
    """On text that is unlike the first one; the twin with a rate of zero improves nothing."""
    for index in range(8):
        (tmp_path / f"{index}.txt").write_text("UPPER CASE WORDS! " * 400)
    assert commands.run(tmp_path, "export", gpt_run, "--to", "base.safetensors").returncode == 0
    recipe = (gpt_run.parent / "recipe.toml").read_text().replace('run_dir = "run"', "")
    lines = [line for line in recipe.splitlines() if not line.startswith("text =")]
    head = f'init_from = "base.safetensors"\n[options]\ntext = "{tmp_path}/*.txt"'
    text = "\n".join(lines).replace("[options]", head)
    (tmp_path / "tune.toml").write_text(text.replace("steps = 10", "steps = 30"))
    data = ["--data", "paceline.tasks.byte_gpt:held_out_windows", "--option", 'text="*.txt"']
    data += ["--option", "context=128", "--option", "held_out_tokens=2048", "--json"]

    def perplexity(run: Path) -> float:
        done = commands.run(tmp_path, "evaluate", run, *data)
        assert done.returncode == 0, done.stderr
        return float(json.loads(done.stdout)["perplexity"])

    before = perplexity(gpt_run)
    for rate, folder in (("1e-2", "tuned"), ("0", "frozen")):
        words = ["train", "tune.toml", "--set", f"run_dir={folder}", "--set", f"optimizer.lr={rate}"]
        done = commands.run(tmp_path, *words)
        assert done.returncode == 0, done.stderr
    assert perplexity(tmp_path / "tuned") < before / 2
    assert perplexity(tmp_path / "frozen") == pytest.approx(before, rel=1e-4)
    done = commands.run(tmp_path, "generate", tmp_path / "tuned", "UPPER ", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    letters = [c for c in done.stdout if c.isalpha()]
    assert sum(c.isupper() for c in letters) > 0.9 * len(letters) > 0
