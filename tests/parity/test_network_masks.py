"""Secure sums of clients of a network: the bits of simulated clients, whoever is lost, and who is named."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from paceline.comm.channel.message_channel import ChannelMessage
from paceline.errors import NumericError, RecipeError, StrategyError
from paceline.federated.client_server import WORK
from paceline.federated.secure_masks import (
    PUBLIC_KEYS_FILE,
    ClientIdentity,
    MaskTerms,
    RoundTerms,
    SecureSumError,
)
from paceline.federated.secure_network import LOST_SECRETS, stage_message
from paceline.federated.secure_rounds import RingReduction
from paceline.observe.metrics_schema import find_schema_errors
from paceline.session.federated_client import ClientSettings, MaskedTraining
from paceline.session.session import Session
from tests.parity.network_clients import (
    KEY,
    SIZES,
    ClientThread,
    events_of,
    network_recipe,
    new_port,
    same_bits,
    simulated_recipe,
    trained,
)
from tests.unit.federated.test_secure_masks import TWINS

pytestmark = [pytest.mark.capability("R3", "Q9"), pytest.mark.timeout(240)]
KEYS, SHARES, INPUT, UNMASK = range(1, 5)
MASKED = {"secure": "masks", "threshold": 0.51}


@pytest.fixture(autouse=True)
def key_of_the_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PACELINE_TOKEN", KEY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_keys(folder: Path) -> Path:
    """Keys of all clients in a folder, which is returned."""
    for name in SIZES:
        ClientIdentity.make(folder, name)
    return folder


def identity(keys: Path, name: str, public: str = PUBLIC_KEYS_FILE) -> ClientIdentity:
    return ClientIdentity.read(name, keys / f"{name}.key", keys / public)


@contextmanager
def masked_clients(port: int, keys: Path, **settings: Any) -> Iterator[dict[str, ClientThread]]:
    """The four clients with their identities, and their ends."""
    threads = {name: ClientThread(port, name, identity=identity(keys, name), **settings) for name in SIZES}
    yield threads
    for thread in threads.values():
        thread.wait()


# -- equal bits

LOST = {1: ("site-1", KEYS), 2: ("site-2", SHARES), 3: ("site-3", UNMASK), 4: ("site-0", INPUT)}
"""By round: the client that is lost, and the message before which it is."""


def answer_unless_lost(
    self: MaskedTraining, session: Session, settings: ClientSettings, message: ChannelMessage
) -> ChannelMessage:
    """Answer as a client that does not have its secrets any more, or says nothing that counts."""
    work = message if message.kind == WORK else self._work
    assert work is not None
    lost, at = LOST.get(work.fields["step"], ("", 0))
    stage = {"keys": SHARES, "shares": INPUT, "unmask": UNMASK}.get(message.fields.get("stage", ""), KEYS)
    if (settings.name, stage) != (lost, at):
        return answer(self, session, settings, message)
    if at == UNMASK:
        self._client = None  # as after a restart
        return answer(self, session, settings, message)
    return stage_message(message.fields["ticket"], LOST_SECRETS if at == KEYS else "silence")


answer = MaskedTraining.answer


def sums_of_simulated(folder: Path, lost: Mapping[int, tuple[str, int]], **settings: Any) -> Any:
    """The weights of simulated clients whose words are added without masks."""
    open_round = RingReduction.open_round

    def opened(self: RingReduction, number: int, *arguments: Any) -> None:
        name, at = lost.get(number, ("", 0))
        self.lost_at = lambda number, other: at if other == name else 0
        open_round(self, number, *arguments)

    with patch.object(RingReduction, "open_round", opened):
        return trained(simulated_recipe(folder, federated={"secure": "ring"}, **settings))[0]


def test_masked_clients_have_the_bits_of_simulated_ones_whoever_is_lost_when(tmp_path: Path) -> None:
    """One client is lost at each of the four messages; two of them say nothing, and time ends their wait."""
    settings: dict[str, Any] = {"steps": 5, "outer": {"name": "adam", "lr": 0.05}}
    alone = sums_of_simulated(tmp_path / "simulated", LOST, **settings)
    complete = sums_of_simulated(tmp_path / "complete", {}, **settings)
    keys, port = make_keys(tmp_path / "keys"), new_port()
    federated = {**MASKED, "deadline_seconds": 2.5}
    with patch.object(MaskedTraining, "answer", answer_unless_lost), masked_clients(port, keys) as clients:
        recipe = network_recipe(
            tmp_path / "network", port, federated=federated, log={"wire": True}, **settings
        )
        weights, events = trained(recipe)
    assert not [client.error for client in clients.values() if client.error]
    assert same_bits(weights, alone) and not same_bits(weights, complete)
    left_out = [[*record["left_out"]] for record in events["cohort"]]
    assert left_out == [[], ["site-1"], ["site-2"], [], ["site-0"]]

    # What a client says: no number of its own but the samples, with which it joins.
    wire = events_of(tmp_path / "network", "wire.jsonl")["wire"]
    assert {record["kind"] for record in wire} == {"hello", "recipe", "join", "work", "masks", "update"}
    assert not [error for record in wire for error in find_schema_errors(record)]
    said = [r for r in wire if r["direction"] == "received" and r["kind"] in ("masks", "update")]
    assert {len(r["tensors"]) for r in said} == {1}
    assert {field for r in said for field in r["fields"]} <= {"ticket", "stage", "status", "step"}

    # A client that is started again knows what it has revealed.
    first = (keys / "site-0.key.revealed").read_text().splitlines()[0]
    run, number, name, kind = first.split()
    terms = RoundTerms(MaskTerms(bytes.fromhex(run)), int(number), bytes(32), {0: name})
    again = identity(keys, "site-0").ledger
    with pytest.raises(SecureSumError, match=f"both kinds of share of client {name} in round 0"):
        again.note([(name, "key" if kind == "seed" else "seed")], terms)


@pytest.mark.parametrize("twin", [*TWINS])
def test_wrong_masks_of_clients_give_another_sum(tmp_path: Path, twin: str) -> None:
    alone = sums_of_simulated(tmp_path / "simulated", {}, steps=1)
    keys, port = make_keys(tmp_path / "keys"), new_port()
    with (
        patch("paceline.federated.secure_masks.add_mask", TWINS[twin]),
        masked_clients(port, keys),
    ):
        weights, _ = trained(network_recipe(tmp_path / "network", port, steps=1, federated=MASKED))
    assert not same_bits(weights, alone)


# -- who is named, and what is refused


def test_a_client_with_the_key_of_another_name_ends_the_run_and_names_it(tmp_path: Path) -> None:
    keys, port = make_keys(tmp_path / "keys"), new_port()
    public = (keys / PUBLIC_KEYS_FILE).read_text().splitlines()
    stranger = ClientIdentity.make(tmp_path / "other", "site-2").with_name(PUBLIC_KEYS_FILE).read_text()
    (keys / "wrong.keys").write_text(
        "\n".join([line for line in public if "site-2" not in line] + [stranger])
    )
    problem = "the keys of client site-2 in round 0 are not signed with the key that belongs to this name"
    deceived = ClientThread(port, "site-0", identity=identity(keys, "site-0", "wrong.keys"))
    others = [
        ClientThread(port, name, identity=identity(keys, name), deadline_seconds=2.0)
        for name in SIZES
        if name != "site-0"
    ]
    with pytest.raises(SecureSumError, match=f"client site-0 has ended round 0: {problem}"):
        trained(network_recipe(tmp_path / "network", port, federated=MASKED))
    deceived.wait()
    assert isinstance(deceived.error, SecureSumError) and problem in str(deceived.error)
    for client in others:
        client.wait()
        assert client.num_works == 0


def test_a_value_that_does_not_fit_ends_the_run_and_names_client_and_tensor(tmp_path: Path) -> None:
    keys, port = make_keys(tmp_path / "keys"), new_port()
    tiny = {**MASKED, "largest": 1e-6}
    with (
        masked_clients(port, keys, deadline_seconds=2.0) as clients,
        pytest.raises(SecureSumError, match=r"the update of client site-\d has a value of .* in updates/0"),
    ):
        trained(network_recipe(tmp_path / "network", port, federated=tiny))
    assert any(isinstance(client.error, NumericError) for client in clients.values())


def test_a_client_without_keys_and_a_cohort_of_one_are_refused(tmp_path: Path) -> None:
    keys, port = make_keys(tmp_path / "keys"), new_port()
    without, alone = ClientThread(port, "site-1"), list[ClientThread]()

    def come_later() -> None:
        without.wait()
        alone.append(ClientThread(port, "site-0", identity=identity(keys, "site-0"), deadline_seconds=2.0))

    later = threading.Thread(target=come_later)
    later.start()
    with pytest.raises(SecureSumError, match="has a cohort of 1, and the sum over one client"):
        trained(network_recipe(tmp_path / "network", port, federated={**MASKED, "at_least": 1}))
    later.join()
    assert isinstance(without.error, RecipeError) and "take the place of all of them" in str(without.error)
    alone[0].wait()
    assert alone[0].num_works == 0


def test_a_client_with_keys_refuses_a_server_that_asks_for_its_update_as_it_is(tmp_path: Path) -> None:
    keys, port = make_keys(tmp_path / "keys"), new_port()
    careful, plain = ClientThread(port, "site-0", identity=identity(keys, "site-0")), list[ClientThread]()

    def come_later() -> None:
        careful.wait()
        plain.append(ClientThread(port, "site-1"))

    later = threading.Thread(target=come_later)
    later.start()
    _, events = trained(network_recipe(tmp_path / "network", port, steps=1, federated={"at_least": 1}))
    later.join()
    plain[0].wait()
    assert "would receive its updates as they are" in str(careful.error)
    assert [record["clients"] for record in events["cohort"]] == [["site-1"]]


def test_noise_is_added_to_the_masked_sum_and_a_cohort_that_hides_clients_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="needs paceline[private]")
    settings: dict[str, Any] = {"steps": 1, "reproducible": False}
    settings["private"] = {"noise": 0.5, "clip_norm": 0.7}
    settings["debug"] = {"entropy_seed": 3}
    simulated = {"secure": "ring", "weights": "equal"}
    alone, _ = trained(simulated_recipe(tmp_path / "simulated", federated=simulated, **settings))
    keys, port = make_keys(tmp_path / "keys"), new_port()
    federated = {**MASKED, "weights": "equal"}
    with masked_clients(port, keys):
        weights, _ = trained(network_recipe(tmp_path / "network", port, federated=federated, **settings))
    assert same_bits(weights, alone)
    port, few = new_port(), {**federated, "cohort": 3}
    with (
        masked_clients(port, keys, deadline_seconds=2.0),
        pytest.raises(StrategyError, match="clients of a network know who else takes part"),
    ):
        trained(network_recipe(tmp_path / "few", port, federated=few, **settings))
