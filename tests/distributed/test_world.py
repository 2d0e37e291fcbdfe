"""Exchanges between ranks, their store and their rendezvous: in real processes, and with one rank."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from hopline.distributed import launch
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import RankSpec, World, _own_address, serve
from hopline.util.errors import PeerError, RankError
from tests.support.helpers import shared_memory_of_hopline
from tests.support.launched import check_words, environment, everything_then_death, program, started


def assert_all_name(folder: Path, victim: int, ranks: tuple[int, ...]):
    for rank in ranks:
        lost = json.loads((folder / f"lost{rank}").read_text())
        assert lost["seconds"] < 8, lost
        assert f"rank {victim} " in lost["error"], lost
        assert "stopped answering" in lost["error"], lost
        assert "resume=true" in lost["error"], lost


@pytest.mark.alone  # other tests share memory too
def test_three_ranks_exchange_everything_until_one_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "END_S", 20.0)  # so that the others notice by themselves
    before = shared_memory_of_hopline()
    with pytest.raises(RankError, match=r"^rank 1 was ended by SIGKILL") as caught:
        launch.run(everything_then_death, LaunchSettings(devices=3, timeout_s=8), str(tmp_path), 1)
    assert (caught.value.rank, caught.value.exit_code) == (1, -signal.SIGKILL)
    assert_all_name(tmp_path, 1, (0, 2))
    seats = [json.loads((tmp_path / f"seat{rank}").read_text()) for rank in range(3)]
    assert [(s["rank"], s["local_rank"], s["size"], s["local_size"], s["node"]) for s in seats] == [
        (rank, rank, 3, 3, 0) for rank in range(3)
    ]
    assert shared_memory_of_hopline() <= before


def test_the_rank_that_keeps_the_store_is_named_too(tmp_path: Path):
    variables = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "any", "SLURM_STEP_TASKS_PER_NODE": "2"}
    variables |= {"SLURM_NODEID": "0", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0"}
    ranks = [environment(**variables, SLURM_PROCID=str(k), SLURM_LOCALID=str(k)) for k in range(2)]
    command = program("everything_then_death", "1", "8", str(tmp_path), "0")
    with started(*((command, each) for each in ranks)) as processes:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    codes = [process.returncode for process in processes]
    assert codes == [-signal.SIGKILL, 1], outputs
    assert_all_name(tmp_path, 0, (1,))


def test_alone_every_exchange_is_free():
    world = World.alone("cpu")
    assert (world.rank, world.size, world.local_rank, world.local_size, world.node) == (0, 1, 0, 1, 0)
    assert world.device == torch.device("cpu")
    check_words(world)
    model = nn.Linear(2, 2)
    world.sum_gradients(model.parameters())
    assert model.weight.grad is None
    world.close()
    world.close()
    world.barrier()


@pytest.mark.parametrize(
    ("set_by", "size", "threads"), [("launcher", 1, 3), ("launcher", 2, 3), (None, 2, 3), (None, 1, 2), ("user", 2, 2)]
)
def test_torch_has_the_threads_of_the_cores_while_ranks_work_unless_the_user_set_them(
    set_by: str | None, size: int, threads: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("hopline.distributed.world.who_set_threads", lambda: set_by)
    monkeypatch.setattr("hopline.distributed.world.num_cores", lambda: 3)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with World(RankSpec(size=size)).watch():
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 2
        with pytest.raises(KeyError), World(RankSpec(size=size)).watch():
            raise KeyError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("local", [True, False])
def test_a_store_takes_a_free_port(local: bool):
    first, second = (serve("127.0.0.1", 0, 5, local=local) for _ in range(2))
    assert first.port != second.port
    assert min(first.port, second.port) > 0


def listens_at(port: int) -> list[str]:
    connections = psutil.Process().net_connections("inet")
    return [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port]


@pytest.mark.parametrize("local", [True, False])
def test_a_store_listens_only_where_ranks_reach_it(local: bool):
    store = serve("127.0.0.1", 0, 5, local=local)
    assert listens_at(store.port) == ["127.0.0.1"]
    store.set("a", "b")
    other = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    assert other.get("a") == b"b"


def test_own_address_is_that_of_an_interface_of_this_host(monkeypatch: pytest.MonkeyPatch):
    addresses: dict[str, list[str]] = {
        "node1": ["127.0.1.1", "10.0.0.5"],
        "debian": ["127.0.1.1"],
        "public": ["203.0.113.7"],
        "six": ["fe80::1%eth0", "10.0.0.5"],
        "127.0.0.1": ["127.0.0.1"],
    }
    interfaces = [SimpleNamespace(address=a) for a in ("127.0.0.1", "10.0.0.5", "fe80::1%eth0")]
    monkeypatch.setattr("hopline.distributed.world.psutil.net_if_addrs", lambda: {"eth0": interfaces})
    monkeypatch.setattr(
        "hopline.distributed.world.socket.getaddrinfo",
        lambda name, port, type: [(0, type, 0, "", (number, 0)) for number in addresses[name]],
    )
    chosen = {name: [_own_address(name, local=local) for local in (True, False)] for name in addresses}
    assert chosen == {
        "node1": ["127.0.1.1", "10.0.0.5"],
        "debian": ["127.0.1.1", None],
        "public": [None, None],
        "six": ["fe80::1%eth0", "fe80::1%eth0"],
        "127.0.0.1": ["127.0.0.1", "127.0.0.1"],
    }


def test_a_store_without_an_own_address_listens_on_all_interfaces_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("hopline.distributed.world._own_address", lambda address, local: None)
    store = serve("127.0.0.1", 0, 5, local=False)
    assert store.port > 0
    assert "no address of this host" in caplog.text


def join(port: int) -> World:
    return World.join(RankSpec(rank=1, size=2, local_rank=1, local_size=2, timeout_s=1, port=port))


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hopline.distributed.heartbeat.STALE_S", 0.5)
    monkeypatch.setattr("hopline.distributed.heartbeat.BEAT_S", 0.1)
    store = serve("127.0.0.1", 0, 5, local=True)
    # What ranks of an earlier start left behind is not taken for those of this one.
    store.set("hopline/earlier/seat/0", json.dumps([2, 0, [], ""]))
    store.set("hopline/earlier/alive/0", "5 5")
    with pytest.raises(PeerError, match=r"^rank 0 did not start \(rank 1"):
        join(store.port)


def test_a_rendezvous_that_is_not_there_is_named():
    store = serve("127.0.0.1", 0, 5, local=True)
    port = store.port
    del store
    with pytest.raises(PeerError, match=rf"rank 0 at 127\.0\.0\.1:{port} .*: check address="):
        join(port)


@pytest.mark.parametrize("local", [True, False])
def test_a_port_in_use_is_named(local: bool):
    store = serve("127.0.0.1", 0, 5, local=False)
    with pytest.raises(ValueError, match=rf"cannot listen at 127\.0\.0\.1:{store.port} .*address=HOST:PORT"):
        serve("127.0.0.1", store.port, 1, local=local)


def test_ranks_that_mean_different_sizes_are_refused():
    store = serve("127.0.0.1", 0, 5, local=True)
    store.set("hopline//seat/0", json.dumps([3, 0, [], ""]))
    with pytest.raises(ValueError, match=r"3 and rank 1 .* 2: .*devices="):
        join(store.port)


@pytest.mark.parametrize("other", ["GPU-1", "GPU-2"])
def test_two_ranks_of_nccl_on_one_gpu_are_refused_before_they_try(other: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hopline.distributed.world.gpu_identity", lambda device: "GPU-1")
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)

    def start(*args: object, **settings: object) -> None:
        raise MemoryError("the exchange would begin")

    monkeypatch.setattr("torch.distributed.init_process_group", start)
    store = serve("127.0.0.1", 0, 5, local=True)
    store.set("hopline//seat/0", json.dumps([2, 0, [], other]))
    spec = RankSpec(
        rank=1, size=2, local_rank=1, local_size=2, device="cuda:0", backend="nccl", timeout_s=1, port=store.port
    )
    kind, message = (
        (
            ValueError,
            r"ranks 0 and 1 have the same GPU \(GPU-1\), .*: start one process per GPU .* HOPLINE_BACKEND=gloo",
        )
        if other == "GPU-1"
        else (MemoryError, "would begin")
    )
    with pytest.raises(kind, match=message):
        World.join(spec)
