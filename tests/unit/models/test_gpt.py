"""GPT: causal, tied, either kind of positions, and one block maps hidden states to hidden states."""

import math

import pytest
import torch
from torch.nn import functional as F

from paceline.errors import TaskError
from paceline.models import GPT, GPTConfig, generate, initialize_gpt, set_micro_batch_key
from paceline.models.gpt import RotaryEmbedding
from paceline.models.text_generation import sample_token

SMALL = {"vocab": 64, "context": 16, "layers": 2, "heads": 2, "width": 32}


def small(**changes: object) -> GPT:
    model = GPT(GPTConfig(**(SMALL | changes)))
    initialize_gpt(model, 1)
    return model


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_no_logit_depends_on_a_later_token_and_the_order_matters(positions: str) -> None:
    model = small(positions=positions)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 64
    one, other = model(tokens), model(changed)
    assert torch.equal(one[:, :9], other[:, :9])
    assert not torch.allclose(one[:, 9:], other[:, 9:])
    swapped = tokens.clone()
    swapped[:, [2, 5]] = tokens[:, [5, 2]]
    assert not torch.allclose(model(swapped)[:, -1], one[:, -1])


def test_rotary_scores_depend_on_the_distance_only() -> None:
    rotary = RotaryEmbedding(32, 8).double()
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    turned_q, turned_k = (rotary(x.expand(1, 1, 32, 8))[0, 0] for x in (q, k))
    scores = turned_q @ turned_k.T
    assert torch.allclose(scores[10, 7], scores[25, 22], atol=1e-6)  # the tables are float32
    assert not torch.allclose(scores[10, 7], scores[10, 3], atol=1e-3)
    assert torch.allclose(turned_q.norm(dim=-1), q.norm(), atol=1e-6)


def test_the_loss_of_fresh_weights_is_that_of_a_uniform_guess() -> None:
    tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(1))
    loss = F.cross_entropy(small()(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert abs(loss.item() - math.log(64)) < 0.1


def test_every_parameter_gets_a_gradient_and_the_tied_one_from_both_ends() -> None:
    model = small(bias=True, positions="learned")
    tokens = torch.randint(64, (2, 16))
    model(tokens).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    unseen = torch.ones(64, dtype=torch.bool)
    unseen[tokens.unique()] = False
    assert torch.all(model.embed.weight.grad[unseen].abs().sum(1) > 0)  # only the output layer saw these


def test_the_number_of_parameters_is_the_closed_form() -> None:
    model = GPT(GPTConfig(vocab=256, layers=4, width=256))
    assert sum(p.numel() for p in model.parameters()) == 256 * 256 + 4 * (12 * 256**2 + 2 * 256) + 256


def test_dropout_is_keyed_everywhere() -> None:
    model = small(dropout=0.3)
    tokens = torch.randint(64, (2, 16))
    set_micro_batch_key(model, 1)
    first = model(tokens)
    torch.manual_seed(3)
    assert torch.equal(model(tokens), first)
    set_micro_batch_key(model, 2)
    assert not torch.equal(model(tokens), first)
    assert len({m.name for m in model.modules() if hasattr(m, "micro_batch_key")}) == 5


def test_an_impossible_shape_is_an_error() -> None:
    with pytest.raises(TaskError, match="3 heads"):
        GPTConfig(width=256, heads=3)


def test_generation_is_keyed_bounded_and_leaves_the_mode() -> None:
    model = small(dropout=0.5)
    prompt = torch.tensor([1, 2, 3])

    def run(seed: int, **how: float) -> torch.Tensor:
        return generate(model, prompt, 30, context=16, generator=torch.Generator().manual_seed(seed), **how)

    assert run(1).shape == (33,)
    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    assert torch.equal(run(1, temperature=0.0), run(2, temperature=0.0))
    assert torch.equal(run(1, top_p=1e-9), run(1, temperature=0.0))
    assert model.training


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()
    generator = torch.Generator().manual_seed(1)
    drawn = torch.cat([sample_token(logits, 1.0, 0.7, generator) for _ in range(300)])
    assert set(drawn.tolist()) == {1, 2}
    assert abs((drawn == 1).float().mean().item() - 2 / 3) < 0.1
    cold = torch.cat([sample_token(logits, 0.25, 1.0, generator) for _ in range(300)])
    assert (cold == 1).float().mean() > 0.85  # 0.5^4 against 0.25^4, 0.15^4 and 0.1^4
