"""`World`: the processes that train together, and the few things they say to each other."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from hopline.device.meter import find_device
from hopline.distributed.gradients import BUCKET_BYTES, split_by_bytes, sum_over_ranks, sum_tensors
from hopline.distributed.heartbeat import Heartbeat, NoHeartbeat, get_all
from hopline.util.errors import PeerError
from hopline.util.host import num_cores, who_set_threads
from hopline.util.log import logger

LEAVE_S = 5.0
"""How long a rank that keeps the rendezvous waits, at the end, for the others to leave it."""
RESUME = "start the same command again with resume=true to go on from the last checkpoint"


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """Where one process sits, and where it meets the others: plain data, for a process that is about to start."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    device: str = "cpu"
    backend: str = "gloo"
    address: str = "127.0.0.1"
    port: int = 0
    timeout_s: float = 600.0
    keeps_store: bool = False
    """Whether this process keeps the store in which the ranks find each other."""
    key: str = ""
    """What tells this start from others that meet in the same store."""


class GroupHandle:
    """A process group that can be let go, whoever uses it.

    Gloo closes its connections when nobody refers to the group any more, not when it is destroyed. Ranks that wait for
    this one learn only by that. So users of a group refer to this object, and ask it for the group at each exchange.
    """

    def __init__(self, group: Any) -> None:
        assert isinstance(group, dist.ProcessGroup)  # this rank is one of its ranks
        self._group: dist.ProcessGroup | None = group

    @property
    def group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("this process group was destroyed")
        return self._group

    def destroy(self, *, broken: bool) -> None:
        """Destroy the group. broken: whether a rank of it is lost. May be called twice."""
        group = self._group
        self._group = None
        if group is not None:
            # Its owner may have destroyed all groups before.
            with suppress(RuntimeError, ValueError, AssertionError):
                destroy_group(group, broken=broken)


class World:
    """One rank's view of all ranks. Alone, every exchange is free; else each must be called by all, in one order.

    Sums are the same from run to run for the same number of ranks on the same machines, and the same on every rank.
    There are three ways to one:

    - `hl.World.current()`: the ranks of `torch.distributed`, where a script, Ray Train, Lightning Fabric or Accelerate
      has initialised it. A `Trainer` without `world=` calls this itself.
    - `hopline.distributed.launch.run` starts ranks, or joins those of torchrun and srun, and gives each its world.
    - `hl.World.alone()`: this process, whatever `torch.distributed` says.

    Attributes: `rank` of `size`; `local_rank` of `local_size` on host number `node`; `device`; `num_cores` for this
    rank; `group`, the process group of all exchanges, for collectives of your own (None is torch's default group).

    Example:
        >>> world = hl.World.current()
        >>> world.rank, world.size, world.sum([2.0])
        (0, 1, [2.0])
    """

    def __init__(
        self,
        spec: RankSpec,
        heartbeat: Heartbeat | None = None,
        store: dist.Store | None = None,
    ) -> None:
        self.rank = spec.rank
        self.size = spec.size
        self.local_rank = spec.local_rank
        self.local_size = spec.local_size
        self.node = spec.node
        self.device = torch.device(spec.device)
        self.timeout_s = spec.timeout_s
        self.num_cores = num_cores()
        """Cores that this rank may use beside the other ranks of its host."""
        self._heartbeat = heartbeat
        self._store = store
        self._keeps_store = spec.keeps_store
        self._made_default_group = False
        self._lost = ""

    @classmethod
    def alone(cls, device: str | torch.device = "cpu") -> World:
        """The world of a single process."""
        return cls(RankSpec(device=str(device)))

    @classmethod
    def current(cls, device: str | torch.device = "cpu", timeout_s: float | None = None) -> World:
        """The ranks of `torch.distributed` if it is initialised, else this process alone.

        Every rank of the process group must call this, in the same order as other collective calls. The group and its
        store stay its owner's: they are never destroyed here. Exchanges have a process group of their own over the
        same ranks, made by `torch.distributed.new_group`.

        Args:
            device: Where this rank trains. "cuda" is the GPU that the process group was bound to, that Ray or the
                current CUDA device names, or the one of the local rank; "cuda:1" is taken as it is. The current CUDA
                device is set to it.
            timeout_s: Seconds to wait for a rank that does not answer. Default: the timeout of the process group.

        Raises:
            PeerError: Not every rank has called this within the timeout.
            ValueError: There is no such device, or ranks of an NCCL group have one GPU together.

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
        """Meet the other ranks; every one of them must call this within `timeout_s`."""
        start_s = time.monotonic()
        address = f"{spec.address}:{spec.port}"
        try:
            store, heartbeat_store = _connect_stores(spec)
        except RuntimeError as error:
            raise PeerError(
                f"rank {spec.rank} cannot reach rank 0 at {address} ({reason_of(error)}): check address="
            ) from error
        heartbeat = Heartbeat(heartbeat_store, spec.rank, spec.size, address)
        world = cls(spec, heartbeat, store)
        try:
            with world.exchange(start_s):
                world.num_cores = _find_share_of_cores(spec, store)
                if world.device.type == "cuda":
                    torch.cuda.set_device(world.device)
                with defaults_in_environment(_backend_environment(spec)):
                    dist.init_process_group(
                        spec.backend,
                        store=dist.PrefixStore("group", store),
                        rank=spec.rank,
                        world_size=spec.size,
                        timeout=timedelta(seconds=spec.timeout_s),
                    )
                    world._made_default_group = True
            world.barrier()
        except BaseException as error:
            world.close(f"{type(error).__name__}: {error}")
            raise
        return world

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace every gradient by its sum over the ranks: see `distributed.gradients`."""
        sum_over_ranks(parameters, self)

    def sum_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Replace every tensor by its sum over the ranks, in place; types and shapes must be the same everywhere."""
        sum_tensors(tensors, self)

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over the ranks, in float64."""
        if self.size == 1:
            return [float(value) for value in values]
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """The largest over the ranks, one by one."""
        return [float(value) for value in values] if self.size == 1 else self._reduce(values, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Whether some rank says yes."""
        return bool(flag) if self.size == 1 else self._reduce([float(flag)], dist.ReduceOp.MAX)[0] > 0

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.any(False)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """The value that rank `src` has, as JSON makes it (tuples become lists); the others' is not looked at."""
        data = b""
        problem: Exception | None = None
        if self.rank == src:
            try:
                data = json.dumps(value).encode()
            except (TypeError, ValueError) as error:
                problem = error
        if self.size > 1:
            # The others must not wait for a value that cannot be sent.
            length = torch.tensor([-1 if problem else len(data)], device=self.device)
            self._broadcast(length, src)

            content = torch.empty(max(0, int(length)), dtype=torch.uint8, device=self.device)
            if self.rank == src and data:
                content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            if content.numel():
                self._broadcast(content, src)
            data = content.cpu().numpy().tobytes()

            if int(length) < 0 and problem is None:
                raise ValueError(f"rank {src} has a value that is not plain: broadcast numbers, text, lists and dicts")
        if problem is not None:
            raise ValueError(f"{problem}: broadcast numbers, text, lists and dicts") from problem
        return json.loads(data.decode())

    def broadcast_tensors(self, tensors: Iterable[Tensor], src: int = 0) -> None:
        """Give every rank the numbers of rank `src`, in place; types and shapes must be the same everywhere."""
        if self.size == 1:
            return
        for bucket in split_by_bytes(BUCKET_BYTES, [t.detach() for t in tensors if t.numel()]):
            contiguous = [tensor.contiguous() for tensor in bucket]
            bytes_of = [tensor.reshape(-1).view(torch.uint8) for tensor in contiguous]
            flat = torch.cat([own_bytes.to(self.device) for own_bytes in bytes_of])
            self._broadcast(flat, src)
            if self.rank == src:
                continue
            parts = flat.split([own_bytes.numel() for own_bytes in bytes_of])
            for tensor, same, own_bytes, received in zip(bucket, contiguous, bytes_of, parts, strict=True):
                own_bytes.copy_(received)
                is_copy = same.data_ptr() != tensor.data_ptr()
                if is_copy:
                    tensor.copy_(same)

    def all_to_all(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """By rank, the rows that each has for this one: piece r goes to rank r. Only the number of rows may differ."""
        if self.size == 1:
            return list(pieces)
        send_counts = torch.tensor([piece.size(0) for piece in pieces], device=self.device)
        receive_counts = torch.empty_like(send_counts)
        sent = torch.cat(list(pieces)).contiguous().to(self.device)
        with self.exchange():
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

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of all exchanges; None is torch's default group."""
        return None

    def new_group(self) -> GroupHandle:
        """A further process group of all ranks (gloo, on the host): every rank must call this, in the same order."""
        return GroupHandle(dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s)))

    @contextmanager
    def watch(self) -> Generator[None]:
        """A context in which the ranks do something together, such as `Trainer.fit`.

        Within, torch has as many threads as this rank has cores, unless the user has set OMP_NUM_THREADS.
        """
        threads_before = torch.get_num_threads()
        set_by = who_set_threads()
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
        """Whoever started the ranks closes their worlds: see `launch`."""

    def _running_heartbeat(self) -> Heartbeat | NoHeartbeat:
        if self._heartbeat is None:
            raise PeerError("this rank has left the others: nothing can be exchanged after close()")
        return self._heartbeat

    def close(self, error: str = "") -> None:
        """Leave; `error` is what the others are told where this rank could not go on. May be called twice."""
        heartbeat = self._heartbeat
        if heartbeat is None:
            return
        self._heartbeat = None
        heartbeat.stop(last_words(error))
        if self._made_default_group and dist.is_initialized():
            with suppress(RuntimeError):
                destroy_group(None, broken=bool(self._lost))
        if self._keeps_store:
            heartbeat.wait_for_others(LEAVE_S)
        self._store = None

    def _reduce(self, values: Sequence[float], operation: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        with self.exchange():
            dist.all_reduce(tensor, operation, group=self.group)
        return tensor.tolist()

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        with self.exchange():
            dist.broadcast(tensor, src, group=self.group)

    @contextmanager
    def exchange(self, start_s: float | None = None) -> Generator[None]:
        """Whatever goes wrong inside is another rank's doing: find out whose."""
        if self._lost:
            raise PeerError(self._lost)
        heartbeat = self._running_heartbeat()
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
    """[n, bytes per row] uint8 over the memory of contiguous rows [n, ...]: for backends that lack some dtypes."""
    return rows[:, None].flatten(1).view(torch.uint8)


def device_of_rank(spec: RankSpec, device: str, *, spawned: bool) -> str:
    """The device of one rank: ranks of a host take its GPUs in their order."""
    if torch.device(device).type != "cuda":
        return device
    num_gpus = torch.cuda.device_count()
    if num_gpus >= spec.local_size:
        return f"cuda:{spec.local_rank}"
    # Slurm may show every task only a GPU of its own; and gloo, unlike nccl, lets ranks share one.
    may_have_its_own = num_gpus == 1 and not spawned
    if num_gpus and (spec.backend == "gloo" or may_have_its_own):
        return f"cuda:{spec.local_rank % num_gpus}"
    raise ValueError(
        f"there are {num_gpus} GPUs for {spec.local_size} ranks on this host: start one process per GPU, by "
        f"devices={max(1, num_gpus)} or your launcher"
    )


def serve(address: str, port: int, timeout_s: float, *, local: bool) -> dist.TCPStore:
    """The store in which ranks meet, kept by this process; port 0 takes a free one (see `.port`).

    It answers whoever reaches it, so it listens only at the address that the ranks use. local: whether all are here.
    """
    listener: int | None = None
    try:
        own_address = _own_address(address, local=local)
        if own_address is None:  # as a public address that another machine passes on
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
    """The number of this host's interface that an address names; None where it names none.

    On many hosts the host's own name means 127.0.1.1, at which no other one can reach it: not what ranks on several
    hosts use. A loopback number itself, as of a tunnel, they do use.
    """
    numbers = [str(entry[4][0]) for entry in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)]
    own_numbers: set[str] = set()
    for addresses in psutil.net_if_addrs().values():
        own_numbers.update(entry.address.partition("%")[0] for entry in addresses)
    for number in numbers:
        if number.startswith("127.") or number == "::1":
            if local or number == address:
                return number
        elif number.partition("%")[0] in own_numbers:
            return number
    return None


def _connect_stores(spec: RankSpec) -> tuple[dist.Store, dist.Store]:
    """Two connections, one of them for the heart: a store answers one question at a time, and some wait for others."""

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
    """What a rank writes about itself in the store, as a JSON list, before it joins the process group."""

    size: int
    """Number of ranks that it was started with."""
    node: int
    """Number of its host."""
    cores: list[int]
    """Cores that it may run on, sorted. Empty where the system does not tell."""
    gpu: str
    """Identity of its GPU. "" unless the backend is NCCL."""


def _find_share_of_cores(spec: RankSpec, store: dist.Store) -> int:
    """Cores for this rank beside those that may run on the same ones, after all ranks were compared."""
    own = _Seat(
        size=spec.size,
        node=spec.node,
        cores=sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        gpu=gpu_identity(spec.device) if spec.backend == "nccl" else "",
    )
    store.set(f"seat/{spec.rank}", json.dumps(own))
    values = get_all(store, [f"seat/{r}" for r in range(spec.size)])
    seats = [_read_seat(rank, value, spec) for rank, value in enumerate(values)]

    first_with_gpu: dict[str, int] = {}
    for rank, seat in enumerate(seats):
        if seat.size != spec.size:
            raise ValueError(
                f"rank {rank} was started as one of {seat.size} and rank {spec.rank} as one of {spec.size}: "
                "give the same devices= on every host"
            )
        first_rank = first_with_gpu.setdefault(seat.gpu, rank)
        if seat.gpu and first_rank != rank:
            raise ValueError(
                f"ranks {first_rank} and {rank} have the same GPU ({seat.gpu}), which nccl cannot share: start one "
                "process per GPU (torchrun --nproc-per-node, srun --ntasks-per-node, devices=), "
                "or set the environment variable HOPLINE_BACKEND=gloo"
            )

    num_sharing = sum(seat.node == own.node and seat.cores == own.cores for seat in seats)
    share = max(1, num_cores() // num_sharing)
    if who_set_threads() != "user":
        torch.set_num_threads(share)
    return share


def _read_seat(rank: int, value: bytes, spec: RankSpec) -> _Seat:
    try:
        size, node, cores, gpu = json.loads(value.decode())
    except (ValueError, TypeError) as error:  # UnicodeDecodeError is a ValueError
        raise ValueError(
            f"what stands for rank {rank} at {spec.address}:{spec.port} was not written by hopline ({value[:40]!r}): "
            "choose another address=HOST:PORT"
        ) from error
    return _Seat(size=size, node=node, cores=cores, gpu=gpu)


def gpu_identity(device: str) -> str:
    """What tells a GPU from all others, whatever its number is among those that a process may see."""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def _backend_environment(spec: RankSpec) -> dict[str, str]:
    """What the backends read from the environment when they start."""
    if spec.backend == "nccl":
        return {"TORCH_NCCL_BLOCKING_WAIT": "1"}  # a lost rank raises an error; by default it aborts the process
    # Gloo asks what the host's own name means, which on many machines is an address that no other host can reach.
    name = interface_towards(spec.address, several_hosts=spec.local_size < spec.size)
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


def interface_towards(address: str, *, several_hosts: bool) -> str | None:
    """The network interface over which this host reaches another, if that can be told."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing: the system only picks the way
            own_address = probe.getsockname()[0]
    except OSError:
        return None
    if several_hosts and own_address.startswith(("127.", "::1")):
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == own_address for entry in addresses):
            return name
    return None


@contextmanager
def defaults_in_environment(values: dict[str, str]) -> Generator[None]:
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def destroy_group(group: dist.ProcessGroup | None, *, broken: bool) -> None:
    """Destroy a process group, or with None the default one and all others."""
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if broken and abort is not None and dist.get_backend(group) == "nccl":
        abort(group)  # destroying waits for exchanges that will never end
    else:
        dist.destroy_process_group(group)


def last_words(error: str) -> str:
    """What a rank says at its end, for the others to read: see `heartbeat`."""
    return f"error {error[:500]}" if error else "left"


def sentence(error: BaseException) -> str:
    """An error in one line, with its kind."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def reason_of(error: BaseException) -> str:
    """The first line of what torch says, without the place in its source."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rpartition("] ")[2].rstrip(". ")[:160] or type(error).__name__
