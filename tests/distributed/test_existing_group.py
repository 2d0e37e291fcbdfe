"""A process group of the user's: its ranks train, and the group stays open for the user."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hopline as hl
from hopline.distributed.existing_group import (
    Introduction,
    _start_heartbeat,
    backend_for,
    find_gpu,
    spec_of,
)
from hopline.distributed.heartbeat import NoHeartbeat
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.membership import Membership
from hopline.distributed.world import RankSpec, World, share_of_cores
from hopline.util.errors import PeerError
from tests.methods.full_batch import ranks as full_batch
from tests.methods.historical import ranks as historical
from tests.support.group_ranks import NORMED
from tests.support.launched import environment, free_port, started
from tests.support.ranks import train
from tests.support.runs import sage, small


def run_in_group(name: str, folder: Path, size: int, *, by_file: bool = False, dies: int | None = None) -> list[Any]:
    """Results of the ranks of a user's process group, each of which runs `tests.support.group_ranks NAME`.

    dies: a rank that ends early. Its result is None.
    """
    port = str(free_port())
    commands = []
    for rank in range(size):
        command = ["-W", "error::UserWarning", "-m", "tests.support.group_ranks", name, str(folder)]
        variables = {} if by_file else {"RANK": str(rank), "WORLD_SIZE": str(size)}
        variables |= {} if by_file else {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        commands.append((command + ([str(rank), str(size)] if by_file else []), environment(**variables)))
    with started(*commands) as processes:
        outputs = [process.communicate(timeout=240) for process in processes]
    codes = [process.returncode for process in processes]
    assert all(code == 0 for rank, code in enumerate(codes) if rank != dies), outputs
    files = [folder / f"found{rank}" for rank in range(size)]
    return [json.loads(file.read_text()) if rank != dies else None for rank, file in enumerate(files)]


def assert_same(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    assert ours["losses"] == pytest.approx(expected["losses"], abs=1e-9)
    assert ours["metrics"] == expected["metrics"]
    for name, numbers in expected["weights"].items():
        assert ours["weights"][name] == pytest.approx(numbers, abs=1e-6), name


def train_both(world: World) -> dict[str, Any]:
    return {
        "historical": historical.result_of(historical.trainer_of(world, {})),
        "full_batch": full_batch.train(world, "sage", {}, **NORMED),
    }


def test_ranks_of_a_users_group_train_every_method_as_launched_ones(tmp_path: Path):
    results = run_in_group("train_everything", tmp_path, 2)
    alone = train(World.alone(), "sage")
    launched = run(train_both, LaunchSettings(devices=2, timeout_s=30))
    for result in results:
        assert result["plain"]["size"] == 2
        assert_same(result["plain"], alone)
        assert result["given"] == result["plain"]  # bit for bit
        assert result["historical"] == launched["historical"]
        assert result["full_batch"]["losses"] == launched["full_batch"]["losses"]
        assert result["full_batch"]["weights"] == launched["full_batch"]["weights"]
        assert "leave out devices=3" in result["refused"]
    seats = [json.loads((tmp_path / f"seat{rank}").read_text()) for rank in range(2)]
    assert [(s["rank"], s["size"], s["local_rank"], s["local_size"], s["node"]) for s in seats] == [
        (0, 2, 0, 2, 0),
        (1, 2, 1, 2, 0),
    ]
    assert [s["timeout_s"] for s in seats] == [60.0, 60.0]  # the group's own


def test_after_an_error_on_one_rank_the_others_are_told_and_the_group_trains_again(tmp_path: Path):
    results = run_in_group("fail_and_train_again", tmp_path, 2)
    assert results[1]["first"]["kind"] == "ValueError"
    assert results[0]["first"]["kind"] == "PeerError"
    assert "rank 1 stopped with ValueError: the labels of rank 1 are wrong" in results[0]["first"]["error"]
    assert results[0]["first"]["seconds"] < 20
    assert "rank 1 stopped with ValueError" in results[0]["again"]["error"]
    assert "make a new Trainer" in results[1]["again"]["error"]
    for result in results:
        assert result["again"]["kind"] == "PeerError"
        assert_same(result["after"], train(World.alone(), "sage"))


def test_a_rank_that_is_killed_is_named_and_the_group_and_its_store_stay(tmp_path: Path):
    results = run_in_group("lose_a_rank", tmp_path, 3, dies=1)
    for rank in (0, 2):
        assert "rank 1 stopped answering" in results[rank]["error"], results[rank]
        assert results[rank]["seconds"] < 30


def test_hosts_may_have_different_numbers_of_ranks(tmp_path: Path):
    results = run_in_group("train_on_uneven_hosts", tmp_path, 3)
    seats = [json.loads((tmp_path / f"seat{rank}").read_text()) for rank in range(3)]
    assert [(s["local_rank"], s["local_size"], s["node"]) for s in seats] == [(0, 1, 0), (0, 2, 1), (1, 2, 1)]
    alone = train(World.alone(), "sage")
    exact = full_batch.train(World.alone(), "sage", {"num_shards": 1}, **NORMED)
    for result in results:
        assert_same(result["sampled"], alone)
        assert result["full_batch"]["losses"] == pytest.approx(exact["losses"], abs=1e-9)


def test_a_group_that_met_in_a_file_trains_too(tmp_path: Path):
    results = run_in_group("fail_and_train_again", tmp_path, 2, by_file=True)
    assert "rank 1 stopped with ValueError: the labels of rank 1 are wrong" in results[0]["first"]["error"]
    assert_same(results[0]["after"], train(World.alone(), "sage"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("name", "device"), [("train_cpu_model_in_nccl_group", "cpu"), ("train_gpu_model_in_gloo_group", "cuda:0")]
)
def test_the_backend_of_the_group_need_not_be_that_of_the_model(name: str, device: str, tmp_path: Path):
    results = run_in_group(name, tmp_path, 2)
    alone = train(World.alone(device), "sage", device=device)
    for result in results:
        assert result["size"] == 2
        assert result["losses"] == pytest.approx(alone["losses"], abs=1e-9)


@pytest.mark.parametrize(
    ("config", "device", "backend"),
    [
        ("cpu:gloo,cuda:gloo", "cpu", "gloo"),
        ("cpu:gloo,cuda:gloo", "cuda", "gloo"),
        ("cuda:nccl", "cpu", "gloo"),
        ("cuda:nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu", "gloo"),
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
        ("cpu:ucc", "cpu", "gloo"),
    ],
)
def test_exchanges_have_a_backend_for_the_device_of_the_model(
    config: str, device: str, backend: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", dist.HashStore)
    monkeypatch.setattr("torch.distributed.distributed_c10d.get_backend_config", lambda: config)
    assert backend_for(torch.device(device)) == backend


def test_a_group_without_a_store_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: None)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "mpi")
    with pytest.raises(ValueError, match=r"mpi.*gloo or nccl"):
        backend_for(torch.device("cpu"))


def test_a_rank_that_makes_a_world_alone_is_told_what_to_type(tmp_path: Path):
    results = run_in_group("come_alone", tmp_path, 2)
    assert "not all 2 ranks" in results[0]["error"]
    assert "world=hl.World.alone()" in results[0]["error"]


def test_a_store_that_serves_one_connection_still_ends_an_exchange_with_an_error(tmp_path: Path):
    results = run_in_group("die", tmp_path, 2, dies=1)
    assert "a rank stopped answering" in results[0]["error"]


def test_a_group_whose_store_cannot_be_cloned_has_no_heartbeat():
    class NoClone:
        pass

    store: Any = NoClone()
    group: Any = object()
    membership = Membership(partial(_start_heartbeat, store, 0, 2), group)
    membership.groups.clear()
    assert isinstance(membership.running_heartbeat(), NoHeartbeat)
    membership.close("X: y")
    with pytest.raises(PeerError, match=r"\(X: y\).*make a new Trainer"):
        membership.running_heartbeat()


def test_a_group_of_one_rank_is_this_process_alone(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        world = hl.World.current()
        assert (world.rank, world.size, world.group) == (0, 1, None)
        world.close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_hosts_and_their_ranks_are_counted_in_the_order_of_the_ranks():
    alternating = [Introduction(host=host) for host in ("a", "b", "a")]
    specs = [spec_of(alternating, rank, "gloo", 60.0) for rank in range(3)]
    assert [(spec.local_rank, spec.local_size, spec.node) for spec in specs] == [(0, 2, 0), (0, 1, 1), (1, 2, 0)]


def test_ranks_that_may_run_on_the_same_cores_share_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hopline.distributed.world.num_cores", lambda: 8)
    monkeypatch.setattr("hopline.distributed.world.allowed_cores", lambda: [1])
    assert share_of_cores([[0], [1], [1]]) == 4
    assert share_of_cores([(1,)]) == 8
    assert share_of_cores([[1]] * 9) == 1


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    """Four GPUs, and a process group that is bound to none."""

    class Group:
        bound_device_id: Any = None

    group = Group()
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_group", lambda: group)
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
    return group


def choose_gpu(current: int, local_rank: int, other_gpus: list[int], device: str = "cuda") -> str:
    """The GPU of a rank whose current device is `current`, on a host with ranks on other GPUs."""
    spec = RankSpec(rank=local_rank, size=1 + len(other_gpus), local_rank=local_rank, local_size=1 + len(other_gpus))
    introductions = [Introduction(host="a", current_gpu=number) for number in [current, *other_gpus]]
    return str(find_gpu(torch.device(device), spec, introductions))


def test_the_gpu_of_a_rank_is_the_one_that_its_engine_has_chosen(gpus: Any, monkeypatch: pytest.MonkeyPatch):
    current = 0
    monkeypatch.setattr("torch.cuda.current_device", lambda: current)
    assert choose_gpu(0, 0, [0]) == "cuda:0"  # nobody has chosen: by local rank
    assert choose_gpu(0, 1, [0]) == "cuda:1"
    assert choose_gpu(0, 1, [3]) == "cuda:0"  # Fabric(devices=[3, 0]): rank 1 has the first GPU
    assert choose_gpu(0, 1, [0], "cuda:3") == "cuda:3"  # the device= of the user
    current = 2
    assert choose_gpu(2, 0, [3]) == "cuda:2"
    current = 0
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:1")  # Ray: two workers on half a GPU each
    assert choose_gpu(0, 3, [0, 0, 0]) == "cuda:1"
    gpus.bound_device_id = torch.device("cuda:2")  # init_process_group(device_id=...)
    assert choose_gpu(0, 3, [0, 0, 0]) == "cuda:2"
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE")
    gpus.bound_device_id = None
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)  # a GPU of its own, the only one that it sees
    assert choose_gpu(0, 1, [0]) == "cuda:0"


def test_a_launchers_variables_without_a_group_are_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert hl.World.current().size == 1
    assert "WORLD_SIZE is 2" in caplog.text
    assert "RANK" not in os.environ


def test_a_world_of_another_type_is_refused():
    with pytest.raises(ValueError, match=r"hl\.World\.current\(\), not str 'all'"):
        hl.Trainer(sage(small()), small(), world="all", show=False)  # type: ignore[arg-type]


def test_a_device_that_is_not_the_worlds_is_refused():
    data = small()
    with pytest.raises(ValueError, match=r"device='cuda' .*world= .*cpu: .*hl\.World\.current\("):
        hl.Trainer(sage(data), data, world=hl.World.current(), device="cuda")
