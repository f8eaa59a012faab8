"""Slots are keys: equal ones are found, also in another process."""

import os
import pickle
import subprocess
import sys

import torch

from paceline.state.slot import TensorSlot


def test_a_slot_from_another_process_is_found_here() -> None:
    slot = TensorSlot.whole("layers.0.weight", torch.zeros(3, 4)).narrow(0, (1, 3), "shard")
    code = "import pickle, sys; s = pickle.load(sys.stdin.buffer); sys.stdout.buffer.write(pickle.dumps(s))"
    here = os.environ.get("PYTHONHASHSEED")
    found = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(slot),
        env={"PYTHONHASHSEED": "2" if here == "1" else "1"},
        capture_output=True,
        check=True,
        timeout=120,
    )
    other = pickle.loads(found.stdout)
    assert other == slot
    assert {slot: 1}[other] == 1


def test_parts_of_parts_are_places_in_the_whole() -> None:
    whole = torch.arange(24).view(4, 6)
    slot = TensorSlot.whole("w", whole)
    part = slot.narrow(1, (2, 6), "tensor").narrow(0, (1, 3), "shard")
    assert part.part == ((1, 3), (2, 6)) and part.sizes == (2, 4) and part.axes == {"tensor", "shard"}
    outer = slot.narrow(1, (2, 6), "tensor")
    assert torch.equal(whole[part.index], whole[outer.index][part.inside(outer)])
