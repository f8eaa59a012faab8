"""Loader workers that are lost while they hand something over."""

from collections.abc import Iterator

import pytest
import torch

from paceline.data.loader import Loader, Stream, _MicroBatchFeed
from paceline.data.reader import Reply
from paceline.errors import DataError
from paceline.recipe.model import LoaderRecipe


@pytest.mark.capability("M3")
@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), EOFError()])
def test_a_worker_that_is_lost_in_mid_sentence_is_named_as_such(error: Exception) -> None:
    """So it ends where the kernel kills a worker that shows a tensor's memory."""

    def broken() -> Iterator[Reply]:
        raise error
        yield

    loader = Loader([], list, LoaderRecipe(workers=1), torch.device("cpu"))
    with pytest.raises(DataError, match=r"the loader failed: .*(reset|EOFError)"):
        next(Stream(loader, _MicroBatchFeed(()), broken()))
