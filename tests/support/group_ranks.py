"""Ranks in a process group of their own: `python -m tests.support.group_ranks SCENARIO FOLDER [RANK SIZE]`.

The process group is initialised as a user's script does it, by the environment or by a file. Scenarios train, fail and
lose ranks in it. The group must be the same object afterwards and still work, and no heartbeat thread may be left.
Each rank writes its results to FOLDER/foundRANK.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hopline as hl
from hopline.distributed import existing_group
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.util.errors import PeerError
from tests.methods.full_batch import ranks as full_batch
from tests.methods.historical import ranks as historical
from tests.support import different_ranks
from tests.support.launched import everything
from tests.support.ranks import train
from tests.support.runs import method, sage, small

NORMED: dict[str, Any] = {"norm": "batch", "epochs": 2}
"""Options of a full-batch run whose norms go over all ranks."""


def check_owner(before: Any, size: int) -> None:
    """The process group of the owner is the same object, and still sums over its ranks."""
    assert dist.is_initialized()
    assert dist.distributed_c10d._get_default_group() is before
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    assert total.item() == sum(range(size))


def heartbeat_threads() -> list[str]:
    """The names of hopline's heartbeat threads in this process."""
    return [thread.name for thread in threading.enumerate() if thread.name == "hopline-heart"]


def train_everything(folder: Path) -> dict[str, Any]:
    """Train every method, with and without a given world; the owner uses the group before, between and after."""
    owner = dist.distributed_c10d._get_default_group()
    size = dist.get_world_size()
    results: dict[str, Any] = {"plain": train(None, "sage"), "given": train(hl.World.current(), "sage")}
    check_owner(owner, size)
    assert not heartbeat_threads()
    world = hl.World.current()
    everything(world, str(folder))
    results["historical"] = historical.result_of(historical.trainer_of(world, {}))
    results["full_batch"] = full_batch.train(world, "sage", {}, **NORMED)
    check_owner(owner, size)
    groups = set(dist.distributed_c10d._world.pg_map)
    assert len(groups) > 2
    world.close()
    world.close()
    assert owner in set(dist.distributed_c10d._world.pg_map) < groups
    launched = run(lambda joined: train(joined, "sage"), LaunchSettings(timeout_s=20))
    assert launched == results["plain"]
    try:
        run(train, LaunchSettings(devices=size + 1), "sage")
    except ValueError as error:
        results["refused"] = str(error)
    check_owner(owner, size)
    assert not heartbeat_threads()
    results["threads"] = torch.get_num_threads()
    return results


def fail_and_train_again(folder: Path) -> dict[str, Any]:
    """One rank fails in a step; the others are told why, and all train again in the same process group."""
    owner = dist.distributed_c10d._get_default_group()
    rank = dist.get_rank()

    def step(model: nn.Module, batch: hl.Batch) -> Tensor:
        if rank == 1:
            raise ValueError("the labels of rank 1 are wrong: look at them")
        return nn.functional.cross_entropy(model(batch), batch.labels)

    data = small()
    trainer = hl.Trainer(sage(data), data, method(), train_step=step, epochs=1, show=False)
    results: dict[str, Any] = {}
    for attempt in ("first", "again"):
        start = time.monotonic()
        try:
            trainer.fit()
        except (ValueError, PeerError) as error:
            results[attempt] = {"kind": type(error).__name__, "error": str(error), "seconds": time.monotonic() - start}
        check_owner(owner, dist.get_world_size())
        assert not heartbeat_threads()
    results["after"] = train(None, "sage")
    check_owner(owner, dist.get_world_size())
    return results


def lose_a_rank(folder: Path) -> dict[str, Any]:
    """Rank 1 is killed in its fifth step; the others learn of it, and keep their group and its store."""
    owner = dist.distributed_c10d._get_default_group()
    error = ""
    start = time.monotonic()
    try:
        train(None, "sage", kill=(1, 5))
    except PeerError as lost:
        error = str(lost)
    assert dist.distributed_c10d._get_default_group() is owner
    store = dist.distributed_c10d._get_default_store()
    store.set(f"mine/{dist.get_rank()}", "still here")
    assert store.get(f"mine/{dist.get_rank()}") == b"still here"
    assert not heartbeat_threads()
    seconds = time.monotonic() - start
    other = 2 - dist.get_rank()
    store.wait([f"mine/{other}"], timedelta(seconds=20))  # rank 0 keeps the store for the other one
    return {"error": error, "seconds": seconds}


def train_on_uneven_hosts(folder: Path) -> dict[str, Any]:
    """One rank on a first host and two on a second, simulated by host_identity."""
    host = "first" if dist.get_rank() == 0 else "second"
    existing_group.host_identity = lambda: host
    world = hl.World.current()
    everything(world, str(folder), data=False)
    return {"full_batch": full_batch.train(world, "sage", {}, **NORMED), "sampled": train(world, "sage")}


def come_alone(folder: Path) -> dict[str, Any]:
    """Only rank 0 makes a world."""
    if dist.get_rank() == 0:
        try:
            hl.World.current(timeout_s=2)
        except PeerError as error:
            return {"error": str(error)}
    return {"error": ""}


def die(folder: Path) -> dict[str, Any]:
    """A rank is killed in a group whose store cannot serve a second connection."""
    world = hl.World.current()
    start = partial(existing_group._start_heartbeat, NoClone(), world.rank, world.size)  # type: ignore[arg-type]
    world._membership._start_heartbeat = start  # type: ignore[union-attr]
    world.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        world.barrier()
    except PeerError as error:
        return {"error": str(error)}
    return {"error": ""}


def train_cpu_model_in_nccl_group(folder: Path) -> dict[str, Any]:
    """NCCL exchanges no tensors on the host: ours go by gloo."""
    assert dist.get_backend() == "nccl"
    return train(None, "sage")


def train_gpu_model_in_gloo_group(folder: Path) -> dict[str, Any]:
    """Two ranks on one GPU, which gloo allows."""
    torch.cuda.set_device(0)
    return train(None, "sage", device="cuda:0")


class NoClone:
    """A store of a user's own making, which cannot be cloned."""


def differ(folder: Path) -> dict[str, Any]:
    """The ranks are given different things, one after the other, and the group stays usable."""
    owner = dist.distributed_c10d._get_default_group()
    outcomes = different_ranks.try_all(folder)
    assert not heartbeat_threads()
    check_owner(owner, dist.get_world_size())
    return outcomes


SCENARIOS: tuple[Callable[[Path], dict[str, Any]], ...] = (
    train_everything,
    fail_and_train_again,
    lose_a_rank,
    train_on_uneven_hosts,
    come_alone,
    die,
    differ,
    train_cpu_model_in_nccl_group,
    train_gpu_model_in_gloo_group,
)


def main(name: str, folder: str, rank: str = "", size: str = "") -> None:
    """Run a scenario under the environment of a launcher; with RANK and SIZE, a file takes the place of a server."""
    by_file: dict[str, Any] = {}
    if rank:
        by_file = {"init_method": f"file://{folder}/store", "rank": int(rank), "world_size": int(size)}
    backend = "nccl" if "nccl" in name else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=60), **by_file)
    scenario = next(function for function in SCENARIOS if function.__name__ == name)
    results = scenario(Path(folder))
    (Path(folder) / f"found{dist.get_rank()}").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
