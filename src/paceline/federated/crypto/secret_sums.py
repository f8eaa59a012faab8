"""Ways to add vectors of several clients for a server: as they are, masked, in shares, or encrypted.

Each way is a class that is one party's side of it: clients contribute, the server collects. All but the
plain one use fixed-point numbers, and show the server the sum alone, which reveals enough: see
`paceline.studies.gradient_inversion`.
Invariant: every sum equals the plain one up to the rounding of each client's values to 2^-20.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from torch import Tensor

from paceline.errors import DataError, MissingExtraError
from paceline.federated.crypto.paillier import (
    PaillierPrivateKey,
    PaillierPublicKey,
    generate_keys,
    pack_slots,
    unpack_slots,
)
from paceline.federated.crypto.parties import Party
from paceline.federated.crypto.ring_shares import decode_fixed, encode_fixed
from paceline.federated.crypto.shamir_vectors import ShamirVector, rebuild_vector, split_vector
from paceline.federated.ring_sum import RingWords
from paceline.federated.secure_masks import (
    ClientKeys,
    MaskClient,
    MaskServer,
    MaskTerms,
    RoundTerms,
    add_mask,
)
from paceline.privacy.entropy import Entropy

_SERVER, _KEY_HOLDER = 0, 1
_SLOT_BITS = 40  # a sum of 2^19 with 20 fraction bits
_SHAMIR_SLOTS = 3  # of the 126 bits of the field
_HASH_BYTES, _SHARE_BYTES = 32, 16


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


class MaskedSum:
    """Updates under masks that cancel in the sum; see `paceline.federated.secure_masks`.

    The four messages of each round go through the server. The public keys that belong to names, which clients
    know beforehand, are exchanged between them at the start.
    """

    def __init__(self, party: Party) -> None:
        self._party, self._number, self._clients = party, 0, [*range(1, party.num_parties)]
        self._identity = Ed25519PrivateKey.generate()
        self._known: dict[str, Ed25519PublicKey] = {}
        if party.rank != _SERVER:
            public = self._identity.public_key()
            self._known[f"client-{party.rank}"] = public
            others = [client for client in self._clients if client != party.rank]
            for client in others:
                party.send(client, "identity", [_to_tensor(public.public_bytes_raw())])
            for client in others:
                data = _to_bytes(party.receive(client, "identity").tensors[0])
                self._known[f"client-{client}"] = Ed25519PublicKey.from_public_bytes(data)

    def contribute(self, values: Tensor) -> None:
        party, own = self._party, self._party.rank
        client = MaskClient(self._next_round(), own, self._identity, self._known, Entropy())
        party.send(_SERVER, "keys", [_to_tensor(client.advertise().to_bytes())])
        keys = self._receive_table(_SERVER, "all-keys")
        shares = client.share({rank: ClientKeys.read(data) for rank, data in keys.items()})
        self._send_table(_SERVER, "sealed-shares", shares)
        sealed = self._receive_table(_SERVER, "shares-for-you")
        words = RingWords(encode_fixed(values).numpy().view(np.uint64), np.zeros(0, np.uint64))
        client.mask(sealed, words)
        party.send(_SERVER, "masked", [_to_tensor(words.to_bytes())])
        survivors, lost = party.receive(_SERVER, "unmask").fields["clients"]
        revealed = client.reveal(survivors, lost)
        shown = {rank: share.to_bytes(_SHARE_BYTES, "little") for rank, share in revealed.items()}
        self._send_table(_SERVER, "revealed", shown)

    def collect(self, count: int) -> Tensor:
        party, server = self._party, MaskServer(self._next_round())
        received = {c: _to_bytes(party.receive(c, "keys").tensors[0]) for c in self._clients}
        keys = {c: one.to_bytes() for c, one in server.forward_keys(received).items()}
        for client in self._clients:
            self._send_table(client, "all-keys", keys)
        shares = {c: self._receive_table(c, "sealed-shares") for c in self._clients}
        for client, sealed in server.forward_shares(shares).items():
            self._send_table(client, "shares-for-you", sealed)
        masked = [_to_bytes(party.receive(c, "masked").tensors[0]) for c in self._clients]
        values = np.stack([np.frombuffer(one, np.uint64) for one in masked]).sum(0, dtype=np.uint64)
        words = RingWords(values, np.zeros(0, np.uint64))
        survivors, lost = server.requests(self._clients)
        for client in self._clients:
            party.send(client, "unmask", clients=[survivors, lost])
        answers = {c: self._receive_table(c, "revealed") for c in self._clients}
        revealed = {
            c: {owner: int.from_bytes(share, "little") for owner, share in answer.items()}
            for c, answer in answers.items()
        }
        for mask in server.masks_left(survivors, lost, revealed):
            add_mask(words, mask.key, mask.sign)
        return decode_fixed(torch.from_numpy(words.values.view(np.int64)))

    def _next_round(self) -> RoundTerms:
        # The study has one model on all clients, so its hash is not computed.
        number, self._number = self._number, self._number + 1
        names = {client: f"client-{client}" for client in self._clients}
        return RoundTerms(MaskTerms(b"privacy study"), number, bytes(_HASH_BYTES), names)

    def _send_table(self, to: int, kind: str, rows: Mapping[int, bytes]) -> None:
        self._party.send(to, kind, [_to_tensor(row) for row in rows.values()], ranks=[*rows])

    def _receive_table(self, sender: int, kind: str) -> dict[int, bytes]:
        message = self._party.receive(sender, kind)
        rows = zip(message.fields["ranks"], message.tensors, strict=True)
        return {rank: _to_bytes(row) for rank, row in rows}


class ShamirSum:
    """Shares of each update for every client, which adds what it holds; t of these sums rebuild the sum."""

    def __init__(self, party: Party) -> None:
        self._party, self._clients = party, range(1, party.num_parties)
        self._threshold = len(self._clients) // 2 + 1

    def contribute(self, values: Tensor) -> None:
        packed = pack_slots(encode_fixed(values).tolist(), _SLOT_BITS, _SHAMIR_SLOTS)
        shares = split_vector(packed, self._threshold, len(self._clients))
        held = shares[self._party.rank - 1]
        for client in self._clients:
            if client != self._party.rank:
                self._party.send_integers(client, "shares", shares[client - 1].values, _SHARE_BYTES)
        for client in self._clients:
            if client != self._party.rank:
                received = self._party.receive_integers(client, "shares")
                held = held + ShamirVector(self._party.rank, self._threshold, tuple(received))
        self._party.send_integers(_SERVER, "share-of-sum", held.values, _SHARE_BYTES)

    def collect(self, count: int) -> Tensor:
        sums = [
            ShamirVector(rank, self._threshold, tuple(self._party.receive_integers(rank, "share-of-sum")))
            for rank in self._clients
        ]
        packed = rebuild_vector(sums[-self._threshold :])
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

    def __init__(self, public: PaillierPublicKey, private: PaillierPrivateKey | None = None) -> None:
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
        if self._private is None:
            raise DataError("only the holder of the key decrypts", next_step="decrypt where the key is")
        packed = [self._private.decrypt(one) for one in self._split(data)]
        return decode_fixed(torch.tensor(unpack_slots(packed, _SLOT_BITS, self._num_slots, count)))

    def _join(self, ciphertexts: Sequence[int]) -> bytes:
        return b"".join(one.to_bytes(self._public.num_bytes, "little") for one in ciphertexts)

    def _split(self, data: bytes) -> list[int]:
        size = self._public.num_bytes
        return [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]


class CKKSCipher:
    """CKKS by TenSEAL: approximate arithmetic on encrypted vectors of up to 4,096 values.

    `EncryptedSum` adds with it, and `paceline.federated.crypto.encrypted_inference` computes linear scores.
    Values beyond 2^18 in magnitude wrap around. A decrypted vector has a small error that depends on the
    secret key, so whoever decrypts should not show many of them to who computes (Li and Micciancio 2021,
    On the security of homomorphic encryption on approximate numbers, EUROCRYPT).

    Args:
        context: of TenSEAL.
    """

    num_slots = 4096

    def __init__(self, context: Any) -> None:
        self._context = context

    @classmethod
    def generate(cls) -> CKKSCipher:
        """Generate keys for ring dimension 8192, with 128 bits of security.

        Raises:
            MissingExtraError: TenSEAL is not installed.
        """
        tenseal = require_tenseal()
        context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, 8192, coeff_mod_bit_sizes=[60, 40, 60])
        context.global_scale = 2**40
        return cls(context)

    @classmethod
    def read(cls, data: bytes) -> CKKSCipher:
        """Read a context without the secret key.

        Raises:
            DataError: the context contains the secret key.
            MissingExtraError: TenSEAL is not installed.
        """
        context = require_tenseal().context_from(data)
        if context.is_private():
            raise DataError(
                "the CKKS context contains the secret key of its owner",
                next_step="send what CKKSCipher.public_bytes returns, and generate new keys",
            )
        return cls(context)

    def public_bytes(self) -> bytes:
        """Return the context with the public key alone."""
        only_public = {"save_secret_key": False, "save_galois_keys": False, "save_relin_keys": False}
        return bytes(self._context.serialize(save_public_key=True, **only_public))

    def encrypt(self, values: Tensor) -> bytes:
        """Encrypt a vector, float64 [n]."""
        return bytes(require_tenseal().ckks_vector(self._context, values.tolist()).serialize())

    def add(self, parts: Sequence[bytes]) -> bytes:
        """Add encrypted vectors."""
        total, *others = [self._read_vector(part) for part in parts]
        for other in others:
            total += other
        return bytes(total.serialize())

    def add_weighted(self, parts: Sequence[bytes], weights: Tensor, bias: float, count: int) -> bytes:
        """Return the encrypted vector `bias + sum_j weights[j] * parts[j]`.

        Args:
            parts: D encrypted vectors of `count` values each.
            weights: float64 [D], not encrypted.
            bias: added to every value.
        """
        # Fresh noise under the public key, so that the result is a ciphertext also with weights of zero.
        total = require_tenseal().ckks_vector(self._context, [bias] * count)
        for part, weight in zip(parts, weights.tolist(), strict=True):
            total += self._read_vector(part) * weight
        return bytes(total.serialize())

    def decrypt(self, data: bytes, count: int) -> Tensor:
        """Decrypt a vector of so many values.

        Raises:
            DataError: this cipher has no secret key.
        """
        if not self._context.is_private():
            raise DataError("only the holder of the key decrypts", next_step="decrypt where the key is")
        return torch.tensor(self._read_vector(data).decrypt()[:count], dtype=torch.float64)

    def _read_vector(self, data: bytes) -> Any:
        return require_tenseal().ckks_vector_from(self._context, data)


def require_tenseal() -> Any:
    """Return the module tenseal.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import tenseal
    except ImportError as error:
        raise MissingExtraError(
            "CKKS is computed by TenSEAL, which is not installed", next_step="pip install tenseal"
        ) from error
    return tenseal


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
    "masks": SumWay(
        MaskedSum,
        "server: the sum; clients: nothing of each other",
        "less than two thirds of the clients collude with the server; clients know each other's keys",
    ),
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


def _to_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _to_bytes(data: Tensor) -> bytes:
    return data.numpy().tobytes()
