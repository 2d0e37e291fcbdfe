"""The world of a process group that somebody else has made: a script, Ray Train, Lightning Fabric, Accelerate.

The group, called the owner's here, is only asked for its ranks, its backend and its store. Exchanges go through a
process group of our own over the same ranks, for three reasons:

- Its backend fits the device that trains: gloo for tensors on the host under an NCCL group, for example.
- Exchanges of the owner, such as those of DDP in another thread, never meet ours.
- After an error on one rank, destroying our group wakes the others, which wait in an exchange. The owner's group stays
  as it is and can be used again.

Ranks find their hosts, and say that they are alive, in the store of our group, which is the owner's under a prefix.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import traceback
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hopline.distributed.environment import read_local_rank_and_node
from hopline.distributed.heartbeat import Heartbeat, NoHeartbeat, get_all
from hopline.distributed.world import (
    GroupHandle,
    RankSpec,
    World,
    defaults_in_environment,
    device_of_rank,
    gpu_identity,
    interface_towards,
    last_words,
    reason_of,
    sentence,
)
from hopline.util.errors import PeerError
from hopline.util.host import host_identity, num_cores

USUAL_TIMEOUT_S = 600.0
"""Where the owner's group does not tell its own."""


LEAVE_S = 5.0
"""How long the first rank, which may keep the store, waits after an error for the others to read about it."""


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """What every rank says of itself before it has a place."""

    host: str
    """Equal on ranks that can share memory."""
    local_rank: int | None = None
    """As a launcher says; None where none does."""
    node: int | None = None
    """The number of its host, as a launcher says."""
    cores: Sequence[int] = ()
    current_gpu: int | None = None
    """The current CUDA device; None on a rank that trains on the host."""


@dataclass(frozen=True, kw_only=True)
class HostRank:
    """Where a rank is among those of its host."""

    local_rank: int
    local_size: int
    node: int
    num_sharing_cores: int
    """Ranks of the host that may run on the same cores, this one included."""


class GroupWorld(World):
    """The world of an existing process group: `World.current` makes it.

    Its heart beats from the first exchange on, until `watch` ends or the world is closed. An error within `watch`
    closes it. What was made here goes with this object; the owner's group and store do not.
    """

    def __init__(self, spec: RankSpec, resources: GroupResources, num_cores: int) -> None:
        super().__init__(spec)
        self.num_cores = num_cores
        self._resources = resources
        weakref.finalize(self, resources.close, last_words(""))

    @property
    def group(self) -> dist.ProcessGroup:
        return self._resources.groups[0].group

    def new_group(self) -> GroupHandle:
        group = _new_group("gloo", self.timeout_s)
        self._resources.groups.append(group)
        return group

    def close(self, error: str = "") -> None:
        self._resources.close(last_words(error), broken=bool(self._lost))

    def _end_watch(self, error: BaseException | None) -> None:
        if error is None:
            self._resources.pause_heartbeat()
            return
        # Frames of an exchange that failed refer to the process group, whose end the other ranks wait for.
        if isinstance(error, PeerError):
            traceback.clear_frames(error.__traceback__)
            if error.__cause__ is not None:
                traceback.clear_frames(error.__cause__.__traceback__)
        self.close(sentence(error))

    def _running_heartbeat(self) -> Heartbeat | NoHeartbeat:
        return self._resources.running_heartbeat()


class GroupResources:
    """What a `GroupWorld` has made in the owner's process: process groups, and a heart while it beats.

    It knows nothing of its world, so that it can end with it. Threads that prepare batches exchange too, hence the
    lock.
    """

    def __init__(self, group: GroupHandle, store: dist.Store, rank: int, size: int) -> None:
        self.groups = [group]
        self._store = store
        self._rank = rank
        self._size = size
        self._heartbeat: Heartbeat | NoHeartbeat | None = None
        self._num_exchanges = 0
        """Those of hearts that have stopped."""
        self._last_words: str | None = None
        self._lock = threading.Lock()

    def running_heartbeat(self) -> Heartbeat | NoHeartbeat:
        """The heart, started if it is at rest."""
        with self._lock:
            if self._last_words is not None:
                reason = self._last_words.removeprefix("error ")
                raise PeerError(
                    f"this rank has left the others ({reason}), so nothing can be exchanged: make a new Trainer, or "
                    "call hl.World.current() again"
                )
            if self._heartbeat is None:
                self._heartbeat = self._new_heartbeat()
            return self._heartbeat

    def pause_heartbeat(self) -> None:
        """Stop the heart until the next exchange: nobody waits for this rank."""
        with self._lock:
            self._stop_heartbeat(last_words(""))

    def close(self, words: str, broken: bool = False) -> None:
        """Tell the others why this rank leaves, and destroy what was made here. May be called twice."""
        with self._lock:
            if self._last_words is not None:
                return
            self._last_words = words
            is_error = words != last_words("")
            if is_error and self._heartbeat is None:
                self._heartbeat = self._new_heartbeat()  # so that the others can read why
            heartbeat = self._heartbeat
            self._stop_heartbeat(words)
            for group in self.groups:
                group.destroy(broken=broken)
            if is_error and self._rank == 0 and isinstance(heartbeat, Heartbeat):
                heartbeat.wait_for_others(LEAVE_S)  # the store may end with this process

    def _new_heartbeat(self) -> Heartbeat | NoHeartbeat:
        try:
            # A store answers one question at a time, and some wait for others: a heartbeat needs its own connection.
            store = self._store.clone()
        except (AttributeError, RuntimeError):  # the owner's store is of a kind that cannot be cloned
            return NoHeartbeat(self._num_exchanges)
        return Heartbeat(store, self._rank, self._size, _address_of(self._store), self._num_exchanges)

    def _stop_heartbeat(self, words: str) -> None:
        heartbeat = self._heartbeat
        self._heartbeat = None
        if heartbeat is not None:
            self._num_exchanges = heartbeat.exchanges
            heartbeat.stop(words)


def join_existing_group(device: torch.device, timeout_s: float | None) -> GroupWorld:
    """Meet the other ranks of torch's default group; every one of them must call this."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    backend = backend_for(device)
    timeout_s = timeout_s or _owner_timeout_s()
    try:
        group = _new_group(backend, timeout_s)
    except RuntimeError as error:
        raise PeerError(
            f"not all {size} ranks of the process group came together within {timeout_s:.0f} s ({reason_of(error)}): "
            "make the Trainer on every rank, or on one alone with world=hl.World.alone()"
        ) from error
    store = dist.PrefixStore("hopline", distributed_c10d._get_process_group_store(group.group))
    resources = GroupResources(group, store, rank, size)
    try:
        introductions = _introduce(store, rank, size, device)
        host_rank = find_host_ranks(introductions)[rank]
        own_host = introductions[rank].host
        spec = RankSpec(
            rank=rank,
            size=size,
            local_rank=host_rank.local_rank,
            local_size=host_rank.local_size,
            node=host_rank.node,
            backend=backend,
            timeout_s=timeout_s,
        )
        if device.type == "cuda":
            device = find_gpu(device, spec, [other for other in introductions if other.host == own_host])
            torch.cuda.set_device(device)
        if backend == "nccl":
            _check_own_gpu(store, rank, size, device)
        spec = replace(spec, device=str(device))
        return GroupWorld(spec, resources, num_cores=max(1, num_cores() // host_rank.num_sharing_cores))
    except BaseException as error:
        resources.close(last_words(sentence(error)))
        raise


def find_host_ranks(introductions: Sequence[Introduction]) -> list[HostRank]:
    """The place of every rank on its host, and the number of its host; hosts may have different numbers of ranks.

    Local ranks and numbers of hosts are those that launchers say, where these make sense together. Else ranks of a
    host, and hosts, are counted in the order of the ranks.
    """
    ranks_by_host: dict[str, list[int]] = {}
    for rank, introduction in enumerate(introductions):
        ranks_by_host.setdefault(introduction.host, []).append(rank)
    hosts = list(ranks_by_host.values())

    host_ranks: dict[int, HostRank] = {}
    for ranks, node in zip(hosts, _number_hosts(introductions, hosts), strict=True):
        local_ranks = [introductions[rank].local_rank for rank in ranks]
        if set(local_ranks) != set(range(len(ranks))):
            local_ranks = range(len(ranks))
        for rank, local_rank in zip(ranks, local_ranks, strict=True):
            assert local_rank is not None
            own_cores = introductions[rank].cores
            host_ranks[rank] = HostRank(
                local_rank=local_rank,
                local_size=len(ranks),
                node=node,
                num_sharing_cores=sum(introductions[other].cores == own_cores for other in ranks),
            )
    return [host_ranks[rank] for rank in range(len(introductions))]


def _number_hosts(introductions: Sequence[Introduction], hosts: Sequence[Sequence[int]]) -> list[int]:
    """A number for every host: the launcher's, if it says one for each host and no two hosts have the same."""
    stated: list[int] = []
    for ranks in hosts:
        numbers = {introductions[rank].node for rank in ranks}
        if len(numbers) == 1:
            stated += [number for number in numbers if number is not None]
    is_complete = len(stated) == len(hosts) == len(set(stated))
    return stated if is_complete else list(range(len(hosts)))


def find_gpu(device: torch.device, spec: RankSpec, on_host: Sequence[Introduction]) -> torch.device:
    """The GPU of this rank: the one it is given, or the one that the owner of the group has chosen for it.

    Lightning Fabric and Accelerate make it the current device, and so do most scripts. Ray Train leaves that to its
    `prepare_model`, and names the device in ACCELERATE_TORCH_DEVICE before. Where all ranks of a host are at GPU 0,
    nobody has chosen, and they take its GPUs in their order.
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
    """The backend of our group: NCCL for a GPU if the owner's group has it, else gloo, which takes all tensors."""
    if distributed_c10d._get_default_store() is None:
        raise ValueError(
            f"the process group (backend {dist.get_backend()}) has no store in which ranks could meet: initialise "
            "torch.distributed with backend gloo or nccl"
        )
    if device.type == "cuda" and "cuda:nccl" in distributed_c10d.get_backend_config():
        return "nccl"
    return "gloo"


def _owner_timeout_s() -> float:
    group = distributed_c10d._get_default_group()
    for kind in ("cuda", "cpu"):
        # No such device in the group, or a backend that does not tell.
        with contextlib.suppress(RuntimeError, AttributeError):
            return group._get_backend(torch.device(kind)).options._timeout.total_seconds()
    return USUAL_TIMEOUT_S


def _new_group(backend: str, timeout_s: float) -> GroupHandle:
    """A process group of all ranks, which is ours."""
    variables: dict[str, str] = {}
    if backend == "nccl":
        variables["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a lost rank raises an error; by default it aborts the process
    elif "gloo" not in distributed_c10d.get_backend_config():
        # Gloo takes the address that the host's own name means, which others may not reach. The owner's group shows
        # the way to the first rank. Where the owner uses gloo itself, it works as it is.
        host = _address_of(distributed_c10d._get_default_store()).rpartition(":")[0]
        interface = interface_towards(host, several_hosts=True) if host else None
        if interface:
            variables["GLOO_SOCKET_IFNAME"] = interface
    with defaults_in_environment(variables):
        return GroupHandle(dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s)))


def _address_of(store: dist.Store) -> str:
    """HOST:PORT of a store that a process serves; "" of one in files."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if isinstance(store, dist.TCPStore) else ""


def _introduce(store: dist.Store, rank: int, size: int, device: torch.device) -> list[Introduction]:
    """What all ranks say of themselves."""
    local_rank, node = read_local_rank_and_node(os.environ, rank, size)
    own = Introduction(
        host=host_identity(),
        local_rank=local_rank,
        node=node,
        cores=sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        current_gpu=torch.cuda.current_device() if device.type == "cuda" else None,
    )
    texts = _tell_all(store, "seat", rank, size, json.dumps(asdict(own)))
    return [Introduction(**json.loads(text)) for text in texts]


def _check_own_gpu(store: dist.Store, rank: int, size: int, device: torch.device) -> None:
    """Refuse ranks that have one GPU together, on which NCCL would wait or fail."""
    first_with_gpu: dict[str, int] = {}
    for other, gpu in enumerate(_tell_all(store, "gpu", rank, size, gpu_identity(str(device)))):
        first_rank = first_with_gpu.setdefault(gpu, other)
        if gpu and first_rank != other:
            raise ValueError(
                f"ranks {first_rank} and {other} have the same GPU ({gpu}), which nccl cannot share: start one process "
                "per GPU, or initialise the process group with backend gloo"
            )


def _tell_all(store: dist.Store, what: str, rank: int, size: int, text: str) -> list[str]:
    """By rank, what each says of something, after all have said it."""
    store.set(f"{what}/{rank}", text)
    try:
        return [value.decode() for value in get_all(store, [f"{what}/{other}" for other in range(size)])]
    except RuntimeError as error:
        silent = [other for other in range(size) if not store.check([f"{what}/{other}"])]
        raise PeerError(f"ranks {silent} of the process group stopped answering ({reason_of(error)})") from error
