"""What every test gets: real graphs where they are, and a check that nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its kernels then run here, on CPU tensors

from hopline.util.host import num_cores
from tests.support import warm
from tests.support.fake_cuda import FakeCuda

# Workers that run side by side share the cores. Without a limit, 15 workers on 16 cores would start 240 threads, and
# a suite on a GPU would mostly wait for them. At least two, so that code with threads is still tested as such.
_num_threads = max(2, num_cores() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
torch.set_num_threads(min(torch.get_num_threads(), _num_threads))

# `nohup make test &` starts everything with these signals ignored, and processes that tests start would inherit that.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

LONG_LIVED = ("hopline-ops",)
"""Threads that live as long as the process by design."""


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with real graphs: HOPLINE_TEST_DATA, or ../shared/data beside the project."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("HOPLINE_TEST_DATA", default))
    if not (folder / "cora.npz").exists():
        pytest.skip("no real graphs here: set HOPLINE_TEST_DATA to a folder with cora.npz and others")
    return folder


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    environment, threads = dict(os.environ), set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in threads and not t.name.startswith(LONG_LIVED)]
    left = [t for t in left if "(_read_thread)" not in t.name]  # of torch.compile, up to torch 2.8
    for thread in left:  # one that is just ending is not left behind
        thread.join(timeout=2)
    still = [t.name for t in left if t.is_alive()]
    assert not still, f"threads left behind: {still}"
    ignored = {"PYTEST_CURRENT_TEST", "KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK", "TORCHINDUCTOR_CACHE_DIR"}
    changed = {k for k in environment.keys() | os.environ.keys() if environment.get(k) != os.environ.get(k)}
    assert not changed - ignored, f"environment variables left behind: {changed - ignored}"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB, where this process may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """In place of a GPU's streams and graphs."""
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--spawn", action="store_true", help="spawn every process as the library does, none is warm")


@pytest.fixture(scope="session", autouse=True)
def _warm_server(request: pytest.FixtureRequest) -> Iterator[None]:
    if warm.is_possible(request.config):
        warm.start()
    yield
    warm.stop()


@pytest.fixture(autouse=True)
def _warm_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes that the library would spawn from a warm server, but for tests of spawning itself."""
    spawns = not warm.is_possible(request.config) or request.node.get_closest_marker("spawn") is not None
    if not spawns:
        monkeypatch.setattr(multiprocessing, "get_context", warm.get_context)
