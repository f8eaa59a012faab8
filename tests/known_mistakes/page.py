"""The page of known mistakes, written from what the tests run: `python -m tests.known_mistakes.page`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.known_mistakes.mistake import Story
from tests.known_mistakes.refusals import REFUSALS
from tests.known_mistakes.tasks import TASKS
from tests.known_mistakes.test_loops import MISTAKES

PAGE = Path(__file__).parents[2] / "docs" / "known-mistakes.md"
HEAD = """\
# Known mistakes of distributed training

Each entry is a program that the tests in `tests/known_mistakes` run: with the mistake it is
detected or refused, and without it the result is correct. `python -m tests.known_mistakes.page` writes this
page.
"""
PARTS = {
    "In your own loop": """\
Plain loops on two ranks, four steps of 11 samples with masks of different lengths. A correct loop ends within
2e-6 of Paceline with the same data, seed and rates; with one of these mistakes it ends at least 2e-3 away
(`test_loops.py`).""",
    "In the task": """\
The task is the model, data, loss and optimizer. `paceline verify` on two ranks detects each of these within
five steps, and passes once the line is fixed (`test_tasks.py`).""",
    "Refused": """\
Each of these ends with an error that says what to change, before the first step (`test_refusals.py`).""",
}


def stories() -> Mapping[str, list[Story]]:
    """All stories, by part of the page."""
    loops = [vars(loop)["story"] for loop in MISTAKES.values()]
    tasks = [mistake.story for mistake in TASKS.values()]
    return dict(zip(PARTS, (loops, tasks, [case.story for case in REFUSALS.values()]), strict=True))


def render() -> str:
    """The whole page."""
    found = [HEAD]
    for part, told in stories().items():
        found += [f"## {part}\n", f"{PARTS[part]}\n", *(render_story(story) for story in told)]
    return "\n".join(found)


def render_story(story: Story) -> str:
    """One entry."""
    title = story.title[0].upper() + story.title[1:]
    return "\n".join(
        [
            f"### {title}\n",
            f"- **Seen in:** {story.seen}.",
            f"- **Symptom:** {story.symptom}.",
            f"- **Cause:** {story.cause}.",
            f"- **The line:** `{story.wrong}`",
            f"- **Fixed:** `{story.right}`\n",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
