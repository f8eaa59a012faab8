"""Shares, encrypted sums and garbled circuits, whose parties are threads with real connections here."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from paceline.errors import CommunicationError, DataError
from paceline.federated.crypto import paillier, secret_sums
from paceline.federated.crypto.garbled_circuit import (
    Circuit,
    adder_circuit,
    bitwise_circuit,
    comparator_circuit,
    evaluate,
    from_bits,
    garble,
    to_bits,
)
from paceline.federated.crypto.oblivious_transfer import (
    PRIME_2048,
    receive_obliviously,
    send_obliviously,
)
from paceline.federated.crypto.paillier import generate_keys, pack_slots, unpack_slots
from paceline.federated.crypto.parties import Party, connect_parties
from paceline.federated.crypto.ring_shares import (
    FRACTION_BITS,
    SharedArithmetic,
    decode_fixed,
    encode_fixed,
    serve_dealer,
    split_secret,
)
from paceline.federated.crypto.shamir_vectors import rebuild_vector, split_vector
from paceline.federated.crypto.shared_training import SquareNet
from paceline.federated.shamir import split
from paceline.privacy.entropy import Entropy
from paceline.studies.privacy_spectrum import _run_federated, load_breast_cancer

SMALL_KEY = paillier._generate_keys(1024)


def run_threads(function: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> list[Any]:
    """Run a party in each thread."""
    ports, ready = [0] * len(arguments), threading.Barrier(len(arguments))

    def run(rank: int) -> Any:
        def exchange(port: int) -> list[int]:
            ports[rank] = port
            ready.wait(60)
            return ports

        party = connect_parties(rank, len(arguments), "key", exchange, 60.0)
        try:
            return function(party, *arguments[rank])
        finally:
            party.close()

    with ThreadPoolExecutor(len(arguments)) as pool:
        return [future.result(120) for future in [pool.submit(run, r) for r in range(len(arguments))]]


def is_uniform(counts: np.ndarray) -> bool:
    return bool(stats.chisquare(counts).pvalue > 1e-6)


def nibbles(x: Tensor) -> np.ndarray:
    """The top four bits of each element."""
    return (x.numpy().view(np.uint64) >> np.uint64(60)).astype(int)


def joint_counts(first: Tensor, second: Tensor) -> np.ndarray:
    return np.bincount(nibbles(first) * 16 + nibbles(second), minlength=256)


@pytest.mark.capability("R1")
def test_two_of_three_shares_are_uniform_together() -> None:
    secret = torch.full((1 << 15,), 5)
    shares = split_secret(secret, 3, Entropy(1).bytes)
    assert torch.equal(sum(shares[1:], shares[0]), secret)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert is_uniform(joint_counts(shares[i], shares[j]))
    # The twin: each share is uniform, two of them are not.
    drawn = split_secret(secret, 2, Entropy(2).bytes)[0]
    twin = [drawn, drawn, secret - 2 * drawn]
    assert all(is_uniform(np.bincount(nibbles(share), minlength=16)) for share in twin[:2])
    assert not is_uniform(joint_counts(twin[0], twin[1])) and not is_uniform(joint_counts(twin[0], twin[2]))


def multiply(party: Party, x: Tensor | None, y: Tensor | None) -> Any:
    if party.rank == party.num_parties - 1:
        return serve_dealer(party)
    arithmetic = SharedArithmetic(party, party.num_parties - 1)
    factors = [arithmetic.share(owner, value) for owner, value in ((0, x), (1, y))]
    masked = [arithmetic.mask(factor) for factor in factors]
    z = arithmetic.open(arithmetic.multiply(*masked))
    matrices = [arithmetic.mask(factor.view(40, 25)) for factor in factors]
    product = arithmetic.open(arithmetic.multiply(*matrices, "x.T@y"))
    arithmetic.end()
    return z, product, masked[0].opened


def truncate_locally(arithmetic: SharedArithmetic, x: Tensor) -> Tensor:
    """Mohassel and Zhang 2017: right for two parties only."""
    return x >> FRACTION_BITS if arithmetic.party.rank == 0 else -(-x >> FRACTION_BITS)


@pytest.mark.capability("R4")
def test_a_thousand_products_are_right_to_the_last_fraction_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = (encode_fixed(torch.randn(1000, generator=draw) * 30) for _ in range(2))
    expected, unit = decode_fixed(x) * decode_fixed(y), 2.0**-FRACTION_BITS

    def errors(num_computing: int) -> tuple[float, float, Tensor]:
        others = [(None, None)] * (num_computing - 1)
        z, product, opened = run_threads(multiply, [(x, None), (None, y), *others])[0]
        matrix = decode_fixed(x).view(40, 25).T @ decode_fixed(y).view(40, 25)
        worst = (decode_fixed(z) - expected).abs().max(), (decode_fixed(product) - matrix).abs().max()
        return float(worst[0]), float(worst[1]), opened

    for num_computing in (2, 3):
        by_element, of_matrices, opened = errors(num_computing)
        assert by_element <= unit and of_matrices <= unit
        assert is_uniform(np.bincount(nibbles(opened), minlength=16))
    # The twin.
    monkeypatch.setattr(SharedArithmetic, "truncate", truncate_locally)
    assert errors(2)[0] <= unit < 1e6 < errors(3)[0]


def test_values_that_do_not_fit_are_refused() -> None:
    for value in (float("nan"), 2.0**22, -(2.0**22)):
        with pytest.raises(DataError, match="does not fit the ring"):
            encode_fixed(torch.tensor([0.0, value]))


def train_net(party: Party, rows: Tensor | None, targets: Tensor | None) -> Any:
    if party.rank == 2:
        return serve_dealer(party)
    arithmetic = SharedArithmetic(party, 2)
    net = SquareNet.share(arithmetic, (5, 4, 3), seed=1)
    start = [arithmetic.open(one) for one in (net.hidden, net.output, net.bias)]
    x, y = (arithmetic.share(0, None if one is None else encode_fixed(one)) for one in (rows, targets))
    masked = arithmetic.mask(x)
    for _ in range(2):
        net = net.train_step(arithmetic, masked, y, lr=0.1)
    scores = arithmetic.open(net.predict(arithmetic, x))
    stepped = [arithmetic.open(one) for one in (net.hidden, net.output, net.bias)]
    arithmetic.end()
    return [decode_fixed(one) for one in (*start, *stepped, scores)]


@pytest.mark.capability("R4")
def test_two_steps_of_a_net_on_shares_are_those_of_autograd() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(8, 5, generator=draw, dtype=torch.float64) - 0.5
    y = torch.eye(3, dtype=torch.float64)[torch.arange(8) % 3]
    *weights, hidden, output, bias, scores = run_threads(train_net, [(x, y), (None, None), (None, None)])[0]
    for _ in range(2):
        tracked = [one.detach().requires_grad_() for one in weights]
        loss = ((x @ tracked[0]) ** 2 @ tracked[1] + tracked[2] - y).square().sum() / 2 / len(x)
        steps = zip(tracked, torch.autograd.grad(loss, tracked), strict=True)
        weights = [(one - 0.1 * gradient).detach() for one, gradient in steps]
    for shared, plain in zip((hidden, output, bias), weights, strict=True):
        assert (shared - plain).abs().max() < 1e-4
    assert (scores - ((x @ weights[0]) ** 2 @ weights[1] + weights[2])).abs().max() < 1e-4


@pytest.mark.capability("R2")
def test_shamir_sums_rebuild_from_any_threshold_and_from_no_fewer() -> None:
    first, second = [5, -7, 2**120], [-8, 7, 1]
    vectors = [split_vector(values, 3, 5) for values in (first, second)]
    sums = [a + b for a, b in zip(*vectors, strict=True)]
    for held in (sums[:3], sums[2:], [sums[0], sums[4], sums[2]], sums):
        assert rebuild_vector(held) == [-3, 0, 2**120 + 1]
    with pytest.raises(DataError, match="2 shares cannot rebuild a secret of threshold 3"):
        rebuild_vector(sums[:2])
    with pytest.raises(DataError, match="do not belong together"):
        rebuild_vector([sums[0], sums[0], sums[1]])
    with pytest.raises(DataError, match="6 of 5 shares"):
        split_vector(first, 6, 5)


@pytest.mark.capability("R2")
def test_two_shamir_shares_of_threshold_three_say_nothing() -> None:
    """On the field of 7 elements, jointly; three shares of the same secrets are the twin."""

    def counts(secret: int, places: Sequence[int]) -> np.ndarray:
        entropy, table = Entropy(secret + 1), np.zeros(7 ** len(places))
        for _ in range(4000):
            shares = split(secret, [1, 2, 3], 3, entropy, prime=7)
            table[sum(shares[place] * 7**i for i, place in enumerate(places))] += 1
        return table

    assert all(is_uniform(counts(secret, (1, 3))) for secret in (0, 4))
    assert not is_uniform(counts(4, (1, 2, 3)))


@pytest.mark.capability("R5")
def test_paillier_adds_and_scales_what_it_cannot_read() -> None:
    public, draw = SMALL_KEY.public, random.Random(0)
    for _ in range(5):
        a, b, k = (draw.randint(-(10**30), 10**30) for _ in range(3))
        assert SMALL_KEY.decrypt(public.add(public.encrypt(a), public.encrypt(b))) == a + b
        assert SMALL_KEY.decrypt(public.multiply(public.encrypt(a), k)) == a * k
    assert public.encrypt(5) != public.encrypt(5)
    with pytest.raises(DataError, match="larger than the key"):
        public.encrypt(public.n // 2 + 1)
    with pytest.raises(DataError, match="1024 bits can be broken"):
        generate_keys(1024)
    assert generate_keys().public.n.bit_length() == 2048


@pytest.mark.capability("R5")
def test_packed_slots_add_like_the_numbers_in_them() -> None:
    public, draw = SMALL_KEY.public, random.Random(1)
    slots = public.num_slots(40)
    vectors = [[draw.randint(-(2**36), 2**36) for _ in range(60)] for _ in range(3)]
    packed = [pack_slots(vector, 40, slots) for vector in vectors]
    totals = [public.encrypt(one) for one in packed[0]]
    for other in packed[1:]:
        totals = [public.add(t, public.encrypt(one)) for t, one in zip(totals, other, strict=True)]
    opened = unpack_slots([SMALL_KEY.decrypt(one) for one in totals], 40, slots, 60)
    assert len(totals) == 3 and opened == [sum(column) for column in zip(*vectors, strict=True)]
    with pytest.raises(DataError, match="does not fit a slot"):
        pack_slots([2**39], 40, slots)


@pytest.mark.capability("R5")
def test_phe_reads_what_this_encrypts() -> None:
    phe = pytest.importorskip("phe", reason="phe is GPL: only where a developer has it")
    public = SMALL_KEY.public
    theirs = phe.PaillierPublicKey(public.n)
    private = phe.PaillierPrivateKey(theirs, SMALL_KEY.p, SMALL_KEY.q)
    assert private.raw_decrypt(public.add(public.encrypt(20), theirs.raw_encrypt(22))) == 42
    assert SMALL_KEY.decrypt(theirs.raw_encrypt(42)) == 42


def compute(circuit: Circuit, x: int, y: int) -> int:
    """Garble and evaluate, without a transfer."""
    garbled = garble(circuit)
    bits = [*to_bits(x, circuit.num_garbler), *to_bits(y, circuit.num_evaluator)]
    outputs = evaluate(circuit, [garbled.input_label(i, bit) for i, bit in enumerate(bits)], garbled.tables)
    return from_bits([label & 1 ^ bit for label, bit in zip(outputs, garbled.output_bits, strict=True)])


FUNCTIONS: dict[str, tuple[Callable[[int], Circuit], Callable[[int, int], int]]] = {
    "and": (lambda bits: bitwise_circuit("and", bits), lambda x, y: x & y),
    "xor": (lambda bits: bitwise_circuit("xor", bits), lambda x, y: x ^ y),
    "adder": (adder_circuit, lambda x, y: x + y),
    "comparator": (comparator_circuit, lambda x, y: int(x < y)),
}


@pytest.mark.capability("R6")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_garbled_circuits_compute_what_they_say(name: str) -> None:
    build, expected = FUNCTIONS[name]
    pairs = [(x, y) for x in range(16) for y in range(16)]
    assert [compute(build(4), x, y) for x, y in pairs] == [expected(x, y) for x, y in pairs]
    assert build(32).num_ands == (0 if name == "xor" else 32)
    draw = random.Random(0)
    for _ in range(20):
        x, y = draw.getrandbits(32), draw.getrandbits(32)
        assert compute(build(32), x, y) == expected(x, y)
    assert compute(build(32), 7, 7) == expected(7, 7)


NUM_GARBLINGS = 200


def shown_bits(garbler_value: int, random_bits: Callable[[int], int]) -> np.ndarray:
    """How often each of the low 8 bits of the labels that an evaluator sees is set, of 200 garblings."""
    circuit, counts = adder_circuit(4), np.zeros((9, 8))
    for _ in range(NUM_GARBLINGS):
        garbled = garble(circuit, random_bits)
        bits = [*to_bits(garbler_value, 4), *to_bits(9, 4)]
        labels = [garbled.input_label(i, bit) for i, bit in enumerate(bits)]
        seen = [*labels[:8], evaluate(circuit, labels, garbled.tables)[0]]
        counts += [[label >> place & 1 for place in range(8)] for label in seen]
    return counts


def differ(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether a frequency differs by more than five and a half deviations of fair bits."""
    return bool(np.abs(first - second).max() > 5.5 * (NUM_GARBLINGS / 2) ** 0.5)


@pytest.mark.capability("R6")
def test_the_labels_of_an_evaluator_do_not_depend_on_the_others_input() -> None:
    draw = random.Random(0)
    assert not differ(shown_bits(0, draw.getrandbits), shown_bits(15, draw.getrandbits))
    # The twin: a last bit that is the value itself, not a permutation.
    assert differ(
        shown_bits(0, lambda n: draw.getrandbits(n) & ~1), shown_bits(15, lambda n: draw.getrandbits(n) & ~1)
    )


def test_the_prime_of_the_transfer_is_that_of_rfc_3526() -> None:
    digits = 2100  # bits of pi, by Machin's formula

    def arctan_of_inverse(x: int) -> int:
        total, term, n = 0, (1 << digits) // x, 0
        while term:
            total += (-1) ** n * (term // (2 * n + 1))
            term, n = term // (x * x), n + 1
        return total

    pi = 4 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239))
    expected = 2**2048 - 2**1984 - 1 + 2**64 * ((pi >> (digits - 1918)) + 124476)
    assert expected == PRIME_2048


def transfer(party: Party, pairs: Any, choices: Any) -> Any:
    if party.rank == 0:
        return send_obliviously(party, 1, pairs)
    return receive_obliviously(party, 0, choices)


def break_keys(party: Party) -> None:
    if party.rank == 0:
        with pytest.raises(CommunicationError, match="outside the group"):
            send_obliviously(party, 1, [(bytes(16), bytes(16))])
        with pytest.raises(CommunicationError, match="sent 'other' where the protocol has 'transfer-keys'"):
            send_obliviously(party, 1, [(bytes(16), bytes(16))])
    else:
        party.receive_integers(0, "transfer-begin")
        party.send_integers(0, "transfer-keys", [1], 256)
        party.receive_integers(0, "transfer-begin")
        party.send(0, "other")


@pytest.mark.capability("R6")
def test_a_transfer_brings_the_chosen_message_alone() -> None:
    pairs = [(bytes([i]) * 16, bytes([100 + i]) * 16) for i in range(3)]
    received = run_threads(transfer, [(pairs, None), (None, [0, 1, 1])])[1]
    assert received == [pairs[0][0], pairs[1][1], pairs[2][1]]
    run_threads(break_keys, [(), ()])


def add_vectors(party: Party, name: str, values: Any) -> Any:
    way = secret_sums.WAYS[name].build(party)
    if party.rank == 0:
        return [way.collect(70) for _ in range(2)]
    return [way.contribute(value) for value in values]


@pytest.mark.parametrize("name", secret_sums.WAYS)
@pytest.mark.capability("R5", "Z13")
def test_every_way_of_adding_returns_the_plain_sum(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    way = secret_sums.WAYS[name]
    if way.module:
        pytest.importorskip(way.module)
    monkeypatch.setattr(secret_sums, "generate_keys", lambda: SMALL_KEY)
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(2, 70, generator=draw, dtype=torch.float64) * 100 for _ in range(3)]
    sums = run_threads(add_vectors, [(name, None), *((name, one) for one in values)])[0]
    expected = sum(values[1:], values[0])
    # Of CKKS and of float32 the sum is approximate.
    tolerance = 3 * 2.0 ** -(FRACTION_BITS + 1) if name not in ("plain", "ckks") else 1e-3
    assert (torch.stack(sums) - expected).abs().max() <= tolerance


@pytest.mark.capability("R3", "Z13")
def test_fedavg_learns_as_much_from_sums_as_from_updates() -> None:
    task = load_breast_cancer()
    data = [(task.held_out_rows, task.held_out_targets), *task.parts(3)]

    def accuracy(way: str) -> float:
        arguments = [(way, task.widths, 4, task.lr, task.batch, own) for own in data]
        return float(run_threads(_run_federated, arguments)[0])

    plain = accuracy("plain")
    assert plain > 0.9 and accuracy("masks") == accuracy("shamir") == plain
