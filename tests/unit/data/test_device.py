"""Batches of any shape reach the device of the model."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from paceline.data.loader import to_device

META = torch.device("meta")  # a device that is on every machine and is not the CPU


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Named(UserDict):
    title = "kept"


def test_every_tensor_moves_and_containers_keep_their_type() -> None:
    x = torch.ones(2)
    batch: dict[str, Any] = {
        "list": [x, 1],
        "tuple": (x, "text"),
        "pair": Pair(x, x),
        "ordered": OrderedDict(a=x),
        "none": None,
    }
    moved: Any = to_device(batch, META)
    assert moved["list"][0].device == moved["tuple"][0].device == moved["pair"].y.device == META
    assert moved["ordered"]["a"].device == META
    assert isinstance(moved["pair"], Pair)
    assert isinstance(moved["ordered"], OrderedDict)
    assert (moved["list"][1], moved["tuple"][1], moved["none"]) == (1, "text", None)
    assert batch["list"][0] is x, "the batch that came in is not modified"
    assert x.device.type == "cpu"


def test_mappings_of_other_kinds() -> None:
    named = Named(a=torch.ones(2))
    named.title = "mine"
    moved = to_device(named, META)
    assert (moved["a"].device, moved.title, named["a"].device.type) == (META, "mine", "cpu")
    assert to_device(MappingProxyType({"a": torch.ones(1)}), META)["a"].device == META


def test_an_own_to_is_used() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert to_device(packed, META).data.device == META


def test_what_is_there_already_is_not_copied() -> None:
    x = torch.ones(2)
    assert to_device(x, torch.device("cpu")) is x
