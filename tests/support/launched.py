"""Functions that launched ranks run in tests: checks of every collective call, and ranks that die, wait or fail.

    python -m tests.support.launched FUNCTION DEVICES TIMEOUT_S ARGUMENTS

`started` runs such processes and ends them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hopline.data.dataset import Dataset
from hopline.data.host_copy import share
from hopline.data.synthetic import planted_partition
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import World
from hopline.util.errors import PeerError
from tests.support.warm import Process, python

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMP_NUM_THREADS")


def tiny() -> Dataset:
    """A planted graph that takes no time to make."""
    return planted_partition(num_nodes=200, num_edges=900, num_classes=3, num_features=5, num_train=60, num_valid=40)


def gradient(rank: int, position: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A gradient that differs between ranks; whole numbers, so that sums are exact in any order."""
    values = torch.arange(torch.Size(shape).numel()).view(shape) % 7 - 3
    return (values * (rank + 1) + position).to(dtype)


def check_gradients(world: World) -> None:
    """Summed gradients: equal on all ranks, in place, and the same at every call.

    Some parameters have a gradient on all ranks, one on a single rank, one on none; some fill more than a bucket.
    """
    last = world.size - 1
    shapes = [(3, 4), (5,), (2, 2), (1,), (4,), (3000, 1200), (1500, 2000), (), (6,)]
    dtypes = [torch.float32] * 9
    dtypes[2] = torch.float64
    dtypes[4] = torch.bfloat16
    ranks_with_gradient = {1: [last], 3: [], 6: [0]}  # all the others are held by every rank
    parameters = [nn.Parameter(torch.zeros(s, dtype=d)) for s, d in zip(shapes, dtypes, strict=True)]
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    for k, parameter in enumerate(parameters):
        if world.rank in ranks_with_gradient.get(k, range(world.size)):
            parameter.grad = gradient(world.rank, k, shapes[k], dtypes[k])
    parameters[5].grad = gradient(world.rank, 5, (1200, 3000), torch.float32).t()  # not contiguous
    gradients_before = [parameter.grad for parameter in parameters]
    world.sum_gradients(iter([*parameters, frozen]))
    assert frozen.grad is None
    for k, parameter in enumerate(parameters):
        ranks = ranks_with_gradient.get(k, range(world.size))
        if not ranks:
            assert parameter.grad is None
            continue
        shape = shapes[k] if k != 5 else (1200, 3000)
        expected = sum((gradient(r, k, shape, dtypes[k]) for r in ranks), torch.zeros(shape, dtype=dtypes[k]))
        assert parameter.grad is not None
        assert parameter.grad.dtype == dtypes[k]
        assert torch.equal(parameter.grad, expected if k != 5 else expected.t()), k
        assert gradients_before[k] is None or gradients_before[k] is parameter.grad  # in place
    model = nn.Linear(300, 300)
    sums = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(world.rank)
        model.weight.grad = torch.randn(300, 300, generator=generator)
        world.sum_gradients(model.parameters())
        sums.append(model.weight.grad.clone())
    assert torch.equal(sums[0], sums[1])  # bit by bit, from run to run
    first = sums[0].clone()
    world.broadcast_tensors([first])
    assert torch.equal(first, sums[0])  # and on every rank


def check_words(world: World) -> None:
    """Sums, flags, broadcasts and all-to-all, of numbers, objects and tensors of several dtypes."""
    assert world.sum([1, world.rank, 0.1]) == [world.size, sum(range(world.size)), sum([0.1] * world.size)]
    assert world.sum([]) == []
    assert world.any(world.rank == world.size - 1)
    assert not world.any(False)
    value = {"a": (1, 2.5), "b": None, "c": "Übung", "d": [True], "big": "x" * 100_000}
    for src in (0, world.size - 1):
        received = world.broadcast_object(value if world.rank == src else object(), src=src)
        assert received == value | {"a": [1, 2.5]}
    assert world.broadcast_object("" if world.rank == 0 else 1) == ""
    try:
        world.broadcast_object({1, 2})
    except ValueError as error:
        assert "broadcast numbers" in str(error)  # noqa: PT017
    else:
        raise AssertionError("a set was broadcast")
    tensors = [torch.arange(6.0).view(2, 3).t(), torch.ones(3, dtype=torch.bool), torch.tensor(7), torch.empty(0)]
    tensors += [torch.full((5,), 1.5, dtype=torch.bfloat16), nn.Parameter(torch.ones(4))]
    expected = [t.detach().clone() for t in tensors]
    if world.rank != 0:
        for tensor in tensors:
            tensor.data.zero_()
    world.broadcast_tensors(tensors)
    assert all(torch.equal(a.detach(), b) for a, b in zip(tensors, expected, strict=True))
    counts = torch.arange(3000 * 1200).view(3000, 1200).t() % 5  # not contiguous, and a bucket's worth
    summed = [counts.float() * (world.rank + 1), nn.Parameter(torch.full((2,), world.rank + 0.5, dtype=torch.bfloat16))]
    summed += [torch.empty(0), torch.full((), world.rank + 0.25, dtype=torch.float64)]
    sum_of_ranks = sum(range(world.size))
    world.sum_tensors(summed)
    assert torch.equal(summed[0], counts.float() * (sum_of_ranks + world.size))
    assert summed[1].detach().tolist() == [sum_of_ranks + 0.5 * world.size] * 2
    assert summed[3].item() == sum_of_ranks + 0.25 * world.size
    for shape, dtype in (((2,), torch.bfloat16), ((), torch.int64), ((3, 1), torch.float64)):
        sent = [torch.full((rank, *shape), 10 * world.rank + rank, dtype=dtype) for rank in range(world.size)]
        for rank, piece in enumerate(world.all_to_all(sent)):
            assert torch.equal(piece, torch.full((world.rank, *shape), 10 * rank + world.rank, dtype=dtype))
    world.barrier()


def same_dataset(ours: Dataset, expected: Dataset) -> bool:
    """Whether graph, features, labels and splits are equal to the bit."""
    tensors = [(d.graph.indptr, d.graph.indices, d.x[torch.arange(len(d.x))], d.labels) for d in (ours, expected)]
    splits = [[*d.splits.items(), *(i for s in d.alternatives for i in s.items())] for d in (ours, expected)]
    return (
        all(torch.equal(a, b) for a, b in zip(*tensors, strict=True))
        and all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(*splits, strict=True))
        and len(ours.alternatives) == len(expected.alternatives)
    )


def check_sharing(world: World) -> None:
    """The ranks of a host share one copy of a dataset, and leave no file in shared memory or temporary folders."""
    original = tiny()
    swapped = {"train": original.splits["test"], "test": original.splits["train"]}
    with_two_splits = replace(original, alternatives=(swapped, original.splits))
    for dataset in (original, with_two_splits.with_split(0), with_two_splits.with_split(1)):
        shared = share(dataset if world.local_rank == 0 else None, world)
        assert same_dataset(shared, dataset)
        assert (shared is dataset) == (world.local_size == 1)
        if world.local_size > 1:
            maps = Path("/proc/self/maps").read_text()
            assert "(deleted)" in next(line for line in maps.splitlines() if "hopline-shared-" in line)
    if world.local_size > 1:
        for unshareable in (None, replace(original, meta={"not": object()})):
            try:
                share(unshareable if world.local_rank == 0 else None, world)
            except (ValueError, TypeError):
                continue
            raise AssertionError("shared what cannot be")


def everything(world: World, folder: str, data: bool = True) -> dict[str, Any]:
    """Check all collective calls, and write the position of this rank to FOLDER/seatRANK."""
    check_words(world)
    check_gradients(world)
    if data:
        check_sharing(world)
    spec = {k: getattr(world, k) for k in ("rank", "size", "local_rank", "local_size", "node", "timeout_s")}
    spec |= {"threads": torch.get_num_threads(), "num_cores": world.num_cores, "pid": os.getpid()}
    (Path(folder) / f"seat{world.rank}").write_text(json.dumps(spec))
    return {"size": world.size}


def everything_then_death(world: World, folder: str, victim: int) -> None:
    """Check everything; then one rank is killed, and the others write the error that they get."""
    everything(world, folder)
    if world.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    for _ in range(2):  # a world that has lost a rank says so again
        try:
            world.sum([1.0])
        except PeerError as error:
            text = json.dumps({"error": str(error), "seconds": time.monotonic() - start})
            (Path(folder) / f"lost{world.rank}").write_text(text)
    world.barrier()


def stay(world: World, folder: str) -> None:
    """Write that this rank runs, then wait for a signal."""
    world.barrier()
    (Path(folder) / f"running{world.rank}").write_text(str(os.getpid()))
    try:
        time.sleep(60)
    finally:
        (Path(folder) / f"ended{world.rank}").write_text("by a signal")


def fail(world: World, filler: str, length: int) -> None:
    """Fail in rank 1 while the others wait for it. filler: an argument that must arrive whole."""
    assert len(filler) == length
    if world.rank == 1:
        raise ValueError("batch_size is too large: give batch_size=10")
    world.barrier()


def environment(**changes: str) -> dict[str, str]:
    """The environment for a subprocess: no launcher's variables but these."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    return plain | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"} | changes


def free_port() -> int:
    """A port of this host that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def started(*commands: tuple[list[str], Mapping[str, str]]) -> Iterator[list[Process]]:
    """Run Python processes, given by arguments and environment; all are ended afterwards."""
    processes = [python(*arguments, env=variables) for arguments, variables in commands]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=20)


def program(*arguments: str) -> list[str]:
    """The arguments of Python that run this module."""
    return ["-W", "error::UserWarning", "-m", "tests.support.launched", *arguments]


def main(name: str, devices: str, timeout_s: str, *args: str) -> None:
    """Run a function of this module in ranks; whole numbers among the arguments become int."""
    functions = {f.__name__: f for f in (everything, everything_then_death, stay, fail)}
    arguments = [int(a) if a.isdecimal() else a for a in args]
    settings = LaunchSettings(devices=int(devices), timeout_s=float(timeout_s))
    print(run(functions[name], settings, *arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
