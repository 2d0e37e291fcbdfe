"""Starting the ranks of a run: alone, by spawning them, or where torchrun, srun or a process group has them already."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

import torch
import torch.distributed as dist

from hopline.distributed.environment import Task, detect
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import RankSpec, World, device_of_rank, sentence, serve
from hopline.util.errors import PeerError, RankError
from hopline.util.host import keep_freed_memory
from hopline.util.signals import SIGNALS, Interrupted

END_S = 2.0
"""After one rank has failed, the others get so long to end by themselves, and again so long once told to."""
CHECKPOINT_S = 30.0
"""After a signal, ranks get so long to write a checkpoint and end."""
_PR_SET_PDEATHSIG = 1


def run(function: Callable[..., Any], settings: LaunchSettings, *args: Any, device: str = "cpu") -> Any:
    """Run `function(world, *args)` in every rank; returns what it returned in this process, or in rank 0.

    Where processes are started here, `function` must be importable, `args` plain data, and the result goes through
    JSON. A rank that fails ends the others. A signal (Ctrl-C, SIGTERM, SIGUSR1) is passed on to them once. Where
    `torch.distributed` is initialised, its processes are the ranks, and no process is started.
    """
    if dist.is_available() and dist.is_initialized():
        _check_starts_none(settings)
        return _member(function, args, World.current(device, settings.timeout_s))
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's agent ends its ranks, unless it is killed itself
        _end_with_parent(os.getppid())
    task = detect(os.environ)
    count = _devices_here(settings, task, device)
    spec = _first_rank_spec(settings, task, count, device)
    if spec.size == 1:
        return function(World.alone(device), *args)
    if count > 1:
        return _spawn(function, args, spec, count)
    spec = replace(spec, device=device_of_rank(spec, device, spawned=False))
    before = torch.get_num_threads()
    try:
        return _member(function, args, World.join(spec))
    finally:
        torch.set_num_threads(before)


def _check_starts_none(settings: LaunchSettings) -> None:
    """Refuse settings of processes that would be started, in a process that is one of several already."""
    asked = [f"address={settings.address}"] if settings.address else []
    if settings.devices not in (1, "auto", dist.get_world_size()):
        asked.append(f"devices={settings.devices}")
    if asked:
        raise ValueError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} of a process group that is initialised "
            f"already, and no process is started under it: leave out {' and '.join(asked)}"
        )


def _devices_here(settings: LaunchSettings, task: Task | None, device: str) -> int:
    """How many processes to start here."""
    kind = torch.device(device).type
    one_per_node = task is None or task.size == task.num_nodes
    if settings.devices == "auto":
        return max(1, torch.cuda.device_count()) if kind == "cuda" and one_per_node else 1
    if settings.devices > 1 and not one_per_node:
        assert task is not None
        if settings.devices == task.local_size:  # said twice, but the same thing
            return 1
        raise ValueError(
            f"{task.launcher} started {task.local_size} tasks on this host, under each of which devices="
            f"{settings.devices} would start more: leave out devices=, or start one task per host"
        )
    return settings.devices


def _first_rank_spec(settings: LaunchSettings, task: Task | None, count: int, device: str) -> RankSpec:
    """The seat of this process, or of the first one to be started here."""
    backend = _backend(device)
    if task is None:
        return RankSpec(
            size=count,
            local_size=count,
            device=device,
            backend=backend,
            address=settings.host or "127.0.0.1",
            port=settings.port or 0,
            timeout_s=settings.timeout_s,
            keeps_store=True,
        )
    if task.launcher == "torchrun" and settings.address:
        raise ValueError("leave out address= under torchrun: it has --master-addr and --master-port")
    return RankSpec(
        rank=task.rank * count,
        size=task.size * count,
        local_rank=task.local_rank * count,
        local_size=task.local_size * count,
        node=task.node,
        device=device,
        backend=backend,
        address=settings.host or task.address,
        port=settings.port or task.port,
        timeout_s=settings.timeout_s,
        keeps_store=task.rank == 0 and not task.has_store,
        key=task.key,
    )


def _backend(device: str) -> str:
    """What carries the exchanges between ranks on devices of a kind."""
    usual = "nccl" if torch.device(device).type == "cuda" else "gloo"
    chosen = os.environ.get("HOPLINE_BACKEND") or usual
    if chosen not in ("gloo", "nccl"):
        raise ValueError(f"HOPLINE_BACKEND is {chosen!r}: it must be gloo or nccl")
    if chosen == "nccl" and usual != "nccl":
        raise ValueError(f"HOPLINE_BACKEND=nccl needs device=cuda, not device={device}: unset it")
    return chosen


def _member(function: Callable[..., Any], args: Sequence[Any], world: World) -> Any:
    """Run one rank, and tell the others how it ended."""
    try:
        result = function(world, *args)
    except BaseException as error:
        world.close(sentence(error))
        raise
    world.close()
    return result


@dataclass
class _Child:
    """A rank that was started here, as its parent sees it."""

    rank: int
    process: Any
    pipe: Connection
    ready: bool = False
    said: dict[str, Any] = dataclasses.field(default_factory=dict)
    ended_by_us: bool = False

    @property
    def alive(self) -> bool:
        return self.process.exitcode is None

    @property
    def failed(self) -> bool:
        return not self.alive and self.process.exitcode != 0

    @property
    def ended_by_signal(self) -> bool:
        """Whether a signal ended it in good order; some launchers send their notice to the ranks themselves."""
        return not self.alive and self.process.exitcode - 128 in SIGNALS

    def listen(self) -> None:
        """Take in what the rank has written: JSON, which is read as text and never unpickled."""
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                self.said |= json.loads(self.pipe.recv_bytes())
        self.ready = "ready" in self.said

    def send(self, number: int) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)


def _spawn(function: Callable[..., Any], args: Sequence[Any], first: RankSpec, count: int) -> Any:
    """Start ranks, watch over them, and return what rank 0 returned."""
    store = None
    if first.keeps_store:
        # Kept here, where no rank's end can take it away.
        store = serve(first.address, first.port, first.timeout_s, local=first.local_size == first.size)
        first = replace(first, port=store.port, keeps_store=False)
    context = multiprocessing.get_context("spawn")
    children: list[_Child] = []
    with _forwarding(children) as received:
        try:
            for k in range(count):
                spec = replace(first, rank=first.rank + k, local_rank=first.local_rank + k)
                spec = replace(spec, device=device_of_rank(spec, first.device, spawned=True))
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(function, tuple(args), spec, theirs, os.getpid()))
                process.start()
                theirs.close()  # so that reading ends when the child does
                children.append(_Child(spec.rank, process, ours))
            _watch(children, received)
        finally:
            for child in children:
                child.send(signal.SIGKILL)
            for child in children:
                child.process.join()
                child.listen()
                child.pipe.close()
    failed = [child for child in children if child.process.exitcode != 0]
    error = _failure(failed, received) if failed else None
    for child in children:
        child.process.close()
    del store  # until here the ranks may have been using it
    if error is not None:
        raise error
    return children[0].said.get("result")


@contextlib.contextmanager
def _forwarding(children: list[_Child]) -> Generator[list[int]]:
    """Pass the first signal of each kind on to the ranks; yields those received. A second Ctrl-C ends them at once."""
    received: list[int] = []

    def forward(number: int, frame: Any) -> None:
        again = number in received
        received.append(number)
        for child in children:
            if not child.ready:  # nothing has begun, so nothing can be lost
                child.send(signal.SIGKILL)
            elif not again or number == signal.SIGINT:
                child.send(signal.SIGKILL if again else number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        # Not those that are ignored (nohup), nor handlers that Python did not install: it could not put them back.
        free = [n for n in SIGNALS if signal.getsignal(n) not in (signal.SIG_IGN, None)]
        before = {n: signal.signal(n, forward) for n in free}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(children: Sequence[_Child], received: Sequence[int]) -> None:
    """Return when all ranks have ended: by themselves, or because one failed or a signal came."""
    deadline, last = math.inf, signal.SIGTERM
    while alive := [child for child in children if child.alive]:
        wait_for([child.process.sentinel for child in alive] + [child.pipe for child in alive], timeout=0.2)
        for child in children:
            child.listen()
        now = time.monotonic()
        if received and not all(child.ready for child in children):
            deadline = 0.0
        elif deadline == math.inf and (received or any(child.ended_by_signal for child in children)):
            deadline, last = now + CHECKPOINT_S, signal.SIGKILL
        elif deadline == math.inf and any(child.failed for child in children):
            deadline = now + END_S
        if now > deadline:
            for child in alive:
                child.ended_by_us = child.alive
                child.send(last)
            deadline, last = now + END_S, signal.SIGKILL


def _failure(failed: Sequence[_Child], received: Sequence[int]) -> BaseException:
    """The error to raise: that of the rank that failed first, not of those that failed because it did."""
    told = [child for child in failed if "error" in child.said and child.said["kind"] != PeerError.__name__]
    ended_by_signal = [child.process.exitcode - 128 for child in failed if child.ended_by_signal]
    killed = [c for c in failed if "error" not in c.said and not c.ended_by_us and not c.ended_by_signal]
    # A notice to one rank alone may end it where the others were not asked, as in evaluation: they fail without it.
    if not told and (received or (ended_by_signal and not killed)):
        return Interrupted([*received, *ended_by_signal][0])
    child = (told or killed or list(failed))[0]
    code = child.process.exitcode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    said = child.said.get("error", "")
    if child.said.get("kind") == "ValueError":  # the user's to put right, as in a run of one process
        return ValueError(f"{said.removeprefix('ValueError: ')} (rank {child.rank} {how})")
    hint = "" if said else ": it may have run out of memory; resume=true goes on from the last checkpoint"
    error = RankError(f"rank {child.rank} {how}{': ' + said if said else hint}", child.rank, code)
    if "trace" in child.said:
        error.add_note(f"In rank {child.rank}:\n{child.said['trace']}")
    return error


def _child(function: Callable[..., Any], args: tuple[Any, ...], spec: RankSpec, pipe: Connection, parent: int) -> None:
    """The life of a spawned rank."""
    _end_with_parent(parent)
    # Ctrl-C in a terminal goes to every process of a group: it shall come once, from the parent.
    os.setpgid(0, 0)
    keep_freed_memory()
    try:
        world = World.join(spec)
        _tell(pipe, ready=True)
        result = _member(function, args, world)
        try:
            _tell(pipe, result=result if spec.rank == 0 else None)
        except (TypeError, ValueError):
            name = type(result).__name__
            raise ValueError(f"rank 0 returned a {name}: return numbers, text, lists or dicts, or nothing") from None
    except Interrupted as error:
        sys.exit(128 + error.number)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
        trace = {} if isinstance(error, ValueError | PeerError) else {"trace": traceback.format_exc()}
        _tell(pipe, error=sentence(error), kind=kind, **trace)
        sys.exit(1)


def _tell(pipe: Connection, **said: Any) -> None:
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(json.dumps(said).encode())


def _end_with_parent(parent: int) -> None:
    """Have this process end when its parent does, even when that is killed."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_end_after, name="hopline-parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before we could ask
        os._exit(1)


def _end_after() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)
