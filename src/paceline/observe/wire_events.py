"""What is told of the choices of the wire: fields of the events `route`, `buckets` and `codec`."""

ROUTE = {
    "group": "str: whose sums",
    "ranks": "list: of this group",
    "choice": "str: which route sums take up to which size of a buffer",
    "choices": "table: the same by collective; those that were not measured are foretold",
    "source": "str: measured, measured before, or the file of a link profile",
    "routes": "table: by route, what an all_reduce took: alpha, beta and the points that were measured",
}
BUCKETS = {
    "bucket_bytes": "int: of gradients that are sent together",
    "reason": "str: why, with alpha and beta of the links",
    "source": "str: measured, or the file of a link profile",
}
CODEC = {
    "codec": "str: chosen among those that the strategy allows; fp32: none of them pays",
    "reason": "str: why, with what was measured",
    "compute_seconds": "float: forward and backward of a step, on the slowest rank",
    "bits_per_second": "float: of the links, in an all_reduce",
    "step_seconds": "table: by codec, what a step is expected to take",
    "break_even": "table: by codec, the bits per second below which it pays",
}
