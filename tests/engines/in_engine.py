"""A program that ranks run under an engine: `python -m tests.engines.in_engine ENGINE FOLDER`.

Each engine makes the process group in its own way. Then ranks train, fail, train again, and use the group themselves.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hopline as hl
from hopline.util.host import who_set_threads
from tests.support.group_ranks import check_owner, fail_and_train_again
from tests.support.runs import losses, method, sage, small


def train_and_write(folder: str, wrap: Callable[[nn.Module], Any]) -> None:
    """What each rank found; the model is also trained as the engine has wrapped it for its own loops."""
    owner, size = dist.distributed_c10d._get_default_group(), dist.get_world_size()
    found = fail_and_train_again(Path(folder))
    data = small()
    found["wrapped"] = losses(
        hl.Trainer(wrap(sage(data)), data, method(batch_size=50 // size), epochs=2, show=False).fit()
    )
    check_owner(owner, size)
    world = hl.World.current()
    spec = {name: getattr(world, name) for name in ("rank", "size", "local_rank", "local_size", "node")}
    with world.watch():
        found["threads"] = torch.get_num_threads()
    found |= {"seat": spec, "set_by": who_set_threads(), "omp": os.environ.get("OMP_NUM_THREADS")}
    world.close()
    check_owner(owner, size)
    (Path(folder) / f"found{dist.get_rank()}").write_text(json.dumps(found))


def by_torchrun(folder: str) -> None:
    dist.init_process_group("gloo")
    train_and_write(folder, DistributedDataParallel)
    dist.destroy_process_group()


def by_fabric(folder: str) -> None:
    from lightning.fabric import Fabric  # type: ignore

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    train_and_write(folder, fabric.setup_module)


def by_accelerate(folder: str) -> None:
    from accelerate import Accelerator  # type: ignore

    accelerator = Accelerator(cpu=True)
    train_and_write(folder, accelerator.prepare)
    accelerator.end_training()


def by_ray(folder: str) -> None:
    import ray.train  # type: ignore
    from ray.train.torch import TorchTrainer, prepare_model  # type: ignore

    def loop(config: dict[str, Any]) -> None:
        train_and_write(config["folder"], prepare_model)

    scaling = ray.train.ScalingConfig(num_workers=2)
    stored = ray.train.RunConfig(storage_path=f"{folder}/ray")
    TorchTrainer(loop, train_loop_config={"folder": folder}, scaling_config=scaling, run_config=stored).fit()


ENGINES = {"torchrun": by_torchrun, "fabric": by_fabric, "accelerate": by_accelerate, "ray": by_ray}


if __name__ == "__main__":
    ENGINES[sys.argv[1]](sys.argv[2])
