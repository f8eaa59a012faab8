"""Training state: slots that name parts of tensors, optimizer state, and keys of random numbers.

This package imports errors only, so that every package above can use it; `state.keys` is free of torch.
"""
