"""Compiled kernels write the bytes that PyTorch's operations write, and nothing that is damaged is loaded."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.comm import Codec
from paceline.comm.codecs import CodecKeys, codec_kernels
from paceline.comm.codecs.bf16_fp16 import Bf16Codec, Fp16Codec
from paceline.comm.codecs.codec_kernels import CodecKernels, find_kernels, load_kernels
from paceline.comm.codecs.fixed_point import FixedPointCodec
from paceline.comm.codecs.int8_int4_int2 import BlockIntCodec
from paceline.comm.codecs.sign import SignCodec
from paceline.comm.codecs.top_k import TopKCodec, make_keep_count
from paceline.comm.workspace import Workspace
from tests.marks import soak_param

Make = Callable[[CodecKernels | None], Codec]
CODECS: dict[str, Make] = {
    "int8": lambda kernels: BlockIntCodec(8, kernels=kernels),
    "int4": lambda kernels: BlockIntCodec(4, kernels=kernels),
    "int2": lambda kernels: BlockIntCodec(2, kernels=kernels),
    "int8:stochastic": lambda kernels: BlockIntCodec(8, stochastic=True, kernels=kernels),
    "int4:stochastic": lambda kernels: BlockIntCodec(4, stochastic=True, kernels=kernels),
    "int2:stochastic": lambda kernels: BlockIntCodec(2, stochastic=True, kernels=kernels),
    "bf16": Bf16Codec,
    "fp16": Fp16Codec,
    "fixed:1": lambda kernels: FixedPointCodec(1, kernels),
    "fixed:8": lambda kernels: FixedPointCodec(8, kernels),
    "fixed:14": lambda kernels: FixedPointCodec(14, kernels),
    "sign": SignCodec,
    "topk:0.01": lambda kernels: TopKCodec(make_keep_count(0.01), kernels=kernels),
    "topk:0.4": lambda kernels: TopKCodec(make_keep_count(0.4), kernels=kernels),
    "topk:7+int4": lambda kernels: TopKCodec(make_keep_count(7), BlockIntCodec(4, kernels=kernels), kernels),
}
SHORT = ("int8", "int2:stochastic", "bf16", "fp16", "fixed:14", "sign", "topk:0.4", "topk:7+int4")
LENGTHS = (1, 7, 255, 257, 1025, 65_536, 65_539, 150_001)
KEYS = CodecKeys(5, 6)
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small operations wait for each other's threads where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> CodecKernels:
    found = load_kernels(tmp_path_factory.mktemp("kernels"))
    assert found is not None
    return found


def rows(n: int) -> dict[str, Tensor]:
    """Values of every kind, by its name, [2, n]."""
    g = torch.Generator().manual_seed(n)
    plain = torch.randn(2, n, generator=g)
    wide = plain * 10.0 ** torch.randint(-30, 30, (2, n), generator=g)
    few = torch.where(torch.rand(2, n, generator=g) < 0.005, plain, 0.0)
    levels = torch.randint(-3, 4, (2, n), generator=g).float()
    return {
        "plain": plain,
        "wide": wide,
        "mostly zeros": few,
        "zeros": torch.zeros(2, n),
        "many equal": levels,
        "halves": torch.randint(-14, 15, (2, n), generator=g) / 2,  # of 1/7 of the largest
        "denormal": plain * 1e-42,
        "late": torch.cat([plain[:, : n // 2] * 1e-3, plain[:, n // 2 :]], 1),
    }


def bad_rows(n: int) -> dict[str, Tensor]:
    """Rows that hold what is not finite."""
    found = {}
    for bad in (math.inf, -math.inf, math.nan):
        found[str(bad)] = torch.randn(2, n, generator=torch.Generator().manual_seed(n))
        found[str(bad)][1, n // 2] = bad
    return found


def differences(make: Make, kernels: CodecKernels, n: int) -> list[str]:
    """Kinds of rows for which a codec with kernels writes other bytes, or reads other values."""
    wrong, worn = [], Workspace()
    fast, slow = make(kernels), make(None)
    for kind, x in (rows(n) | bad_rows(n)).items():
        payload = slow.encode(x, KEYS, Workspace())
        found = fast.encode(x, KEYS, worn).clone()
        right, out = torch.empty_like(x), torch.full_like(x, 7.0)
        slow.decode(payload, right, KEYS, Workspace())
        fast.decode(payload, out, KEYS, worn)
        same = torch.equal(found, payload) or kind == "nan"  # a NaN has many forms
        slow.decode(found, x.copy_(right), KEYS, Workspace())
        same &= torch.equal(out.nan_to_num(1e9), right.nan_to_num(1e9))
        wrong += [] if same and torch.equal(x.isnan(), right.isnan()) else [f"{kind}, {n} values"]
    return wrong


@pytest.mark.capability("H2")
@NEEDS_COMPILER
@pytest.mark.parametrize("word", [word if word in SHORT else soak_param(word) for word in CODECS])
def test_kernels_write_the_bytes_of_the_operations_that_they_replace(
    word: str, kernels: CodecKernels
) -> None:
    assert [kind for n in LENGTHS for kind in differences(CODECS[word], kernels, n)] == []


@NEEDS_COMPILER
def test_kernels_that_round_otherwise_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "kernels.c"
    source.write_text(
        codec_kernels._KERNEL_SOURCE.read_text().replace("rintf(", "roundf(")
    )  # halves away from zero
    monkeypatch.setattr(codec_kernels, "_KERNEL_SOURCE", source)
    other = load_kernels(tmp_path)
    assert other is not None
    assert differences(CODECS["int4"], other, 1025)


@NEEDS_COMPILER
def test_values_of_other_types_and_strides_are_coded_without_kernels(kernels: CodecKernels) -> None:
    x = torch.randn(3, 600, dtype=torch.float64)
    for make in CODECS.values():
        fast, slow = make(kernels), make(None)
        for values in (x, x.float().T.contiguous().T):
            found = fast.encode(values, KEYS, Workspace())
            assert torch.equal(found, slow.encode(values, KEYS, Workspace()))


@NEEDS_COMPILER
def test_a_file_that_was_damaged_is_compiled_again(tmp_path: Path) -> None:
    assert load_kernels(tmp_path) is not None
    (file,) = tmp_path.glob("*.so")
    whole, written = file.read_bytes(), file.stat().st_ino
    assert load_kernels(tmp_path) is not None and file.stat().st_ino == written  # compiled once
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    other = file.with_name("copy")
    other.write_bytes(damaged)
    other.replace(file)  # the library that is loaded keeps its own
    assert load_kernels(tmp_path) is not None
    (again,) = tmp_path.glob("*.so")
    assert again.read_bytes() != bytes(damaged)


def test_without_a_compiler_or_in_a_folder_of_others_there_are_none(tmp_path: Path) -> None:
    assert load_kernels(tmp_path, compiler="no-such-compiler") is None
    assert find_kernels(tmp_path, compiler="no-such-compiler") == "no C compiler (no-such-compiler) was found"
    assert "does not compile" in str(find_kernels(tmp_path, compiler="false"))
    tmp_path.chmod(0o777)
    assert load_kernels(tmp_path) is None
    assert load_kernels(tmp_path / "made") is not None or shutil.which("cc") is None
    if os.getuid() == 0:
        os.chown(tmp_path, 12345, -1)  # whoever that is could put another folder in place of ours
        assert load_kernels(tmp_path / "made") is None
        os.chown(tmp_path, 0, -1)
    (tmp_path / "a file").touch()
    assert load_kernels(tmp_path / "a file" / "kernels") is None


@NEEDS_COMPILER
def test_a_user_whose_group_may_write_what_is_made_has_kernels_too(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        assert load_kernels(tmp_path / "made") is not None
    finally:
        os.umask(before)
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700
