"""Freed memory of a rank: it goes back to the system where the layout was chosen for memory.

The launcher has malloc keep what is freed, because a step that gets it back from the system pays thousands
of page faults. Plain replicas do that throughout. Where the state is partitioned, or activations are
recomputed, freed memory goes back between two rounds, and only after work that leaves more of it than a step
needs: the start, the first round, evaluations and saves. All other steps find the memory of the step before.
"""

from __future__ import annotations

from paceline.job.mesh import AXES, Mesh
from paceline.observe.process_info import return_freed_memory
from paceline.recipe.recipe import Recipe


def is_chosen_for_memory(recipe: Recipe, mesh: Mesh) -> bool:
    """Return whether ranks hold parts of a replica, or the recipe limits memory."""
    is_partitioned = any(mesh.axes[axis].size > 1 for axis in AXES if axis != "replica")
    return is_partitioned or recipe.memory.budget is not None or recipe.memory.recomputes


class FreedMemory:
    """Freed memory of this rank between two rounds.

    Args:
        recipe, mesh: those of the session; plain replicas keep all freed memory.

    Attributes:
        is_returned: False if all freed memory is kept.
    """

    def __init__(self, recipe: Recipe, mesh: Mesh) -> None:
        self.is_returned, self._is_warm = is_chosen_for_memory(recipe, mesh), False

    def return_to_system(self) -> None:
        """Return freed memory, after work that leaves more of it than a step needs."""
        if self.is_returned:
            return_freed_memory()

    def after_round(self, *, is_after_other_work: bool) -> None:
        """Return freed memory after the first round, and after other work than training.

        Args:
            is_after_other_work: an evaluation or a save came after the round.
        """
        # The first round allocates moments and buckets, so it leaves holes that later rounds do not fill.
        if is_after_other_work or not self._is_warm:
            self.return_to_system()
        self._is_warm = True
