"""`World`: one rank's view of the processes that train together, and their collective calls.

A rank joins in three steps (`World.join`):

    1. store   one process serves a key-value store at a host and port; every rank connects to it
    2. seats   every rank writes what it was started with; contradictions are refused
    3. group   torch.distributed makes the process group (gloo or NCCL) that carries the collective calls

A rank that dies would make the others wait. So each rank has a heartbeat, and every collective call runs
within `World.collective_call`. An error inside becomes a `PeerError` that names the rank that stopped and
says how to resume.

The rest of the file is about networks. A store must listen at an address that all hosts reach, and gloo
must use the network interface that leads to them. The name of a host often means a loopback address, which
neither may use if ranks are on several hosts.
"""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from hopline.device.meter import find_device
from hopline.distributed.environment import Rank
from hopline.distributed.gradients import BUCKET_BYTES, split_by_bytes, sum_over_ranks, sum_tensors
from hopline.distributed.heartbeat import Heartbeat, get_all
from hopline.distributed.membership import GroupHandle, Membership
from hopline.util.errors import PeerError
from hopline.util.host import allowed_cores, num_cores, who_set_threads
from hopline.util.log import logger

RESUME = "start the same command again with resume=true to resume from the last checkpoint"
"""Advice of every error about a lost rank."""


@dataclass(frozen=True, kw_only=True)
class RankSpec(Rank):
    """All that a process needs to know to be a rank. Plain data, which is sent to a process that starts."""

    device: str = "cpu"
    backend: str = "gloo"
    """Backend of the process group: "gloo" or "nccl"."""
    timeout_s: float = 600.0
    """Seconds to wait for a rank that does not answer."""
    keeps_store: bool = False


class World:
    """One rank's view of all ranks, with the collective calls between them.

    All ranks must make the same collective calls in the same order. With one rank they cost nothing. Every
    rank gets the same sums. They are the same from run to run for the same number of ranks on the same
    machines.

    A world comes from one of three functions:

    - `hl.World.current()`: the ranks of `torch.distributed`, if a script, Ray Train, Lightning Fabric or
      Accelerate has initialised it. A `Trainer` without `world=` calls this itself.
    - `hopline.distributed.launch.run` starts ranks, or joins those of torchrun and srun, and gives each its
      world.
    - `hl.World.alone()`: this process, whatever `torch.distributed` says.

    Attributes: `rank` of `size`; `local_rank` of `local_size` on host number `node`; `device`; `num_cores`
    for this rank; `group`, the process group of the collective calls, for calls of your own (None is
    torch's default group).

    Example:
        >>> world = hl.World.current()
        >>> world.rank, world.size, world.sum([2.0])
        (0, 1, [2.0])
    """

    def __init__(self, spec: RankSpec, membership: Membership | None = None, cores: int | None = None) -> None:
        self.rank = spec.rank
        self.size = spec.size
        self.local_rank = spec.local_rank
        self.local_size = spec.local_size
        self.node = spec.node
        self.device = torch.device(spec.device)
        self.timeout_s = spec.timeout_s
        self.num_cores = cores or num_cores()
        """Cores for this rank: its share of those that it has together with other ranks of its host."""
        self._membership = membership
        """None if this process is alone."""
        self._lost = ""
        """Message of the first `PeerError`. "" while no rank is lost."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.size > 1:
            raise TypeError(
                "a World of several ranks cannot be copied or pickled, since it has a process group: call "
                "hl.World.current() in the process that needs one"
            )
        return World.alone, (str(self.device),)

    @classmethod
    def alone(cls, device: str | torch.device = "cpu") -> World:
        """The world of a single process."""
        return cls(RankSpec(device=str(device)))

    @classmethod
    def current(cls, device: str | torch.device = "cpu", timeout_s: float | None = None) -> World:
        """The ranks of `torch.distributed` if it is initialised, else this process alone.

        Every rank of the process group must call this, in the same order as other collective calls. The
        group and its store belong to whoever made them, and are never destroyed by the world. Collective
        calls of the world use another process group over the same ranks, made by
        `torch.distributed.new_group`.

        Args:
            device: Where this rank trains. "cuda": the GPU that the process group is bound to, that Ray
                names or that is the current CUDA device, else the one of the local rank. "cuda:1": this
                GPU. It becomes the current CUDA device.
            timeout_s: Seconds to wait for a rank that does not answer. Default: the timeout of the process
                group.

        Raises:
            PeerError: Not every rank has called this within the timeout.
            ValueError: There is no such device, or two ranks of an NCCL group have the same GPU.

        Example:
            >>> hl.World.current().size  # nobody has called torch.distributed.init_process_group
            1
        """
        from hopline.distributed.existing_group import join_existing_group

        own_device = find_device(str(device))
        is_initialized = dist.is_available() and dist.is_initialized()
        if is_initialized and dist.get_world_size() > 1:
            return join_existing_group(own_device, timeout_s)
        if not is_initialized and os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
            logger.warning(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but torch.distributed is not initialised, so this process "
                "trains alone and on all seeds: call torch.distributed.init_process_group() before, or give "
                "world=hl.World.alone() if that is meant"
            )
        return cls.alone(own_device)

    @classmethod
    def join(cls, spec: RankSpec) -> World:
        """Meet the other ranks, each of which must call this within `timeout_s`.

        It initialises torch's default process group, which `close` destroys.

        Raises:
            PeerError: The store cannot be reached, or a rank did not come or stopped.
            ValueError: Ranks were started with different settings, or two of them have the same GPU under
                NCCL.
        """
        start_s = time.monotonic()
        address = f"{spec.address}:{spec.port}"
        try:
            store, heartbeat_store = _connect_stores(spec)
        except RuntimeError as error:
            raise PeerError(
                f"rank {spec.rank} cannot reach rank 0 at {address} ({reason_of(error)}): check address="
            ) from error
        membership = Membership(
            partial(Heartbeat, heartbeat_store, spec.rank, spec.size, address),
            served_store=store if spec.keeps_store else None,
        )
        world = cls(spec, membership)
        try:
            with world.collective_call(start_s):
                world.num_cores = _find_share_of_cores(spec, store)
                if world.device.type == "cuda":
                    torch.cuda.set_device(world.device)
                several_hosts = spec.local_size < spec.size
                with defaults_in_environment(_backend_environment(spec.backend, spec.address, several_hosts)):
                    dist.init_process_group(
                        spec.backend,
                        store=dist.PrefixStore("group", store),
                        rank=spec.rank,
                        world_size=spec.size,
                        timeout=timedelta(seconds=spec.timeout_s),
                    )
            world.barrier()
        except BaseException as error:
            world.close(f"{type(error).__name__}: {error}")
            raise
        return world

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace every gradient by its sum over the ranks, in place. See `gradients.sum_over_ranks`."""
        sum_over_ranks(parameters, self)

    def sum_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Replace every tensor by its sum over the ranks, in place. All ranks must give the same types and shapes."""
        sum_tensors(tensors, self)

    def sum(self, values: Sequence[float]) -> list[float]:
        """The elementwise sum over the ranks, in float64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """The elementwise maximum over the ranks, in float64."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on at least one rank."""
        return self._reduce([float(flag)], dist.ReduceOp.MAX)[0] > 0

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.any(False)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """The value of rank `src`, as JSON makes it: tuples become lists.

        Values of other ranks are ignored.

        Raises a ValueError on every rank if JSON cannot hold the value.
        """
        data = b""  # no JSON is empty, so rank `src` says by no bytes that it cannot send its value
        problem: Exception | None = None
        if self.rank == src:
            try:
                data = json.dumps(value).encode()
            except (TypeError, ValueError) as error:
                problem = error
        if self.size > 1:
            length = torch.tensor([len(data)], device=self.device)
            self._broadcast(length, src)
            content = torch.zeros(int(length), dtype=torch.uint8, device=self.device)
            if data:
                content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            if content.numel():
                self._broadcast(content, src)
            data = content.cpu().numpy().tobytes()
        if not data:
            what = problem or f"rank {src} has a value that is not plain"
            raise ValueError(f"{what}: broadcast numbers, text, lists and dicts") from problem
        return json.loads(data.decode())

    def broadcast_tensors(self, tensors: Iterable[Tensor], src: int = 0) -> None:
        """Write the values of rank `src` into the tensors of every rank, which have the same types and shapes."""
        if self.size == 1:
            return
        for bucket in split_by_bytes(BUCKET_BYTES, [t.detach() for t in tensors if t.numel()]):
            # As bytes, tensors of different types go in one call. `contiguous` copies a tensor that is not
            # contiguous. Such a copy receives the values, and is written back.
            dense_tensors = [tensor.contiguous() for tensor in bucket]
            byte_views = [dense.reshape(-1).view(torch.uint8) for dense in dense_tensors]
            flat = torch.cat([byte_view.to(self.device) for byte_view in byte_views])
            self._broadcast(flat, src)
            if self.rank == src:
                continue
            received_parts = flat.split([byte_view.numel() for byte_view in byte_views])
            for byte_view, received in zip(byte_views, received_parts, strict=True):
                byte_view.copy_(received)
            for tensor, dense in zip(bucket, dense_tensors, strict=True):
                is_copy = dense.data_ptr() != tensor.data_ptr()
                if is_copy:
                    tensor.copy_(dense)

    def all_to_all(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Send rows to every rank, and return the rows that each has for this one, by rank.

        pieces: By rank, rows [n_r, ...] that go to it. All have the same type and the same shape but for
            n_r.
        """
        if self.size == 1:
            return list(pieces)
        send_counts = torch.tensor([piece.size(0) for piece in pieces], device=self.device)
        receive_counts = torch.empty_like(send_counts)
        sent = torch.cat(list(pieces)).contiguous().to(self.device)
        with self.collective_call():
            dist.all_to_all_single(receive_counts, send_counts, group=self.group)
            received = sent.new_empty(int(receive_counts.sum()), *sent.shape[1:])
            dist.all_to_all_single(
                bytes_of_rows(received),
                bytes_of_rows(sent),
                receive_counts.tolist(),
                send_counts.tolist(),
                group=self.group,
            )
        return list(received.to(pieces[0].device).split(receive_counts.tolist()))

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """The bytes of every rank, by rank. Ranks may have different numbers of them."""
        piece = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return [received.numpy().tobytes() for received in self.all_to_all([piece] * self.size)]

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the collective calls. None is torch's default group."""
        membership = self._membership
        if membership is None or membership.is_launched:
            return None
        return membership.groups[0].group

    def new_group(self) -> GroupHandle:
        """A further process group of all ranks (gloo, tensors on the host). Every rank must call this."""
        group = new_group("gloo", self.timeout_s)
        if self._membership is not None:
            self._membership.groups.append(group)
        return group

    @contextmanager
    def watch(self) -> Generator[None]:
        """A context for work that the ranks do together, such as `Trainer.fit`.

        In it torch has as many threads as this rank has cores, unless the user has set OMP_NUM_THREADS. A
        process that is alone keeps torch's own number, unless a launcher has set it. At the end the number
        of before is restored.
        """
        threads_before = torch.get_num_threads()
        set_by = who_set_threads()
        # Launchers such as torchrun set OMP_NUM_THREADS=1 if the user has not. That says nothing about the
        # cores.
        is_ours_to_set = set_by == "launcher" or (set_by is None and self.size > 1)
        if is_ours_to_set:
            torch.set_num_threads(self.num_cores)
        try:
            yield
        except BaseException as error:
            self._end_watch(error)
            raise
        else:
            self._end_watch(None)
        finally:
            if is_ours_to_set:
                torch.set_num_threads(threads_before)

    def _end_watch(self, error: BaseException | None) -> None:
        """Pause the heartbeat, or after an error close the world. A launched one is closed by `launch`."""
        if self._membership is None or self._membership.is_launched:
            return
        if error is None:
            self._membership.pause_heartbeat()
            return
        # Frames of a failed call, which the error keeps alive, refer to the process group. Gloo closes its
        # connections only when nothing refers to the group, and other ranks wait for that.
        if isinstance(error, PeerError):
            traceback.clear_frames(error.__traceback__)
            if error.__cause__ is not None:
                traceback.clear_frames(error.__cause__.__traceback__)
        self.close(sentence(error))

    def close(self, error: str = "") -> None:
        """Leave the other ranks. May be called twice. A process group that somebody else has made stays open.

        error: Why this rank could not continue. The others read it. "": it ended in good order.
        """
        if self._membership is not None:
            self._membership.close(error, broken=bool(self._lost))

    def _reduce(self, values: Sequence[float], operation: Any) -> list[float]:
        if self.size == 1:
            return [float(value) for value in values]
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        with self.collective_call():
            dist.all_reduce(tensor, operation, group=self.group)
        return tensor.tolist()

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        with self.collective_call():
            dist.broadcast(tensor, src, group=self.group)

    @contextmanager
    def collective_call(self, start_s: float | None = None) -> Generator[None]:
        """A context for one collective call.

        Torch raises a RuntimeError if another rank does not answer. It becomes a `PeerError` that names the
        lost rank. Running out of memory is this rank's own failure, and is raised as it is. After the first
        PeerError every later call raises it again.

        start_s: When the wait began, by `time.monotonic`, for the error. Default: now.
        """
        if self._lost:
            raise PeerError(self._lost)
        assert self._membership is not None  # a process that is alone makes no collective calls
        heartbeat = self._membership.running_heartbeat()
        heartbeat.exchanges += 1
        start_s = time.monotonic() if start_s is None else start_s
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            sentence_about_lost = heartbeat.find_lost()
            noticed = f"rank {self.rank} noticed after {time.monotonic() - start_s:.0f} s"
            self._lost = f"{sentence_about_lost} ({noticed}: {reason_of(error)}): {RESUME}"
            raise PeerError(self._lost) from error


def bytes_of_rows(rows: Tensor) -> Tensor:
    """[n, bytes per row] uint8 over the memory of contiguous rows [n, ...], so that all-to-all takes any type."""
    # `None`: rows that are single numbers, [n], become [n, 1].
    return rows[:, None].flatten(1).view(torch.uint8)


def device_of_rank(spec: RankSpec, device: str, *, spawned: bool) -> str:
    """The device of one rank: ranks of a host take its GPUs in their order.

    spawned: Whether hopline started the rank. Such ranks all see the same GPUs.
    """
    if torch.device(device).type != "cuda":
        return device
    num_gpus = torch.cuda.device_count()
    if num_gpus >= spec.local_size:
        return f"cuda:{spec.local_rank}"
    # Slurm may show every task only its own GPU, as number 0. And gloo, unlike NCCL, allows ranks that
    # share a GPU.
    may_have_its_own = num_gpus == 1 and not spawned
    if num_gpus and (spec.backend == "gloo" or may_have_its_own):
        return f"cuda:{spec.local_rank % num_gpus}"
    raise ValueError(
        f"there are {num_gpus} GPUs for {spec.local_size} ranks on this host: start one process per GPU, by "
        f"devices={max(1, num_gpus)} or your launcher"
    )


def serve(address: str, port: int, timeout_s: float, *, local: bool) -> dist.TCPStore:
    """Serve the store in which the ranks meet.

    The store answers any process that reaches it. So it listens only at the address that the ranks use.

    Args:
        address: The host, by a name or an IP address.
        port: The port. If it is 0, the store takes a free one, its attribute `port`.
        timeout_s: Seconds that calls of the store wait for a key.
        local: Whether all ranks are on this host.

    Raises a ValueError if this process cannot listen at the address.
    """
    listener: int | None = None
    try:
        own_address = _own_address(address, local=local)
        if own_address is None:  # such as a public address that a router translates
            logger.warning(
                f"the ranks meet at {address}, which is no address of this host that others can reach: listening on "
                "all of its interfaces; to use one of them, give address= its number"
            )
        else:
            family = socket.AF_INET6 if ":" in own_address else socket.AF_INET
            server = socket.create_server((own_address, port), family=family)
            port = server.getsockname()[1]
            listener = server.detach()
        return dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener,
        )
    except (OSError, RuntimeError) as error:
        where = f"{address}:{port}" if port else address
        raise ValueError(f"cannot listen at {where} ({reason_of(error)}): choose another address=HOST:PORT") from error


def _own_address(address: str, *, local: bool) -> str | None:
    """The IP address of this host at which ranks reach it under `address`. None if there is none.

    On many hosts the host's own name means 127.0.1.1, which other hosts cannot reach. So a name that means
    a loopback address counts only if all ranks are local. A loopback address that was given as a number
    always counts: it may be the end of a tunnel.
    """
    candidates: list[str] = []
    for *_, socket_address in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM):
        ip_address, *_ = socket_address
        candidates.append(str(ip_address))
    # "fe80::1%eth0" is compared without its interface.
    own_addresses: set[str] = set()
    for entries in psutil.net_if_addrs().values():
        own_addresses.update(entry.address.partition("%")[0] for entry in entries)
    for candidate in candidates:
        if candidate.startswith("127.") or candidate == "::1":
            if local or candidate == address:
                return candidate
        elif candidate.partition("%")[0] in own_addresses:
            return candidate
    return None


def _connect_stores(spec: RankSpec) -> tuple[dist.Store, dist.Store]:
    """(store of the rank, store of its heartbeat): two connections to one store, with the same prefix.

    A connection handles one call at a time, and some calls wait for other ranks. A heartbeat must not wait
    with them.
    """

    def connect() -> dist.TCPStore:
        timeout = timedelta(seconds=spec.timeout_s)
        return dist.TCPStore(spec.address, spec.port, is_master=False, wait_for_workers=False, timeout=timeout)

    if spec.keeps_store:
        store = serve(spec.address, spec.port, spec.timeout_s, local=spec.local_size == spec.size)
    else:
        store = connect()
    heartbeat_store = connect()
    prefix = f"hopline/{spec.key}"
    return dist.PrefixStore(prefix, store), dist.PrefixStore(prefix, heartbeat_store)


class _Seat(NamedTuple):
    """What a rank writes about itself into the store before it joins the process group."""

    size: int
    node: int
    cores: list[int]
    """Cores that it may run on, sorted. Empty if the system does not tell."""
    gpu: str
    """Identity of its GPU. "" unless the backend is NCCL."""


def _find_share_of_cores(spec: RankSpec, store: dist.Store) -> int:
    """Cores for this rank: those that it may run on, divided by the ranks that may run on the same ones.

    It waits until every rank has written its seat. Torch gets this number of threads, unless the user has
    chosen one.

    Raises a ValueError if ranks were started with different numbers of ranks, or have the same GPU under
    NCCL.
    """
    own_seat = _Seat(
        size=spec.size,
        node=spec.node,
        cores=allowed_cores(),
        gpu=gpu_identity(spec.device) if spec.backend == "nccl" else "",
    )
    seats = [_Seat(*seat) for seat in tell_all(store, "seat", spec.rank, spec.size, own_seat)]
    for rank, seat in enumerate(seats):
        if seat.size != spec.size:
            raise ValueError(
                f"rank {rank} was started as one of {seat.size} and rank {spec.rank} as one of {spec.size}: "
                "give the same devices= on every host"
            )
    check_own_gpus(
        [seat.gpu for seat in seats],
        "start one process per GPU (torchrun --nproc-per-node, srun --ntasks-per-node, devices=), or set the "
        "environment variable HOPLINE_BACKEND=gloo",
    )

    share = share_of_cores([seat.cores for seat in seats if seat.node == own_seat.node])
    if who_set_threads() != "user":
        torch.set_num_threads(share)
    return share


def share_of_cores(cores_on_host: Iterable[Sequence[int]]) -> int:
    """Cores for this rank: those of its process, divided by the ranks that may run on the same ones. At least 1.

    cores_on_host: `allowed_cores` of each rank of this host, this one included.
    """
    own_cores = allowed_cores()
    num_sharing = sum(list(cores) == own_cores for cores in cores_on_host)
    return max(1, num_cores() // num_sharing)


def tell_all(store: dist.Store, what: str, rank: int, size: int, value: Any) -> list[Any]:
    """The plain values of all ranks, by rank, once all have written theirs into the store. what: names the values."""
    store.set(f"{what}/{rank}", json.dumps(value))
    try:
        return [json.loads(text) for text in get_all(store, [f"{what}/{other}" for other in range(size)])]
    except RuntimeError as error:
        silent = [other for other in range(size) if not store.check([f"{what}/{other}"])]
        raise PeerError(f"ranks {silent} of the process group stopped answering ({reason_of(error)})") from error


def gpu_identity(device: str) -> str:
    """The UUID of a GPU, whose number may differ between processes. "" if torch has none."""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def check_own_gpus(gpus: Sequence[str], advice: str) -> None:
    """Refuse two ranks with the same GPU, which NCCL cannot share. gpus: `gpu_identity` by rank; "" equals none."""
    first_with_gpu: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        first_rank = first_with_gpu.setdefault(gpu, rank)
        if gpu and first_rank != rank:
            raise ValueError(
                f"ranks {first_rank} and {rank} have the same GPU ({gpu}), which nccl cannot share: {advice}"
            )


def _backend_environment(backend: str, address: str, several_hosts: bool) -> dict[str, str]:
    """Environment variables that a backend reads when it starts. address: of the ranks' store. "": gloo chooses."""
    if backend == "nccl":
        return {"TORCH_NCCL_BLOCKING_WAIT": "1"}  # a lost rank raises an error; by default it aborts the process
    # By default gloo resolves the host's own name, which on many hosts is an address that no other host can
    # reach.
    name = interface_towards(address, several_hosts=several_hosts) if address else None
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


def interface_towards(address: str, *, several_hosts: bool) -> str | None:
    """Name of the network interface by which this host reaches an address. None if it cannot be found out.

    several_hosts: a loopback interface is then no answer.
    """
    try:
        # 9 is any port: only the address decides the route.
        family, kind, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # of a datagram socket: sends nothing, the system only chooses a route
            own_address = probe.getsockname()[0]
    except OSError:
        return None
    if several_hosts and own_address.startswith(("127.", "::1")):
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == own_address for entry in addresses):
            return name
    return None


def new_group(backend: str, timeout_s: float) -> GroupHandle:
    """A new process group of all ranks. Every rank must call this."""
    # The address of the owner's store tells which network interface leads to the other ranks. If the owner's group uses
    # gloo itself, its settings work as they are.
    is_known = "gloo" in distributed_c10d.get_backend_config()
    host = "" if is_known else address_of(distributed_c10d._get_default_store()).rpartition(":")[0]
    with defaults_in_environment(_backend_environment(backend, host, several_hosts=True)):
        return GroupHandle(dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s)))


def address_of(store: dist.Store) -> str:
    """HOST:PORT of a store that a process serves. "" for a store in files."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if isinstance(store, dist.TCPStore) else ""


@contextmanager
def defaults_in_environment(values: dict[str, str]) -> Generator[None]:
    """A context in which these environment variables are set, unless they were set before."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def sentence(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def reason_of(error: BaseException) -> str:
    """At most 160 characters of the first line of an error of torch, without the source location before it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rpartition("] ")[2].rstrip(". ")[:160] or type(error).__name__
