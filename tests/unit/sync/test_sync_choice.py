"""A rule is chosen where the link is so slow that it pays: held against the rates at which it really does."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from statistics import median

import pytest

from paceline.errors import StrategyError
from paceline.recipe import Strategy, support
from paceline.recipe.strategy_text import is_resolved_from, resolve_phases
from paceline.sync.sync_choice import MIN_SPEEDUP, TIMED_STEPS, StepTimings, choose_sync

MB = 1e6


@dataclass(frozen=True)
class World:
    """Replicas on a link, by a simulation of every sum.

    Args:
        forward, backward, optimizer: seconds of a step.
        buckets: bytes that leave in turn while backward goes on, evenly.
        latency: seconds of a sum beside its bytes.
        rules: allowed.
    """

    forward: float
    backward: float
    optimizer: float
    buckets: tuple[float, ...]
    latency: float
    rules: tuple[str, ...]

    @property
    def compute(self) -> float:
        return self.forward + self.backward + self.optimizer

    def exchange(self, rate: float) -> float:
        return sum(self.latency + size / rate for size in self.buckets)

    def step(self, rule: str, rate: float) -> float:
        """What a step really takes, at so many bytes a second."""
        word, _, steps = rule.partition(":")
        if word == "gossip":
            return self.gossip(int(steps), rate)
        if steps:
            return self.compute + self.exchange(rate) / int(steps)
        free = 0.0
        for number, size in enumerate(self.buckets, start=1):
            ready = self.forward + self.backward * number / len(self.buckets)
            free = max(free, ready) + self.latency + size / rate
        return free + self.optimizer

    def gossip(self, bound: int, rate: float) -> float:
        """One clock after another, in a round without an end: what is sent after one is needed S later."""
        arrivals, ends, line = list[float](), [0.0], 0.0
        for clock in range(400):
            due = arrivals[clock - bound - 1] if clock > bound else 0.0
            ends.append(max(ends[-1], due) + self.compute)
            line = max(line, ends[-1]) + sum(self.buckets) / rate
            arrivals.append(line + self.latency)
        return (ends[-1] - ends[200]) / 200

    def best(self, rate: float) -> str:
        """The first rule that is nearly as fast as the fastest, by running all of them."""
        times = {rule: self.step(rule, rate) for rule in self.rules}
        return next(rule for rule, time in times.items() if time <= MIN_SPEEDUP * min(times.values()))

    def measured(self, rate: float, draw: random.Random, noise: float) -> StepTimings:
        """What steps show, each a little longer or shorter; the exchange, the shorter of two."""

        def seen(seconds: float, times: int) -> list[float]:
            return [seconds * draw.lognormvariate(0, noise) for _ in range(times)]

        step, compute, backward = (
            median(seen(seconds, TIMED_STEPS))
            for seconds in (self.step("every-step", rate), self.compute, self.backward)
        )
        exchange, size = min(seen(self.exchange(rate), 2)), sum(self.buckets)
        message = min(seen(self.latency + size / rate, 2))
        return StepTimings(step, compute, backward, exchange, size, message, self.latency + 1 / rate, 1e9)

    def chosen(self, rate: float, draw: random.Random, noise: float) -> str:
        return choose_sync(self.rules, self.measured(rate, draw, noise)).rule


def drawn(draw: random.Random) -> World:
    backward = 10 ** draw.uniform(-2.5, -0.3)
    sizes = tuple(draw.uniform(0.2, 16) * MB for _ in range(draw.randint(1, 8)))
    first = draw.choice([4, 8, 16])
    later = (f"diloco:{first * draw.choice([4, 8])}",) if draw.random() < 0.5 else ()
    rules = ("every-step", f"local:{first}", *later)
    return World(backward * draw.uniform(0.3, 0.6), backward, 0.1 * backward, sizes, 2e-5, rules)


def crossings(world: World) -> list[float]:
    """The rates, from fast to slow, at which another rule becomes the best."""
    rates = [1e11 / 1.02**number for number in range(800)]
    return [rate for fast, rate in pairwise(rates) if world.best(fast) != world.best(rate)]


@pytest.mark.capability("I11", clause="the crossover is within 15 % of the exhaustive one")
def test_the_crossover_is_within_15_percent_of_that_of_running_every_rule() -> None:
    """Every time by exact times; nearly so by times that vary by 1 % from step to step."""
    draw, held, by_noise = random.Random(11), 0, 0
    for _ in range(100):
        world = drawn(draw)
        for rate in crossings(world):
            for beside in (rate * 1.15, rate / 1.15):
                best = world.best(beside)
                assert world.chosen(beside, draw, noise=0.0) == best, (world, rate)
                by_noise += world.chosen(beside, draw, noise=0.01) == best
                held += 1
    assert held >= 200 and by_noise >= 0.95 * held


def test_a_choice_by_bandwidth_alone_would_not_be() -> None:
    """The twin: every-step as if nothing of an exchange were hidden behind backward."""
    draw, wrong, held = random.Random(11), 0, 0
    for _ in range(50):
        world = drawn(draw)
        for rate in crossings(world):
            for beside in (rate * 1.15, rate / 1.15):
                found = world.measured(beside, draw, 0.0)
                blind = found._replace(step_seconds=found.compute_seconds + found.exchange_seconds)
                wrong += choose_sync(world.rules, blind).rule != world.best(beside)
                held += 1
    assert wrong > held / 10


@pytest.mark.capability("I11", clause="every-step, local, asynchronous as latency grows")
def test_as_latency_grows_it_is_every_step_then_local_then_asynchronous() -> None:
    """Where running each of them shows it, within 15 % of the latency; on fast links of many lengths."""
    draw = random.Random(7)
    for _ in range(8):
        backward, bound = draw.uniform(0.02, 0.2), draw.choice([4, 8])
        rules = ("every-step", "local:16", f"gossip:{bound}")
        world = World(0.4 * backward, backward, 0.1 * backward, (MB,) * draw.randint(2, 8), 0.0, rules)
        worlds = [replace(world, latency=1e-4 * 1.03**number) for number in range(300)]
        best = [one.best(1e10) for one in worlds]
        assert [rule for rule, _ in groupby(best)][:3] == [*rules]
        last = max(number for number, rule in enumerate(best) if rule == rules[-1])  # then it waits, too
        crossed = [number for number in range(1, last) if best[number] != best[number - 1]]
        for number in [beside for at in crossed for beside in (at - 6, at + 5)]:  # 16 % to both sides
            assert worlds[number].chosen(1e10, draw, noise=0.0) == best[number], (world, number)


def test_messages_that_took_no_time_would_choose_it_on_slow_links() -> None:
    """The twin: gossip is not what a narrow link asks for, as it sends all parameters in every step."""
    world = World(0.02, 0.05, 0.01, (MB,) * 4, 1e-4, ("every-step", "local:16", "gossip:8"))
    found = world.measured(1e6, random.Random(1), 0.0)
    assert choose_sync(world.rules, found).rule == world.best(1e6) == "local:16"
    assert choose_sync(world.rules, found._replace(message_seconds=0.0)).rule == "gossip:8"
    often = found._replace(message_seconds=0.0, round_steps=2.0)  # all meet every other step
    assert choose_sync(world.rules, often).rule == "local:16"


@pytest.mark.capability("I11", clause="the break-even is named")
def test_the_break_even_is_where_the_choice_changes() -> None:
    """Measured on a slow link, where sums are seen to go on after backward; of many buckets."""
    draw = random.Random(3)
    for _ in range(100):
        world = World(0.02, 0.05, 0.01, (MB,) * draw.randint(12, 24), 0.0, ("every-step", "diloco:8"))
        found = world.measured(1e6 * 10 ** draw.uniform(0, 1), draw, 0.0)
        limit = found.bits_per_second(found.break_even("diloco:8")) / 8
        assert world.best(limit * 1.1) == "every-step" and world.best(limit / 1.1) == "diloco:8"
    text = str(choose_sync(world.rules, found))
    assert text.startswith("sync: diloco:8 (predicted step: every-step ") and text.count("diloco:8") == 3


def test_what_is_allowed_first_stays_where_a_later_one_gains_little() -> None:
    slow = StepTimings(0.5, 0.1, 0.06, 0.46, 40 * MB)
    assert choose_sync(["every-step", "local:8", "diloco:64"], slow).rule == "diloco:64"
    assert choose_sync(["every-step", "local:64", "diloco:65"], slow).rule == "local:64"
    memory = StepTimings(0.1, 0.099, 0.06, 0.002, 0.0)
    found = choose_sync(["every-step", "diloco:8"], memory)
    assert found.rule == "every-step" and "no rate (diloco:8)" in found.reason
    assert memory.break_even("local:1") == float("inf")


@pytest.mark.parametrize(
    "sync",
    [
        "auto",
        "auto:",
        "auto:every-step",
        "auto:diloco:8",
        "auto:diloco:8,every-step",
        "auto:every-step,every-step",
        "auto:every-step,hogwild",
        "auto:every-step,backup:1",
        "auto:gossip:2",
        "auto:every-step,auto:local:2",
        "auto:every-step,diloco",
        "every-step@9,auto:every-step",
    ],
)
def test_only_rules_that_sum_can_be_chosen_from_every_step_first(sync: str) -> None:
    with pytest.raises(StrategyError, match="expected"):
        Strategy.parse(f"replicas=2 sync={sync}")


def test_gossip_may_stand_at_the_end_and_nothing_follows_it() -> None:
    for sync, fits in {
        "auto:every-step,diloco:8,gossip:2": True,
        "every-step@9,gossip:2": True,
        "auto:every-step,gossip:2,diloco:8": False,
        "gossip:2@9,every-step": False,
    }.items():
        answer = support(Strategy.parse(f"replicas=2 sync={sync}"), processes=2, shards=4)
        assert answer.ok == fits and (fits or "at last to one with a server, or to gossip" in answer.reason)


def test_it_is_every_step_until_it_is_known() -> None:
    text = "auto:every-step,local:4,diloco:8"
    strategy = Strategy.parse(f"replicas=2 sync={text}")
    assert Strategy.parse(str(strategy)) == strategy
    assert strategy.sync_choices == ("every-step", "local:4", "diloco:8")
    assert [strategy.phase(step) for step in (0, 999)] == [("every-step", "sync")] * 2
    assert strategy.is_approximate and strategy.sync_spec.agrees == "replica"
    assert support(strategy, processes=2, shards=4).ok
    answer = support(strategy.replace(shard=2, zero=1, replicas=1), processes=2, shards=4)
    assert not answer.ok and "in place of @straggler or auto" in answer.reason
    assert resolve_phases(text, 8, "every-step") == "every-step"
    assert resolve_phases(text, 8, "local:4") == "every-step@8,local:4"
    for known, fits in {
        text: True,
        "every-step": True,
        "every-step@8,local:4": True,
        "every-step@8,local:5": False,
        "local:4": False,
        "every-step@8,local:4@9,diloco:8": False,
    }.items():
        assert is_resolved_from(text, known) == fits, known


@pytest.mark.capability("I11")
@pytest.mark.parametrize(("bound", "seconds"), [(0, 0.5), (1, 0.25), (3, 0.125), (9, 0.1)])
def test_a_step_of_gossip_waits_for_a_message_that_is_as_many_steps_old(bound: int, seconds: float) -> None:
    """Compute of 0.1 s, and a message of 0.4 s that is latency alone: bound + 1 steps are under way."""
    found = StepTimings(1.0, 0.1, 0.0, 1.0, MB, message_seconds=0.4, latency_seconds=0.4, round_steps=1e12)
    assert found.seconds(f"gossip:{bound}") == pytest.approx(seconds)
