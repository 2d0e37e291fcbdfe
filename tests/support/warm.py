"""Warm processes for tests: forked from a server that has torch, PyG and hopline imported already.

The library starts its ranks by multiprocessing's "spawn": a new interpreter that imports torch and PyG anew, some five
seconds of a core. In tests such a process is forked from a server that did these imports once. It is as fresh as a
spawned one: no thread, no process group, no random state of an earlier test. So any test may kill it. Tests of
starting itself have the marker `spawn` and get real processes.

The server is safe to fork from: it imports, and runs no kernel, so that neither torch nor Numba has started a thread.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver, process
from multiprocessing.context import BaseContext, ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import psutil
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

PRELOADED = ("tests.support.warm_imports",)
"""Modules that the server imports before it is asked for a process."""

Result = TypeVar("Result")

_real_get_context = multiprocessing.get_context


class WarmContext(ForkServerContext):
    """A context whose processes are forked from the warm server, in the environment of the test that starts them."""

    def get_start_method(self, allow_none: bool = False) -> str:
        return "spawn"  # multiprocessing and torch send memory between processes in the way of this method

    def Process(self, *, target: Callable[..., None], args: tuple[Any, ...] = (), **options: Any) -> BaseProcess:  # type: ignore[override]
        options.pop("name", None)  # that of a rank ends it unless its parent is the process that asks for it
        return super().Process(target=_in_environment, args=(_address(), dict(os.environ), target, args), **options)


def _address() -> str:
    """The address at which the server listens."""
    forkserver.ensure_running()
    return forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]


def _use_server_at(address: str) -> None:
    """Have this process ask the server that it was forked from for processes, where it would start one of its own."""
    forkserver._forkserver._forkserver_address = address  # type: ignore[attr-defined]
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    forkserver.ensure_running = lambda: None


def _in_environment(
    address: str, environment: dict[str, str], target: Callable[..., None], args: tuple[Any, ...]
) -> None:
    """Run the target of a process. A spawned process gets its parent's variables, a forked one those of the server."""
    _use_server_at(address)
    os.environ.clear()
    os.environ.update(environment)
    target(*args)


def get_context(method: str | None = None) -> BaseContext:
    """Take the place of `multiprocessing.get_context`: "spawn" is warm."""
    return WarmContext() if method == "spawn" else _real_get_context(method)


class Program:
    """`python ARGUMENTS` in a warm process, with those methods of `subprocess.Popen` that tests use."""

    def __init__(self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        self._outputs = outputs
        context = _real_get_context("forkserver")
        arguments_of_target = (_address(), list(arguments), cwd, dict(env), outputs)
        self._process = context.Process(target=_run_program, args=arguments_of_target)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("python", timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; return what was written to stdout and stderr."""
        self.wait(timeout)
        stdout, stderr = (path.read_text() if path.exists() else "" for path in self._outputs)
        return stdout, stderr

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run_program(address: str, arguments: list[str], cwd: Path, env: dict[str, str], outputs: list[Path]) -> None:
    """Do what the interpreter does with its arguments: -W FILTER, then -m MODULE, -c CODE or a file."""
    _use_server_at(address)
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    process.ORIGINAL_DIR = os.getcwd()  # where processes that this one starts begin
    for stream, path in zip((sys.stdout, sys.stderr), outputs, strict=True):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream.fileno())
        os.close(file)
    while arguments[0] == "-W":
        warnings._setoption(arguments[1])  # type: ignore[attr-defined]
        arguments = arguments[2:]
    flag, *rest = arguments
    if flag == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif flag == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(flag, run_name="__main__")


Process: TypeAlias = "Program | subprocess.Popen[str]"


def python(*arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> Process:
    """Start `python ARGUMENTS` in a session of its own: warm, but for tests with the marker `spawn`."""
    env = {**(os.environ if env is None else env), "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    if multiprocessing.get_context is get_context:
        return Program(arguments, cwd, env)
    command = [sys.executable, *arguments]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=cwd, env=env, text=True, start_new_session=True, **pipes)


class Ended(NamedTuple):
    """How a program ended."""

    returncode: int | None
    stdout: str
    stderr: str


def run_python(*arguments: str, timeout: float = 300, **options: Any) -> Ended:
    """Run `python ARGUMENTS` to its end, as `python` starts it."""
    program = python(*arguments, **options)
    try:
        stdout, stderr = program.communicate(timeout=timeout)
    finally:
        program.kill()
    return Ended(program.returncode, stdout, stderr)


def call(function: Callable[..., Result], *args: Any) -> Result:
    """Call a function of a module in a process of its own, and return its result."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def children() -> list[psutil.Process]:
    """The processes that the library has started from this one and that have not ended: warm or spawned."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    forked = [] if server is None else psutil.Process(server).children()
    family = psutil.Process().children(recursive=True)
    return [*forked, *(child for child in family if "spawn_main" in " ".join(child.cmdline()))]


def is_possible(config: pytest.Config) -> bool:
    """Whether tests get warm processes: not by --spawn, nor where there is a GPU, since CUDA cannot be forked."""
    has_server = "forkserver" in multiprocessing.get_all_start_methods()
    return has_server and not (config.getoption("--spawn") or torch.cuda.is_available())


def start() -> None:
    """Start the server, which imports what processes will need while the first tests run."""
    forkserver.set_forkserver_preload(list(PRELOADED))
    forkserver.ensure_running()


def stop() -> None:
    """End the server, and wait for it."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
