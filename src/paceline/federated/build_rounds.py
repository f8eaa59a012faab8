"""The construction of the rule of federated rounds, with its server, its reduction and what a task keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.comm.reduction.gradients import GradientReduction, LocalReducer
from paceline.errors import StrategyError
from paceline.federated.client_codec import ClientCodec
from paceline.federated.client_keeper import KeeperRounds, KeptVectors
from paceline.federated.cohort_table import read_cohort_replay
from paceline.federated.rounds import FederatedRounds, buffer_slot
from paceline.federated.server_step import ServerStep
from paceline.federated.vectorized_clients import build_vectorized
from paceline.parallel.gradient_reduction import build_client_reduction
from paceline.parallel.model_layout import ModelLayout
from paceline.parallel.model_runner import ModelRunner
from paceline.parallel.session_context import SessionContext
from paceline.privacy.entropy import KNOWN_ENTROPY, PRIVACY_KEY, RELEASED_FIELDS, PrivacyRecord
from paceline.state.slot import TensorSlot
from paceline.state.train_state import TrainState
from paceline.sync.every_step import EveryStep
from paceline.sync.outer_optimizer import AdaptiveServer
from paceline.sync.sync_rule import SyncRule


def build_federated_rounds(context: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """Build the rule, and register the moments of the server optimizer as state; collective."""
    recipe, runner = context.recipe, layout.runner
    outer = recipe.outer

    def build(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if outer.name == "sgd":
            return torch.optim.SGD(groups, lr=outer.lr, momentum=outer.momentum)
        return AdaptiveServer(groups, outer.name, outer.lr, outer.betas, outer.eps)

    server = ServerStep(runner.sharded_model.updates, build)
    tensors: dict[TensorSlot, Tensor] = dict(server.vectors)
    if runner.buffers.num_values:
        values = torch.zeros(runner.buffers.num_values, dtype=torch.float64, device=context.device)
        tensors[buffer_slot(values)] = values
    state.extra_states["server"] = server
    keeper = _build_keeper(context, runner)
    if keeper is not None:
        state.extra_states["kept"] = keeper.vectors
        if keeper.shared.numel():
            tensors[keeper.slot] = keeper.shared
    codec, errors = ClientCodec.of(recipe), None
    if codec is not None and codec.keeps_errors and not recipe.federated.is_networked:
        num_values = sum(v.numel() * (1 + v.is_complex()) for v in server.vectors.values())
        first = torch.zeros(num_values, dtype=codec.dtype, device=context.device)
        errors = state.extra_states["errors"] = KeptVectors(first, context.mesh.data, context.net)
    step = (context.components.rule or EveryStep)(
        context.mesh.inside,
        context.net,
        LocalReducer(dict(runner.sharded_model.computes)),
        phases=context.phases,
        items_per_sample=context.rule_inputs.items_per_sample,
    )
    rule = _choose_rounds(context)(
        step,
        server,
        _build_reduction(context, tensors),
        recipe,
        group=context.mesh.data,
        net=context.net,
        phases=context.phases,
        note=context.note,
        stop_requested=context.rule_inputs.stop_requested,
        keeper=keeper,
        codec=codec,
        errors=errors,
        private=context.rule_inputs.private,
        vectorized=build_vectorized(context, layout, state, server.start)
        if recipe.federated.vectorize
        else None,
    )
    _note_privacy(context, state)
    if recipe.debug.replay_arrivals is not None and recipe.federated.vectorize:
        raise StrategyError(
            "clients that train as one batched computation cannot leave out those that were late",
            where="debug.replay_arrivals",
            next_step="set federated.vectorize = 0",
        )
    rule.slots, rule.replay = tensors, read_cohort_replay(recipe.debug.replay_arrivals)
    return rule


def _note_privacy(context: SessionContext, state: TrainState) -> None:
    """Note what the server of a secure sum learns, as an event, in checkpoints and in the result."""
    settings, is_known = context.recipe.federated, context.recipe.debug.entropy_seed is not None
    if settings.secure == "none" or context.components.federated is not None:
        return
    released = RELEASED_FIELDS if settings.secure == "masks" else ["all of the update of each client"]
    if settings.is_networked:
        released = [*released, "the number of samples of each client, when it joins"]
    record = {
        "secure": settings.secure,
        "released": released,
        "warning": KNOWN_ENTROPY if is_known else "",
    }
    state.keep(PRIVACY_KEY, PrivacyRecord(record))
    context.note("privacy", record)
    if is_known:
        context.warn(f"warning: {KNOWN_ENTROPY} (debug.entropy_seed)")
    if settings.is_networked:
        context.warn(
            "clients need --identity and --keys: whoever gives them the file of public keys could take the"
            " place of any of them, and must not be this server"
        )
    elif settings.secure == "masks":
        context.warn(
            "clients are simulated: this job makes the keys of all of them, so the masks hide nothing from it"
        )


def _choose_rounds(context: SessionContext) -> Callable[..., FederatedRounds]:
    """Return the class of the rule: of simulated clients, or of those that connect."""
    settings = context.recipe.federated
    if settings.secure == "masks" and settings.is_networked:
        from paceline.federated.secure_network import SecureNetworkRounds

        return SecureNetworkRounds
    if settings.secure != "none" and context.components.federated is None:
        from paceline.federated.secure_rounds import SecureRounds

        return SecureRounds
    if context.components.federated is not None or not settings.is_networked:
        return context.components.federated or FederatedRounds
    # It needs gRPC, which simulated clients do not.
    from paceline.federated.network_rounds import BufferedRounds, NetworkRounds

    return BufferedRounds if settings.buffer else NetworkRounds


def _build_reduction(context: SessionContext, tensors: Mapping[TensorSlot, Tensor]) -> GradientReduction:
    """Return the sum over clients: in the tree, or of words in a ring; collective."""
    if context.recipe.federated.secure == "none":
        return build_client_reduction(context, tensors)
    # It needs cryptography, which plain sums do not.
    from paceline.federated.secure_rounds import build_ring_reduction

    return build_ring_reduction(context, tensors)


def _build_keeper(context: SessionContext, runner: ModelRunner) -> KeeperRounds | None:
    """Return what the task keeps of each client; None: nothing.

    Raises:
        StrategyError: clients should run as one batched computation, which has no correction by client, or
            connect over a network.
    """
    keeper = context.rule_inputs.keeper
    if keeper is None:
        return None
    if context.recipe.federated.is_networked:
        raise StrategyError(
            "the task keeps something of each client (Task(keeper=...)), which those of"
            " a network do not send",
            where="federated.clients",
            next_step="set federated.clients to a number of simulated clients, or leave the keeper out",
        )
    if context.recipe.federated.secure != "none":
        raise StrategyError(
            "the task keeps something of each client (Task(keeper=...)), and the server of a secure sum sees"
            " no client alone",
            where="federated.secure",
            next_step='set federated.secure = "none", or leave the keeper out',
        )
    if context.recipe.federated.vectorize:
        raise StrategyError(
            "the task keeps something of each client (Task(keeper=...)), and a batched step has no correction"
            " by client",
            where="federated.vectorize",
            next_step="set federated.vectorize = 0",
        )
    parameters = {slot.name: p.detach() for slot, p in runner.sharded_model.computes.items()}
    return KeeperRounds(keeper, parameters, context.mesh.data, context.net)
