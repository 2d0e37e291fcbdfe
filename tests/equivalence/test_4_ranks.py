"""Identity 4, over ranks: several ranks equal one process with the union of their batches, with dropout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import World
from hopline.util.errors import RankError
from tests.support.ranks import train, train_each
from tests.support.warm import Ended, run_python

ROOT = Path(__file__).resolve().parents[2]
KINDS = ["sage", "gcn", "gat"]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The runs of one process with the batches of all ranks."""
    return train_each(World.alone(), KINDS, None, {})


def assert_same(ours: dict[str, Any], expected: dict[str, Any], size: int) -> None:
    """Losses, metrics and weights of every kind of run are equal to rounding."""
    for kind in KINDS:
        our_run = ours["kinds"][kind]
        expected_run = expected["kinds"][kind]
        assert our_run["size"] == size
        assert our_run["losses"] == pytest.approx(expected_run["losses"], abs=1e-9)
        assert our_run["metrics"] == expected_run["metrics"]
        for name, numbers in expected_run["weights"].items():
            assert our_run["weights"][name] == pytest.approx(numbers, abs=1e-6), (kind, name)
    # Fewer seeds in the last step than ranks: some have none, and nobody waits for them.
    for number, losses in expected["awkward"].items():
        assert ours["awkward"][number] == pytest.approx(losses, abs=1e-9), number


def under_torchrun(size: int, tmp_path: Path, out: str, changes: dict[str, Any], *options: str) -> Ended:
    """Run `tests.support.ranks` under torchrun; results go to found.json."""
    command = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", *options]
    command += ["--nproc-per-node", str(size), "-m", "tests.support.ranks"]
    arguments = [str(tmp_path / "found.json"), out, json.dumps(KINDS if not out else ["sage"]), json.dumps(changes)]
    return run_python(*command, *arguments)


@pytest.mark.parametrize("size", [2, 3])
def test_spawned(size: int, alone: dict[str, Any]) -> None:
    assert_same(run(train_each, LaunchSettings(devices=size, timeout_s=30), KINDS, None, {}), alone, size)


@pytest.mark.process
@pytest.mark.parametrize("size", [2, 3])
def test_under_torchrun(size: int, alone: dict[str, Any], tmp_path: Path) -> None:
    done = under_torchrun(size, tmp_path, "", {})
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same(json.loads((tmp_path / "found.json").read_text()), alone, size)


def test_a_rank_that_dies_is_named_and_the_run_resumes_exactly(tmp_path: Path) -> None:
    settings = LaunchSettings(devices=2, timeout_s=10)
    whole = run(train_each, settings, ["sage"], str(tmp_path / "whole"), {})["kinds"]["sage"]
    with pytest.raises(RankError, match="rank 1"):
        run(train_each, settings, ["sage"], str(tmp_path / "cut"), {"kill": [1, 5]})
    resumed = run(train_each, settings, ["sage"], str(tmp_path / "cut"), {})["kinds"]["sage"]
    assert resumed == whole  # bit for bit
    # With another number of ranks every seed is still trained once, so the numbers agree to rounding.
    expected = train(World.alone(), "sage")
    assert resumed["losses"] == pytest.approx(expected["losses"], abs=1e-9)


@pytest.mark.extended
def test_torchrun_restarts_a_run_and_it_resumes(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"kill": [1, 5]}
    done = under_torchrun(2, tmp_path, str(tmp_path / "run"), changes, "--max-restarts", "1")
    assert done.returncode == 0, done.stderr[-3000:]
    ours = json.loads((tmp_path / "found.json").read_text())["kinds"]["sage"]
    assert ours["losses"] == pytest.approx(train(World.alone(), "sage")["losses"], abs=1e-9)
    assert "resuming from" in (tmp_path / "run" / "run.log").read_text()
