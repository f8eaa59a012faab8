"""Cryptography for parties that compute together: secret shares, encrypted sums, garbled circuits.

`parties` starts and connects processes; `ring_shares` adds and multiplies shares in Z_2^64, and
`shared_training` trains on them; `shamir_vectors` splits vectors into t of n shares; `paillier` adds what
is encrypted; `garbled_circuit` computes a boolean function of two inputs, with `oblivious_transfer`;
`secret_sums` adds vectors in five ways; `encrypted_inference` scores rows that only their owner can read. All
of them are small, correct and slow, and for parties that are honest but curious: there is no defence against
one that deviates, and none is constant-time.
"""

from paceline.federated.crypto.encrypted_inference import ScoringClient, serve_scores
from paceline.federated.crypto.garbled_circuit import (
    Circuit,
    adder_circuit,
    bitwise_circuit,
    comparator_circuit,
    run_evaluator,
    run_garbler,
)
from paceline.federated.crypto.oblivious_transfer import receive_obliviously, send_obliviously
from paceline.federated.crypto.paillier import generate_keys, pack_slots, unpack_slots
from paceline.federated.crypto.parties import Party, connect_parties, run_parties
from paceline.federated.crypto.ring_shares import (
    SharedArithmetic,
    decode_fixed,
    encode_fixed,
    serve_dealer,
    split_secret,
)
from paceline.federated.crypto.secret_sums import WAYS
from paceline.federated.crypto.shamir_vectors import rebuild_vector, split_vector
from paceline.federated.crypto.shared_training import SquareNet, train_logistic_regression, train_square_net

__all__ = [
    "WAYS",
    "Circuit",
    "Party",
    "ScoringClient",
    "SharedArithmetic",
    "SquareNet",
    "adder_circuit",
    "bitwise_circuit",
    "comparator_circuit",
    "connect_parties",
    "decode_fixed",
    "encode_fixed",
    "generate_keys",
    "pack_slots",
    "rebuild_vector",
    "receive_obliviously",
    "run_evaluator",
    "run_garbler",
    "run_parties",
    "send_obliviously",
    "serve_dealer",
    "serve_scores",
    "split_secret",
    "split_vector",
    "train_logistic_regression",
    "train_square_net",
    "unpack_slots",
]
