"""A worker that all-reduces: `trainer.py [RANK=raise|kill] [until=FILE] [started=FOLDER]`.

It sums the ranks once, says so, then goes on until FILE appears, or its own fault comes.
"""

import os
import signal
import sys
import time
from pathlib import Path

from paceline.job.cluster import Cluster
from paceline.launch import guard

cluster = Cluster.from_env()
options = dict(argument.split("=") for argument in sys.argv[1:])
with guard(cluster):
    import torch
    import torch.distributed as dist

    cluster = cluster.connect("cpu", 30.0)
    total = torch.tensor([float(cluster.global_rank)])
    dist.all_reduce(total)
    sys.stdout.write(f"rank {cluster.global_rank} of {cluster.world_size}: {total.item():g}\n")
    if "started" in options:
        Path(options["started"], f"started-{cluster.global_rank}").touch()
    going = torch.ones(1)
    while going.item() and ("until" in options or len(options)):
        if options.get(str(cluster.global_rank)) == "raise":
            raise ValueError("boom")
        if options.get(str(cluster.global_rank)) == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
        going = torch.tensor([0.0 if Path(options.get("until", "/no/such/file")).exists() else 1.0])
        dist.all_reduce(going, dist.ReduceOp.MIN)
    cluster.disconnect()
