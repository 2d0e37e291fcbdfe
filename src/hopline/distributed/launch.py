"""Starting the ranks of a run: alone, by spawning them, or where torchrun, srun or a process group has them already."""

from __future__ import annotations

import contextlib
import ctypes
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
from dataclasses import dataclass, field, replace
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
POLL_S = 0.2
"""How often the parent looks at deadlines while its ranks say nothing."""
_PR_SET_PDEATHSIG = 1


def run(function: Callable[..., Any], settings: LaunchSettings, *args: Any, device: str = "cpu") -> Any:
    """Run `function(world, *args)` in every rank; returns what it returned in this process, or in rank 0.

    Where processes are started here, `function` must be importable, `args` plain data, and the result goes through
    JSON. A rank that fails ends the others. A signal (Ctrl-C, SIGTERM, SIGUSR1) is passed on to them once. Where
    `torch.distributed` is initialised, its processes are the ranks, and no process is started.
    """
    if dist.is_available() and dist.is_initialized():
        _check_starts_no_process(settings)
        return _run_rank(function, args, World.current(device, settings.timeout_s))
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's agent ends its ranks, unless it is killed itself
        _end_with_parent(os.getppid())
    task = detect(os.environ)
    num_processes = _count_processes(settings, task, device)
    spec = _first_rank_spec(settings, task, num_processes, device)
    if spec.size == 1:
        return function(World.alone(device), *args)
    if num_processes > 1:
        return _spawn(function, args, spec, num_processes)

    spec = replace(spec, device=device_of_rank(spec, device, spawned=False))
    threads_before = torch.get_num_threads()
    try:
        return _run_rank(function, args, World.join(spec))
    finally:
        torch.set_num_threads(threads_before)


def _check_starts_no_process(settings: LaunchSettings) -> None:
    """Refuse settings of processes that would be started, in a process that is one of several already."""
    refused = [f"address={settings.address}"] if settings.address else []
    if settings.devices not in (1, "auto", dist.get_world_size()):
        refused.append(f"devices={settings.devices}")
    if refused:
        raise ValueError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} of a process group that is initialised "
            f"already, and no process is started under it: leave out {' and '.join(refused)}"
        )


def _count_processes(settings: LaunchSettings, task: Task | None, device: str) -> int:
    """How many processes to start here."""
    is_one_per_node = task is None or task.size == task.num_nodes
    if settings.devices == "auto":
        has_all_gpus = torch.device(device).type == "cuda" and is_one_per_node
        return max(1, torch.cuda.device_count()) if has_all_gpus else 1
    if settings.devices > 1 and not is_one_per_node:
        assert task is not None
        if settings.devices == task.local_size:  # said twice, but the same thing
            return 1
        raise ValueError(
            f"{task.launcher} started {task.local_size} tasks on this host, under each of which devices="
            f"{settings.devices} would start more: leave out devices=, or start one task per host"
        )
    return settings.devices


def _first_rank_spec(settings: LaunchSettings, task: Task | None, num_processes: int, device: str) -> RankSpec:
    """The seat of this process, or of the first one to be started here."""
    backend = _choose_backend(device)
    if task is None:
        return RankSpec(
            size=num_processes,
            local_size=num_processes,
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
        rank=task.rank * num_processes,
        size=task.size * num_processes,
        local_rank=task.local_rank * num_processes,
        local_size=task.local_size * num_processes,
        node=task.node,
        device=device,
        backend=backend,
        address=settings.host or task.address,
        port=settings.port or task.port,
        timeout_s=settings.timeout_s,
        keeps_store=task.rank == 0 and not task.has_store,
        key=task.key,
    )


def _choose_backend(device: str) -> str:
    """What carries the exchanges between ranks on devices of a kind."""
    default = "nccl" if torch.device(device).type == "cuda" else "gloo"
    backend = os.environ.get("HOPLINE_BACKEND") or default
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"HOPLINE_BACKEND is {backend!r}: it must be gloo or nccl")
    if backend == "nccl" and default != "nccl":
        raise ValueError(f"HOPLINE_BACKEND=nccl needs device=cuda, not device={device}: unset it")
    return backend


def _run_rank(function: Callable[..., Any], args: Sequence[Any], world: World) -> Any:
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
    messages: dict[str, Any] = field(default_factory=dict)
    is_ended_by_us: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether the rank has joined the others."""
        return "ready" in self.messages

    @property
    def is_alive(self) -> bool:
        return self.process.exitcode is None

    @property
    def has_failed(self) -> bool:
        return not self.is_alive and self.process.exitcode != 0

    @property
    def is_ended_by_signal(self) -> bool:
        """Whether a signal ended it in good order; some launchers send their notice to the ranks themselves."""
        return not self.is_alive and self.process.exitcode - 128 in SIGNALS

    def read_messages(self) -> None:
        """Take in what the rank has written: JSON, which is read as text and never unpickled."""
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                self.messages |= json.loads(self.pipe.recv_bytes())

    def send_signal(self, number: int) -> None:
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)


def _spawn(function: Callable[..., Any], args: Sequence[Any], first: RankSpec, num_processes: int) -> Any:
    """Start ranks, watch over them, and return what rank 0 returned."""
    store = None
    if first.keeps_store:
        # Kept here, where no rank's end can take it away.
        store = serve(first.address, first.port, first.timeout_s, local=first.local_size == first.size)
        first = replace(first, port=store.port, keeps_store=False)
    context = multiprocessing.get_context("spawn")
    children: list[_Child] = []
    with _forward_signals(children) as received:
        try:
            for k in range(num_processes):
                spec = replace(first, rank=first.rank + k, local_rank=first.local_rank + k)
                spec = replace(spec, device=device_of_rank(spec, first.device, spawned=True))
                parent_end, child_end = context.Pipe(duplex=False)
                process = context.Process(target=_run_child, args=(function, tuple(args), spec, child_end, os.getpid()))
                process.start()
                child_end.close()  # so that reading ends when the child does
                children.append(_Child(spec.rank, process, parent_end))
            _watch(children, received)
        finally:
            for child in children:
                child.send_signal(signal.SIGKILL)
            for child in children:
                child.process.join()
                child.read_messages()
                child.pipe.close()

    failed = [child for child in children if child.process.exitcode != 0]
    error = _make_error(failed, received) if failed else None
    for child in children:
        child.process.close()
    del store  # until here the ranks may have been using it
    if error is not None:
        raise error
    return children[0].messages.get("result")


@contextlib.contextmanager
def _forward_signals(children: list[_Child]) -> Generator[list[int]]:
    """Pass the first signal of each kind on to the ranks; yields those received. A second Ctrl-C ends them at once."""
    received: list[int] = []

    def forward(number: int, frame: Any) -> None:
        is_repeated = number in received
        received.append(number)
        for child in children:
            if not child.is_ready:  # nothing has begun, so nothing can be lost
                child.send_signal(signal.SIGKILL)
            elif not is_repeated:
                child.send_signal(number)
            elif number == signal.SIGINT:
                child.send_signal(signal.SIGKILL)

    handlers_before = {}
    if threading.current_thread() is threading.main_thread():
        # Not those that are ignored (nohup), nor handlers that Python did not install: it could not put them back.
        forwarded = [n for n in SIGNALS if signal.getsignal(n) not in (signal.SIG_IGN, None)]
        handlers_before = {n: signal.signal(n, forward) for n in forwarded}
    try:
        yield received
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)


def _watch(children: Sequence[_Child], received: Sequence[int]) -> None:
    """Return when all ranks have ended: by themselves, or because one failed or a signal came."""
    deadline_s = math.inf
    final_signal = signal.SIGTERM
    while True:
        alive = [child for child in children if child.is_alive]
        if not alive:
            return
        wait_for([child.process.sentinel for child in alive] + [child.pipe for child in alive], timeout=POLL_S)
        for child in children:
            child.read_messages()

        now_s = time.monotonic()
        is_interrupted = bool(received) or any(child.is_ended_by_signal for child in children)
        if received and not all(child.is_ready for child in children):
            deadline_s = 0.0
        elif deadline_s == math.inf and is_interrupted:
            deadline_s = now_s + CHECKPOINT_S
            final_signal = signal.SIGKILL
        elif deadline_s == math.inf and any(child.has_failed for child in children):
            deadline_s = now_s + END_S

        if now_s > deadline_s:
            for child in alive:
                child.is_ended_by_us = child.is_alive
                child.send_signal(final_signal)
            deadline_s = now_s + END_S
            final_signal = signal.SIGKILL


def _make_error(failed: Sequence[_Child], received: Sequence[int]) -> BaseException:
    """The error to raise: that of the rank that failed first, not of those that failed because it did."""
    with_own_error: list[_Child] = []
    killed: list[_Child] = []
    signals = list(received)
    for child in failed:
        if child.is_ended_by_signal:
            signals.append(child.process.exitcode - 128)
        if "error" in child.messages:
            if child.messages["kind"] != PeerError.__name__:
                with_own_error.append(child)
        elif not child.is_ended_by_us and not child.is_ended_by_signal:
            killed.append(child)

    # A notice to one rank alone may end it where the others were not asked, as in evaluation: they fail without it.
    if not with_own_error and (received or (signals and not killed)):
        return Interrupted(signals[0])

    culprit = (with_own_error or killed or list(failed))[0]
    code = culprit.process.exitcode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    message = culprit.messages.get("error", "")
    if culprit.messages.get("kind") == "ValueError":  # the user's to put right, as in a run of one process
        return ValueError(f"{message.removeprefix('ValueError: ')} (rank {culprit.rank} {how})")
    reason = message or "it may have run out of memory; resume=true resumes from the last checkpoint"
    error = RankError(f"rank {culprit.rank} {how}: {reason}", culprit.rank, code)
    if "trace" in culprit.messages:
        error.add_note(f"In rank {culprit.rank}:\n{culprit.messages['trace']}")
    return error


def _run_child(
    function: Callable[..., Any], args: tuple[Any, ...], spec: RankSpec, pipe: Connection, parent: int
) -> None:
    """The life of a spawned rank."""
    _end_with_parent(parent)
    # Ctrl-C in a terminal goes to every process of a group: it shall come once, from the parent.
    os.setpgid(0, 0)
    keep_freed_memory()
    try:
        world = World.join(spec)
        _send_message(pipe, ready=True)
        result = _run_rank(function, args, world)
        try:
            _send_message(pipe, result=result if spec.rank == 0 else None)
        except (TypeError, ValueError):
            raise ValueError(
                f"rank 0 returned a {type(result).__name__}: return numbers, text, lists or dicts, or nothing"
            ) from None
    except Interrupted as error:
        sys.exit(128 + error.number)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
        trace = {} if isinstance(error, ValueError | PeerError) else {"trace": traceback.format_exc()}
        _send_message(pipe, error=sentence(error), kind=kind, **trace)
        sys.exit(1)


def _send_message(pipe: Connection, **message: Any) -> None:
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(json.dumps(message).encode())


def _end_with_parent(parent: int) -> None:
    """Have this process end when its parent does, even when that is killed."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_exit_after_parent, name="hopline-parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before we could ask
        os._exit(1)


def _exit_after_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)
