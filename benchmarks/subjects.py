"""What is trained in the benchmarks: jobs, each as a recipe, a task and the mean loss a user would write.

Invariant: every side of a comparison gets a copy of the same initial weights and the same samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.models import MLP
from paceline.observe.process_info import cache_folder
from paceline.recipe import (
    BatchRecipe,
    OptimizerRecipe,
    PrecisionRecipe,
    Recipe,
    RuntimeRecipe,
    ScheduleRecipe,
    load_recipe,
)
from paceline.task import Loss, Task
from paceline.tasks import load_task

_ROOT = Path(__file__).resolve().parent.parent
_STEPS = 100_000  # the run never ends before the measurement does
_QUICK = ("options.layers=1", "options.width=64", "options.context=64")


@dataclass(frozen=True)
class Subject:
    """One training job.

    Args:
        task: its model has the initial weights; it is copied, never trained.
        mean_loss: `mean_loss(model, batch)`, as a loop without Paceline computes it.
    """

    recipe: Recipe
    task: Task
    mean_loss: Callable[[nn.Module, Any], Tensor]

    def fresh(self) -> Task:
        """The task with a model of its own."""
        return replace(self.task, model=copy.deepcopy(self.task.model))

    def changed(self, **changes: Any) -> Subject:
        """The same job with other sections of the recipe."""
        return replace(self, recipe=self.recipe.replace(**changes))

    def with_shards(self, shards: int) -> Subject:
        """The same global batch, cut into another number of virtual shards."""
        return self.changed(batch=self.recipe.batch.replace(shards=shards))

    @property
    def device(self) -> torch.device:
        """Device on which the recipe computes: a GPU only if it says so."""
        return torch.device("cuda", 0) if self.recipe.runtime.device == "cuda" else torch.device("cpu")

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.task.model.parameters())


def byte_gpt(*, quick: bool = False, precision: str = "bf16", wide: bool = False) -> Subject:
    """The model and the text of recipes/byte-gpt.toml: 1.8 million parameters, 8 windows of 256 bytes.

    Args:
        wide: 3.2 million parameters and 16 windows, for more arithmetic a step.
    """
    sizes = ["options.width=256", "batch.size=16"] if wide else []
    sizes += _QUICK if quick else []
    return _gpt(precision, sizes)


def _gpt(precision: str, sizes: Sequence[str]) -> Subject:
    recipe = load_recipe(
        _ROOT / "recipes" / "byte-gpt.toml",
        [f"steps={_STEPS}", f'precision.compute="{precision}"', "schedule.warmup_steps=10", *sizes],
        strategy="ddp",
    )
    task = load_task(recipe.task, recipe.options, recipe.seed, _ROOT / "recipes", cache_folder())
    if task.initialize is not None:
        task.initialize(task.model, recipe.seed)
    return Subject(recipe, task, _mean_next_token_loss)


def large_gpt(*, quick: bool = False, precision: str = "bf16") -> Subject:
    """19 million parameters and two short windows a step: much state, few activations."""
    large = ["options.width=512", "options.layers=6", "options.context=128"]
    return _gpt(precision, ["batch.size=2", "batch.shards=2", *(_QUICK if quick else large)])


def deep_gpt(*, quick: bool = False, precision: str = "bf16") -> Subject:
    """The byte-gpt with eight blocks and an output layer of its own: a chain of ten without a tied weight."""
    sizes = [*_QUICK, "options.layers=2"] if quick else ["options.layers=8"]
    job = _gpt(precision, sizes)
    job.task.model.head.weight = nn.Parameter(job.task.model.embed.weight.detach().clone())
    return replace(job, task=replace(job.task, initialize=None))


def llama(*, quick: bool = False, precision: str = "bf16") -> Subject:
    """A Llama of Transformers, built from a config, on made-up tokens: 8 sequences of 128 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, length = (32, 1, 16) if quick else (256, 4, 128)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=length,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = LlamaForCausalLM(config)
        tokens = torch.randint(config.vocab_size, (4096, length + 1))
    recipe = made_up(batch_size=8, shards=1, precision=precision)
    return Subject(recipe, Task(model, tokens, _next_token_loss), _mean_llama_loss)


def digits(model: str, *, quick: bool = False) -> Subject:
    """A classifier of scikit-learn's digits, with the sizes of its recipe.

    Args:
        model: "convnet" or "mlp".
    """
    name = {"convnet": "digits-convnet.toml", "mlp": "digits.toml"}[model]
    sizes = ["options.channels=4"] if quick and model == "convnet" else []
    recipe = load_recipe(
        _ROOT / "recipes" / name, [f"steps={_STEPS}", 'precision.compute="fp32"', *sizes], strategy="ddp"
    )
    task = load_task(recipe.task, recipe.options, recipe.seed, _ROOT / "recipes", cache_folder())
    if task.initialize is not None:
        task.initialize(task.model, recipe.seed)
    return Subject(recipe, task, _mean_class_loss)


def mlp(hidden: tuple[int, ...], *, batch_size: int, shards: int, inputs: int = 1024) -> Subject:
    """A classifier of made-up vectors: no data cost, so communication and overhead show.

    Args:
        hidden: widths of the hidden layers; widths of 2048 make the gradients large for little arithmetic.
        batch_size: of the global batch.
    """
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4096, inputs, generator=generator)
    y = (x[:, :256].sum(1) * 0.3).round().long().clamp(-5, 4) + 5
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = MLP(inputs, hidden, 10)
    recipe = made_up(batch_size=batch_size, shards=shards, precision="fp32")
    return Subject(recipe, Task(model, TensorDataset(x, y), _class_loss), _mean_class_loss)


def made_up(*, batch_size: int, shards: int, precision: str) -> Recipe:
    """What a job on made-up data has in common with the others."""
    return Recipe(
        task="made up",
        steps=_STEPS,
        batch=BatchRecipe(size=batch_size, shards=shards),
        optimizer=OptimizerRecipe(lr=1e-4, weight_decay=0.1, clip_norm=1.0),
        schedule=ScheduleRecipe(decay="cosine", warmup_steps=10),
        precision=PrecisionRecipe.model_validate({"compute": precision}),
        runtime=RuntimeRecipe(device="cpu"),
    )


def _mean_next_token_loss(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    logits = model(tokens_BT[:, :-1]).flatten(0, 1).float()
    return F.cross_entropy(logits, tokens_BT[:, 1:].flatten())


def _llama_logits(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    return model(input_ids=tokens_BT[:, :-1], use_cache=False).logits.flatten(0, 1).float()


def _next_token_loss(model: nn.Module, tokens_BT: Tensor) -> Loss:
    targets = tokens_BT[:, 1:].flatten()
    return Loss(F.cross_entropy(_llama_logits(model, tokens_BT), targets, reduction="sum"), targets.numel())


def _mean_llama_loss(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    return F.cross_entropy(_llama_logits(model, tokens_BT), tokens_BT[:, 1:].flatten())


def _class_loss(model: nn.Module, batch: list[Tensor]) -> Loss:
    x, y = batch
    return Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


def _mean_class_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)
