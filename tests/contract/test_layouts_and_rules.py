"""Layouts and rules keep their contracts."""

from typing import Any

import pytest

from paceline.recipe import Recipe
from paceline.testing.contracts import LayoutContract, RuleContract
from tests.marks import soak_param


@pytest.mark.soak
@pytest.mark.capability("A2")
class TestReplicate(LayoutContract):
    strategy, num_ranks = "replicas=2", 2


@pytest.mark.soak
@pytest.mark.capability("A11", "Z1")
class TestZero1(LayoutContract):
    strategy, num_ranks = "replicas=1 shard=3 zero=1", 3


@pytest.mark.capability("A11", "Z1")
class TestReplicasOfZero1(LayoutContract):
    strategy, num_ranks = "replicas=2 shard=2 zero=1", 4


@pytest.mark.soak
@pytest.mark.capability("I1", "Z1")
class TestEveryStep(RuleContract):
    strategy, num_ranks = "replicas=2", 2


@pytest.mark.soak
@pytest.mark.capability("H8", "Z1")
class TestCodedEveryStep(RuleContract):
    strategy, num_ranks = "replicas=2 codec=int8", 2


@pytest.mark.capability("H8", "Z1")
class TestCodedZero1(RuleContract):
    strategy, num_ranks = "replicas=1 shard=2 zero=1 codec=int8", 2


@pytest.mark.capability("I6", "Z1")
class TestLocalSGD(RuleContract):
    strategy, num_ranks = "replicas=2 sync=local:3", 2


@pytest.mark.soak
@pytest.mark.capability("I6", "Z1")
class TestDiLoCo(RuleContract):
    strategy, num_ranks = "replicas=2 sync=diloco:4", 2


@pytest.mark.capability("H8", "Z1")
class TestCodedDiLoCo(RuleContract):
    strategy, num_ranks = "replicas=2 sync=diloco:4 codec=int8", 2


@pytest.mark.capability("Q2", "Z1")
class TestFederated(RuleContract):
    strategy, num_ranks, batch = "replicas=2 sync=federated:1", 2, {}

    def recipe(self, **changes: Any) -> Recipe:
        return super().recipe(**({"federated": {"batch": 40}} | changes))


@pytest.mark.capability("B3", "Z1")
class TestAsynchronousServer(RuleContract):
    strategy, num_ranks, deterministic = "servers=1 sync=server-async", 3, False
    interrupts = 2


@pytest.mark.soak
@pytest.mark.capability("I4", "Z1")
class TestBoundedStaleness(RuleContract):
    strategy, num_ranks, deterministic, interrupts = "servers=1 sync=bounded:1", 3, False, 2


@pytest.mark.capability("I5", "Z1")
class TestHogwild(RuleContract):
    strategy, num_ranks, deterministic = "replicas=2 sync=hogwild", 2, False


@pytest.mark.capability("I7", "Z1")
class TestBackupWorkers(RuleContract):
    strategy, num_ranks, deterministic = "servers=1 sync=backup:1", 4, False
    interrupts = 2


@pytest.mark.capability("I7", "Z1")
class TestNoBackupWorkers(RuleContract):
    strategy, num_ranks = "servers=1 sync=backup:0", 3
    interrupts = 2


@pytest.mark.soak
@pytest.mark.capability("D1", "D2", "D3", "Z1")
class TestTwoStages(LayoutContract):
    strategy, num_ranks = "replicas=1 pipeline=2", 2


@pytest.mark.soak
@pytest.mark.capability("D1", "D2", "D3", "Z1")
class TestThreeStages(LayoutContract):
    strategy, num_ranks = "replicas=1 pipeline=3", 3


@pytest.mark.capability("D6", "Z1")
class TestPipeDream(RuleContract):
    strategy, num_ranks = "replicas=1 pipeline=2 sync=pipedream", 2


@pytest.mark.soak
@pytest.mark.capability("H8", "Z1")
class TestCodedStages(RuleContract):
    strategy, num_ranks = "replicas=2 pipeline=2 codec=int8", 4


@pytest.mark.soak
@pytest.mark.capability("A11", "Z1")
class TestZero2(LayoutContract):
    strategy, num_ranks = "replicas=1 shard=2 zero=2", 2


@pytest.mark.soak
@pytest.mark.capability("A11", "Z1")
class TestReplicasOfZero2(LayoutContract):
    strategy, num_ranks = "replicas=2 shard=2 zero=2 route=native", 4


@pytest.mark.soak
@pytest.mark.capability("A11", "D4", "Z1")
class TestZero2OfStages(LayoutContract):
    strategy, num_ranks = "replicas=1 shard=2 zero=2 pipeline=2 schedule=1f1b", 4


@pytest.mark.soak
@pytest.mark.capability("A11", "Z1")
class TestZero3ByMessages(LayoutContract):
    """Nothing lies in common: the next block is gathered while one computes."""

    strategy, num_ranks = "replicas=1 shard=3 zero=3 route=native", 3


class TensorContract(LayoutContract):
    """A layout of models that have a tensor plan; the ConvNet has none."""

    @pytest.mark.parametrize("model", ["mlp"])
    def test_every_step_is_that_of_the_oracle(self, model: str) -> None:
        super().test_every_step_is_that_of_the_oracle(model)


@pytest.mark.capability("A11", "Z1")
class TestZero3(LayoutContract):
    strategy, num_ranks = "replicas=1 shard=2 zero=3", 2


@pytest.mark.soak
@pytest.mark.capability("A11", "Z1")
class TestZero3OnThree(LayoutContract):
    strategy, num_ranks = "replicas=1 shard=3 zero=3", 3


@pytest.mark.soak
@pytest.mark.capability("A11", "Z1")
class TestReplicasOfZero3(LayoutContract):
    strategy, num_ranks = "replicas=2 shard=2 zero=3", 4


@pytest.mark.soak
@pytest.mark.capability("C3", "C4", "Z1")
class TestTensor(TensorContract):
    strategy, num_ranks = "replicas=1 tensor=2", 2


@pytest.mark.soak
@pytest.mark.capability("C3", "C4", "Z1")
class TestUnevenTensor(TensorContract):
    """48 and 32 features, of which five ranks have not the same number."""

    strategy, num_ranks = "replicas=1 tensor=5", 5


@pytest.mark.soak
@pytest.mark.capability("C3", "C4", "Z1")
class TestReplicasOfTensor(TensorContract):
    strategy, num_ranks = "replicas=2 tensor=2", 4


@pytest.mark.capability("D4", "Z1")
class TestOneForwardOneBackward(LayoutContract):
    strategy, num_ranks = "replicas=1 pipeline=2 schedule=1f1b", 2


@pytest.mark.soak
@pytest.mark.capability("D4", "Z1")
class TestReplicasOfOneForwardOneBackward(LayoutContract):
    strategy, num_ranks = "replicas=2 pipeline=2 schedule=1f1b", 4


@pytest.mark.soak
@pytest.mark.capability("A11", "D1", "Z1")
class TestZero1OfStages(LayoutContract):
    strategy, num_ranks = "replicas=1 shard=2 zero=1 pipeline=2", 4


@pytest.mark.soak
@pytest.mark.capability("C4", "D1", "Z1")
class TestTensorInStages(TensorContract):
    strategy, num_ranks = "replicas=1 tensor=2 pipeline=2", 4


@pytest.mark.soak
@pytest.mark.capability("A11", "C4", "Z1")
class TestZero1OfTensor(TensorContract):
    strategy, num_ranks = "replicas=1 shard=2 zero=1 tensor=2", 4


@pytest.mark.soak
@pytest.mark.capability("H8", "Z1")
class TestSparseEveryStep(RuleContract):
    strategy, num_ranks = "replicas=2 codec=topk:0.3", 2


@pytest.mark.soak
@pytest.mark.capability("H8", "Z1")
class TestSparseStages(RuleContract):
    strategy, num_ranks = "replicas=2 pipeline=2 codec=topk:0.3", 4


@pytest.mark.soak
@pytest.mark.capability("H8", "Z1")
class TestSparseZero3(RuleContract):
    strategy, num_ranks = "replicas=1 shard=2 zero=3 codec=topk:0.3", 2


@pytest.mark.soak
@pytest.mark.capability("H8", "Z1")
class TestSparseDiLoCo(RuleContract):
    strategy, num_ranks = "replicas=2 sync=diloco:4 codec=topk:0.3", 2


@pytest.mark.soak
@pytest.mark.capability("Z1")
class TestTree(LayoutContract):
    strategy, num_ranks = "replicas=3 route=tree", 3


@pytest.mark.soak
@pytest.mark.capability("H8", "Z1")
class TestCodedTree(RuleContract):
    strategy, num_ranks = "replicas=3 route=tree codec=int8", 3


# Pairs of cuts on four ranks: steps of the oracle here, the whole contract in the soak


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
@pytest.mark.parametrize("pair", [soak_param(PAIRS[0]), *PAIRS[1:]])
def test_a_pair_of_cuts_whose_contract_is_long_has_the_steps_of_the_oracle(
    pair: type[LayoutContract],
) -> None:
    pair().test_every_step_is_that_of_the_oracle("mlp")
