"""A thousand random mixes of requests: every text is the one generated alone. `make soak`."""

import pytest
import torch

from paceline.serving.kv_cache import SlotSettings
from tests.request_mixes import RecordingEngine, cached_forward, count_wrong_texts, small_gpt

SETTINGS = {
    "masked": SlotSettings(8, 8, 64, "masked"),
    "by slot": SlotSettings(8, 16, 64, "by_slot"),
    "added rows": SlotSettings(5, 7, 60, "masked", rows=8),
    "one slot": SlotSettings(1, 8, 64, "by_slot"),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("threads", [1, 2])
def test_texts_of_random_mixes_are_those_generated_alone(name: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        engine = RecordingEngine(cached_forward(small_gpt(), SETTINGS[name]))
        assert count_wrong_texts(engine, num_mixes=125, seed=threads) == 0
    finally:
        torch.set_num_threads(before)
