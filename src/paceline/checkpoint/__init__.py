"""Checkpoints: the training state in a folder, complete or not there.

A checkpoint is a folder `step-NNNNNNNN`: a file of tensors and a report of each rank, and a manifest that is
written last. `saver` writes them, `checkpoint_reader` reads them, `catalog` lists and removes them; see
`docs/howto/checkpoints.md`. Nothing is imported here, because the process of `checkpoint.disk` starts without
torch.
"""
