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

`world.last_words` makes the last message of a rank's heartbeat. `last_words("")` is "left", for a rank that
leaves without an error, and `last_words(TEXT)` is "error TEXT".
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

from hopline.distributed.heartbeat import Heartbeat, NoHeartbeat, get_all
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import (
    LEAVE_S,
    GroupHandle,
    RankSpec,
    World,
    check_own_gpus,
    defaults_in_environment,
    device_of_rank,
    gpu_identity,
    interface_towards,
    last_words,
    reason_of,
    sentence,
    share_of_cores,
)
from hopline.util.errors import PeerError
from hopline.util.host import allowed_cores, host_identity


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """What a rank knows about itself before it knows the others.

    All ranks read it from the store, as JSON.
    """

    host: str
    """Identity of its host. Equal on ranks that can share memory."""
    cores: Sequence[int] = ()
    """Cores that it may run on, sorted. Empty if the system does not tell."""
    current_gpu: int | None = None
    """Number of its current CUDA device. None if it trains on the CPU."""


class GroupWorld(World):
    """The world of an existing process group. `World.current` makes it.

    Its heartbeat runs from a first collective call until `watch` ends or the world is closed. An error
    within `watch` closes the world. It owns its `GroupResources`, which are closed with it at the latest.
    The owner's group and store stay.
    """

    def __init__(self, spec: RankSpec, resources: GroupResources, num_cores: int) -> None:
        super().__init__(spec)
        self.num_cores = num_cores
        self._resources = resources
        weakref.finalize(self, resources.close, last_words(""))  # "": it leaves without an error

    @property
    def group(self) -> dist.ProcessGroup:
        return self._resources.groups[0].group

    def new_group(self) -> GroupHandle:
        group = _new_group("gloo", self.timeout_s)
        self._resources.groups.append(group)
        return group

    def close(self, error: str = "") -> None:
        # `World.collective_call` sets `_lost` to a sentence about the rank that was lost. It is "" before.
        self._resources.close(last_words(error), broken=bool(self._lost))

    def _end_watch(self, error: BaseException | None) -> None:
        if error is None:
            self._resources.pause_heartbeat()
            return
        # Frames of a failed call, which the error keeps alive, refer to the process group. Gloo closes its
        # connections only when nothing refers to the group, and other ranks wait for that.
        if isinstance(error, PeerError):
            traceback.clear_frames(error.__traceback__)
            if error.__cause__ is not None:
                traceback.clear_frames(error.__cause__.__traceback__)
        self.close(sentence(error))

    def _running_heartbeat(self) -> Heartbeat | NoHeartbeat:
        return self._resources.running_heartbeat()


class GroupResources:
    """What a `GroupWorld` has made in the owner's process: process groups, and a heartbeat while it runs.

    The resources do not refer to their world. The world's finalizer refers to the resources, so otherwise it
    would keep the world alive.
    Prefetching threads make collective calls too, so a lock guards the heartbeat and the last message.
    """

    def __init__(self, group: GroupHandle, store: dist.Store, rank: int, size: int) -> None:
        self.groups = [group]
        """All process groups of the world. The first one carries its own collective calls."""
        self._store = store
        self._rank = rank
        self._size = size
        self._heartbeat: Heartbeat | NoHeartbeat | None = None
        self._num_exchanges = 0
        """The number of collective calls that this rank had begun when the last heartbeat was stopped.

        A heartbeat counts them as `exchanges`.
        """
        self._last_words: str | None = None
        """The last message of this rank. None until `close`."""
        self._lock = threading.Lock()

    def running_heartbeat(self) -> Heartbeat | NoHeartbeat:
        """The heartbeat, which is started if it does not run. Raises a PeerError after `close`."""
        with self._lock:
            if self._last_words is not None:
                reason = self._last_words.removeprefix("error ")  # the text of the error, or "left"
                raise PeerError(
                    f"this rank has left the others ({reason}), so nothing can be exchanged: make a new Trainer, or "
                    "call hl.World.current() again"
                )
            if self._heartbeat is None:
                self._heartbeat = self._new_heartbeat()
            return self._heartbeat

    def pause_heartbeat(self) -> None:
        """Stop the heartbeat until the next collective call. Nobody waits for this rank meanwhile."""
        with self._lock:
            self._stop_heartbeat(last_words(""))

    def close(self, words: str, broken: bool = False) -> None:
        """Tell the others why this rank leaves, and destroy the process groups. May be called twice.

        words: The last message, as `last_words` makes it.
        broken: Whether a rank is lost.
        """
        with self._lock:
            if self._last_words is not None:
                return
            self._last_words = words
            is_error = words != last_words("")
            if is_error and self._heartbeat is None:
                self._heartbeat = self._new_heartbeat()  # so that the others can read the error
            heartbeat = self._heartbeat  # `_stop_heartbeat` sets the attribute to None
            self._stop_heartbeat(words)
            for group in self.groups:
                group.destroy(broken=broken)
            if is_error and self._rank == 0 and isinstance(heartbeat, Heartbeat):
                # The store may end with this process, and the others have to read the error first. A
                # stopped heartbeat writes no more, but can still read the last messages of the others.
                heartbeat.wait_for_others(LEAVE_S)

    def _new_heartbeat(self) -> Heartbeat | NoHeartbeat:
        """A new heartbeat. The caller holds the lock.

        Its count of collective calls starts with that of the last one. After a failure the ranks compare
        their counts, and a count that starts again would make this rank seem to be behind.
        """
        try:
            # A connection handles one call at a time, and some calls of other threads wait for other ranks.
            # The heartbeat has a connection of its own, so that it never waits for such a call.
            store = self._store.clone()
        except (AttributeError, RuntimeError):  # the owner's store is of a kind that cannot be cloned
            return NoHeartbeat(self._num_exchanges)
        return Heartbeat(store, self._rank, self._size, _address_of(self._store), self._num_exchanges)

    def _stop_heartbeat(self, words: str) -> None:
        """Stop the heartbeat if it runs. words: its last message. The caller holds the lock."""
        heartbeat = self._heartbeat
        self._heartbeat = None
        if heartbeat is not None:
            self._num_exchanges = heartbeat.exchanges
            heartbeat.stop(words)


def join_existing_group(device: torch.device, timeout_s: float | None) -> GroupWorld:
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
        spec = spec_of(introductions, rank, backend, timeout_s)
        on_host = [other for other in introductions if other.host == introductions[rank].host]
        if device.type == "cuda":
            device = find_gpu(device, spec, on_host)
            torch.cuda.set_device(device)
        if backend == "nccl":
            gpus = _tell_all(store, "gpu", rank, size, gpu_identity(str(device)))
            check_own_gpus(gpus, "start one process per GPU, or initialise the process group with backend gloo")
        spec = replace(spec, device=str(device))
        return GroupWorld(spec, resources, num_cores=share_of_cores([other.cores for other in on_host]))
    except BaseException as error:
        resources.close(last_words(sentence(error)))
        raise


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


def _new_group(backend: str, timeout_s: float) -> GroupHandle:
    """A new process group of all ranks. Every rank must call this."""
    variables: dict[str, str] = {}
    if backend == "nccl":
        variables["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a lost rank raises an error; by default it aborts the process
    elif "gloo" not in distributed_c10d.get_backend_config():
        # By default gloo resolves the host's own name, which may be an address that other hosts cannot
        # reach. The address of the owner's store tells which network interface leads to them. If the
        # owner's group uses gloo itself, its settings work as they are.
        host = _address_of(distributed_c10d._get_default_store()).rpartition(":")[0]
        interface = interface_towards(host, several_hosts=True) if host else None
        if interface:
            variables["GLOO_SOCKET_IFNAME"] = interface
    with defaults_in_environment(variables):
        return GroupHandle(dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s)))


def _address_of(store: dist.Store) -> str:
    """HOST:PORT of a store that a process serves. "" for a store in files."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if isinstance(store, dist.TCPStore) else ""


def _introduce(store: dist.Store, rank: int, size: int, device: torch.device) -> list[Introduction]:
    """Introductions of all ranks, by rank. Every rank must call this."""
    own = Introduction(
        host=host_identity(),
        cores=allowed_cores(),
        current_gpu=torch.cuda.current_device() if device.type == "cuda" else None,
    )
    texts = _tell_all(store, "introduction", rank, size, json.dumps(asdict(own)))
    return [Introduction(**json.loads(text)) for text in texts]


def _tell_all(store: dist.Store, what: str, rank: int, size: int, text: str) -> list[str]:
    """Write a text into the store, and return the texts of all ranks, by rank. Waits until all are written.

    what: Part of the keys. Every rank must call this with the same one.
    """
    store.set(f"{what}/{rank}", text)
    try:
        return [value.decode() for value in get_all(store, [f"{what}/{other}" for other in range(size)])]
    except RuntimeError as error:
        silent = [other for other in range(size) if not store.check([f"{what}/{other}"])]
        raise PeerError(f"ranks {silent} of the process group stopped answering ({reason_of(error)})") from error
