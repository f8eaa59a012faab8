"""Fields of the records about who is slow, what was done, and who serves what; see `schema`."""

SERVERS = {
    "partition": "str: how tensors are cut for several servers",
    "bytes": "list: of parameters, by server",
}

SHARES = {
    "step": "int: index of the first step with these shares",
    "shares": "list: of each replica, how many shards of a batch it runs",
    "seconds": "list: of each, how long a shard has taken it",
}
GAIN = {
    "step": "int: steps taken before",
    "before": "float: seconds of a step on this rank under the shares before, the median of a window",
    "after": "float: the same under the present shares",
}
STRAGGLER = {
    "step": "int: steps taken before",
    "cause": "str: data, compute or communication",
    "seconds": "float: that it takes for a micro-batch, or to be reached",
    "usual": "float: that others take, their median",
}
