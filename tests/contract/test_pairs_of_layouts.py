"""Pairs of cuts on four ranks: steps of the oracle here, the whole contract in the soak."""

import pytest

from paceline.testing.contracts import LayoutContract
from tests.contract.test_layouts_and_rules import TensorContract


@pytest.mark.soak
@pytest.mark.capability("D3", "Z1")
class TestReplicasOfStages(LayoutContract):
    strategy, num_ranks = "replicas=2 pipeline=2", 4


@pytest.mark.soak
@pytest.mark.capability("A11", "D4", "Z1")
class TestZero3OfStages(LayoutContract):
    strategy, num_ranks = "replicas=1 shard=2 zero=3 pipeline=2 schedule=1f1b", 4


@pytest.mark.soak
@pytest.mark.capability("A11", "C4", "Z1")
class TestZero3OfTensor(TensorContract):
    strategy, num_ranks = "replicas=1 shard=2 zero=3 tensor=2", 4


PAIRS = (TestReplicasOfStages, TestZero3OfStages, TestZero3OfTensor)


@pytest.mark.capability("A11", "C4", "D3", "D4", "Z1")
@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_of_cuts_whose_contract_is_long_has_the_steps_of_the_oracle(
    pair: type[LayoutContract],
) -> None:
    pair().test_every_step_is_that_of_the_oracle("mlp")
