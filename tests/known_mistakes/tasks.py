"""All mistakes in what a user brings, by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.known_mistakes import data, models
from tests.known_mistakes.data import Mistake

TASKS: Mapping[str, type[Mistake]] = {
    name: found
    for module in (data, models)
    for name, found in vars(module).items()
    if isinstance(found, type) and issubclass(found, Mistake) and "story" in vars(found)
}
