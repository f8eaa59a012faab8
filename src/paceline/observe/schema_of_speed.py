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
SAMPLES = {
    "step": "int: steps taken before",
    "taken": "int: samples that all replicas have taken since the run was started or resumed",
    "applied": "int: of these, applied",
    "dropped": "int: of these, in updates that were left out; applied and dropped are all",
}
GAIN = {
    "step": "int: steps taken before",
    "before": "float: seconds of a step on this rank under the shares, or the rule, before",
    "after": "float: the same under the present ones",
    "times": "float: how many times as many items a second updates are made of now",
}
STRAGGLER = {
    "step": "int: steps taken before",
    "cause": "str: data, compute or communication",
    "seconds": "float: that it takes for a micro-batch, or to be reached",
    "usual": "float: that others take, their median",
}
RECOVERED = {
    "step": "int: steps taken before",
    "seconds": "float: in which it answers the server, or runs a micro-batch, now, its median",
    "usual": "float: in which others do",
}
SYNC = {
    "step": "int: steps taken before",
    "sync": "str: the rule from here on, chosen among those that the strategy allows",
    "reason": "str: why, with what was measured",
    "compute_seconds": "float: of a step, on the slowest rank",
    "exchange_seconds": "float: of a sum of all gradients while nobody computes",
    "message_seconds": "float: of all parameters from each rank to the next; 0: nobody would send them",
    "bits_per_second": "float: of the links, in that sum",
    "step_seconds": "table: by rule, what a step takes or is expected to take",
    "break_even": "table: by rule, the bits per second below which it pays",
}
