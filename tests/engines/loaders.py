"""A program that ranks run under an engine: `python -m tests.engines.loaders ENGINE`.

Rank 0 prints the number of seeds per rank, and of all ranks together, in one epoch of each loader. The plain
`DataLoader` stands for PyG's `NeighborLoader`, which divides its seeds as one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import hopline as hl
from tests.support.runs import small

NUM_SEEDS = 1839
DATA = small(num_nodes=3000, num_edges=30_000, num_train=NUM_SEEDS, num_valid=500)


def plain() -> DataLoader:
    seeds: Any = DATA.splits["train"]
    return DataLoader(seeds, batch_size=100, shuffle=True, collate_fn=torch.stack)


def neighbor_loader(**arguments: Any) -> hl.NeighborLoader:
    return hl.NeighborLoader(DATA, [3, 2], "train", batch_size=100, shuffle=True, **arguments)


def sampled(**arguments: Any) -> hl.Loader:
    return hl.Sampled(fanouts=(3, 2), batch_size=100).loader(DATA, **arguments)


LOADERS: dict[str, Callable[..., Any]] = {
    "DataLoader": plain,
    "NeighborLoader": neighbor_loader,
    "Sampled.loader": sampled,
}


def seeds_of(batch: Any) -> list[int]:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return (batch.seeds if isinstance(batch, hl.Batch) else batch.n_id[: batch.batch_size]).tolist()


def report(name: str, batches: Iterable[Any]) -> None:
    """Count the seeds of an epoch. Collective."""
    seeds = [seed for batch in batches for seed in seeds_of(batch)]
    all_seeds: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(all_seeds, seeds)
    if dist.get_rank() == 0:
        print("RESULT", json.dumps([name, [len(one) for one in all_seeds], len(set().union(*all_seeds))]), flush=True)


def by_lightning() -> None:
    import lightning  # type: ignore

    class Module(lightning.LightningModule):
        """Takes its loader from a hook, or from `fit`."""

        def __init__(self, make: Callable[[], Any]) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))
            self.make, self.batches = make, []

        def train_dataloader(self) -> Any:
            return self.make()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.batches.append(batch)
            return self.weight * len(seeds_of(batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    quiet |= {"strategy": "ddp", "devices": 2, "accelerator": "cpu", "max_epochs": 1, "enable_model_summary": False}
    # In a hook first: there hopline's classes are imported while Lightning watches constructors.
    for where in ("hook", "argument"):
        for name, make in reversed(LOADERS.items()):
            module = Module(make)
            lightning.Trainer(**quiet).fit(module, *([] if where == "hook" else [make()]))
            report(name, module.batches)


def by_fabric() -> None:
    from lightning.fabric import Fabric  # type: ignore

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    for name, make in LOADERS.items():
        report(name, fabric.setup_dataloaders(make()))


def by_accelerate() -> None:
    from accelerate import Accelerator  # type: ignore

    accelerator = Accelerator(cpu=True)
    for name, make in LOADERS.items():
        report(name, accelerator.prepare(make()))
    accelerator.end_training()


def by_torchrun() -> None:
    """No engine divides: `world=` does, and without it each rank has all seeds."""
    dist.init_process_group("gloo")
    world = hl.World.current()
    for name in ("NeighborLoader", "Sampled.loader"):
        report(name, LOADERS[name](world=world))
    world.close()
    for name in ("NeighborLoader", "Sampled.loader"):
        report(f"{name} without world", LOADERS[name]())


ENGINES = {"lightning": by_lightning, "fabric": by_fabric, "accelerate": by_accelerate, "torchrun": by_torchrun}


if __name__ == "__main__":
    ENGINES[sys.argv[1]]()
    if dist.is_initialized():  # Lightning and Fabric leave the group to the end of the process
        dist.destroy_process_group()
