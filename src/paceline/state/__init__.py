"""The training state as named tensors: slots and their boxes, and the keys of random numbers."""
