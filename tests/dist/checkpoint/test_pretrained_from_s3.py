"""First weights out of a store of objects, with its checksums."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import nn

from paceline.checkpoint.pretrained import load_weights
from paceline.errors import CheckpointError
from tests.dist.checkpoint.object_store import BUCKET


@pytest.mark.capability("W6")
def test_a_folder_in_s3_is_read_and_checked(server: str, tmp_path: Path) -> None:
    import s3fs

    model = nn.Linear(3, 2)
    store = s3fs.S3FileSystem(use_listings_cache=False)
    store.mkdir(BUCKET)
    data = save(model.state_dict())
    store.pipe_file(f"{BUCKET}/model/model.safetensors", data)
    folder = f"s3://{BUCKET}/model"
    other = nn.Linear(3, 2)
    assert load_weights(other, folder).unverified_files == ("model.safetensors",)
    assert torch.equal(other.weight, model.weight) and torch.equal(other.bias, model.bias)
    line = f"{hashlib.sha256(data).hexdigest()}  model.safetensors\n"
    store.pipe_file(f"{BUCKET}/model/SHA256SUMS", line.encode())
    assert load_weights(other, f"{folder}/model.safetensors").unverified_files == ()
    store.pipe_file(f"{BUCKET}/model/model.safetensors", data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load_weights(other, folder)
    with pytest.raises(CheckpointError, match="cannot read the weights"):
        load_weights(other, f"s3://{BUCKET}/nothing")
