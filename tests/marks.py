"""Marks of single parameter sets, also of those that a contract has."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest
from _pytest.mark import ParameterSet

FURTHER_CELLS: Mapping[str, tuple[str, Collection[object]]] = {
    "test_it_ends_where_the_scalar_reference_ends": ("num_ranks", (1, 2)),
    "test_it_resumes_under_another_layout": ("num_ranks", (2,)),
    "test_verify_confirms_every_step": ("num_ranks", (2, 4)),
    "test_every_step_is_that_of_the_oracle": ("model", ("convnet",)),
}
"""Of tests of contracts, the parameter and its values that only `make soak` runs."""
RESUMED = ("TestAdafactor", "TestMuon", "TestKFac")
"""Optimizers, with states of several shapes, that the suite resumes under another layout."""
WITH_CONVNET = ("TestZero3", "TestOneForwardOneBackward")
"""Layouts whose steps the suite verifies with the ConvNet too."""


def soak_param(*values: object, name: str | None = None) -> ParameterSet:
    """A parameter set that `make soak` runs and the suite does not; `name` is its id."""
    return pytest.param(*values, marks=pytest.mark.soak, id=name)


def is_further_cell(test: pytest.Function) -> bool:
    """Return whether a test of a contract is left to `make soak`; contracts themselves leave nothing out."""
    if test.cls is None or test.originalname not in FURTHER_CELLS or test.cls.__name__ in WITH_CONVNET:
        return False
    name, values = FURTHER_CELLS[test.originalname]
    if test.originalname == "test_it_resumes_under_another_layout" and test.cls.__name__ not in RESUMED:
        return True
    return hasattr(test, "callspec") and test.callspec.params.get(name) in values
