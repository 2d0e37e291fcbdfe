"""The world of a process group that a script, Ray Train, Lightning Fabric or Accelerate has made.

The *owner* is whoever has initialised torch.distributed. Hopline asks the owner's group for its ranks, its
backend and its store, and does not use it otherwise. Collective calls go through a second process group
over the same ranks:

- Its backend fits the device that trains, such as gloo for tensors on the host under an NCCL group.
- Collective calls of the owner, such as those of DDP in another thread, never mix with those of hopline.
- After an error on one rank, destroying the second group wakes ranks that wait in a call. The owner's group
  stays as it is and can be used again.

The owner's group has ranks, but does not say which of them share a host. So each rank writes an
`Introduction` into the store of the second group, which is the owner's store under a prefix.
`spec_of` numbers the hosts and the ranks of each host, both in the order of the ranks. The heartbeats use the
same store.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hopline.distributed.heartbeat import Heartbeat, NoHeartbeat
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.membership import Membership
from hopline.distributed.world import (
    RankSpec,
    World,
    address_of,
    check_own_gpus,
    device_of_rank,
    gpu_identity,
    new_group,
    reason_of,
    sentence,
    share_of_cores,
    tell_all,
)
from hopline.util.errors import PeerError
from hopline.util.host import allowed_cores, host_identity


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """What a rank knows about itself before it knows the others."""

    host: str
    """Identity of its host. Equal on ranks that can share memory."""
    cores: Sequence[int] = ()
    """Cores that it may run on, sorted. Empty if the system does not tell."""
    current_gpu: int | None = None
    """Number of its current CUDA device. None if it trains on the CPU."""


def join_existing_group(device: torch.device, timeout_s: float | None) -> World:
    """The world of torch's default process group. Every rank of the group must call this.

    device: Where this rank trains. "cuda" without a number: `find_gpu` chooses.
    timeout_s: Seconds to wait for a rank. None: the timeout of the owner's group.

    Raises a PeerError if not all ranks come within the timeout.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    backend = backend_for(device)
    timeout_s = timeout_s or _owner_timeout_s()
    try:
        group = new_group(backend, timeout_s)
    except RuntimeError as error:
        raise PeerError(
            f"not all {size} ranks of the process group came together within {timeout_s:.0f} s ({reason_of(error)}): "
            "make the Trainer on every rank, or on one alone with world=hl.World.alone()"
        ) from error
    store = dist.PrefixStore("hopline", distributed_c10d._get_process_group_store(group.group))
    membership = Membership(
        partial(_start_heartbeat, store, rank, size), group, served_store=store if rank == 0 else None
    )
    try:
        own = Introduction(
            host=host_identity(),
            cores=allowed_cores(),
            current_gpu=torch.cuda.current_device() if device.type == "cuda" else None,
        )
        introductions = [Introduction(**told) for told in tell_all(store, "introduction", rank, size, asdict(own))]
        spec = spec_of(introductions, rank, backend, timeout_s)
        on_host = [other for other in introductions if other.host == introductions[rank].host]
        if device.type == "cuda":
            device = find_gpu(device, spec, on_host)
            torch.cuda.set_device(device)
        if backend == "nccl":
            gpus = tell_all(store, "gpu", rank, size, gpu_identity(str(device)))
            check_own_gpus(gpus, "start one process per GPU, or initialise the process group with backend gloo")
        spec = replace(spec, device=str(device))
        world = World(spec, membership, cores=share_of_cores([other.cores for other in on_host]))
        weakref.finalize(world, membership.close)
        return world
    except BaseException as error:
        membership.close(sentence(error))
        raise


def _start_heartbeat(store: dist.Store, rank: int, size: int, exchanges: int) -> Heartbeat | NoHeartbeat:
    """A heartbeat over a connection of its own: some calls of other threads wait for other ranks."""
    try:
        own_store = store.clone()
    except (AttributeError, RuntimeError):  # the owner's store is of a kind that cannot be cloned
        return NoHeartbeat(exchanges)
    return Heartbeat(own_store, rank, size, address_of(store), exchanges)


def spec_of(introductions: Sequence[Introduction], rank: int, backend: str, timeout_s: float) -> RankSpec:
    """The specification of a rank, without its device. Hosts may have different numbers of ranks.

    Hosts, and the ranks of each, are counted in the order of the ranks, as launchers count them.

    introductions: Those of all ranks, by rank.
    """
    hosts = [introduction.host for introduction in introductions]
    own_host = hosts[rank]
    return RankSpec(
        rank=rank,
        size=len(hosts),
        local_rank=hosts[:rank].count(own_host),
        local_size=hosts.count(own_host),
        node=list(dict.fromkeys(hosts)).index(own_host),
        backend=backend,
        timeout_s=timeout_s,
    )


def find_gpu(device: torch.device, spec: RankSpec, on_host: Sequence[Introduction]) -> torch.device:
    """The GPU of this rank. The first of these that is known:

    1. The number in `device`.
    2. The GPU that the owner's group is bound to.
    3. ACCELERATE_TORCH_DEVICE, in which Ray Train names the GPU before its `prepare_model` makes it the
       current one.
    4. The current CUDA device, if a rank of the host has another one than GPU 0. Lightning Fabric,
       Accelerate and most scripts set it. If all ranks of a host are at GPU 0, nobody has chosen.
    5. The GPU whose number is the local rank.

    on_host: Introductions of all ranks of this host.
    """
    if device.index is not None:
        return device
    bound = getattr(distributed_c10d._get_default_group(), "bound_device_id", None)
    if bound is not None and bound.type == "cuda" and bound.index is not None:
        return bound
    named = os.environ.get("ACCELERATE_TORCH_DEVICE", "")
    if named.startswith("cuda:"):
        return torch.device(named)
    has_chosen = any(other.current_gpu for other in on_host)
    if has_chosen:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device_of_rank(spec, "cuda", spawned=False))


def backend_for(device: torch.device) -> str:
    """The backend of the second process group: NCCL for a GPU if the owner's group has it, else gloo.

    Gloo takes tensors of GPUs too. Raises a ValueError if the owner's group has no store.
    """
    if distributed_c10d._get_default_store() is None:
        raise ValueError(
            f"the process group (backend {dist.get_backend()}) has no store in which ranks could meet: initialise "
            "torch.distributed with backend gloo or nccl"
        )
    if device.type == "cuda" and "cuda:nccl" in distributed_c10d.get_backend_config():
        return "nccl"
    return "gloo"


def _owner_timeout_s() -> float:
    """Timeout of the owner's group in seconds, or that of the launch settings if it does not tell."""
    group = distributed_c10d._get_default_group()
    for kind in ("cuda", "cpu"):
        # Suppressed: the group has no backend for this kind of device, or that backend has no options.
        with contextlib.suppress(RuntimeError, AttributeError):
            return group._get_backend(torch.device(kind)).options._timeout.total_seconds()
    return LaunchSettings().timeout_s
