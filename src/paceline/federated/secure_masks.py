"""Secure aggregation: clients add masks that cancel in the sum, and a server learns nothing else.

A round has four messages of a client, and between them the server forwards what it has received:

1. keys: two fresh X25519 keys and the hash of the model, signed with the Ed25519 key of the client's name;
2. shares: of its mask key and of the seed of its own mask, for each neighbour, sealed with AES-GCM;
3. masked input: its words plus one mask for each neighbour (AES-256-CTR under an HKDF of the agreed key,
   added by the one and subtracted by the other) plus its own mask;
4. unmask: of each neighbour whose input arrived the share of the seed, of each other one that of the key.

A client can be lost before any of them. If its input has not arrived, its masks with its neighbours are
computed again from its mask key; if it has, only its own mask is removed, from its seed.

Invariants: keys are fresh in every round. A client reveals one kind of share of a name in a round, and notes
that before it does, so not even after a restart can the server get both, which together unmask one input.
Against whom: docs/howto/private.md and SECURITY.md. No active server: it is honest but curious.
Sources: Bonawitz et al. 2017, Practical Secure Aggregation, CCS, figure 4; Bell et al. 2020, Secure
Single-Server Aggregation with (Poly)Logarithmic Overhead, CCS (the graph of neighbours).
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from paceline.errors import CommunicationError, RecipeError
from paceline.federated.ring_sum import RingWords
from paceline.federated.shamir import SECRET_BITS, SHARE_BYTES, rebuild, split
from paceline.privacy.entropy import Entropy

_HASH_BYTES, _KEY_BYTES, _SIGNATURE_BYTES = 32, 32, 64
_NONCE_BYTES, _TAG_BYTES = 12, 16
KEYS_BYTES = 2 * _KEY_BYTES + _HASH_BYTES + _SIGNATURE_BYTES
SEALED_BYTES = _NONCE_BYTES + 2 * SHARE_BYTES + _TAG_BYTES
_BLOCK_BYTES = 1 << 18  # of a mask: as much as stays in a cache while it is added
_ZEROS = bytes(_BLOCK_BYTES)
MIN_CLIENTS = 2
ShareKind = Literal["key", "seed"]


class SecureSumError(CommunicationError):
    """A secure sum cannot be computed, or a participant has deviated from the protocol; names it."""


@dataclass(frozen=True)
class MaskTerms:
    """The parts of the protocol on which all participants of a run agree.

    Args:
        run: identifier of the run, which every key is bound to.
        threshold: share of the holders of a secret that can rebuild it, above one half.
        neighbours: with how many clients each one shares masks and secrets; 0: all.
    """

    run: bytes
    threshold: float = 0.67
    neighbours: int = 0

    def shares_needed(self, num_holders: int) -> int:
        """Return how many of the shares of a secret rebuild it."""
        return max(1, math.ceil(self.threshold * num_holders - 1e-9))

    def neighbours_of(self, keys: Mapping[int, ClientKeys]) -> dict[int, list[int]]:
        """Return the neighbours of each client: k to both sides in a circle, or all.

        The order of the circle is a hash of all keys of the round, so no participant can choose it.
        """
        clients, degree = [*keys], self.neighbours
        if not degree or degree >= len(clients) - 1:
            return {client: [other for other in clients if other != client] for client in clients}
        salt = hashlib.sha256(b"".join(keys[client].mask_key for client in sorted(clients))).digest()
        circle = sorted(clients, key=lambda c: hashlib.sha256(salt + struct.pack("<I", c)).digest())
        steps = [step for half in range(1, degree // 2 + 1) for step in (half, -half)]
        return {
            client: sorted(circle[(place + step) % len(circle)] for step in steps)
            for place, client in enumerate(circle)
        }


@dataclass(frozen=True)
class RoundTerms:
    """A round of the protocol.

    Args:
        terms: of the run.
        number: of the round.
        model: SHA-256 of the weights with which it begins.
        names: of the clients of the cohort, by position.
    """

    terms: MaskTerms
    number: int
    model: bytes
    names: Mapping[int, str]

    def info(self, purpose: str, *positions: int) -> bytes:
        """Return what a derived key is bound to: run, round, purpose and clients."""
        names = [self.names[position].encode() for position in positions]
        head = struct.pack("<Q", self.number) + self.terms.run + purpose.encode()
        return head + b"".join(struct.pack("<I", len(name)) + name for name in names)


class ClientKeys(NamedTuple):
    """The first message of a client.

    Args:
        seal_key, mask_key: public X25519 keys.
        model: hash of the weights that it has received.
        signature: of all of this.
    """

    seal_key: bytes
    mask_key: bytes
    model: bytes
    signature: bytes

    def to_bytes(self) -> bytes:
        """Return the message, `KEYS_BYTES` long."""
        return b"".join(self)

    @classmethod
    def read(cls, data: bytes) -> ClientKeys:
        """Read a message.

        Raises:
            SecureSumError: it has another length.
        """
        if len(data) != KEYS_BYTES:
            raise SecureSumError(f"a message with keys has {len(data)} bytes, and not {KEYS_BYTES}")
        ends = np.cumsum([0, _KEY_BYTES, _KEY_BYTES, _HASH_BYTES, _SIGNATURE_BYTES]).tolist()
        return cls(*(data[a:b] for a, b in pairwise(ends)))

    def signed(self, round_terms: RoundTerms, position: int) -> bytes:
        """Return what is signed."""
        return round_terms.info("keys", position) + self.seal_key + self.mask_key + self.model


class ShareLedger:
    """The record of the kinds of shares that a client has revealed.

    Args:
        path: of the file that outlives a restart; None: in memory only, for clients of a simulation.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self._kinds = {key: kind for key, _, kind in (line.rpartition(" ") for line in lines)}

    def note(self, asked: Sequence[tuple[str, ShareKind]], round_terms: RoundTerms) -> None:
        """Note which kinds are about to be revealed; nothing is noted if one of them must not be.

        Args:
            asked: the name of the client whose secret it is, and the kind.
        Raises:
            SecureSumError: both kinds of one name, now or with what was revealed in this round before.
        """
        kinds, head = dict(self._kinds), f"{round_terms.terms.run.hex()} {round_terms.number}"
        for name, kind in asked:
            if kinds.setdefault(f"{head} {name}", kind) != kind:
                raise SecureSumError(
                    f"the server asks for both kinds of share of client {name} in round {round_terms.number},"
                    " with which it could unmask the update of that client alone",
                    next_step="do not trust this server: look at who has changed it",
                )
        new = {key: kind for key, kind in kinds.items() if key not in self._kinds}
        self._kinds = kinds
        if self._path is not None and new:
            with self._path.open("a") as file:
                file.writelines(f"{key} {kind}\n" for key, kind in new.items())
                file.flush()
                os.fsync(file.fileno())


PUBLIC_KEYS_FILE = "clients.keys"


@dataclass(frozen=True)
class ClientIdentity:
    """What a client on a machine of its own has beforehand.

    Args:
        key: the private key that belongs to its name.
        known: public keys by name.
        ledger: of the shares that it has revealed.
    """

    key: Ed25519PrivateKey
    known: Mapping[str, Ed25519PublicKey]
    ledger: ShareLedger

    @staticmethod
    def make(folder: Path, name: str) -> Path:
        """Write a private key to NAME.key, and add its public key to `clients.keys`; return the former.

        Raises:
            RecipeError: the name has a key already, or is no name of a file; or a file cannot be written.
        """
        path, key = folder / f"{name}.key", Ed25519PrivateKey.generate()
        if not name.isprintable() or name != name.strip() or name in ("", ".", "..") or "/" in name:
            raise RecipeError(f"'{name}' is no name of a file", next_step="use letters, digits, - and _")
        line = f"ed25519 {key.public_key().public_bytes_raw().hex()} {name}\n"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
            with (folder / PUBLIC_KEYS_FILE).open("a", encoding="utf-8") as lines:
                lines.write(line)
        except OSError as error:
            raise RecipeError(
                f"cannot write the key of client {name}: {error.strerror}: {error.filename}",
                next_step="choose another folder, or use the key that is there",
            ) from error
        return path

    @classmethod
    def read(cls, name: str, key_file: Path, keys_file: Path) -> ClientIdentity:
        """Read what `make` has written; what is revealed is noted in NAME.key.revealed.

        Raises:
            RecipeError: a file is missing or invalid, or other users can read the private key.
        """
        try:
            mode = stat.S_IMODE(key_file.stat().st_mode)
            key = load_pem_private_key(key_file.read_bytes(), None)
            lines = [line.split(" ", 2) for line in keys_file.read_text("utf-8").splitlines() if line.strip()]
            known = {n: Ed25519PublicKey.from_public_bytes(bytes.fromhex(text)) for _, text, n in lines}
            ledger = ShareLedger(key_file.with_name(key_file.name + ".revealed"))
        except (OSError, ValueError, TypeError) as error:
            raise RecipeError(
                f"cannot read the keys of client {name}: {error}",
                next_step="make a key with `paceline certificate FOLDER --client NAME`, and give every client"
                " the lines of all clients.keys in one file",
            ) from error
        if mode & 0o077 or not isinstance(key, Ed25519PrivateKey):
            problem = f"{key_file} has mode {mode:04o}, and only its owner may read an Ed25519 key"
        elif len(known) < len(lines):
            problem = f"{keys_file} has two keys of one client"
        elif name not in known or known[name] != key.public_key():
            problem = f"the public key of {name} in {keys_file} is not that of {key_file}"
        else:
            return cls(key, known, ledger)
        raise RecipeError(problem, next_step="look at where the two files come from")


class MaskClient:
    """A client in one round.

    Args:
        round_terms: of the round.
        position: of the client in the cohort.
        identity: the private key that belongs to its name.
        known: public keys by name.
        entropy: of its secrets.
        ledger: of what it has revealed.
    """

    def __init__(
        self,
        round_terms: RoundTerms,
        position: int,
        identity: Ed25519PrivateKey,
        known: Mapping[str, Ed25519PublicKey],
        entropy: Entropy,
        ledger: ShareLedger | None = None,
    ) -> None:
        self._round, self._position, self._identity, self._known = round_terms, position, identity, known
        self._entropy, self._ledger = entropy, ledger or ShareLedger()
        self._mask_secret, self._seed = entropy.integer(SECRET_BITS), entropy.integer(SECRET_BITS)
        self._seal = X25519PrivateKey.from_private_bytes(entropy.bytes(_KEY_BYTES))
        self._mask = mask_private_key(self._mask_secret)
        self._keys: dict[int, ClientKeys] = {}
        self._neighbours: list[int] = []
        self._held: dict[int, tuple[int, int]] = {}

    # -- message 1

    def advertise(self) -> ClientKeys:
        """Return the keys of this round, and the hash of the model that this client has, signed."""
        seal, mask = (key.public_key().public_bytes_raw() for key in (self._seal, self._mask))
        unsigned = ClientKeys(seal, mask, self._round.model, b"")
        signature = self._identity.sign(unsigned.signed(self._round, self._position))
        return unsigned._replace(signature=signature)

    # -- message 2

    def share(self, keys: Mapping[int, ClientKeys]) -> dict[int, bytes]:
        """Return the sealed shares of this client's secrets by the position of their holder.

        Args:
            keys: of all clients whose first message has arrived.
        Raises:
            SecureSumError: too few clients; keys that the owner of a name has not signed; another model.
        """
        check_keys(keys, self._round, self._known)
        self._keys = {**keys}
        self._neighbours = self._round.terms.neighbours_of(keys)[self._position]
        holders = [self._position, *self._neighbours]
        needed = self._round.terms.shares_needed(len(holders))
        points = [holder + 1 for holder in holders]
        of_key = split(self._mask_secret, points, needed, self._entropy)
        of_seed = split(self._seed, points, needed, self._entropy)
        self._held[self._position] = of_key[self._position + 1], of_seed[self._position + 1]
        return {
            holder: self._seal_shares(holder, of_key[holder + 1], of_seed[holder + 1])
            for holder in self._neighbours
        }

    def _seal_shares(self, holder: int, of_key: int, of_seed: int) -> bytes:
        nonce = self._entropy.bytes(_NONCE_BYTES)
        plain = of_key.to_bytes(SHARE_BYTES, "little") + of_seed.to_bytes(SHARE_BYTES, "little")
        aad = self._round.info("shares", self._position, holder)
        return nonce + self._sealer(holder).encrypt(nonce, plain, aad)

    def _sealer(self, other: int) -> AESGCM:
        pair = sorted((self._position, other))
        return AESGCM(agree(self._seal, self._keys[other].seal_key, self._round.info("seal", *pair)))

    # -- message 3

    def mask(self, sealed: Mapping[int, bytes], words: RingWords) -> None:
        """Mask words in place.

        Args:
            sealed: the shares that neighbours have sealed for this client, by position.
        Raises:
            SecureSumError: too few neighbours have sent any; a share was changed on the way.
        """
        terms, position = self._round.terms, self._position
        needed = terms.shares_needed(1 + len(self._neighbours))
        if len(sealed) + 1 < needed:
            raise too_few(self._round, 1 + len(sealed), needed, "have sent their shares")
        for other, data in sealed.items():
            aad = self._round.info("shares", other, position)
            try:
                plain = self._sealer(other).decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], aad)
            except InvalidTag:
                raise SecureSumError(
                    f"the shares that client {self._round.names[other]} has sealed for"
                    f" {self._round.names[position]} were changed on the way",
                    next_step="look at who can change messages between clients and server",
                ) from None
            of_key, of_seed = plain[:SHARE_BYTES], plain[SHARE_BYTES:]
            self._held[other] = int.from_bytes(of_key, "little"), int.from_bytes(of_seed, "little")
            pair = pair_mask_key(self._round, self._mask, position, other, self._keys[other].mask_key)
            add_mask(words, pair, sign_of(position, other))
        add_mask(words, own_mask_key(self._round, position, self._seed), 1)

    # -- message 4

    def reveal(self, survivors: Collection[int], lost: Collection[int]) -> dict[int, int]:
        """Return the shares that unmask the sum, by the position of the client whose secret it is.

        Args:
            survivors: clients whose input has arrived: the share of their seed is revealed.
            lost: clients whose input has not arrived: that of their mask key.
        Raises:
            SecureSumError: a name is asked for both ways, or too few inputs have arrived.
        """
        holders, names = {self._position, *self._neighbours}, self._round.names
        needed = self._round.terms.shares_needed(len(holders))
        arrived = holders & {*survivors}
        if len(arrived) < needed:
            raise too_few(self._round, len(arrived), needed, "have sent their masked updates")
        asked: list[tuple[int, ShareKind]] = [(p, "seed") for p in survivors if p in self._held]
        asked += [(p, "key") for p in lost if p in self._held]
        self._ledger.note([(names[p], kind) for p, kind in asked], self._round)
        return {p: self._held[p][kind == "seed"] for p, kind in asked}


def check_keys(
    keys: Mapping[int, ClientKeys], round_terms: RoundTerms, known: Mapping[str, Ed25519PublicKey]
) -> None:
    """Check the keys that a server has forwarded.

    Raises:
        SecureSumError: there are too few; a name has no known key, or a signature is not that of the name;
            clients have other models.
    """
    require_clients(round_terms.number, len(keys))
    for position, message in keys.items():
        name = round_terms.names[position]
        if name not in known:
            raise SecureSumError(
                f"nobody has given this client the public key of {name}, which takes part in round"
                f" {round_terms.number}",
                next_step="add its line to the file of public keys of every client, or look at who has sent"
                " this name",
            )
        try:
            known[name].verify(message.signature, message.signed(round_terms, position))
        except InvalidSignature:
            raise SecureSumError(
                f"the keys of client {name} in round {round_terms.number} are not signed with the key that"
                " belongs to this name: they were changed on the way",
                next_step="look at who can change messages between clients and server",
            ) from None
        if message.model != round_terms.model:
            raise SecureSumError(
                f"client {name} has received other weights for round {round_terms.number} than others: the"
                " difference of two updates could show one of them",
                next_step="do not trust this server: all clients of a round begin with the same model",
            )


def require_clients(number: int, num_clients: int) -> None:
    """Check that a round has more than one client.

    Raises:
        SecureSumError: it has not.
    """
    if num_clients < MIN_CLIENTS:
        raise SecureSumError(
            f"round {number} has a cohort of {num_clients}, and the sum over one client is its update",
            where="federated.secure",
            next_step="raise federated.cohort",
        )


def too_few(round_terms: RoundTerms, found: int, needed: int, what: str) -> SecureSumError:
    """Return the error of a round from which too many clients were lost."""
    return SecureSumError(
        f"too few clients are left in round {round_terms.number}: {needed} of those that hold a secret must"
        f" answer, and {found} {what}",
        where="federated.threshold",
        next_step="lower federated.threshold (above 0.5), or raise federated.cohort or federated.neighbours",
    )


# -- masks


class Mask(NamedTuple):
    """A mask that is still in the sum.

    Args:
        key: of its stream.
        sign: 1 or -1, with which it has to be added to remove it.
    """

    key: bytes
    sign: int


def add_mask(words: RingWords, key: bytes, sign: int) -> None:
    """Add the stream of a key to words in place, or subtract it."""
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    longest = max(words.numbers.nbytes, words.values.nbytes)
    buffer = bytearray(min(_BLOCK_BYTES, longest + 7 & -8))  # whole words of either kind
    for part in (words.numbers, words.values):
        stream = np.frombuffer(buffer, part.dtype)
        step = max(1, len(stream))
        for start in range(0, len(part), step):
            block = part[start : start + step]
            encryptor.update_into(memoryview(_ZEROS)[: block.nbytes], buffer)
            if sign > 0:
                block += stream[: len(block)]
            else:
                block -= stream[: len(block)]


def mask_private_key(secret: int) -> X25519PrivateKey:
    """Return the private key that follows from a secret, of which shares are given away."""
    data = secret.to_bytes(SHARE_BYTES, "little")
    return X25519PrivateKey.from_private_bytes(derive(data, b"mask key"))


def agree(own: X25519PrivateKey, other: bytes, info: bytes) -> bytes:
    """Return the key on which two clients agree for a purpose, 32 bytes."""
    return derive(own.exchange(X25519PublicKey.from_public_bytes(other)), info)


def derive(secret: bytes, info: bytes) -> bytes:
    """Return HKDF-SHA-256 of a secret, 32 bytes."""
    return HKDF(hashes.SHA256(), _KEY_BYTES, None, info).derive(secret)


def pair_mask_key(
    round_terms: RoundTerms, own: X25519PrivateKey, position: int, other: int, other_key: bytes
) -> bytes:
    """Return the key of the mask of two clients, the same for both."""
    return agree(own, other_key, round_terms.info("pair", *sorted((position, other))))


def own_mask_key(round_terms: RoundTerms, position: int, seed: int) -> bytes:
    """Return the key of the mask that only one client adds."""
    return derive(seed.to_bytes(SHARE_BYTES, "little"), round_terms.info("own", position))


def sign_of(position: int, other: int) -> int:
    """Return the sign with which a client adds the mask that it shares with another one."""
    return 1 if position < other else -1


# -- the server


class MaskServer:
    """The server in one round: it forwards messages, and computes which masks are left in a sum.

    Args:
        round_terms: of the round.
    """

    def __init__(self, round_terms: RoundTerms) -> None:
        self._round = round_terms
        self.keys: dict[int, ClientKeys] = {}
        self._neighbours: dict[int, list[int]] = {}
        self.sharers: set[int] = set()

    def forward_keys(self, received: Mapping[int, bytes]) -> dict[int, ClientKeys]:
        """Return the keys that every client receives."""
        self.keys = {p: ClientKeys.read(received[p]) for p in sorted(received)}
        self._neighbours = self._round.terms.neighbours_of(self.keys)
        return self.keys

    def forward_shares(self, received: Mapping[int, Mapping[int, bytes]]) -> dict[int, dict[int, bytes]]:
        """Return by client the shares that others have sealed for it."""
        self.sharers = {*received}
        return {
            holder: {owner: received[owner][holder] for owner in received if holder in received[owner]}
            for holder in received
        }

    def requests(self, arrived: Collection[int]) -> tuple[list[int], list[int]]:
        """Return the clients whose input has arrived, and those of which it is missing.

        Raises:
            SecureSumError: too few inputs have arrived.
        """
        survivors = sorted(self.sharers & {*arrived})
        num_holders = 1 + max(map(len, self._neighbours.values()), default=0)
        needed = self._round.terms.shares_needed(num_holders)
        if len(survivors) < max(needed, MIN_CLIENTS):
            raise too_few(
                self._round, len(survivors), max(needed, MIN_CLIENTS), "have sent their masked updates"
            )
        return survivors, sorted(self.sharers - {*survivors})

    def masks_left(
        self, survivors: Sequence[int], lost: Sequence[int], revealed: Mapping[int, Mapping[int, int]]
    ) -> Iterator[Mask]:
        """Yield the masks that must be added to the sum of the inputs of the survivors.

        Their number is at most that of the survivors, plus for each lost client that of its neighbours.

        Args:
            revealed: for each client that has answered, shares by the position of their owner.
        Raises:
            SecureSumError: too few shares of a client; shares that do not fit its key.
        """
        for position in survivors:
            yield Mask(own_mask_key(self._round, position, self._rebuild(position, revealed)), -1)
        present = {*survivors}
        for position in lost:
            private = mask_private_key(self._rebuild(position, revealed))
            if private.public_key().public_bytes_raw() != self.keys[position].mask_key:
                raise SecureSumError(
                    f"the shares of the key of client {self._round.names[position]} do not fit the key"
                    " that it has signed",
                    next_step="find the client that runs another program than the others",
                )
            for other in self._neighbours[position]:
                if other in present:
                    other_key = self.keys[other].mask_key
                    pair = pair_mask_key(self._round, private, position, other, other_key)
                    yield Mask(pair, -sign_of(other, position))

    def _rebuild(self, owner: int, revealed: Mapping[int, Mapping[int, int]]) -> int:
        """Return a secret of a client from the shares of those that hold it."""
        shares = {holder + 1: answer[owner] for holder, answer in revealed.items() if owner in answer}
        needed = self._round.terms.shares_needed(1 + len(self._neighbours[owner]))
        if len(shares) < needed:
            found = f"have answered for client {self._round.names[owner]}"
            raise too_few(self._round, len(shares), needed, found)
        return rebuild(dict([*shares.items()][:needed]))
