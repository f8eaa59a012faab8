"""The page of known mistakes is the one that the tests run."""

import pytest

from tests.known_mistakes.page import PAGE, render, stories


@pytest.mark.capability("Z17")
def test_the_page_is_what_is_tested() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "python -m tests.known_mistakes.page"


def test_every_mistake_is_told_once() -> None:
    titles = [story.title for told in stories().values() for story in told]
    assert len(titles) == len(set(titles)) >= 40
