"""Routes, codecs, rules, layouts, optimizers and sinks of another package: one file and one line each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import StrategyError
from paceline.recipe import Strategy
from tests.dist.launch.actors import as_users_have_it

ROOT = Path(__file__).parents[2]

ROUTE = '''
"""Everybody gathers everything, and adds in the order of the ranks."""

from pathlib import Path

from paceline.comm import NativeCollective
from paceline.recipe.registry import RouteSpec

SPEC = RouteSpec(word="gathered", summary="gather, then add", build="gathered_route:gathered")


class Gathered(NativeCollective):
    def all_reduce(self, x, key):
        Path(f"used-gathered-{self.group.rank}").touch()
        return self.all_gather(x, key).then(lambda rows: x.copy_(rows.sum(0)))


def gathered(group, site):
    return site.apply_codec(Gathered(site.net, group))
'''
CODEC = '''
"""Two bytes a value."""

from pathlib import Path

import torch

from paceline.recipe.registry import CodecSpec

SPEC = CodecSpec(word="half", summary="16-bit floats", build="half_codec:half")


class Half:
    needs_error_feedback, ragged, block = True, False, 1

    def num_bytes(self, num_values):
        return 2 * num_values

    def encode(self, x, keys, workspace):
        Path(f"used-half-{torch.distributed.get_rank()}").touch()
        return x.to(torch.float16).contiguous().view(torch.uint8)

    def decode(self, payload, out, keys, workspace):
        out.copy_(payload.clone().view(torch.float16))


def half(argument):
    assert argument is None
    return Half()
'''
RULE = '''
"""Replicas agree in every step, and one may say how often it is noted."""

from dataclasses import replace
from pathlib import Path

from paceline.recipe.registry import WordArgument, SyncSpec
from paceline.sync import EveryStep
from paceline.sync.every_step import build_every_step_rule

SPEC = SyncSpec(
    word="noted",
    summary="every-step, noted every N steps",
    argument=WordArgument("10", "an integer", int),
    build="noted_rule:noted",
    exact=True,
    agrees="world",
    shares_state=True,
    steady=True,
)


def noted(context, layout, state):
    every = context.recipe.strategy.sync_word.argument

    class Noted(EveryStep):
        def step(self, work, stream, placed, update_step):
            if state.step % every == 0:
                with Path(f"used-noted-{context.mesh.world.rank}").open("a") as notes:
                    notes.write(f"{state.step} ")
            return super().step(work, stream, placed, update_step)

    components = replace(context.components, rule=Noted)
    return build_every_step_rule(replace(context, components=components), layout, state)
'''
LAYOUT = '''
"""ZeRO-1 by whole tensors: each is updated by one rank, in turn."""

from dataclasses import dataclass, replace
from pathlib import Path

from paceline.recipe.registry import LayoutSpec
from paceline.parallel import ModelPartition

SPEC = LayoutSpec(
    word="by-tensor",
    summary="a rank updates whole tensors",
    build="tensor_layout:by_tensor",
    with_terms="replicas=1 shard=2 zero=1",
    order=40,
    applies=lambda strategy: strategy.cut == "by-tensor",
)


@dataclass(frozen=True)
class Owners:
    owners: dict
    degree: int
    axis = "shard"

    def cut(self, held, coordinate):
        slot = held.computes
        mine = self.owners[slot.name]
        parts = tuple(slot.on(self.axis) if place == mine else None for place in range(self.degree))
        return replace(held, parts=parts)


def by_tensor(context, material):
    group = context.mesh.axes["shard"]
    names = [name for name, p in material.model.named_parameters()]

    def prepare(holding):
        updated = " ".join(slot.name for slot in holding.updates)
        Path(f"used-by-tensor-{group.rank}").write_text(updated)
        return holding

    owners = Owners({name: i % group.size for i, name in enumerate(names)}, group.size)
    return ModelPartition(owners, prepare=prepare)
'''
OPTIMIZER = '''
"""K-FAC: a gradient between the inverses of two factors, which the ranks sum (Martens and Grosse 2015)."""

from pathlib import Path

import torch
from torch import nn

from paceline.recipe.registry import OptimizerSpec

SPEC = OptimizerSpec(word="own_kfac", summary="K-FAC over linear layers", build="kfac_optimizer:kfac")
DAMPING, KEPT = 0.1, 0.9


class KFac(torch.optim.Optimizer):
    elementwise = False

    def __init__(self, model, groups, lr):
        super().__init__(groups, {"lr": lr})
        layers = [m for m in model.modules() if isinstance(m, nn.Linear) and not m.weight.is_meta]
        self.sums = {layer.weight: _nothing(layer.weight) for layer in layers}
        self.add = lambda x: x
        for layer in layers:
            layer.register_forward_hook(self.note)

    def on_build(self, session):
        Path(f"used-kfac-{session.mesh.world.rank}").touch()
        self.add = lambda x: session.net.all_reduce(x, session.mesh.data).wait()
        for weight in self.sums:  # a loss was tried
            self.sums[weight] = _nothing(weight)

    def note(self, layer, inputs, output):
        if output.requires_grad:
            inside = inputs[0].detach()
            output.register_hook(lambda grad: self.more(layer.weight, inside, grad))

    def more(self, weight, inside, grad):
        for own, one in zip(self.sums[weight], (inside.T @ inside, grad.T @ grad, len(inside)), strict=True):
            own += one

    @torch.no_grad()
    def step(self, closure=None):
        sums = {weight: [*map(self.add, own)] for weight, own in self.sums.items()}  # on all ranks alike
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(self.conditioned(p, *sums[p]) if p in sums else p.grad, alpha=group["lr"])
        for weight in self.sums:
            self.sums[weight] = _nothing(weight)

    def conditioned(self, weight, inside, outside, count):
        kept = self.state[weight]
        for name, now in (("a", inside / count), ("g", outside / count)):
            kept[name] = KEPT * kept[name] + (1 - KEPT) * now if name in kept else now
        left, right = (kept[name] + DAMPING * torch.eye(len(kept[name])) for name in "ga")
        return torch.linalg.solve(left, torch.linalg.solve(right, weight.grad.T).T)


def _nothing(weight):
    return [torch.zeros(n, n) for n in reversed(weight.shape)] + [torch.zeros(())]


def kfac(model, groups, recipe, *, fused):
    return KFac(model, groups, recipe.lr)
'''
NORMALISED = '''
"""A gradient by the norm of its whole tensor, however ranks divide it."""

from paceline.optim import SlotOptimizer, slot_norms
from paceline.recipe.registry import OptimizerSpec

SPEC = OptimizerSpec(word="normalised", summary="unit steps", build="normalised_optimizer:normalised")


class Normalised(SlotOptimizer):
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})

    def update_tensors(self):
        slots = self.slot_group.slots
        moved = [(p, options["lr"]) for options in self.param_groups for p in options["params"]]
        (norms,) = slot_norms([{slots[p]: p.grad for p, _ in moved}], self.slot_group)
        for p, lr in moved:
            p.sub_(p.grad / norms[slots[p]], alpha=lr)


def normalised(model, groups, recipe, *, fused):
    return Normalised(groups, recipe.lr)
'''
SINK = '''
"""The step and loss of every step, in a file that the argument names."""

from paceline.recipe.registry.sink_specs import SinkSpec
from paceline.recipe.registry import WordArgument

SPEC = SinkSpec(
    word="table",
    summary="a CSV file",
    argument=WordArgument("x.csv", "a file name", str),
    build="csv_sink:build_csv",
)


class CsvSink:
    def __init__(self, path):
        self.file = path.open("w")

    def step(self, stats):
        self.file.write(f"{stats.step},{stats.loss!r}\\n")

    def event(self, name, record):
        self.file.write(f"# {name}\\n")

    def close(self):
        self.file.close()


def build_csv(site, argument):
    return CsvSink(site.run_dir / argument)
'''
BROKEN_SINK = '''
"""Loses its connection at the fifth step."""

from paceline.recipe.registry.sink_specs import SinkSpec

SPEC = SinkSpec(word="broken", summary="raises", build="broken_sink:BrokenSink")


class BrokenSink:
    def __init__(self, site, argument):
        pass

    def step(self, stats):
        if stats.step == 5:
            raise ConnectionError("the tracking server is gone")

    def event(self, name, record):
        pass

    def close(self):
        pass
'''
MODULES = {
    "gathered_route": ("paceline.route", "gathered", ROUTE),
    "half_codec": ("paceline.codec", "half", CODEC),
    "noted_rule": ("paceline.sync", "noted", RULE),
    "tensor_layout": ("paceline.layout", "by-tensor", LAYOUT),
    "kfac_optimizer": ("paceline.optimizer", "own_kfac", OPTIMIZER),
    "normalised_optimizer": ("paceline.optimizer", "normalised", NORMALISED),
    "csv_sink": ("paceline.sink", "table", SINK),
    "broken_sink": ("paceline.sink", "broken", BROKEN_SINK),
}
DIGITS = str(ROOT / "recipes" / "digits.toml")
SETTINGS = ("steps=40", "options.hidden=[32]", "epochs=", "evaluate.every_steps=40")
STRATEGIES = {
    "gathered": "replicas=2 route=gathered",
    "half": "replicas=2 codec=half",
    "noted": "replicas=2 sync=noted:20",
    "by-tensor": "replicas=1 shard=2 zero=1 cut=by-tensor",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a package installer would fill it: modules, and one line each that registers them."""
    site = tmp_path_factory.mktemp("plugins") / "site"
    about = site / "something-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: something\nVersion: 1.0\n")
    groups: dict[str, list[str]] = {}
    for module, (group, word, text) in MODULES.items():
        (site / f"{module}.py").write_text(text)
        groups.setdefault(group, []).append(f"{word} = {module}:SPEC\n")
    sections = [f"[{group}]\n{''.join(lines)}" for group, lines in groups.items()]
    (about / "entry_points.txt").write_text("\n".join(sections))
    return site


SEVERAL = """
import json, sys
from pathlib import Path
import paceline
from paceline.errors import StrategyError
from paceline.recipe.recipe_loading import load_recipe

for name, (strategy, *changes) in json.loads(sys.argv[2]).items():
    try:
        paceline.train(load_recipe(sys.argv[1], [*sys.argv[3:], *changes, f"run_dir={name}"], strategy))
    except StrategyError as error:
        Path(f"refused-{name}").write_text(str(error))
"""
KFAC = ("optimizer={name='own_kfac', lr=0.05}", "schedule={}")
KFAC_STRATEGIES = {
    "kfac": "replicas=2",
    "kfac-staged": "replicas=1 pipeline=2",
    "kfac-by-tensor": STRATEGIES["by-tensor"],
    "kfac-in-parts": "replicas=1 shard=2 zero=1",
}

NORMALISED_STEPS = ("optimizer={name='normalised', lr=0.05}", "schedule={}")
NORMALISED_STRATEGIES = {
    "normalised": "replicas=2",
    "normalised-in-parts": "replicas=1 shard=2 zero=1",
    "normalised-by-tensor": "replicas=1 tensor=2",
}


@pytest.fixture(scope="module")
def trained(site: Path) -> Path:
    """Where the runs are: one job trains them all, as each process takes seconds to start."""
    script = site.parent / "several.py"
    script.write_text(SEVERAL + ASK)
    (site.parent / "asked.json").write_text(json.dumps([*REFUSED]))
    every = {name: [strategy] for name, strategy in {"plain": "replicas=2", **STRATEGIES}.items()}
    every["sinks"] = ["replicas=2", "log.sinks=['jsonl', 'broken', 'table:losses.csv']"]
    every |= {name: [strategy, *NORMALISED_STEPS] for name, strategy in NORMALISED_STRATEGIES.items()}
    every |= {name: [strategy, *KFAC] for name, strategy in KFAC_STRATEGIES.items()}
    done = run(site, "-m", "paceline", "run", "-n", "2", str(script), DIGITS, json.dumps(every), *SETTINGS)
    assert done.returncode == 0, done.stderr[-2000:]
    (site.parent / "stderr.txt").write_text(done.stderr)
    return site.parent


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=site.parent,
        env={**as_users_have_it(), "PYTHONPATH": os.pathsep.join([str(site), str(ROOT / "src")])},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def losses(folder: Path) -> list[float]:
    """Those of a run that has ended; its evaluation comes last."""
    assert (folder / "checkpoints" / "step-00000040").is_dir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [row for row in rows if row["event"] in ("step", "evaluation")]
    assert found[-1]["event"] == "evaluation"
    return [row["loss"] for row in found]


@pytest.mark.capability("Z1")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("word", STRATEGIES)
def test_a_component_from_another_package_trains_by_its_word(word: str, trained: Path) -> None:
    found, plain = losses(trained / word), losses(trained / "plain")
    notes = [(trained / f"used-{word}-{rank}").read_text() for rank in range(2)]
    assert len(found) == 41 and found[-1] < 2.2 < found[0]
    assert found == pytest.approx(plain, rel=0.05 if word == "half" else 1e-4)
    if word == "half":
        assert found[-1] != plain[-1]
    if word == "noted":
        assert notes == ["0 20 "] * 2
    if word == "by-tensor":
        assert notes == ["layers.0.weight layers.3.weight", "layers.0.bias layers.3.bias"]


@pytest.mark.capability("Z1")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["kfac-staged", "kfac-by-tensor"])
def test_an_optimizer_from_another_package_has_hooks_sums_and_state(name: str, trained: Path) -> None:
    """It sums factors over ranks, sees the layers of its stage only, and keeps factors in the checkpoint."""
    replicated = losses(trained / "kfac")
    assert replicated[-1] < 1.0 < replicated[0]
    assert losses(trained / name) == pytest.approx(replicated, rel=2e-3)
    assert (trained / "used-kfac-1").exists()
    saved = (trained / name / "checkpoints" / "step-00000040").glob("*.json")
    assert any("weight/g" in path.read_text() for path in saved)


def test_an_optimizer_from_another_package_that_looks_at_whole_tensors_gets_no_parts(trained: Path) -> None:
    assert "KFac" in (trained / "refused-kfac-in-parts").read_text()


@pytest.mark.capability("Z1", "J13")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["normalised-in-parts", "normalised-by-tensor"])
def test_an_optimizer_from_another_package_takes_norms_of_whole_tensors(name: str, trained: Path) -> None:
    replicated = losses(trained / "normalised")
    assert replicated[-1] < 2.1 < replicated[0]
    assert losses(trained / name) == pytest.approx(replicated, rel=1e-4)


@pytest.mark.capability("Z1")
@pytest.mark.timeout(600)
def test_a_sink_from_another_package_receives_steps_and_events_and_changes_nothing(trained: Path) -> None:
    """Although another sink raises on the way."""
    lines = (trained / "sinks" / "losses.csv").read_text().splitlines()
    assert lines[0] == "# run" and "# evaluation" in lines and lines[-1] == "# end"
    steps = [line for line in lines if not line.startswith("#")]
    assert steps == [f"{i},{loss!r}" for i, loss in enumerate(losses(trained / "plain")[:-1])]
    assert not (trained / "sinks" / "log.txt").exists()


def test_a_sink_that_raises_is_one_warning(trained: Path) -> None:
    warnings = [line for line in (trained / "stderr.txt").read_text().splitlines() if "'broken'" in line]
    assert len(warnings) == 1 and "ConnectionError: the tracking server is gone" in warnings[0]


REFUSED = {
    "route=gatherd": 'did you mean "gathered"?',
    "codec=haff": 'did you mean "half"?',
    "sync=noted": 'expected an integer, as in "noted:10"',
    "cut=by-tensors": 'expected one of by-tensor, found "by-tensors"',
}
ASK = """
from paceline.recipe import Strategy

def answer(text):
    try:
        Strategy.parse(text)
    except StrategyError as error:
        return error.what
    return "it is known"

if paceline.Cluster.from_env().global_rank == 0:
    answers = [answer(text) for text in json.loads(Path("asked.json").read_text())]
    Path("answers.json").write_text(json.dumps(answers))
"""


@pytest.mark.capability("B1")
@pytest.mark.timeout(600)
def test_words_of_other_packages_are_listed_and_others_are_refused(site: Path, trained: Path) -> None:
    done = run(site, "-m", "paceline", "strategies", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    for name in ("route=gathered", "codec=half", "sync=noted:10", "replicas=1 shard=2 zero=1 cut=by-tensor"):
        assert rows[name]["supported"], rows[name]["reason"]
    answers = json.loads((trained / "answers.json").read_text())
    assert len(answers) == len(REFUSED)
    for answer, said in zip(answers, REFUSED.values(), strict=True):
        assert said in answer


@pytest.mark.parametrize("word", STRATEGIES)
def test_without_the_package_its_words_are_unknown(word: str) -> None:
    with pytest.raises(StrategyError, match="expected"):
        Strategy.parse(STRATEGIES[word])
