"""Ranks whose units do not know the total take the steps of one process with all their examples."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hopline.contract import Unit
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import RankSpec, World
from hopline.training.rank_steps import align_groups, total_size
from hopline.util.errors import RankError
from tests.training.own_ranks import train

TWO = LaunchSettings(devices=2, timeout_s=30)


def assert_same(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    assert ours["losses"] == pytest.approx(expected["losses"], abs=1e-12)
    assert ours["weights"] == pytest.approx(expected["weights"], abs=1e-12)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("name", ["same", "share", "uneven", "plain", "loader", "loader of ranks"])
def test_two_ranks_with_an_own_method_are_equal_to_one_process(name: str, accumulate: int) -> None:
    ours = run(_train, TWO, name, {"accumulate": accumulate})
    assert_same(ours, train(World.alone(), name, accumulate=accumulate))


def _train(world: World, name: str, changes: dict[str, Any]) -> dict[str, Any]:
    return train(world, name, **changes)


def test_uneven_ranks_resume_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"accumulate": 4, "checkpoint_s": 0.0, "out": str(tmp_path / "run")}
    with pytest.raises(RankError, match="rank 1"):  # in step 4, the end of the second epoch, where rank 0 has no unit
        run(_train, TWO, "uneven", {**changes, "kill": [1, 4]})
    assert_same(run(_train, TWO, "uneven", changes), train(World.alone(), "uneven", accumulate=4))


def test_ranks_that_disagree_about_the_total_are_refused() -> None:
    with pytest.raises(ValueError, match=r"some units .*total_size"):
        run(_train, TWO, "half known", {})


class SizedUnit(Unit):
    """A unit of some size that may know the total over all ranks."""

    def __init__(self, size: int, total: int | None) -> None:
        self.size = size
        self.total = total

    @property
    def total_size(self) -> int | None:
        return self.total

    def forward_backward(self, total: int) -> Tensor:
        return torch.zeros(())


class EchoWorld(World):
    """One of two ranks, where the other one says the same. Counts the exchanges."""

    def __init__(self) -> None:
        super().__init__(RankSpec(rank=0, size=2))
        self.exchanges = 0

    def any(self, flag: bool) -> bool:
        self.exchanges += 1
        return flag

    def sum(self, values: Sequence[float]) -> list[float]:
        self.exchanges += 1
        return [2 * value for value in values]


def test_units_that_know_the_total_cost_one_exchange_an_epoch() -> None:
    world = EchoWorld()
    units = [SizedUnit(3, 7), SizedUnit(4, 9), SizedUnit(0, 1)]

    def groups() -> Generator[list[Unit], None, None]:
        yield [*units[:2]]
        yield [units[2]]

    assert list(align_groups(groups(), world)) == [units[:2], units[2:]]
    assert total_size(units, world) == 17
    assert world.exchanges == 1


def test_sizes_are_summed_where_units_do_not_know_the_total() -> None:
    assert total_size([SizedUnit(3, None), SizedUnit(4, None)], EchoWorld()) == 14
    assert total_size([SizedUnit(3, None), SizedUnit(4, None)], World.alone()) == 7
