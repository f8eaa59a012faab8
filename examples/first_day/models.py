"""The models of a first day: a CNN, an LSTM over unequal sequences, GPT-2 and BERT, a stream of samples."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset

from paceline import Loss, Task


def stripes(count: int = 512, noise: float = 0.5, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Noisy images of stripes, and whether they are level."""
    level = torch.arange(count) % 2
    clean = torch.sin(torch.arange(12) * 1.5).expand(12, 12)
    images = torch.stack([clean if flat else clean.T for flat in level])[:, None]
    images = images + noise * torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))
    return list(zip(images, level, strict=True))


def unseen(count: int = 4) -> list[torch.Tensor]:
    """New images, of which nobody says what they are."""
    return [image for image, _ in stripes(count, seed=1)]


def cnn() -> Task:
    """Stripes: upright or level; held out are images like those of training, and noisier ones."""
    data = stripes()
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 2),
    )

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> Loss:
        x, y = batch
        out = model(x)
        total = F.cross_entropy(out, y, reduction="sum")
        return Loss(total, len(y), {"accuracy": (out.argmax(1) == y).sum()})

    def predict(model: nn.Module, batch: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
        return model(batch if isinstance(batch, torch.Tensor) else batch[0]).argmax(1)

    held_out = {"alike": data[384:], "noisy": stripes(128, noise=1.0, seed=2)}
    return Task(model, data[:384], loss, held_out=held_out, predict=predict)


class Reader(nn.Module):
    """An LSTM that says of a sequence whether its first token was odd."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.head(hidden[torch.arange(len(tokens)), lengths - 1])


def lstm() -> Task:
    """Sequences of 3 to 9 tokens, which `collate` pads."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 10, (512,), generator=generator).tolist()
    data = [torch.randint(1, 32, (n,), generator=generator) for n in lengths]

    def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            "tokens": pad_sequence(samples, batch_first=True),
            "lengths": torch.tensor([len(s) for s in samples]),
            "odd": torch.stack([s[0] % 2 for s in samples]),
        }

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
        out = model(batch["tokens"], batch["lengths"])
        right = (out.argmax(1) == batch["odd"]).sum()
        return Loss(F.cross_entropy(out, batch["odd"], reduction="sum"), len(out), {"accuracy": right})

    return Task(Reader(), data[:384], loss, held_out=data[384:], collate=collate)


def counting() -> list[torch.Tensor]:
    """Sequences that count upwards from anywhere."""
    return [(torch.arange(16) + i) % 50 + 1 for i in range(256)]


def gpt2() -> Task:
    """A small GPT-2 of Hugging Face, from a config: the next token of a sequence that counts."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    model, data = GPT2LMHeadModel(config), counting()

    def loss(model: nn.Module, tokens: torch.Tensor) -> Loss:
        out = model(input_ids=tokens[:, :-1]).logits
        total = F.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        return Loss(total, tokens[:, 1:].numel())

    return Task(model, data[:192], loss, held_out=data[192:], num_tokens_per_sample=15)


def bert() -> Task:
    """A small BERT of Hugging Face, from a config: the token that is masked."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    model, data = BertForMaskedLM(config), counting()

    def loss(model: nn.Module, tokens: torch.Tensor) -> Loss:
        place = tokens[:, 0] % 16  # which token is masked follows from the sample
        rows = torch.arange(len(tokens))
        masked = tokens.clone()
        masked[rows, place] = 63
        out = model(input_ids=masked).logits[rows, place]
        right = (out.argmax(1) == tokens[rows, place]).sum()
        total = F.cross_entropy(out, tokens[rows, place], reduction="sum")
        return Loss(total, len(tokens), {"accuracy": right})

    return Task(model, data[:192], loss, held_out=data[192:])


class Walk(IterableDataset):
    """Steps of a random walk, one after another, and where each led; nobody knows how many there are."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        place = torch.zeros(2)
        for _ in range(1000):
            step = torch.randn(2)
            place = 0.9 * place + step
            yield torch.cat([place - step, step]), place


def stream() -> Task:
    """From the place before, and the step, to the place."""

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> Loss:
        x, y = batch
        return Loss((model(x) - y).square().sum(), len(y))

    return Task(nn.Linear(4, 2), Walk(), loss, held_out=Walk())
