"""A script that knows nothing of Paceline."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():g} {sys.argv[1:]}\n")
dist.destroy_process_group()
