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

Each entry is a program that the tests in `tests/known_mistakes` run: wrong, it is found or refused; mended,
it is right. This page is written from them (`python -m tests.known_mistakes.page`).
"""
PARTS = {
    "In a loop of one's own": """\
Bare loops over two ranks, 11 samples a step with masks of different lengths, four steps. Right, they end
within 2e-6 of Paceline with the same data, seed and rates; with one of these mistakes at least 2e-3 away
(`test_loops.py`).""",
    "In the task": """\
What Paceline is given: model, data, loss, optimizer. Verification on two ranks is red with each of these
within five steps, and green once the line is mended (`test_tasks.py`).""",
    "Refused": """\
These end with an error that says what to change, before anything wrong is trained (`test_refusals.py`).""",
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
            f"- **Mended:** `{story.right}`\n",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
