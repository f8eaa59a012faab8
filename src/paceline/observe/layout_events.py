"""What is told of how a model was cut, and of the memory that a run keeps to: fields of two events."""

STAGES = {
    "stages": "str: modules of each stage, by measured time",
    "link_seconds": "list: of forward and backward of each module",
    "stage_seconds": "list: of each stage",
    "stage_bytes": "list: planned peak of each stage; empty without memory.budget",
    "fastest": "str: modules of each stage that would be faster and need more than the budget, or empty",
    "imbalance": "float: slowest stage over the mean",
}
RECOMPUTE = {
    "recompute": "str: none, blocks, segments, or numbers of blocks: what backward computes again",
    "peak_bytes": "int: planned for the largest rank",
    "budget_bytes": "int: memory.budget",
    "without_bytes": "int: planned for it if nothing were computed again",
    "block_seconds": "list: of a forward of each block, measured; empty if none had to be",
    "seconds": "float: that a micro-batch takes longer",
}
