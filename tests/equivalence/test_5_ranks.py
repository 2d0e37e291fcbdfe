"""Identity 5, over ranks: two ranks, on one host or two, train as one process with the same batches in a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import World
from hopline.util.errors import RankError
from tests.methods.historical.ranks import alone, train_all
from tests.support.helpers import shared_memory_of_hopline

CASES: dict[str, dict[str, Any]] = {
    "plain": {"settings": {}, "dropout": 0.3},
    "compensated": {"settings": {"compensate": True}, "dropout": 0.3},
    "lag": {"settings": {"lag": 1, "compensate": True}},
    "never filled": {"settings": {"warm_up": False, "storage": "bf16"}},
    "regularised": {"settings": {"edge_dropout": 0.3, "groups": "fixed", "lipschitz": 0.1, "refresh_every": 2}},
}


def assert_same(ours: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-9) -> None:
    """Losses, and weights to a tenfold tolerance."""
    assert ours["losses"] == pytest.approx(expected["losses"], abs=tolerance)
    assert ours["weights"] == pytest.approx(expected["weights"], abs=tolerance * 10)


@pytest.mark.parametrize("two_hosts", [False, True])
@pytest.mark.alone  # other tests share memory too
def test_two_ranks_train_as_one_process(two_hosts: bool):
    awkward = [{"settings": {"num_parts": 5}}, {"settings": {"max_batches": 3}}]  # a rank has none at the last turn
    # All parts at every step and exact tables before it: the full batch, whatever the parts.
    exact = {"settings": {"num_parts": 4, "parts_per_batch": 2, "refresh_every": 1, "compensate": True}}
    cases = [*CASES.values(), exact, *([] if two_hosts else awkward)]
    before = shared_memory_of_hopline()
    results = run(train_all, LaunchSettings(devices=2, timeout_s=30), cases, two_hosts)
    assert shared_memory_of_hopline() <= before

    for case, result in zip(CASES.values(), results, strict=False):
        # With a lag of one turn, what two batches commit waits.
        settings = case["settings"] | {"lag": 2 * case["settings"].get("lag", 0)}
        assert_same(result, alone(case | {"settings": settings}, two_hosts), 1e-6 if "storage" in settings else 1e-9)
    full_batch = {"settings": {"num_parts": 1, "parts_per_batch": 1}, "accumulate": 1}
    assert_same(results[len(CASES)], alone(full_batch))
    for case, result in zip(awkward, results[len(CASES) + 1 :], strict=False):
        assert_same(result, alone(case))


@pytest.mark.parametrize("two_hosts", [False, True])
def test_resumed_ranks_train_as_if_never_interrupted(two_hosts: bool, tmp_path: Path):
    settings = {"lag": 1, "compensate": True, "storage": "float32", "folder": tmp_path / "tables"}
    case: dict[str, Any] = {"settings": settings, "dropout": 0.3, "norm": "batch"}
    cases = [
        case | {"out": str(tmp_path / "whole"), "epochs": 4},
        case | {"out": str(tmp_path / "cut"), "epochs": 2},
        case | {"out": str(tmp_path / "cut"), "epochs": 4},
    ]
    whole, _, again = run(train_all, LaunchSettings(devices=2, timeout_s=30), cases, two_hosts)
    assert again == whole  # bit for bit
    assert len(list((tmp_path / "tables").glob("h.0*.bin"))) == 1 + two_hosts
    with pytest.raises(ValueError, match="2 ranks on"):
        train_all(World.alone(), [case | {"out": str(tmp_path / "cut"), "epochs": 5}], False)


@pytest.mark.alone  # other tests share memory too
def test_a_rank_that_dies_within_an_epoch_leaves_no_shared_memory_and_the_run_resumes(tmp_path: Path):
    case: dict[str, Any] = {"settings": {"lag": 1}, "checkpoint_s": 0.0}
    before = shared_memory_of_hopline()
    settings = LaunchSettings(devices=2, timeout_s=10)
    with pytest.raises(RankError, match="rank 1"):
        run(train_all, settings, [case | {"out": str(tmp_path / "cut"), "kill": [1, 5]}], False)
    assert shared_memory_of_hopline() <= before

    cases = [case | {"out": str(tmp_path / name)} for name in ("cut", "whole")]
    again, whole = run(train_all, settings, cases, False)
    assert again == whole  # bit for bit


def test_fewer_ranks_resume_at_the_end_of_an_epoch(tmp_path: Path):
    case = {"settings": {"compensate": True}, "out": str(tmp_path)}
    run(train_all, LaunchSettings(devices=2, timeout_s=30), [case | {"epochs": 2}], True)
    (resumed,) = train_all(World.alone(), [case | {"epochs": 3}], False)
    assert len(resumed["losses"]) == 3
    assert torch.tensor(resumed["losses"]).isfinite().all()
