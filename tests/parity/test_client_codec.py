"""Codecs of federated rounds: each client encodes its own update, with the same bits wherever it trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from paceline.errors import StrategyError
from paceline.federated.client_codec import ClientCodec
from paceline.federated.client_keeper import KeptVectors
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.session.federated_client import ClientTraining
from paceline.session.train_rank import train
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, make_task
from paceline.verification import compare_with_oracle
from paceline.verification.verification_report import VerificationReport
from tests.marks import soak_param
from tests.parity.network_clients import (
    KEY,
    clients,
    events_of,
    network_recipe,
    new_port,
    same_bits,
    simulated_recipe,
    trained,
)
from tests.parity.test_federated import ADAMW, digits
from tests.parity.training_runs import each_case

FEW_CODECS = ("int4:stochastic", "topk:0.05+int4+lossless", "lossless")
CODECS = ("bf16", "fp16", "int8", "topk:0.1", "sign", "fixed:8", "lossless")
LOSSY = ("int8", "topk:0.1")
FEW = {"clients": 6, "cohort": 4, "partition": "dirichlet:0.5", "batch": 80, "clip_norm": 0.5}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The bits of one thread, and the key of network clients."""
    monkeypatch.setenv("PACELINE_TOKEN", KEY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def coded(codec: str, **settings: Any) -> Recipe:
    return digits(
        f"sync=federated:1 codec={codec}", **({"reproducible": True, "federated": FEW, "steps": 4} | settings)
    )


def verified(cluster: Cluster, codec: str, **settings: Any) -> VerificationReport:
    recipe = coded(codec, **settings)
    return compare_with_oracle(recipe, make_task(recipe), cluster, CPU, 4)


@pytest.mark.capability("Q2")
@pytest.mark.parametrize(
    ("codecs", "worlds"), [(FEW_CODECS, (3,)), pytest.param(CODECS, (2, 3), marks=pytest.mark.soak)]
)
def test_updates_of_codecs_have_the_bits_of_the_oracle_on_any_number_of_processes(
    codecs: tuple[str, ...], worlds: tuple[int, ...]
) -> None:
    cases = [(codec,) for codec in codecs]
    alone = [verified(Cluster.single(), *case) for case in cases]
    several = [run_ranks(each_case, world, verified, cases, deadline=300)[0] for world in worlds]
    for (codec,), one, *others in zip(cases, alone, *several, strict=True):
        for other in others:
            assert one.ok and other.ok and other.steps == 4, (codec, one.failure, other.failure)
            assert one.sha256 == other.sha256 is not None, codec
    assert len({report.sha256 for report in alone}) == len(alone)
    assert alone[-1].sha256 == verified(Cluster.single(), "fp32").sha256  # nothing is lost
    batched = {"federated": FEW | {"vectorize": 2}}
    assert verified(Cluster.single(), "int8", **batched).ok


@pytest.mark.capability("Q2")
@pytest.mark.parametrize("codec", [soak_param("int8"), "topk:0.1"])
def test_an_error_that_is_forgotten_is_found(codec: str) -> None:
    def forget(self: KeptVectors, cohort: Any, vectors: Mapping[str, Any]) -> None:
        """Keep nothing, as without error feedback."""

    with patch.object(KeptVectors, "keep", forget):
        report = verified(Cluster.single(), codec)
    assert not report.ok and report.failure is not None and report.failure.step >= 1


@pytest.mark.parametrize("codec", ["int8", "topk:0.01", "sign", "int2"])
def test_what_a_codec_leaves_out_is_sent_later(codec: str) -> None:
    """The decoded updates of a client and its last error add up to its updates."""
    coder = ClientCodec.of(coded(codec))
    assert coder is not None and coder.keeps_errors
    generator, error = torch.Generator().manual_seed(1), None
    sums = torch.zeros(2, 3000, dtype=torch.float64)
    for number in range(20):
        update = torch.randn(3000, generator=generator, dtype=torch.float64)
        sums[0] += update
        vectors = [update[:1000].clone(), update[1000:].clone()]
        payload, error = coder.encode(vectors, number, "a", error)
        assert coder.fits(payload, 3000) and not coder.fits(payload[:-1], 3000)
        sums[1] += torch.cat(vectors)
    assert error is not None and float(error.abs().max()) > 0
    torch.testing.assert_close(sums[1] + error, sums[0], rtol=0, atol=1e-4)


@pytest.mark.capability("Q2")
def test_a_run_that_is_resumed_keeps_the_errors(tmp_path: Path) -> None:
    recipe = coded("int8", steps=6, checkpoint={"every_steps": 3}, outer={"name": "adam"}, optimizer=ADAMW)
    whole = train(recipe.replace(run_dir=str(tmp_path / "whole")))

    def resumed(name: str) -> str | None:
        parts = recipe.replace(run_dir=str(tmp_path / name))
        train(parts.replace(steps=3))
        return train(parts, resume=tmp_path / name).sha256

    assert resumed("parts") == whole.sha256 is not None
    with patch.object(KeptVectors, "load", lambda self, tensors: None):
        assert resumed("forgotten") != whole.sha256


@pytest.mark.capability("Q9")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("codec", ["int8", "topk:0.2+lossless"])
def test_network_clients_send_the_bytes_of_the_codec_and_have_the_bits_of_simulated_ones(
    codec: str, tmp_path: Path
) -> None:
    alone, simulated = trained(simulated_recipe(tmp_path / "simulated", codec))
    port = new_port()
    with clients(port):
        weights, events = trained(network_recipe(tmp_path / "network", port, codec, log={"wire": True}))
    assert same_bits(weights, alone)
    wire = events_of(tmp_path / "network", "wire.jsonl")["wire"]
    updates = [record for record in wire if record["kind"] == "update"]
    assert len(updates) == 16 and all(len(record["tensors"]) == 2 for record in updates)
    for round_sent, round_simulated in zip(events["cohort"], simulated["cohort"], strict=True):
        payloads = [r["tensors"][1][1][0] for r in updates if r["fields"]["step"] == round_sent["step"]]
        assert sum(payloads) == round_simulated["up_bytes"] < round_simulated["down_bytes"]


@pytest.mark.capability("Q9")
@pytest.mark.timeout(240)
def test_a_work_that_is_done_twice_leaves_one_error(tmp_path: Path) -> None:
    """A work that is done twice is counted once, and only its last error is kept."""
    alone, _ = trained(simulated_recipe(tmp_path / "simulated", "int8"))
    train_client = ClientTraining.train

    def twice(self: ClientTraining, session: Any, name: str, message: Any) -> Any:
        train_client(self, session, name, message)  # as after a connection that broke
        return train_client(self, session, name, message)

    port = new_port()
    with patch.object(ClientTraining, "train", twice), clients(port):
        weights, _ = trained(network_recipe(tmp_path / "network", port, "int8"))
    assert same_bits(weights, alone)


@pytest.mark.capability("Q9")
@pytest.mark.timeout(240)
def test_bytes_that_are_no_update_leave_the_client_out(tmp_path: Path) -> None:
    encode = ClientTraining._encode

    def cut(self: ClientTraining, codec: ClientCodec, client: str, round_number: int, update: Any) -> int:
        size = encode(self, codec, client, round_number, update)
        if client == "site-1" and self._payload is not None:
            self._payload = self._payload[: size // 2].clone()
        return size

    port = new_port()
    with patch.object(ClientTraining, "_encode", cut), clients(port):
        _, events = trained(network_recipe(tmp_path / "network", port, "int8+lossless"))
    assert all([*record["left_out"]] == ["site-1"] for record in events["cohort"])


def test_verify_without_reproducible_says_why_not() -> None:
    with pytest.raises(StrategyError, match="rounds values to codes"):
        verified(Cluster.single(), "int8", reproducible=False)
