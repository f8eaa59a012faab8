"""Marks of single parameter sets, also of those that a contract has."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest
from _pytest.mark import ParameterSet

REFERENCE = "test_it_ends_where_the_scalar_reference_ends"
RESUME = "test_it_resumes_under_another_layout"
VERIFY = "test_verify_confirms_every_step"
ORACLE = "test_every_step_is_that_of_the_oracle"
FURTHER_CELLS: Mapping[str, tuple[str, Collection[object]]] = {
    REFERENCE: ("num_ranks", (1, 2)),
    RESUME: ("num_ranks", (2, 4)),
    VERIFY: ("num_ranks", (2, 4)),  # tests/parity/test_optimizers_by_name.py verifies all that have a name
    ORACLE: ("model", ("convnet",)),
}
"""Of tests of contracts, a parameter and its values that only `make soak` runs."""
OF_CLASSES: Mapping[tuple[str, str], Collection[object]] = {
    ("TestAdafactor", RESUME): (2,),
    ("TestMuon", RESUME): (2,),
    ("TestKFac", RESUME): (2,),
    ("TestOptimizerOfAUser", VERIFY): (4,),
    ("TestZero3", ORACLE): (),
    ("TestOneForwardOneBackward", ORACLE): (),
}
"""The values where a class leaves fewer to `make soak`."""


def soak_param(*values: object, name: str | None = None) -> ParameterSet:
    """A parameter set that `make soak` runs and the suite does not; `name` is its id."""
    return pytest.param(*values, marks=pytest.mark.soak, id=name)


def is_further_cell(test: pytest.Function) -> bool:
    """Return whether a test of a contract is left to `make soak`; contracts themselves leave nothing out."""
    if test.cls is None or test.originalname not in FURTHER_CELLS or not hasattr(test, "callspec"):
        return False
    name, values = FURTHER_CELLS[test.originalname]
    values = OF_CLASSES.get((test.cls.__name__, test.originalname), values)
    return test.callspec.params.get(name) in values
