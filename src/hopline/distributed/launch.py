"""`run`: runs a function in every rank, and starts the ranks if nobody else has.

A process is one of four things, and `run` finds out which:

    torch.distributed is initialised   its processes are the ranks: nothing is started
    torchrun or srun started it        it is a rank, or with devices= the parent of several
    devices= is above 1                it is the parent: it spawns the ranks and watches them
    none of these                      it is alone

A parent and a spawned rank talk in three ways. The rank writes JSON into a pipe: that it is ready, its
result or its error. The parent sends signals. The exit code of the rank tells how it ended: 128 + n if it
caught signal n.

Ranks end together. If one fails, the others get `END_S` seconds to notice and to end by themselves. After a
signal they get `CHECKPOINT_S` seconds to write a checkpoint. Then the parent ends them. If the parent is
killed, they end too, even while they still import modules.
"""

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
from hopline.util.output import outlive_output
from hopline.util.signals import SIGNALS, Interrupted, handle_signals

END_S = 2.0
"""Seconds that ranks get to end by themselves after one has failed, and again after SIGTERM."""
CHECKPOINT_S = 30.0
"""Seconds that ranks get after a signal, to write a checkpoint and end."""
POLL_S = 0.2
"""Most seconds between two looks of the parent at its deadlines."""
_PR_SET_PDEATHSIG = 1
"""The option of Linux's `prctl` that sets the signal a process gets when its parent ends."""


def run(function: Callable[..., Any], settings: LaunchSettings, *args: Any, device: str = "cpu") -> Any:
    """Run `function(world, *args)` in every rank.

    If this process starts no ranks, `run` returns what the function returned in it.

    If this process starts ranks, `run` returns what the function returned in the first of them, sent as
    JSON: tuples become lists. The first is rank 0, unless that is on another host. `function` must be
    importable and `args` picklable. A rank that fails ends the others. A signal of
    `util.signals.SIGNALS` is forwarded to the ranks once.

    Args:
        function: Runs in every rank. Its first argument is the `World` of the rank.
        settings: Number of processes to start, and where they meet.
        args: Further arguments of the function.
        device: "cpu" or "cuda". Ranks of a host take its GPUs in their order.

    Raises:
        RankError: A started rank failed or was killed.
        ValueError: A setting does not fit the launcher, or a started rank raised a ValueError.
        Interrupted: A signal ended the ranks.
        PeerError: This process is a rank, and the ranks did not meet or lost one of them.
    """
    if dist.is_available() and dist.is_initialized():
        _check_starts_no_process(settings)
        return _run_rank(function, args, World.current(device, settings.timeout_s))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Torchrun's agent, the parent, ends its ranks, but not if it is killed itself.
        _end_with_parent(os.getppid())
    task = detect(os.environ)
    num_processes = _count_processes(settings, task, device)
    spec = _first_rank_spec(settings, task, num_processes, device)
    if spec.size == 1:
        return function(World.alone(device), *args)
    if num_processes > 1:
        return _spawn(function, args, spec, num_processes)

    spec = replace(spec, device=device_of_rank(spec, device, spawned=False))
    threads_before = torch.get_num_threads()  # `World.join` may set another number
    try:
        return _run_rank(function, args, World.join(spec))
    finally:
        torch.set_num_threads(threads_before)


def _check_starts_no_process(settings: LaunchSettings) -> None:
    """Refuse settings that would start processes, because this process is a rank already."""
    refused = [f"address={settings.address}"] if settings.address else []
    if settings.devices not in (1, "auto", dist.get_world_size()):
        refused.append(f"devices={settings.devices}")
    if refused:
        raise ValueError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} of a process group that is initialised "
            f"already, and no process is started under it: leave out {' and '.join(refused)}"
        )


def _count_processes(settings: LaunchSettings, task: Task, device: str) -> int:
    """Number of ranks that this process starts. 1: it starts none, and is a rank itself."""
    is_one_per_node = task.size == task.num_nodes
    if settings.devices == "auto":
        has_all_gpus = torch.device(device).type == "cuda" and is_one_per_node
        return max(1, torch.cuda.device_count()) if has_all_gpus else 1
    if settings.devices > 1 and not is_one_per_node:
        if settings.devices == task.local_size:  # the launcher has started them already
            return 1
        raise ValueError(
            f"{task.launcher} started {task.local_size} tasks on this host, under each of which devices="
            f"{settings.devices} would start more: leave out devices=, or start one task per host"
        )
    return settings.devices


def _first_rank_spec(settings: LaunchSettings, task: Task, num_processes: int, device: str) -> RankSpec:
    """The specification of this process as a rank, or of the first rank that it starts."""
    if task.launcher == "torchrun" and settings.address:
        raise ValueError("leave out address= under torchrun: it has --master-addr and --master-port")
    return RankSpec(
        rank=task.rank * num_processes,
        size=task.size * num_processes,
        local_rank=task.local_rank * num_processes,
        local_size=task.local_size * num_processes,
        node=task.node,
        device=device,
        backend=_choose_backend(device),
        address=settings.host or task.address,
        port=settings.port or task.port,
        timeout_s=settings.timeout_s,
        keeps_store=task.rank == 0 and not task.has_store,
        key=task.key,
    )


def _choose_backend(device: str) -> str:
    """The backend of the process group: HOPLINE_BACKEND, or by default NCCL for GPUs and gloo for CPUs."""
    default = "nccl" if torch.device(device).type == "cuda" else "gloo"
    backend = os.environ.get("HOPLINE_BACKEND") or default
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"HOPLINE_BACKEND is {backend!r}: it must be gloo or nccl")
    if backend == "nccl" and default != "nccl":
        raise ValueError(f"HOPLINE_BACKEND=nccl needs device=cuda, not device={device}: unset it")
    return backend


def _run_rank(function: Callable[..., Any], args: Sequence[Any], world: World) -> Any:
    """Run the function in this rank, and close its world, which tells the other ranks how it ended."""
    try:
        result = function(world, *args)
    except BaseException as error:
        world.close(sentence(error))
        raise
    world.close()
    return result


@dataclass
class _Child:
    """A spawned rank, as its parent sees it."""

    rank: int
    process: Any
    pipe: Connection
    messages: dict[str, Any] = field(default_factory=dict)
    """All that the rank has written, by key: "ready"; "result"; or "error", "kind" and perhaps "trace"."""
    is_ended_by_us: bool = False

    @property
    def is_ready(self) -> bool:
        return "ready" in self.messages

    @property
    def is_alive(self) -> bool:
        return self.process.exitcode is None

    @property
    def has_failed(self) -> bool:
        return not self.is_alive and self.process.exitcode != 0

    @property
    def is_ended_by_signal(self) -> bool:
        """Whether the rank caught a signal, which some launchers send to ranks directly, and ended in good order."""
        return not self.is_alive and self.process.exitcode - 128 in SIGNALS

    def read_messages(self) -> None:
        """Read what the rank has written so far. It is JSON, which is never unpickled."""
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                self.messages |= json.loads(self.pipe.recv_bytes())

    def send_signal(self, number: int) -> None:
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)


def _spawn(function: Callable[..., Any], args: Sequence[Any], first: RankSpec, num_processes: int) -> Any:
    """Start ranks from `first` on, wait until all have ended, and return what the first returned."""
    store = None
    if first.keeps_store:
        # The parent serves the store, so that it outlives every rank.
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
                sends_result = k == 0
                child_args = (function, tuple(args), spec, child_end, os.getpid(), sends_result)
                process = context.Process(target=_run_child, args=child_args, name=_RankName(f"rank-{spec.rank}"))
                process.start()
                child_end.close()  # so that reading ends when the child does
                children.append(_Child(spec.rank, process, parent_end))
            _watch(children, received)
        finally:
            # A rank is still alive only if an error has ended the block above early.
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
    del store  # referred to until here, because the ranks used it
    if error is not None:
        raise error
    return children[0].messages.get("result")


@contextlib.contextmanager
def _forward_signals(children: list[_Child]) -> Generator[list[int]]:
    """A context that forwards the first signal of each kind to the ranks. A second Ctrl-C kills them.

    The caller may add children meanwhile. Yields a list to which the numbers of received signals are added.
    """
    received: list[int] = []

    def forward(number: int, frame: Any) -> None:
        is_repeated = number in received
        received.append(number)
        for child in children:
            if not child.is_ready:  # it has not begun to train, so nothing is lost
                child.send_signal(signal.SIGKILL)
            elif not is_repeated:
                child.send_signal(number)
            elif number == signal.SIGINT:
                child.send_signal(signal.SIGKILL)

    with handle_signals(forward):
        yield received


def _watch(children: Sequence[_Child], received: Sequence[int]) -> None:
    """Return when all ranks have ended: by themselves, or killed after a deadline.

    The first failure or signal sets a deadline. When it is over, ranks that are still alive get a signal:

        a rank failed                       after `END_S` SIGTERM, `END_S` later SIGKILL
        a signal came                       after `CHECKPOINT_S` SIGKILL
        a signal came before all are ready  at once SIGTERM, `END_S` later SIGKILL

    received: The list of `_forward_signals`, which grows.
    """
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
        is_starting = not all(child.is_ready for child in children)
        # Only before SIGTERM is sent. Afterwards the deadline of SIGKILL is set, and must stay.
        if received and is_starting and final_signal == signal.SIGTERM:
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
    """The error that the parent raises: that of the rank that failed by itself, not of those that lost it.

    In this order: the error of a rank that failed by itself, the signal that came, the error of a rank that
    was killed from outside, the error of any rank.

    failed: Ranks with another exit code than 0.
    received: Signals that the parent got.
    """
    with_own_error: list[_Child] = []
    killed: list[_Child] = []
    signals = list(received)
    for child in failed:
        if child.is_ended_by_signal:
            signals.append(child.process.exitcode - 128)
        if "error" in child.messages:
            if child.messages["kind"] != PeerError.__name__:  # else it only lost another rank
                with_own_error.append(child)
        elif not child.is_ended_by_us and not child.is_ended_by_signal:
            killed.append(child)

    # A signal to one rank alone may end it while the others do not look for signals, as in evaluation. They
    # then fail because it is gone, and the signal is the cause.
    if not with_own_error and (received or (signals and not killed)):
        return Interrupted(signals[0])

    culprit = (with_own_error or killed or list(failed))[0]
    code = culprit.process.exitcode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    message = culprit.messages.get("error", "")
    if culprit.messages.get("kind") == "ValueError":  # a mistake of the user, as in a run of one process
        return ValueError(f"{message.removeprefix('ValueError: ')} (rank {culprit.rank} {how})")
    reason = message or "it may have run out of memory; resume=true resumes from the last checkpoint"
    error = RankError(f"rank {culprit.rank} {how}: {reason}", culprit.rank, code)
    if "trace" in culprit.messages:
        error.add_note(f"In rank {culprit.rank}:\n{culprit.messages['trace']}")
    return error


def _run_child(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    spec: RankSpec,
    pipe: Connection,
    parent: int,
    sends_result: bool,
) -> None:
    """Run a spawned rank from its start to its exit. pipe: to the parent. parent: its process id."""
    _end_with_parent(parent)
    # Ctrl-C in a terminal goes to every process of its group. A group of its own leaves forwarding to the
    # parent.
    os.setpgid(0, 0)
    keep_freed_memory()
    try:
        world = World.join(spec)
        _send_message(pipe, ready=True)
        with outlive_output():
            result = _run_rank(function, args, world)
        try:
            _send_message(pipe, result=result if sends_result else None)
        except (TypeError, ValueError):
            raise ValueError(
                f"rank {spec.rank} returned a {type(result).__name__}: return numbers, text, lists or dicts, or nothing"
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
    with contextlib.suppress(BrokenPipeError):  # the parent has ended
        pipe.send_bytes(json.dumps(message).encode())


def _end_with_parent(parent: int) -> None:
    """Let the system end this process when the process `parent` ends, even if that is killed."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_exit_after_parent, name="hopline-parent", daemon=True).start()
    if os.getppid() != parent:  # the parent ended before `prctl` was called
        os._exit(1)


class _RankName(str):
    """The name of a rank's process. Unpickling it does on Linux what `_end_with_parent` does.

    A spawned process first unpickles its name, then imports the user's script and torch for seconds, and only then
    calls `_run_child`. If the parent is killed meanwhile, the process must end too. The code is a text of
    built-ins, because nothing else can be imported so early.
    """

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        if not sys.platform.startswith("linux"):
            return str, (str(self),)
        end_with_parent = f"__import__('ctypes').CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})"
        check_parent = f"__import__('os').getppid() == {os.getpid()} or __import__('os')._exit(1)"
        return eval, (f"[{end_with_parent}, {check_parent}, {str(self)!r}][-1]",)


def _exit_after_parent() -> None:
    """Wait until the parent ends, then end this process. A thread, for systems without `prctl`."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)
