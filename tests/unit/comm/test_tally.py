"""The tally: one vector, packed and unpacked without a loss, whose size is known beforehand."""

import pytest
import torch

from paceline.comm import Net, StepTally
from paceline.comm.tally import tally_bytes
from paceline.job.mesh import RankGroup

ALONE, PAIR = RankGroup("replica", (0,), 0), RankGroup("replica", (0, 1), 0)
CPU = torch.device("cpu")


class DoublingNet(Net):
    """A second rank with the same tally; notes the payload."""

    payload: torch.Tensor

    def all_reduce(self, x: torch.Tensor, group: RankGroup, reduction: str = "sum"):
        self.payload = x
        return super().all_reduce(x.mul_(2.0), group, reduction)


def make_tally(**changes) -> StepTally:
    values = {
        "micro_batches": 3.0,
        "total": 12.5,
        "count": 2.0**52 + 1,  # a float32 would lose the last item
        "metrics": {"correct": 5.0, "tokens": 7.0},
        "stops": 1.0,
        "used": [1.0, 0.0, 1.0],
        "buffers": torch.tensor([0.25, -4.0], dtype=torch.float64),
    }
    return StepTally(**{**values, **changes})


@pytest.mark.parametrize("net, group, factor", [(Net(), ALONE, 1.0), (DoublingNet(), PAIR, 2.0)])
def test_every_field_is_summed_on_its_own(net: Net, group: RankGroup, factor: float) -> None:
    mine = make_tally()
    agreed = mine.agree(net, group, CPU).wait()
    for field in ("micro_batches", "total", "count", "stops"):
        assert getattr(agreed, field) == factor * getattr(mine, field), field
    assert agreed.metrics == {"correct": factor * 5.0, "tokens": factor * 7.0}
    assert agreed.used == [factor, 0.0, factor]
    assert agreed.buffers.tolist() == [factor * 0.25, factor * -4.0]


def test_own_sums_are_not_changed_by_the_agreement() -> None:
    mine = make_tally()
    mine.agree(DoublingNet(), PAIR, CPU).wait()
    assert mine.buffers.tolist() == [0.25, -4.0]
    assert mine.micro_batches == 3.0


@pytest.mark.capability("G14")
@pytest.mark.parametrize("num_metrics, num_parameters, num_buffers", [(0, 1, 0), (2, 3, 2), (1, 40, 1000)])
def test_the_payload_has_the_size_of_the_closed_form(
    num_metrics: int, num_parameters: int, num_buffers: int
) -> None:
    net = DoublingNet()
    make_tally(
        metrics={f"m{i}": 0.0 for i in range(num_metrics)},
        used=[0.0] * num_parameters,
        buffers=torch.zeros(num_buffers, dtype=torch.float64),
    ).agree(net, PAIR, CPU).wait()
    payload = net.payload.numel() * net.payload.element_size()
    assert payload == tally_bytes(num_metrics, num_parameters, num_buffers)
