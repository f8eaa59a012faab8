"""A small convolutional network for 8 x 8 images, with batch statistics and dropout.

Batch statistics are taken over the samples of one forward, which is one virtual shard: the shards are part
of what is computed, and the world size is not.
"""

from __future__ import annotations

from torch import Tensor, nn

from paceline.models.dropout import KeyedDropout

_SIDE = 8  # pixels, as in the digits of scikit-learn


class ConvNet(nn.Module):
    """Three 3 x 3 convolutions with BatchNorm, one pooling, dropout, and a linear head.

    Args:
        channels: output channels of the first convolution; the others have twice as many.
        num_classes: width of the result.
        dropout: probability of dropping a value before the head.
    """

    def __init__(self, channels: int = 16, num_classes: int = 10, *, dropout: float = 0.1) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_convolution(1, channels),
            *_convolution(channels, 2 * channels),
            nn.MaxPool2d(2),
            *_convolution(2 * channels, 2 * channels),
        )
        self.dropout = KeyedDropout(dropout)
        self.head = nn.Linear(2 * channels * (_SIDE // 2) ** 2, num_classes)

    def chain(self) -> list[nn.Module]:
        """Return the modules whose composition is this model."""
        image = nn.Unflatten(1, (1, _SIDE, _SIDE))
        return [image, *self.features, nn.Flatten(1), self.dropout, self.head]

    def forward(self, x_BP: Tensor) -> Tensor:
        """Map images, float32 [B, 64], to logits, float32 [B, num_classes]."""
        x_BCHW = self.features(x_BP.view(-1, 1, _SIDE, _SIDE))
        return self.head(self.dropout(x_BCHW.flatten(1)))


def _convolution(num_in: int, num_out: int) -> list[nn.Module]:
    return [nn.Conv2d(num_in, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU()]
