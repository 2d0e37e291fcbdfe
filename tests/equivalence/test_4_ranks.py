"""4. Several ranks = one process with the union of their batches, at finite fan-outs and with dropout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import World
from hopline.util.errors import RankError
from tests.ranks import train, train_each
from tests.warm import Ended, run_python

ROOT = Path(__file__).resolve().parents[2]
KINDS = ["sage", "gcn", "gat"]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return train_each(World.alone(), KINDS, None, {})


def assert_same(found: dict[str, Any], expected: dict[str, Any], size: int) -> None:
    for kind in KINDS:
        ours = found["kinds"][kind]
        theirs = expected["kinds"][kind]
        assert ours["size"] == size
        assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-9)
        assert ours["metrics"] == theirs["metrics"]
        for name, numbers in theirs["weights"].items():
            assert ours["weights"][name] == pytest.approx(numbers, abs=1e-6), (kind, name)
    # Fewer seeds in the last step than ranks: some have none, and nobody waits for them.
    for number, losses in expected["awkward"].items():
        assert found["awkward"][number] == pytest.approx(losses, abs=1e-9), number


def under_torchrun(size: int, tmp_path: Path, out: str, changes: dict[str, Any], *options: str) -> Ended:
    command = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", *options]
    command += ["--nproc-per-node", str(size), "-m", "tests.ranks"]
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


def test_a_rank_that_dies_is_named_and_the_run_goes_on_exactly(tmp_path: Path) -> None:
    settings = LaunchSettings(devices=2, timeout_s=10)
    whole = run(train_each, settings, ["sage"], str(tmp_path / "whole"), {})["kinds"]["sage"]
    with pytest.raises(RankError, match="rank 1"):
        run(train_each, settings, ["sage"], str(tmp_path / "cut"), {"kill": [1, 5]})
    found = run(train_each, settings, ["sage"], str(tmp_path / "cut"), {})["kinds"]["sage"]
    assert found == whole  # bit for bit
    # With another number of ranks every seed is still trained once, so the numbers agree to rounding.
    expected = train(World.alone(), "sage")
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-9)


@pytest.mark.extended
def test_torchrun_starts_a_run_again_and_it_goes_on(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"kill": [1, 5]}
    done = under_torchrun(2, tmp_path, str(tmp_path / "run"), changes, "--max-restarts", "1")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())["kinds"]["sage"]
    assert found["losses"] == pytest.approx(train(World.alone(), "sage")["losses"], abs=1e-9)
    assert "resuming from" in (tmp_path / "run" / "run.log").read_text()
