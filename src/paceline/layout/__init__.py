"""Where state lives. A layout turns micro-batches into gradients and knows nothing of the optimizer."""

from paceline.layout.buffers import MicroBatchBuffers
from paceline.layout.holding import Holding
from paceline.layout.lanes import Lanes
from paceline.layout.placed import Placed
from paceline.layout.precision import Precision
from paceline.layout.replicate import Replicate
from paceline.layout.sums import Sums

__all__ = ["Holding", "Lanes", "MicroBatchBuffers", "Placed", "Precision", "Replicate", "Sums"]
