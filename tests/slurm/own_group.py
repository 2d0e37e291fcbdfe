"""A script with a process group of its own under srun: `srun python own_group.py PORT train demo epochs=2 ...`."""

import os
import sys

import torch
import torch.distributed as dist

from hopline.cli import main

if __name__ == "__main__":
    rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=rank, world_size=size)
    sys.argv = ["hopline", *sys.argv[2:]]
    try:
        main()
    except SystemExit as done:
        if done.code:
            raise
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)  # the group is still the script's own
    assert total.item() == size * (size + 1) // 2
    dist.destroy_process_group()
