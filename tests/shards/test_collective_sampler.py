"""Sampling on shards by several ranks. The checks that ranks run are in `shards/ranks.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hopline as hl
from hopline.core.partition import make_partition
from hopline.distributed.all_to_all import Channel
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import World
from hopline.shards.write import cut
from hopline.util.errors import RankError
from tests.shards.ranks import RUNS, check, own_loop, train_on_shards, train_run
from tests.shards.test_write import rich


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("collective")
    data = rich()
    data.save(path / "data")
    for shards, how in ((1, "range"), (2, "metis"), (3, "random")):
        cut(data, make_partition(data.graph, shards, how), path / f"shards-{shards}")
    return path


@pytest.fixture(scope="module")
def losses_alone(folder: Path) -> dict[str, list[float]]:
    data = hl.open(folder / "data")
    return {kind: own_loop(World.alone(), data, kind) for kind in ("sage", "gcn", "gat")}


@pytest.fixture(scope="module")
def runs_alone(folder: Path) -> list[dict[str, Any]]:
    return [train_run(World.alone(), hl.open(folder / "data"), *run) for run in RUNS]


@pytest.fixture(scope="module")
def results_by_size(folder: Path) -> Callable[[int], dict[str, Any]]:
    """Results of `check` on a number of ranks. Each number is launched once."""
    return functools.cache(lambda size: run(check, LaunchSettings(devices=size, timeout_s=30), str(folder)))


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.extended)])
def test_ranks_get_what_one_process_gets(
    results_by_size: Callable[[int], dict[str, Any]],
    losses_alone: dict[str, list[float]],
    runs_alone: list[dict[str, Any]],
    size: int,
) -> None:
    results = results_by_size(size)
    assert results["seeds"] == [2 * 20, 1]
    assert results["batches"] == [2 * -(-20 // (4 * size)), 1]
    for kind, losses in losses_alone.items():
        assert results["losses"][kind] == pytest.approx(losses, abs=1e-9)
    for ours, theirs in zip(results["runs"], runs_alone, strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-9)
        assert ours["weights"] == pytest.approx(theirs["weights"], abs=1e-6)
        assert ours["metrics"] == theirs["metrics"]


def test_a_rank_that_dies_is_named_and_the_run_is_resumed_exactly(
    folder: Path, results_by_size: Callable[[int], dict[str, Any]], tmp_path: Path
) -> None:
    settings = LaunchSettings(devices=2, timeout_s=20)
    with pytest.raises(RankError, match="rank 1"):
        run(train_on_shards, settings, str(folder), str(tmp_path), 5)
    assert (
        run(train_on_shards, settings, str(folder), str(tmp_path), None) == results_by_size(2)["runs"][0]
    )  # bit for bit


def test_mistakes_are_refused_with_a_sentence(folder: Path) -> None:
    shard = hl.shards.open_shard(folder / "shards-1", 0)
    method = hl.Sampled(fanouts=(2,))
    with pytest.raises(ValueError, match="2 shards and 1 processes"):
        method.loader(hl.shards.open_shard(folder / "shards-2", 0))
    with pytest.raises(ValueError, match="split 'trian'"):
        method.loader(shard, "trian")
    with pytest.raises(ValueError, match=r"not a node: .*0 to 59"):
        method.loader(shard, torch.tensor([3, 60]))
    with pytest.raises(ValueError, match="there are no seeds"):
        method.loader(shard, torch.zeros(60, dtype=torch.bool))
    with pytest.raises(ValueError, match="there are no seeds"):
        method.loader(shard, torch.tensor([], dtype=torch.int64))
    with pytest.raises(ValueError, match="set layout=block"):
        hl.Sampled(fanouts=(2,), layout="tree").loader(shard)
    with pytest.raises(ValueError, match=r"table 'z': .*x, words, half"):
        hl.CollectiveLoader(shard, "train", method, tables=["z"])
    with pytest.raises(ValueError, match="must be distinct"):
        hl.shards.CollectiveSampler(shard, Channel(), (2,)).sample(torch.tensor([1, 1]), 0)


def test_tables_can_be_chosen(folder: Path) -> None:
    loader = hl.CollectiveLoader(
        hl.shards.open_shard(folder / "shards-1", 0), "train", hl.Sampled(fanouts=(2,)), tables=[]
    )
    batch = next(iter(loader))
    assert batch.x is None
    assert batch.tables == {}
