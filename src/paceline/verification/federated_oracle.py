"""The oracle of federated rounds, a plain loop over the cohort in one process, and the comparison with it.

Shared with the run is what defines it: who takes part in a round, the samples and keys of the local steps
(`ClientOrder`), and what `Oracle` shares. Local training, weights, the tree of additions, the mean, the
server optimizer and the buffers are implemented here a second time, without hooks or collectives.

Before each round the oracle takes over the state of rank 0, so errors cannot add up over rounds. In a
reproducible run both sides must have the same bits. In another run a bound follows from the task: the oracle
repeats the round with every weight moved by one rounding in a random direction, and what differs is what
rounding leaves undecided (Vignes 2004, as in `oracle_update`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.group_collectives import broadcast_text
from paceline.comm.net import Net
from paceline.errors import StrategyError
from paceline.federated.client_codec import ClientCodec
from paceline.federated.cohorts import ClientOrder, CohortMember, build_order_of_clients
from paceline.parallel.state_hash import state_sha256
from paceline.recipe.recipe import Recipe
from paceline.session.session import Session
from paceline.verification.diagnosis import DIFFERENT_START, UNKNOWN_CAUSE, ErrorDiagnosis
from paceline.verification.error_bounds import compare_tensors, largest_magnitude, unit_roundoff
from paceline.verification.oracle import (
    Oracle,
    Tensors,
    accumulate_shards,
    as_reals,
    rule_of_buffer,
    tree_sum,
)
from paceline.verification.verification_report import VerificationReport

_MODEL, _SERVER, _ERRORS = "model/", "server/", "errors/"
_DRAWS, _MARGIN = 2, 8.0


@dataclass(frozen=True)
class ClientResult:
    """The update of one client.

    Args:
        weight: in the mean.
        factor: of its update in the sum: the weight, times what a clip leaves.
        total, count: sums of the loss over its local steps.
        update: change of each trained parameter, float64, neither clipped nor weighted; under a codec
            clipped, and as the server decodes it.
        error: the quantisation error that the client keeps; None: none.
        buffers: change of each buffer, float64.
    """

    weight: float
    factor: float
    total: float
    count: float
    update: Tensors
    buffers: Tensors
    error: tuple[str, Tensor] | None = None


class FederatedOracle:
    """Rounds of clients, run one after another by one process.

    Args:
        oracle: its model and optimizer are those of every client.
        recipe: of the run.
        order: who takes part, and on which samples.
    """

    def __init__(self, oracle: Oracle, recipe: Recipe, order: ClientOrder) -> None:
        self._oracle, self._settings, self._outer, self._order = oracle, recipe.federated, recipe.outer, order
        self._codec, self._errors = ClientCodec.of(recipe), dict[str, Tensor]()

    def cohort(self, round_number: int) -> tuple[CohortMember, ...]:
        """Return the members of a round."""
        return self._order.cohort(round_number)

    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over model and buffers of a state."""
        with torch.no_grad():
            for name, value in self._oracle.model.state_dict(keep_vars=True).items():
                if _MODEL + name in tensors:
                    value.copy_(tensors[_MODEL + name])

    def train_cohort(self, round_number: int, update: int) -> dict[int, ClientResult]:
        """Train the clients of a round, each from the present weights; return the updates by position.

        Args:
            update: updates of the server before this round, for the learning rate.
        """
        start, buffers = self._weights(), self._oracle.buffers()
        self._oracle.optimizer.state.clear()
        results = {}
        for member in self.cohort(round_number):
            result = self._train_client(round_number, member, update, start, buffers)
            if result is not None:
                results[member.position] = result
            self._restore(start, buffers)
        self._oracle.optimizer.state.clear()
        return results

    def _weights(self) -> Tensors:
        named = self._oracle.model.named_parameters()
        return {name: p.detach().clone() for name, p in named if p.requires_grad}

    def _restore(self, start: Tensors, buffers: Tensors) -> None:
        self._oracle.set_buffers(buffers)
        with torch.no_grad():
            for name, value in start.items():
                self._oracle.model.get_parameter(name).copy_(value)

    def _train_client(
        self, round_number: int, member: CohortMember, update: int, start: Tensors, buffers: Tensors
    ) -> ClientResult | None:
        oracle, totals, counts = self._oracle, list[float](), list[float]()
        oracle.optimizer.state.clear()
        for micro_batch in self._order.micro_batches(round_number, member):
            before = oracle.buffers()
            sums = accumulate_shards(oracle.shards((micro_batch,)), before, oracle.task.buffers)
            oracle.end_buffers(before, sums.buffers)
            totals.append(sums.total)
            counts.append(sums.count)
            if self._settings.proximal:
                factor = self._settings.proximal * (sums.count if oracle.reduction == "mean" else 1.0)
                for name, gradient in sums.gradients.items():
                    pull = oracle.model.get_parameter(name).detach() - start[name]
                    sums.gradients[name] = torch.add(gradient, pull, alpha=factor)
            if not math.isfinite(oracle.apply(sums.gradients, sums.count, update) + sums.total):
                return None
        moved = {n: w.to(torch.float64) - start[n].to(torch.float64) for n, w in self._weights().items()}
        norm = math.hypot(*(float(torch.linalg.vector_norm(d)) for d in moved.values()))
        if not totals or not math.isfinite(norm):
            return None
        num_samples = len(self._order.clients.indices[member.client])
        weight = float(num_samples) if self._settings.weights == "samples" else 1.0
        clip = self._settings.clip_norm
        factor, error = clip / norm if 0.0 < clip < norm else 1.0, None
        if self._codec is not None:
            name = self._order.clients.names[member.client]
            moved = {n: d * factor for n, d in moved.items()}
            parts = [d.view(-1) for d in moved.values()]
            _, left = self._codec.encode(parts, round_number, name, self._errors.get(name))
            factor, error = 1.0, None if left is None else (name, left)
        return ClientResult(
            weight,
            weight * factor,
            math.fsum(totals),
            math.fsum(counts),
            moved,
            {n: _change(b, buffers[n]) for n, b in oracle.buffers().items()},
            error,
        )

    def keep_errors(self, results: Mapping[int, ClientResult]) -> None:
        """Keep the quantisation errors of the clients of a round."""
        self._errors |= dict(r.error for r in results.values() if r.error is not None)

    def apply(self, results: Mapping[int, ClientResult], moments: Tensors, divisor: float) -> Tensors:
        """Apply the mean update and the changes of the buffers to the model.

        Args:
            results: by position; at least one.
            moments: of the server optimizer, by `MOMENT/NAME`.
            divisor: of the sums.
        Returns:
            The moments afterwards.
        """
        after: Tensors = {}
        for name, start in self._weights().items():
            leaves = {position: r.update[name] * r.factor for position, r in results.items()}
            gradient = tree_sum(leaves) / -divisor
            wide = start.to(torch.float64)
            own = {n.removesuffix(f"/{name}"): t for n, t in moments.items() if n.endswith(f"/{name}")}
            own = {moment: t for moment, t in own.items() if "/" not in moment}
            after |= {f"{m}/{name}": v for m, v in self._server_step(wide, gradient, own).items()}
            with torch.no_grad():
                self._oracle.model.get_parameter(name).copy_(wide)
        self._oracle.end_buffers(self._oracle.buffers(), self._buffer_changes(results, divisor))
        return after

    def _server_step(self, wide: Tensor, gradient: Tensor, moments: Tensors) -> Tensors:
        """Step one parameter in place; return its moments."""
        outer, g = self._outer, gradient
        if outer.name == "sgd":
            if not outer.momentum:
                wide.add_(g, alpha=-outer.lr)
                return {}
            old = moments.get("momentum_buffer")
            v = g.clone() if old is None else old.clone().mul_(outer.momentum).add_(g, alpha=1.0)
            wide.add_(v, alpha=-outer.lr)
            return {"momentum_buffer": v}
        (b1, b2), square = outer.betas, g * g
        v = moments.get("exp_avg_sq", torch.full_like(g, outer.eps**2))
        m = moments.get("exp_avg", torch.zeros_like(g))
        match outer.name:
            case "adagrad":
                first, v = g, v + square
            case "yogi":
                first = m = b1 * m + (1.0 - b1) * g
                v = v - (1.0 - b2) * square * torch.sign(v - square)
            case _:
                first = m = b1 * m + (1.0 - b1) * g
                v = b2 * v + (1.0 - b2) * square
        wide.sub_(outer.lr * first / (v.sqrt() + outer.eps))
        return {"exp_avg_sq": v, "exp_avg": m}

    def _buffer_changes(self, results: Mapping[int, ClientResult], divisor: float) -> Tensors:
        """Return the change of each buffer: a weighted mean, a sum, or of a counter the largest."""
        changes: Tensors = {}
        for name, buffer in self._oracle.buffers().items():
            is_counter = buffer.numel() == 1 and not (buffer.is_floating_point() or buffer.is_complex())
            by_position = {position: r.buffers[name] for position, r in results.items()}
            if is_counter:
                changes[name] = max(by_position.values(), key=lambda change: float(change.abs()))
            elif rule_of_buffer(name, self._oracle.task.buffers) in ("sum", "first"):
                changes[name] = tree_sum(by_position)
            else:
                weighted = {p: change * results[p].weight for p, change in by_position.items()}
                changes[name] = tree_sum(weighted) / divisor
        return changes


def _change(now: Tensor, before: Tensor) -> Tensor:
    """Return a difference in float64; equal values change by 0, also where both are infinite."""
    a, b = as_reals(now), as_reals(before)
    return torch.where(a == b, 0.0, a.to(torch.float64) - b.to(torch.float64))


@dataclass(frozen=True)
class RoundReference:
    """A round of the oracle.

    Args:
        results: by position.
        tensors: the state afterwards: model, buffers and moments of the server.
        noise: what rounding leaves undecided of each tensor; empty in a reproducible run.
    """

    results: Mapping[int, ClientResult]
    tensors: Tensors
    noise: Mapping[str, float]


class FederatedVerifier:
    """The comparison of a federated session with the oracle, round by round; all methods are collective.

    Args:
        session: of the run.
        oracle: the same task with a model and an optimizer of its own; only that of rank 0 computes.
    """

    def __init__(self, session: Session, oracle: Oracle) -> None:
        self.session, self._oracle = session, oracle
        if oracle.task.keeper is not None:
            raise StrategyError(
                "the oracle does not know what a task keeps of each client (Task(keeper=...))",
                next_step="verify the task without its keeper, whose methods a test of yours can call",
            )
        if session.recipe.federated.secure != "none":
            raise StrategyError(
                "the oracle adds updates as they are, and a secure sum fixed-point numbers",
                where="federated.secure",
                next_step='verify with --set federated.secure=none, and compare "masks" with "ring"',
            )
        if session.recipe.strategy.is_coded and not session.recipe.reproducible:
            raise StrategyError(
                f"codec={session.recipe.strategy.codec} rounds values to codes, and the last bit of a weight"
                " may decide which, so a bound on the difference of two loops says little",
                where='strategy "sync=federated"',
                next_step="verify with --set reproducible=true, where both must have the same bits",
            )
        order = build_order_of_clients(session.session_base.context.recipe, oracle.task)
        self._rounds = FederatedOracle(oracle, session.recipe, order)
        self._net = Net(session.net.deadline_seconds, times_calls=session.net.times_calls)
        # Clients that are one batched computation use other kernels than one client alone.
        self._is_bitwise = session.recipe.reproducible and not session.recipe.federated.vectorize
        self.report = VerificationReport(str(session.recipe.strategy), session.cluster.world_size)

    def run(self, steps: int, observe: Callable[[int], None] = lambda step: None) -> VerificationReport:
        """Compare up to `steps` rounds, and stop after the first that diverges."""
        session = self.session
        mine = session.snapshot().tensors()
        theirs = {f"{_MODEL}{n}": t for n, t in self._oracle.model.state_dict().items()}
        self._compare(-1, "initial value", mine, theirs, dict.fromkeys(theirs, 0.0))
        if self.report.failure is not None:
            self.report.diagnosis = DIFFERENT_START
        rounds = session.rounds()
        for step in range(session.state.step, session.state.step + steps):
            if not self.report.ok or not self._compare_round(step, rounds):
                break
            self.report.steps += 1
            observe(step)
        if self._is_bitwise and self.report.ok and self.report.steps:
            self.report.sha256 = state_sha256(self._compared())
        return self.report

    def _compare_round(self, step: int, rounds: Iterator[object]) -> bool:
        update = self.session.state.num_updates
        before = {name: tensor.clone() for name, tensor in self._compared().items()}
        stats = next(rounds, None)
        if stats is None:
            return False
        now, reference = self._compared(), None
        if self.session.is_first:
            reference = self._reference_round(step, update, before)
        losses = {"loss": getattr(stats, "loss", 0.0), "count": getattr(stats, "num_items", 0.0)}
        theirs = bounds = None
        if reference is not None:
            count = math.fsum(r.count for r in reference.results.values())
            mean = math.fsum(r.total for r in reference.results.values()) / (count or 1.0)
            theirs = {"loss": _scalar(mean), "count": _scalar(count)}
            bounds = {"loss": 1e-6 * abs(mean), "count": 0.0}
        self._compare(step, "loss", {n: _scalar(value) for n, value in losses.items()}, theirs, bounds)
        theirs = bounds = None
        if reference is not None:
            theirs, bounds = reference.tensors, self._bounds(reference)
        self._compare(step, "state", now, theirs, bounds)
        if self.report.failure is not None:
            self.report.diagnosis = self._diagnose(step, update, before, now)
        return True

    def _compared(self) -> Tensors:
        """Return the state of this rank without the errors of a codec, which later rounds show."""
        tensors = self.session.snapshot().tensors()
        return {name: tensor for name, tensor in tensors.items() if not name.startswith(_ERRORS)}

    def _reference_round(self, step: int, update: int, before: Tensors) -> RoundReference:
        results, tensors = self._run_round(step, update, before)
        self._rounds.keep_errors(results)
        noise = dict.fromkeys(tensors, 0.0)
        if not self._is_bitwise:
            generator = torch.Generator().manual_seed(0)
            for _ in range(_DRAWS):
                _, other = self._run_round(step, update, _moved_by_roundoff(before, generator))
                for name, value in tensors.items():
                    noise[name] = max(noise[name], largest_magnitude(_change(other[name], value)))
        return RoundReference(results, tensors, noise)

    def _run_round(
        self,
        step: int,
        update: int,
        before: Tensors,
        change: Callable[[Mapping[int, ClientResult]], tuple[Mapping[int, ClientResult], float]]
        | None = None,
    ) -> tuple[Mapping[int, ClientResult], Tensors]:
        """Return the results and the state after a round; `change` replaces the factors and the divisor."""
        self._rounds.start_from(before)
        results: Mapping[int, ClientResult] = self._rounds.train_cohort(step, update)
        moments = {n.removeprefix(_SERVER): t for n, t in before.items() if n.startswith(_SERVER)}
        divisor = math.fsum(r.weight for r in results.values())
        counted, used = change(results) if change is not None else (results, divisor)
        if used:
            moments = self._rounds.apply(counted, moments, used)
        state = {f"{_MODEL}{n}": t.clone() for n, t in self._oracle.model.state_dict().items()}
        return results, state | {f"{_SERVER}{n}": t for n, t in moments.items()}

    def _bounds(self, reference: RoundReference) -> dict[str, float]:
        bounds = {}
        for name, value in reference.tensors.items():
            exact = not (value.is_floating_point() or value.is_complex())
            rounding = 0.0 if exact else 2.0 * unit_roundoff(value) * largest_magnitude(value)
            bounds[name] = 0.0 if exact else _MARGIN * reference.noise[name] + rounding
        return bounds

    def _diagnose(self, step: int, update: int, before: Tensors, now: Mapping[str, Tensor]) -> ErrorDiagnosis:
        """Name the known mistake that gives the weights of rank 0; equal on every rank."""
        cause = self._find_cause(step, update, before, now) if self.session.is_first else ""
        device = self.session.runner.sharded_model.device
        cause = broadcast_text(cause, self.session.mesh.world, self._net, device)
        return ErrorDiagnosis(cause, _EXPLANATIONS[cause]) if cause in _EXPLANATIONS else UNKNOWN_CAUSE

    def _find_cause(self, step: int, update: int, before: Tensors, now: Mapping[str, Tensor]) -> str:
        if any(name.startswith("optimizer/") for name in now):
            return "optimizer kept"
        _, right = self._run_round(step, update, before)
        cohort = self._rounds.cohort(step)

        def unweighted(results: Mapping[int, ClientResult]) -> tuple[Mapping[int, ClientResult], float]:
            return {p: _with_weight(r, 1.0) for p, r in results.items()}, float(len(results))

        def by_cohort(results: Mapping[int, ClientResult]) -> tuple[Mapping[int, ClientResult], float]:
            return results, math.fsum(r.weight for r in results.values()) * len(cohort) / len(results)

        for cause, change in (("unweighted mean", unweighted), ("divided by the cohort", by_cohort)):
            _, wrong = self._run_round(step, update, before, change)
            if _distance(now, wrong) <= 1e-3 * _distance(now, right):
                return cause
        return ""

    def _compare(
        self,
        step: int,
        quantity: str,
        mine: Mapping[str, Tensor],
        theirs: Mapping[str, Tensor] | None,
        bounds: Mapping[str, float] | None,
    ) -> None:
        if self._is_bitwise and bounds is not None:
            # Both sides must have the same bits.
            bounds = dict.fromkeys(bounds, 0.0)
        reference = (theirs, bounds) if self.session.is_first else (None, None)
        device, world = self.session.runner.sharded_model.device, self.session.mesh.world
        self.report.add(compare_tensors(step, quantity, mine, *reference, mine, self._net, world, device))


_EXPLANATIONS = {
    "unweighted mean": "clients with few samples count as much as those with many: weight each update by its"
    " samples",
    "divided by the cohort": "the sum is divided by all clients that were drawn, and not by those that"
    " returned an update",
    "optimizer kept": "the optimizer has moments after a round: every client must start with a fresh one",
}


def _with_weight(result: ClientResult, weight: float) -> ClientResult:
    return ClientResult(
        weight,
        weight * result.factor / result.weight,
        result.total,
        result.count,
        result.update,
        result.buffers,
    )


def _distance(now: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    names = [name for name in other if name.startswith(_MODEL) and name in now]
    return max((largest_magnitude(_change(now[name], other[name])) for name in names), default=0.0)


def _moved_by_roundoff(tensors: Tensors, generator: torch.Generator) -> Tensors:
    """Return the state with every weight changed by two unit roundoffs up or down."""
    moved = dict(tensors)
    for name, value in tensors.items():
        if name.startswith(_MODEL) and value.is_floating_point():
            draws = torch.randint(2, value.shape, generator=generator).to(value.device)
            moved[name] = value * (1 + 2 * unit_roundoff(value) * (2 * draws - 1).to(value.dtype))
    return moved


def _scalar(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)
