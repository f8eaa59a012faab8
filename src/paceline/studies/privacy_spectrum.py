"""The privacy study: one federated task in six ways, each party a process, with what it costs and what it hides.

Plain, masked, Shamir, Paillier and CKKS sums train the same model by FedAvg: only how updates are added differs,
and `n_k * delta` and `n_k` go through the same sum. Training on shares has two owners of data and a dealer, and a
model of its own: logistic regression, or a net with the square as activation. Next to them, two clients compare a
number in a garbled circuit. Bytes are those of all parties together, with headers.

No way of adding hides what the sum itself reveals: see `gradient_inversion`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import CommunicationError, DataError, MissingExtraError
from paceline.federated.crypto.garbled_circuit import comparator_circuit, run_evaluator, run_garbler
from paceline.federated.crypto.paillier import PaillierPublicKey, generate_keys, pack_slots, unpack_slots
from paceline.federated.crypto.parties import Party, run_parties
from paceline.federated.crypto.ring_shares import (
    SharedArithmetic,
    decode_fixed,
    encode_fixed,
    serve_dealer,
)
from paceline.federated.crypto.shamir import ShamirShare, rebuild_shamir, split_shamir
from paceline.federated.crypto.shared_training import (
    SquareNet,
    predict_scores,
    scale_rows,
    share_rows,
    train_logistic_regression,
    train_square_net,
)
from paceline.models.mlp import MLP
from paceline.state.keys import key
from paceline.tasks.digits import load_digits

_SERVER, _KEY_HOLDER = 0, 1
_SLOT_BITS = 40  # a sum of 2^19 with 20 fraction bits
_SHAMIR_SLOTS = 3
_KEY_BYTES = 32
_COMPARED_BITS = 32


@dataclass(frozen=True)
class SpectrumTask:
    """A task that is trained in six ways.

    Args:
        name: for the table.
        rows, targets: training data, float64 [N, D] in [-1/2, 1/2], and int64 [N].
        held_out_rows, held_out_targets: data for the accuracy.
        hidden: units of the hidden layer, or none: logistic regression.
        lr, batch: of a client.
        shared_lr, shared_passes: of training on shares; logistic regression has full batches.
    """

    name: str
    rows: Tensor
    targets: Tensor
    held_out_rows: Tensor
    held_out_targets: Tensor
    hidden: tuple[int, ...]
    lr: float
    batch: int
    shared_lr: float
    shared_passes: int

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the sizes of inputs, hidden layer and classes."""
        return self.rows.shape[1], *self.hidden, int(self.targets.max()) + 1

    def parts(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return the data of each client: every count-th row."""
        return [(self.rows[k::count], self.targets[k::count]) for k in range(count)]


def load_breast_cancer() -> SpectrumTask:
    """Return the 569 samples of breast-cancer, of which a hash of the index holds out a sixth.

    Columns are scaled by their range over the training rows, on which the clients must have agreed.

    Raises:
        MissingExtraError: scikit-learn, which brings them, is not installed.
    """
    try:
        from sklearn.datasets import load_breast_cancer as load
    except ImportError as error:
        raise MissingExtraError(
            "breast-cancer is a data set of scikit-learn, which is not installed",
            next_step="pip install 'paceline[digits]'",
        ) from error
    rows, targets = (torch.from_numpy(array) for array in load(return_X_y=True))
    is_held_out = torch.tensor([key("breast-cancer", "held out", i) % 6 == 0 for i in range(len(rows))])
    train = rows[~is_held_out]
    scaled = scale_rows(rows, train.min(0).values, train.max(0).values)[:, :-1]
    return SpectrumTask(
        "breast-cancer",
        scaled[~is_held_out],
        targets[~is_held_out],
        scaled[is_held_out],
        targets[is_held_out],
        (),
        lr=0.5,
        batch=10,
        shared_lr=2.0,
        shared_passes=40,
    )


def load_digit_images() -> SpectrumTask:
    """Return the 1,797 digits, split as in the task `digits`."""
    (rows, targets), (held_rows, held_targets) = (data.tensors for data in load_digits())
    return SpectrumTask(
        "digits",
        rows.double() - 0.5,
        targets,
        held_rows.double() - 0.5,
        held_targets,
        (32,),
        lr=0.1,
        batch=10,
        shared_lr=0.4,
        shared_passes=10,
    )


TASKS: Mapping[str, Callable[[], SpectrumTask]] = {
    "breast-cancer": load_breast_cancer,
    "digits": load_digit_images,
}


class SecretSum(Protocol):
    """One party's side of a way to add vectors; the server is party 0, the others are clients."""

    def contribute(self, values: Tensor) -> None:
        """Take part with a vector, float64 [n], as a client."""

    def collect(self, count: int) -> Tensor:
        """Return the sum of all vectors, float64 [count], on the server."""


class PlainSum:
    """Updates as they are."""

    def __init__(self, party: Party) -> None:
        self._party = party

    def contribute(self, values: Tensor) -> None:
        self._party.send(_SERVER, "update", [values.float()])

    def collect(self, count: int) -> Tensor:
        parts = [self._party.receive(rank, "update").tensors[0] for rank in self._party.others]
        return torch.stack(parts).double().sum(0)


class ShamirSum:
    """Shares of each update for every client, which adds what it holds; t of these sums rebuild the sum."""

    def __init__(self, party: Party) -> None:
        self._party, self._clients = party, range(1, party.num_parties)
        self._threshold = len(self._clients) // 2 + 1

    def contribute(self, values: Tensor) -> None:
        packed = pack_slots(encode_fixed(values).tolist(), _SLOT_BITS, _SHAMIR_SLOTS)
        shares = split_shamir(packed, self._threshold, len(self._clients))
        held = shares[self._party.rank - 1]
        for client in self._clients:
            if client != self._party.rank:
                self._party.send_integers(client, "shares", shares[client - 1].values, 16)
        for client in self._clients:
            if client != self._party.rank:
                received = self._party.receive_integers(client, "shares")
                held = held + ShamirShare(self._party.rank, self._threshold, tuple(received))
        self._party.send_integers(_SERVER, "share-of-sum", held.values, 16)

    def collect(self, count: int) -> Tensor:
        sums = [
            ShamirShare(rank, self._threshold, tuple(self._party.receive_integers(rank, "share-of-sum")))
            for rank in self._clients
        ]
        packed = rebuild_shamir(sums[-self._threshold :])
        return decode_fixed(torch.tensor(unpack_slots(packed, _SLOT_BITS, _SHAMIR_SLOTS, count)))


class EncryptedSum:
    """Ciphertexts that the server adds, and that one client, the holder of the key, decrypts.

    Args:
        party: this party.
        make_cipher: generates a key pair; called by the key holder alone.
        read_cipher: returns a cipher without the private key, from its public part.
    """

    def __init__(
        self, party: Party, make_cipher: Callable[[], Any], read_cipher: Callable[[bytes], Any]
    ) -> None:
        self._party = party
        if party.rank == _KEY_HOLDER:
            self._cipher = make_cipher()
            for rank in party.others:
                party.send(rank, "public-key", [_to_tensor(self._cipher.public_bytes())])
        else:
            self._cipher = read_cipher(_to_bytes(party.receive(_KEY_HOLDER, "public-key").tensors[0]))

    def contribute(self, values: Tensor) -> None:
        self._party.send(_SERVER, "encrypted", [_to_tensor(self._cipher.encrypt(values))])
        if self._party.rank == _KEY_HOLDER:
            total = _to_bytes(self._party.receive(_SERVER, "encrypted-sum").tensors[0])
            self._party.send(_SERVER, "sum", [self._cipher.decrypt(total, len(values))])

    def collect(self, count: int) -> Tensor:
        parts = [_to_bytes(self._party.receive(r, "encrypted").tensors[0]) for r in self._party.others]
        self._party.send(_KEY_HOLDER, "encrypted-sum", [_to_tensor(self._cipher.add(parts))])
        return self._party.receive(_KEY_HOLDER, "sum").tensors[0]


class PaillierCipher:
    """Paillier with packed slots, as `EncryptedSum` uses it.

    Args:
        public: the public key.
        private: the private one; None where it is not known.
    """

    def __init__(self, public: PaillierPublicKey, private: Any = None) -> None:
        self._public, self._private = public, private
        self._num_slots = public.num_slots(_SLOT_BITS)

    @classmethod
    def generate(cls) -> PaillierCipher:
        """Generate a key pair of 2048 bits."""
        private = generate_keys()
        return cls(private.public, private)

    @classmethod
    def read(cls, data: bytes) -> PaillierCipher:
        """Read a public key."""
        return cls(PaillierPublicKey(int.from_bytes(data, "little")))

    def public_bytes(self) -> bytes:
        """Return the public key."""
        return self._public.n.to_bytes(self._public.num_bytes // 2, "little")

    def encrypt(self, values: Tensor) -> bytes:
        """Encrypt a vector, float64 [n]."""
        packed = pack_slots(encode_fixed(values).tolist(), _SLOT_BITS, self._num_slots)
        return self._join([self._public.encrypt(one) for one in packed])

    def add(self, parts: Sequence[bytes]) -> bytes:
        """Add encrypted vectors."""
        total, *others = [self._split(part) for part in parts]
        for other in others:
            total = [self._public.add(a, b) for a, b in zip(total, other, strict=True)]
        return self._join(total)

    def decrypt(self, data: bytes, count: int) -> Tensor:
        """Decrypt a vector of so many values."""
        packed = [self._private.decrypt(one) for one in self._split(data)]
        return decode_fixed(torch.tensor(unpack_slots(packed, _SLOT_BITS, self._num_slots, count)))

    def _join(self, ciphertexts: Sequence[int]) -> bytes:
        return b"".join(one.to_bytes(self._public.num_bytes, "little") for one in ciphertexts)

    def _split(self, data: bytes) -> list[int]:
        size = self._public.num_bytes
        return [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]


class CKKSCipher:
    """CKKS by TenSEAL, as `EncryptedSum` uses it; its sums are approximate.

    Args:
        context: of TenSEAL.
    """

    def __init__(self, context: Any) -> None:
        self._context = context

    @classmethod
    def generate(cls) -> CKKSCipher:
        """Generate keys for ring dimension 8192, with 128 bits of security."""
        import tenseal

        context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, 8192, coeff_mod_bit_sizes=[60, 40, 60])
        context.global_scale = 2**40
        return cls(context)

    @classmethod
    def read(cls, data: bytes) -> CKKSCipher:
        """Read a context without the secret key."""
        import tenseal

        return cls(tenseal.context_from(data))

    def public_bytes(self) -> bytes:
        """Return the context without the secret key."""
        return bytes(self._context.serialize(save_secret_key=False))

    def encrypt(self, values: Tensor) -> bytes:
        """Encrypt a vector, float64 [n]."""
        import tenseal

        return bytes(tenseal.ckks_vector(self._context, values.tolist()).serialize())

    def add(self, parts: Sequence[bytes]) -> bytes:
        """Add encrypted vectors."""
        import tenseal

        total, *others = [tenseal.ckks_vector_from(self._context, part) for part in parts]
        for other in others:
            total += other
        return bytes(total.serialize())

    def decrypt(self, data: bytes, count: int) -> Tensor:
        """Decrypt a vector of so many values."""
        import tenseal

        decrypted = tenseal.ckks_vector_from(self._context, data).decrypt()
        return torch.tensor(decrypted[:count], dtype=torch.float64)


@dataclass(frozen=True)
class SumWay:
    """A way of adding updates, with what it reveals.

    Args:
        build: makes one party's side.
        sees: what each party learns.
        assumes: what must hold for that.
        module: an optional library that it needs.
    """

    build: Callable[[Party], SecretSum]
    sees: str
    assumes: str
    module: str = ""


_KEYS_SEE = "server: the sum; key holder: the sum; clients: nothing of each other"
_KEYS_ASSUME = "the server and the key holder do not collude"
WAYS: Mapping[str, SumWay] = {
    "plain": SumWay(PlainSum, "server: the update of every client", "the server is trusted with all data"),
    "shamir": SumWay(
        ShamirSum,
        "server: the sum; clients: random shares",
        "less than half of the clients collude; shares travel on private links",
    ),
    "paillier": SumWay(
        lambda party: EncryptedSum(party, PaillierCipher.generate, PaillierCipher.read),
        _KEYS_SEE,
        _KEYS_ASSUME,
    ),
    "ckks": SumWay(
        lambda party: EncryptedSum(party, CKKSCipher.generate, CKKSCipher.read),
        _KEYS_SEE,
        f"{_KEYS_ASSUME}; the sum is approximate",
        "tenseal",
    ),
}


@dataclass(frozen=True)
class SpectrumRow:
    """One row of the table.

    Args:
        task, way: names.
        accuracy: on held-out data; None: the way trains nothing, or did not run.
        num_bytes: sent by all parties.
        seconds: wall time from the start of the first round.
        cpu_seconds: of all parties.
        sees: what each party learns.
        assumes: what must hold for that.
        note: why it did not run, or what differs.
    """

    task: str
    way: str
    accuracy: float | None
    num_bytes: int
    seconds: float
    cpu_seconds: float
    sees: str
    assumes: str
    note: str = ""


def run_spectrum(
    task: SpectrumTask, *, clients: int, rounds: int, report: Callable[[str], None] = lambda line: None
) -> list[SpectrumRow]:
    """Train a task in every way that is installed, and compare a number in a garbled circuit.

    Args:
        clients: three or more.
        rounds: of FedAvg, one local epoch each.
        report: receives a line for the user before each way.
    Raises:
        DataError: fewer than three clients.
    """
    if clients < 3:
        raise DataError(f"{clients} clients cannot hide in a sum", next_step="use three or more")
    rows = []
    for name, way in WAYS.items():
        report(f"{task.name}: {name}")
        if way.module and importlib.util.find_spec(way.module) is None:
            note = f"not run: pip install {way.module}"
            rows.append(SpectrumRow(task.name, name, None, 0, 0.0, 0.0, way.sees, way.assumes, note))
        else:
            rows.append(run_way(task, name, clients=clients, rounds=rounds))
    report(f"{task.name}: shares")
    rows.append(run_on_shares(task))
    report(f"{task.name}: garbled comparison")
    rows.append(compare_garbled(task))
    return rows


def run_way(task: SpectrumTask, name: str, *, clients: int, rounds: int) -> SpectrumRow:
    """Train a task by FedAvg with one way of adding updates, the server and each client a process."""
    held_out = (task.held_out_rows, task.held_out_targets)
    settings = (name, task.widths, rounds, task.lr, task.batch)
    arguments = [(*settings, part) for part in (held_out, *task.parts(clients))]
    return _measure(task.name, name, _run_federated, arguments, WAYS[name].sees, WAYS[name].assumes)


def run_on_shares(task: SpectrumTask) -> SpectrumRow:
    """Train a task on shares: two owners with half of the rows each, and a dealer."""
    arguments = [(task, *part) for part in task.parts(2)]
    return _measure(
        task.name,
        "shares",
        _run_shared,
        [*arguments, (None, None, None)],
        "nobody: data, weights or the sum; the first owner: scores of its held-out rows",
        "the dealer is trusted; the two owners do not collude",
        "logistic regression with a cubic sigmoid" if not task.hidden else "square activation, squared error",
    )


def compare_garbled(task: SpectrumTask) -> SpectrumRow:
    """Let two clients learn which of them has the larger mean, and nothing else."""
    values = [(round((1 + rows.mean().item()) * 2**20),) for rows, _ in task.parts(2)]
    return _measure(
        task.name,
        "garbled comparison",
        _run_comparison,
        values,
        "both: which of two numbers of 32 bits is larger",
        "both follow the protocol",
        "compares one number, trains nothing",
    )


def _measure(
    task: str,
    way: str,
    function: Callable[..., Any],
    arguments: Sequence[Sequence[Any]],
    sees: str,
    assumes: str,
    note: str = "",
) -> SpectrumRow:
    results = run_parties(_measured, [(function, own) for own in arguments], deadline_seconds=3600.0)
    values, num_bytes, seconds, cpu_seconds = zip(*results, strict=True)
    return SpectrumRow(task, way, values[0], sum(num_bytes), max(seconds), sum(cpu_seconds), sees, assumes, note)


def _measured(party: Party, function: Callable[..., Any], own: Sequence[Any]) -> tuple[Any, int, float, float]:
    """Return what a party's function returns, its bytes, its seconds and its CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    value = function(party, *own)
    return value, party.sent_bytes, time.perf_counter() - wall, time.process_time() - cpu


def _run_federated(
    party: Party,
    way: str,
    widths: tuple[int, ...],
    rounds: int,
    lr: float,
    batch: int,
    data: tuple[Tensor, Tensor],
) -> float | None:
    """Run the server (party 0), which returns the accuracy, or a client."""
    torch.manual_seed(0)
    model, adding = MLP(widths[0], widths[1:-1], widths[-1]), WAYS[way].build(party)
    rows, targets = data[0].float(), data[1]
    for _ in range(rounds):
        if party.rank == _SERVER:
            weights = nn.utils.parameters_to_vector(model.parameters()).detach()
            for client in party.others:
                party.send(client, "weights", [weights])
            total = adding.collect(len(weights) + 1)
            weights = (weights.double() + total[:-1] / total[-1]).float()
            nn.utils.vector_to_parameters(weights, model.parameters())
        else:
            weights = party.receive(_SERVER, "weights").tensors[0]
            nn.utils.vector_to_parameters(weights, model.parameters())
            train_epoch(model, rows, targets, lr=lr, batch=batch)
            delta = nn.utils.parameters_to_vector(model.parameters()).detach() - weights
            count = torch.tensor([float(len(rows))], dtype=torch.float64)
            adding.contribute(torch.cat([delta.double() * count, count]))
    if party.rank != _SERVER:
        return None
    return float((model(rows).argmax(1) == targets).double().mean())


def train_epoch(model: nn.Module, rows: Tensor, targets: Tensor, *, lr: float, batch: int) -> None:
    """Pass over the rows once with plain SGD on the mean cross-entropy."""
    for x, y in zip(rows.split(batch), targets.split(batch), strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= lr * gradient


def _run_shared(party: Party, task: SpectrumTask | None, rows: Tensor, targets: Tensor) -> float | None:
    """Run one owner of data, of which the first returns the accuracy, or the dealer."""
    if task is None:
        serve_dealer(party)
        return None
    arithmetic, is_linear = SharedArithmetic(party, 2), not task.hidden
    inputs, labels = share_rows(arithmetic, _with_ones(rows)), _label_columns(targets, is_linear)
    shared_labels = share_rows(arithmetic, labels)
    held_out = encode_fixed(_with_ones(task.held_out_rows)) if party.rank == 0 else None
    if is_linear:
        weights = train_logistic_regression(
            arithmetic, inputs, shared_labels, steps=task.shared_passes, lr=task.shared_lr
        )
        scores = predict_scores(arithmetic, arithmetic.share(0, held_out), weights)
    else:
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
        batches = [(inputs[part], shared_labels[part]) for part in order.split(10 * task.batch)]
        net = SquareNet.share(arithmetic, (inputs.shape[1], task.hidden[0], labels.shape[1]), seed=0)
        net = train_square_net(arithmetic, net, batches, epochs=task.shared_passes, lr=task.shared_lr)
        scores = net.predict(arithmetic, arithmetic.share(0, held_out))
    opened = arithmetic.reveal(scores, 0)
    arithmetic.end()
    if opened is None:
        return None
    predicted = (opened[:, 0] > 0).long() if is_linear else opened.argmax(1)
    return float((predicted == task.held_out_targets).double().mean())


def _run_comparison(party: Party, value: int) -> None:
    run = run_garbler if party.rank == 0 else run_evaluator
    run(party, 1 - party.rank, comparator_circuit(_COMPARED_BITS), value)


def _with_ones(rows: Tensor) -> Tensor:
    return torch.cat([rows.double(), torch.ones(len(rows), 1, dtype=torch.float64)], 1)


def _label_columns(targets: Tensor, is_linear: bool) -> Tensor:
    return targets[:, None].double() if is_linear else F.one_hot(targets, 10).double()


def _to_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _to_bytes(data: Tensor) -> bytes:
    return data.numpy().tobytes()
