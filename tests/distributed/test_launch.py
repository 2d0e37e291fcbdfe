"""Ranks are started, watched and ended: by spawning, under torchrun, and as srun would start them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hopline.distributed import launch
from hopline.distributed.environment import ALONE, Task
from hopline.distributed.launch import _Child, _count_processes, _first_rank_spec, _make_error, run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import RankSpec, World, device_of_rank
from hopline.util.errors import RankError
from hopline.util.host import num_cores
from hopline.util.signals import Interrupted
from tests.support.helpers import shared_memory_of_hopline
from tests.support.launched import environment, everything, fail, program, started, stay

LAUNCHED = Task(
    launcher="srun", rank=1, size=4, local_rank=1, local_size=2, node=0, num_nodes=2, address="node1", port=12345
)
ONE_PER_NODE = Task(
    launcher="srun", rank=1, size=3, local_rank=0, local_size=1, node=1, num_nodes=3, address="node1", port=12345
)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"devices": 0}, "devices must be at least 1 or 'auto', not 0"),
        ({"devices": "all"}, "devices must be a whole number or 'auto', not 'all'"),
        ({"devices": True}, "devices must be a whole number or 'auto'"),
        ({"address": "node1:0"}, "address must end in a port between 1 and 65535, such as node1:29500, not 'node1:0'"),
        ({"address": "node1:65536"}, "address must end in a port between 1 and 65535"),
        ({"address": "node1:http"}, "address must end in a port between 1 and 65535"),
        ({"address": "node1:"}, "address must end in a port between 1 and 65535"),
        ({"address": 29500}, "address must be str or None"),
        ({"address": ""}, "address must be a host, a port or both, such as address=node1:29500 or address=:29500"),
        ({"address": " "}, "address must be a host, a port or both"),
        ({"address": ":"}, "address must be a host, a port or both"),
        ({"address": "[]"}, "address must be a host, a port or both"),
        ({"address": "tcp://node1"}, "address must be a host, a port or both"),
        ({"timeout_s": 0}, "timeout_s must be above 0"),
        ({"timeout_s": float("inf")}, "timeout_s must be a finite number"),
        ({"timeout_s": float("nan")}, "timeout_s must be a finite number"),
    ],
    ids=str,
)
def test_a_setting_that_means_nothing_is_refused(wrong: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        LaunchSettings(**wrong)


def test_valid_settings_are_accepted():
    assert LaunchSettings(devices="auto", address="fe80::1").timeout_s == 600


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        (None, None, None),
        ("node1", "node1", None),
        ("node1:29500", "node1", 29500),
        (":29500", None, 29500),
        ("10.0.0.5:1", "10.0.0.5", 1),
        ("fe80::1", "fe80::1", None),
        ("[fe80::1]", "fe80::1", None),
        ("[fe80::1]:29500", "fe80::1", 29500),
    ],
)
def test_an_address_is_a_host_a_port_or_both(address: str | None, host: str | None, port: int | None):
    settings = LaunchSettings(address=address)
    assert (settings.host, settings.port) == (host, port)


def test_devices_decides_how_many_processes_a_host_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    two = LaunchSettings(devices=2)
    auto = LaunchSettings(devices="auto")
    assert _count_processes(two, ALONE, "cpu") == 2
    assert _count_processes(two, ONE_PER_NODE, "cpu") == 2
    assert _count_processes(two, LAUNCHED, "cpu") == 1  # srun has started two here already
    assert _count_processes(LaunchSettings(), LAUNCHED, "cpu") == 1
    assert _count_processes(auto, ALONE, "cpu") == 1
    assert _count_processes(auto, ALONE, "cuda") == 4
    assert _count_processes(auto, ONE_PER_NODE, "cuda") == 4
    assert _count_processes(auto, LAUNCHED, "cuda") == 1
    with pytest.raises(ValueError, match=r"srun started 2 tasks .*devices=3"):
        _count_processes(LaunchSettings(devices=3), LAUNCHED, "cpu")


def test_ranks_are_numbered_host_by_host():
    spec = _first_rank_spec(LaunchSettings(), LAUNCHED, 1, "cpu")
    assert (spec.rank, spec.size, spec.local_rank, spec.local_size, spec.node) == (1, 4, 1, 2, 0)
    assert (spec.address, spec.port, spec.backend, spec.keeps_store) == ("node1", 12345, "gloo", False)
    spec = _first_rank_spec(LaunchSettings(address="other:7"), ONE_PER_NODE, 4, "cuda")
    assert (spec.rank, spec.size, spec.local_rank, spec.local_size, spec.node) == (4, 12, 0, 4, 1)
    assert (spec.address, spec.port, spec.backend) == ("other", 7, "nccl")
    spec = _first_rank_spec(LaunchSettings(address=":7"), ONE_PER_NODE, 4, "cuda")
    assert (spec.address, spec.port) == ("node1", 7)
    torchrun = Task(**{**vars(LAUNCHED), "launcher": "torchrun"})
    with pytest.raises(ValueError, match="leave out address="):
        _first_rank_spec(LaunchSettings(address=":7"), torchrun, 1, "cpu")


def test_an_environment_variable_chooses_what_carries_the_exchanges(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOPLINE_BACKEND", "gloo")
    assert _first_rank_spec(LaunchSettings(), ALONE, 2, "cuda").backend == "gloo"
    monkeypatch.setenv("HOPLINE_BACKEND", "nccl")
    with pytest.raises(ValueError, match="HOPLINE_BACKEND=nccl needs device=cuda"):
        _first_rank_spec(LaunchSettings(), ALONE, 2, "cpu")
    monkeypatch.setenv("HOPLINE_BACKEND", "mpi")
    with pytest.raises(ValueError, match=r"HOPLINE_BACKEND is 'mpi': .*gloo or nccl"):
        _first_rank_spec(LaunchSettings(), ALONE, 2, "cpu")


def test_which_gpu_a_rank_takes(monkeypatch: pytest.MonkeyPatch):
    spec = RankSpec(rank=3, size=4, local_rank=1, local_size=2, backend="nccl")
    assert device_of_rank(spec, "cpu", spawned=True) == "cpu"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert device_of_rank(spec, "cuda", spawned=True) == "cuda:1"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert device_of_rank(spec, "cuda", spawned=False) == "cuda:0"  # each task of srun may see a GPU of its own
    with pytest.raises(ValueError, match=r"1 GPUs for 2 ranks .*devices=1"):
        device_of_rank(spec, "cuda", spawned=True)
    assert device_of_rank(RankSpec(local_rank=1, local_size=2), "cuda", spawned=True) == "cuda:0"


def test_one_process_is_not_spawned():
    def function(world: World, *args: int) -> tuple[int, int, list[int]]:
        return os.getpid(), world.size, list(args)

    assert run(function, LaunchSettings(), 1, 2) == (os.getpid(), 1, [1, 2])


class EndedProcess:
    """A process that has ended."""

    def __init__(self, exitcode: int) -> None:
        self.exitcode = exitcode


def ended_child(rank: int, code: int, by_us: Any = False, **messages: str) -> _Child:
    """A rank's process that has ended with an exit code, and its last messages."""
    return _Child(rank, EndedProcess(code), None, messages=messages, is_ended_by_us=by_us)  # type: ignore[arg-type]


LOST = {"error": "PeerError: rank 2 stopped answering", "kind": "PeerError"}


@pytest.mark.parametrize(
    ("failed", "signals", "kind", "message"),
    [
        (
            [ended_child(0, 1, **LOST), ended_child(2, -9)],
            [],
            RankError,
            "^rank 2 was ended by SIGKILL: it may have run out",
        ),
        (
            [ended_child(0, 1, **LOST), ended_child(1, -15, by_us=True)],
            [],
            RankError,
            "^rank 0 failed .* 1: PeerError: rank 2",
        ),
        ([ended_child(1, 1, error="KeyError: 3", kind="KeyError")], [2], RankError, "^rank 1 failed .*: KeyError: 3"),
        ([ended_child(0, 1, error="ValueError: no", kind="ValueError")], [], ValueError, r"^no \(rank 0 failed"),
        ([ended_child(0, 130), ended_child(1, 130)], [signal.SIGINT], Interrupted, "SIGINT"),
        ([ended_child(0, 1, **LOST), ended_child(1, 143)], [signal.SIGTERM], Interrupted, "SIGTERM"),
        ([ended_child(1, 3)], [], RankError, "rank 1 failed with exit code 3"),
        (
            [ended_child(0, 138), ended_child(1, 138)],
            [],
            Interrupted,
            "SIGUSR1",
        ),  # the notice came to the ranks themselves
        (
            [ended_child(0, 1, **LOST), ended_child(1, 138)],
            [],
            Interrupted,
            "SIGUSR1",
        ),  # to one, where the others were not asked
        ([ended_child(0, 138), ended_child(1, -9)], [], RankError, "^rank 1 was ended by SIGKILL"),
    ],
    ids=range(10),
)
def test_the_failure_that_came_first_is_raised(failed: list[_Child], signals: list[int], kind: type, message: str):
    with pytest.raises(kind, match=message):
        raise _make_error(failed, signals)


def wait_until(true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


def read_seats(folder: Path) -> list[dict[str, int]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("seat*"))]


def test_under_torchrun(tmp_path: Path):
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = [*torchrun, "-m", "tests.support.launched", "everything", "1", "20", str(tmp_path)]
    with started((command, environment(OMP_NUM_THREADS="1"))) as [process]:
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    places = [(s["rank"], s["size"], s["local_rank"], s["local_size"], s["node"]) for s in read_seats(tmp_path)]
    assert places == [(0, 2, 0, 2, 0), (1, 2, 1, 2, 0)]


@pytest.mark.process
@pytest.mark.spawn
@pytest.mark.parametrize("variables", [{}, {"OMP_NUM_THREADS": "1"}], ids=str)
def test_threads_under_torchrun_are_those_of_the_cores_unless_the_user_has_set_them(
    variables: dict[str, str], tmp_path: Path
):
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = [*torchrun, "-m", "tests.support.launched", "everything", "1", "20", str(tmp_path)]
    with started((command, environment(**variables))) as [process]:
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    share = 1 if variables else max(1, num_cores() // 2)
    assert [s["threads"] for s in read_seats(tmp_path)] == [share, share]


def test_one_task_per_node_starts_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    variables = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
    variables |= {"SLURM_STEP_NODELIST": "127.0.0.[1-2]", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "1"}
    for name, value in (variables | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}).items():
        monkeypatch.setenv(name, value)
    second = environment(**variables, SLURM_PROCID="1", SLURM_NODEID="1")
    with started((program("everything", "2", "30", str(tmp_path)), second)) as [process]:
        assert run(everything, LaunchSettings(devices=2, timeout_s=30), str(tmp_path)) == {"size": 4}
        output = process.communicate(timeout=90)[0]
    assert process.returncode == 0, output
    assert "{'size': 4}" in output  # every host returns what its first rank returned
    places = [(s["rank"], s["size"], s["local_rank"], s["local_size"], s["node"]) for s in read_seats(tmp_path)]
    assert places == [(0, 4, 0, 2, 0), (1, 4, 1, 2, 0), (2, 4, 0, 2, 1), (3, 4, 1, 2, 1)]


@pytest.mark.process
def test_no_rank_outlives_an_agent_of_torchrun_that_is_killed(tmp_path: Path):
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = [*torchrun, "-m", "tests.support.launched", "stay", "1", "20", str(tmp_path)]
    with started((command, environment(OMP_NUM_THREADS="1"))) as [process]:
        assert wait_until(lambda: both_ranks_run(tmp_path), 40)
        ranks = [psutil.Process(int((tmp_path / f"running{rank}").read_text())) for rank in range(2)]
        process.kill()
        _, alive = psutil.wait_procs(ranks, timeout=12)
        for rank in alive:
            rank.kill()
        assert not alive


def both_ranks_run(folder: Path) -> bool:
    running = [folder / f"running{rank}" for rank in range(2)]
    return all(path.exists() and path.read_text() for path in running)


@pytest.mark.spawn  # a warm rank has another parent
@pytest.mark.alone  # other tests share memory too
def test_no_rank_outlives_a_parent_that_is_killed(tmp_path: Path):
    before = shared_memory_of_hopline()
    with started((program("stay", "2", "20", str(tmp_path)), environment())) as [process]:
        assert wait_until(lambda: both_ranks_run(tmp_path), 40)
        children = psutil.Process(process.pid).children(recursive=True)
        assert {int((tmp_path / f"running{rank}").read_text()) for rank in range(2)} <= {p.pid for p in children}
        process.kill()
        _, alive = psutil.wait_procs(children, timeout=12)
        assert not alive
    assert shared_memory_of_hopline() <= before


@pytest.mark.spawn
def test_no_rank_that_still_imports_outlives_a_parent_that_is_killed(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import os, pathlib, time
if __name__ != "__main__":  # in a rank, which imports this script first
    pathlib.Path({str(tmp_path)!r}, f"importing-{{os.getpid()}}").touch()
    time.sleep(60)
from hopline.distributed.launch import LaunchSettings, run
if __name__ == "__main__":
    run(print, LaunchSettings(devices=2))
"""
    )
    with started(([str(script)], environment())) as [process]:
        assert wait_until(lambda: len(list(tmp_path.glob("importing-*"))) == 2, 40)
        ranks = [psutil.Process(int(path.name.partition("-")[2])) for path in tmp_path.glob("importing-*")]
        process.kill()
        _, alive = psutil.wait_procs(ranks, timeout=12)
        for rank in alive:
            rank.kill()
        assert not alive


@pytest.mark.alone  # other tests share memory too
def test_ctrl_c_ends_all_ranks(tmp_path: Path):
    before = shared_memory_of_hopline()
    pressed: list[float] = []

    def press() -> None:
        if wait_until(lambda: both_ranks_run(tmp_path), 40):
            pressed.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(Interrupted, match="SIGINT"):
            run(stay, LaunchSettings(devices=2, timeout_s=60), str(tmp_path))
        assert time.monotonic() - pressed[0] < 50  # before the ranks would give up by themselves
    finally:
        thread.join()
    assert all((tmp_path / f"ended{rank}").exists() for rank in range(2))  # each had its chance to end in good order
    assert not [p for p in multiprocessing.active_children() if p.is_alive()]
    assert shared_memory_of_hopline() <= before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_rank_that_fails_ends_the_others_and_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "END_S", 0.3)
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"batch_size=10 \(rank 1 .*exit code 1"):
        # More than one read of a socket or a pipe brings.
        run(fail, LaunchSettings(devices=2, timeout_s=60), "x" * 1_000_000, 1_000_000)
    assert time.monotonic() - start < 60  # before the others would give up


def test_a_signal_before_all_ranks_are_ready_leaves_them_time_to_end_after_sigterm() -> None:
    """A rank that needs half a second to end after SIGTERM is not killed by SIGKILL meanwhile."""
    ours, theirs = multiprocessing.Pipe()

    def end_slowly() -> None:
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), os._exit(7)))
        theirs.send_bytes(b"{}")
        time.sleep(60)

    process = multiprocessing.get_context("fork").Process(target=end_slowly)
    process.start()
    child = _Child(0, process, ours)
    assert ours.poll(10)  # its handler is in place
    launch._watch([child], [signal.SIGINT])
    assert process.exitcode == 7
