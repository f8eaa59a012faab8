"""Secure aggregation: masks cancel for any clients that are lost, and what a server holds says nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from paceline.cli.certificate_command import certificate
from paceline.errors import RecipeError
from paceline.federated import secure_masks
from paceline.federated.ring_sum import Ring, RingLayout, RingWords
from paceline.federated.secure_masks import (
    PUBLIC_KEYS_FILE,
    ClientIdentity,
    ClientKeys,
    MaskClient,
    MaskServer,
    MaskTerms,
    RoundTerms,
    SecureSumError,
    ShareLedger,
    add_mask,
    mask_private_key,
    own_mask_key,
    pair_mask_key,
)
from paceline.privacy.entropy import Entropy
from paceline.state.slot import TensorSlot

MODEL = bytes(32)


def layout(size: int = 41, ring: Ring | None = None) -> RingLayout:
    like = torch.zeros(size, dtype=torch.float64)
    return RingLayout(ring or Ring(), {TensorSlot.whole("w", like): like}, 2)


def words_of(position: int, plan: RingLayout, scale: float = 1.0) -> RingWords:
    (slot,) = plan.tensors
    generator = torch.Generator().manual_seed(position)
    values = scale * torch.randn(plan.num_values, generator=generator, dtype=torch.float64).clamp(-7, 7)
    return plan.encode({slot: values}, [1.0, float(position)], client=f"site-{position}", weight=1.0)


@dataclass
class Cohort:
    """The clients and the server of some rounds, whose messages are passed on in this process."""

    size: int
    terms: MaskTerms = field(default_factory=lambda: MaskTerms(bytes(16)))
    plan: RingLayout = field(default_factory=layout)
    entropy: Entropy = field(default_factory=Entropy)
    change_keys: Callable[[int, dict[int, ClientKeys]], dict[int, ClientKeys]] = lambda position, keys: keys
    models: Mapping[int, bytes] = field(default_factory=dict)
    skips_share: int = 0

    def __post_init__(self) -> None:
        self.names = {position: f"site-{position}" for position in range(self.size)}
        self.identities = {name: Ed25519PrivateKey.generate() for name in self.names.values()}
        self.known = {name: key.public_key() for name, key in self.identities.items()}
        self.inputs: dict[int, RingWords] = {}
        self.num_masks = 0

    def run(self, lost: Mapping[int, int] | None = None, number: int = 0, scale: float = 1.0) -> RingWords:
        """Return the unmasked sum of a round.

        Args:
            lost: the message before which a client is lost.
        """
        lost = lost or {}
        round_terms = RoundTerms(self.terms, number, MODEL, self.names)
        self.server = server = MaskServer(round_terms)
        self.clients = clients = {
            p: MaskClient(
                replace(round_terms, model=self.models.get(p, MODEL)),
                p,
                self.identities[self.names[p]],
                self.known,
                self.entropy.of(number, p),
            )
            for p in self.names
            if lost.get(p) != 1
        }
        keys = server.forward_keys({p: client.advertise().to_bytes() for p, client in clients.items()})
        sealed = server.forward_shares(
            {p: c.share(self.change_keys(p, dict(keys))) for p, c in clients.items() if lost.get(p) != 2}
        )
        total, self.inputs = self.plan.zeros(), {}
        for p, client in clients.items():
            if lost.get(p) not in (2, 3):
                self.inputs[p] = words_of(p, self.plan, scale)
                client.mask(sealed[p], self.inputs[p])
                total.add(self.inputs[p])
        self.survivors, self.missing = server.requests([*self.inputs])
        answers = {
            p: clients[p].reveal(self.survivors, self.missing) for p in self.survivors if lost.get(p) != 4
        }
        self.answers = dict([*answers.items()][self.skips_share :])
        masks = [*server.masks_left(self.survivors, self.missing, self.answers)]
        self.num_masks = len(masks)
        for mask in masks:
            add_mask(total, mask.key, mask.sign)
        return total

    def plain(self, lost: Mapping[int, int] | None = None) -> RingWords:
        """Return the sum of the same inputs without masks."""
        total = self.plan.zeros()
        for p in self.names:
            if (lost or {}).get(p) not in (1, 2, 3):
                total.add(words_of(p, self.plan))
        return total


@pytest.mark.capability("R3")
@pytest.mark.parametrize(("neighbours", "ring"), [(0, Ring()), (6, Ring()), (0, Ring(32, 12))])
def test_the_sum_is_that_without_masks_to_the_bit_whoever_is_lost_when(neighbours: int, ring: Ring) -> None:
    """Random clients are lost before each of the four messages; the number of masks is within its bound."""
    rng, seen = random.Random(5), set[int]()
    for trial in range(25):
        cohort = Cohort(9, MaskTerms(bytes(16), 0.51, neighbours), layout(ring=ring))
        num_lost = rng.randrange(4) if not neighbours else rng.randrange(3)
        lost = {p: rng.randint(1, 4) for p in rng.sample(range(9), num_lost)}
        seen |= {*lost.values()}
        assert cohort.run(lost, trial).to_bytes() == cohort.plain(lost).to_bytes(), lost
        degree = neighbours or 8
        assert cohort.num_masks <= len(cohort.missing) * degree + 9
    assert seen == {1, 2, 3, 4}


def test_one_lost_client_too_many_is_an_error_that_says_so() -> None:
    """Seven of ten hold enough shares and six do not, at each message; a share too few is the same."""
    for message in (1, 2, 3, 4):
        terms = MaskTerms(bytes(16), 0.7)
        enough = dict.fromkeys(range(3), message)
        assert Cohort(10, terms).run(enough).to_bytes() == Cohort(10, terms).plain(enough).to_bytes()
        # The threshold is a share of those that have sent keys, so a client without them weighs nothing.
        with pytest.raises(SecureSumError, match=r"too few clients are left in round 0: 7 .* answer, and 6"):
            Cohort(10, terms).run(
                dict.fromkeys(range(4), message) if message > 1 else {0: 4, 1: 4, 2: 4, 3: 4}
            )
    short = Cohort(10, MaskTerms(bytes(16), 0.7), skips_share=4)
    with pytest.raises(SecureSumError, match="have answered for client site-0"):
        short.run()


def test_a_cohort_of_one_is_refused() -> None:
    for cohort, lost in ((Cohort(1), {}), (Cohort(3), {0: 1, 1: 1})):
        with pytest.raises(SecureSumError, match="cohort of 1"):
            cohort.run(lost)


TWINS = {
    "a mask is added twice": lambda words, key, sign: (
        add_mask(words, key, sign),
        add_mask(words, key, sign),
    ),
    "no mask is subtracted": lambda words, key, sign: add_mask(words, key, 1),
}


@pytest.mark.parametrize("twin", [*TWINS])
def test_wrong_masks_do_not_cancel(twin: str) -> None:
    with patch.object(secure_masks, "add_mask", TWINS[twin]):
        assert Cohort(4).run().to_bytes() != Cohort(4).plain().to_bytes()


def test_an_unmask_with_one_share_too_few_gives_another_sum() -> None:
    """The twin does not require the threshold."""
    with patch.object(MaskTerms, "shares_needed", lambda self, holders: 6):
        cohort = Cohort(9)
        assert cohort.run().to_bytes() == cohort.plain().to_bytes()
        rebuild = secure_masks.rebuild
        with patch.object(secure_masks, "rebuild", lambda shares: rebuild(dict([*shares.items()][1:]))):
            assert cohort.run().to_bytes() != cohort.plain().to_bytes()


# -- what the server holds


def chi_squared(inputs: list[RingWords]) -> float:
    """Return the statistic of all bytes of some inputs, against 255 degrees of freedom."""
    data = np.frombuffer(b"".join(words.to_bytes() for words in inputs), np.uint8)
    expected = len(data) / 256
    return float(((np.bincount(data, minlength=256) - expected) ** 2).sum() / expected)


CHI_BOUND = 350.0  # 255 degrees of freedom: p < 1e-4


def inputs_of_client(rounds: int, scale: float) -> list[RingWords]:
    cohort, inputs = Cohort(3, plan=layout(200)), list[RingWords]()
    for number in range(rounds):
        cohort.run(number=number, scale=scale)
        inputs.append(cohort.inputs[1])
    return inputs


def constant_key(words: RingWords, key: bytes, sign: int) -> None:
    add_mask(words, bytes(32), sign)


@pytest.mark.capability("R3")
def test_masked_inputs_of_a_client_are_uniform_and_say_nothing_of_its_data() -> None:
    """For two data sets, over 150 rounds; the twin has one key for all masks, which then cancel in places."""
    first, second = inputs_of_client(150, 1.0), inputs_of_client(150, 0.01)
    assert chi_squared(first) < CHI_BOUND and chi_squared(second) < CHI_BOUND
    counts = [
        np.bincount(np.frombuffer(b"".join(w.to_bytes() for w in i), np.uint8), minlength=256)
        for i in (first, second)
    ]
    two_samples = float(((counts[0] - counts[1]) ** 2 / (counts[0] + counts[1])).sum())
    assert two_samples < CHI_BOUND
    # Two inputs of one client are jointly uniform too: their difference would show a mask used twice.
    differences = [RingWords(a.values - b.values, a.numbers - b.numbers) for a, b in pairwise(first)]
    assert chi_squared(differences) < CHI_BOUND
    with patch.object(secure_masks, "add_mask", constant_key):
        assert chi_squared(inputs_of_client(20, 1.0)) > 10 * CHI_BOUND


def test_keys_of_a_round_open_nothing_of_the_next_one() -> None:
    """The server rebuilds the key of a lost client, and tries it on the next round; the twin keeps keys."""

    def opens_next_round(cohort: Cohort) -> bool:
        cohort.run({0: 3}, number=1)
        shares = {p + 1: answer[0] for p, answer in cohort.answers.items()}
        needed = cohort.terms.shares_needed(5)
        private = mask_private_key(secure_masks.rebuild(dict([*shares.items()][:needed])))
        cohort.run(number=2)
        return private.public_key().public_bytes_raw() == cohort.server.keys[0].mask_key

    class Reused(Entropy):
        def of(self, *purpose: int | str) -> Entropy:
            return Entropy(0, purpose[1:])

    assert not opens_next_round(Cohort(5))
    assert opens_next_round(Cohort(5, entropy=Reused(0)))


def first_words(num_masks: int) -> NDArray[np.uint64]:
    """Return the first word of the own mask of many clients."""
    terms, entropy = RoundTerms(MaskTerms(bytes(16)), 0, MODEL, {0: "site-0"}), Entropy()
    found = np.zeros(num_masks, dtype=np.uint64)
    for index in range(num_masks):
        words = RingWords(np.zeros(0, np.uint64), found[index : index + 1])
        add_mask(words, own_mask_key(terms, 0, entropy.integer(secure_masks.SECRET_BITS)), 1)
    return found


@pytest.mark.parametrize(
    ("num_masks", "seed_bits"), [(2_000, 16), pytest.param(2_000_000, 32, marks=pytest.mark.soak)]
)
def test_no_two_masks_begin_with_the_same_word(num_masks: int, seed_bits: int) -> None:
    """Of n uniform words of 64 bits two are equal with probability n^2 / 2^65. The twin has a short seed: of
    two million with 32 bits about 466 pairs are equal, and of two thousand with 16 bits 30.
    """
    assert len({*first_words(num_masks).tolist()}) == num_masks
    with patch.object(secure_masks, "SECRET_BITS", seed_bits):
        assert len({*first_words(num_masks).tolist()}) < num_masks


# -- participants that deviate


@pytest.mark.parametrize("restarts", [False, True])
def test_a_client_reveals_one_kind_of_share_of_a_name_in_a_round(tmp_path: Path, restarts: bool) -> None:
    cohort, path = Cohort(4), tmp_path / "revealed"
    cohort.run({3: 4})
    client = cohort.clients[0]
    client._ledger = ShareLedger(path)
    first = client.reveal([0, 1, 2], [3])
    assert {*first} == {0, 1, 2, 3}
    if restarts:
        client._ledger = ShareLedger(path)
    assert client.reveal([0, 1, 2], [3]) == first
    for survivors, lost in (([0, 1, 2, 3], []), ([0, 1], [2, 3])):
        with pytest.raises(SecureSumError, match=r"both kinds of share of client site-[23] in round 0"):
            client.reveal(survivors if len(survivors) > 2 else [0, 1, 3], lost if len(survivors) > 2 else [2])
    with pytest.raises(SecureSumError, match="both kinds of share of client site-1"):
        cohort.clients[2].reveal([0, 1, 2], [1])
    assert "site-3 key" in path.read_text() and str(first[3]) not in path.read_text()


@pytest.mark.parametrize("part", ["seal_key", "mask_key", "signature", "round"])
def test_keys_that_were_changed_on_the_way_are_detected_and_named(part: str) -> None:
    def change(position: int, keys: dict[int, ClientKeys]) -> dict[int, ClientKeys]:
        if position == 1:
            changed = keys[2]._replace(**{part: Entropy().bytes(64 if part == "signature" else 32)})
            keys[2] = changed
        return keys

    def replay(position: int, keys: dict[int, ClientKeys]) -> dict[int, ClientKeys]:
        return {**keys, 2: earlier}

    cohort = Cohort(4)
    cohort.run(number=0)
    earlier = cohort.server.keys[2]
    cohort.change_keys = replay if part == "round" else change
    with pytest.raises(SecureSumError, match="keys of client site-2 in round 1 are not signed"):
        cohort.run(number=1)


def test_a_client_with_another_model_ends_the_round_and_is_named() -> None:
    with pytest.raises(SecureSumError, match="client site-2 has received other weights for round 0"):
        Cohort(4, models={2: bytes([1] * 32)}).run()


def test_shares_that_were_changed_on_the_way_are_detected_and_named() -> None:
    plain = MaskServer.forward_shares

    def change(self: MaskServer, received: dict[int, dict[int, bytes]]) -> dict[int, dict[int, bytes]]:
        forwarded = plain(self, received)
        forwarded[0][1] = forwarded[0][1][:-1] + bytes([forwarded[0][1][-1] ^ 1])
        return forwarded

    with (
        patch.object(MaskServer, "forward_shares", change),
        pytest.raises(SecureSumError, match="shares that client site-1 has sealed for site-0 were changed"),
    ):
        Cohort(3).run()


def test_both_sides_of_a_pair_have_one_key_and_other_pairs_and_rounds_another() -> None:
    names = {0: "a", 1: "b", 2: "c"}
    private = {p: mask_private_key(p + 1) for p in names}
    public = {p: key.public_key().public_bytes_raw() for p, key in private.items()}
    keys = {
        (number, p, q): pair_mask_key(
            RoundTerms(MaskTerms(bytes(16)), number, MODEL, names), private[p], p, q, public[q]
        )
        for number in (0, 1)
        for p in names
        for q in names
        if p != q
    }
    assert all(keys[n, p, q] == keys[n, q, p] for n, p, q in keys) and len({*keys.values()}) == 6


# -- clients on machines of their own


def test_keys_of_clients_are_made_once_and_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    certificate(tmp_path, clients=["site-0", "site 1"])
    public, secret = tmp_path / PUBLIC_KEYS_FILE, tmp_path / "site-0.key"
    assert secret.stat().st_mode & 0o777 == 0o600
    known = ClientIdentity.read("site 1", tmp_path / "site 1.key", public)
    assert [*known.known] == ["site-0", "site 1"]
    assert known.known["site 1"] == known.key.public_key() != known.known["site-0"]
    for name in ("site-0", "../up", ""):
        with pytest.raises(RecipeError, match="File exists" if name == "site-0" else "is no name of a file"):
            ClientIdentity.make(tmp_path, name)
    with pytest.raises(RecipeError, match=r"the public key of site 1 in .* is not that of .*site-0\.key"):
        ClientIdentity.read("site 1", secret, public)
    double = tmp_path / "double"
    double.write_text(public.read_text() + public.read_text())
    with pytest.raises(RecipeError, match="has two keys of one client"):
        ClientIdentity.read("site-0", secret, double)
    secret.chmod(0o644)
    with pytest.raises(RecipeError, match="mode 0644, and only its owner"):
        ClientIdentity.read("site-0", secret, public)
    for text in ("ed25519 00 site-0", "no keys", "\xff"):
        double.write_text(text, encoding="latin-1")
        with pytest.raises(RecipeError, match="cannot read the keys of client site-0"):
            ClientIdentity.read("site-0", secret, double)


def test_a_client_of_the_round_whose_key_nobody_has_given_is_named() -> None:
    identity = Ed25519PrivateKey.generate()
    terms = RoundTerms(MaskTerms(bytes(16)), 0, MODEL, {0: "site-0", 1: "site-1"})
    known = {"site-0": identity.public_key()}
    clients = [MaskClient(terms, p, identity, known, Entropy()) for p in range(2)]
    with pytest.raises(SecureSumError, match="nobody has given this client the public key of site-1"):
        clients[0].share({p: client.advertise() for p, client in enumerate(clients)})
