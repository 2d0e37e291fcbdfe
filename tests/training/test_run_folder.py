"""overwrite=true replaces a run, and nothing else, and not before the new run has made a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hopline.training.run_folder import ASIDE, FILES
from tests.support.runs import command, fit, records, small


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_run_is_replaced_and_other_files_stay(tmp_path: Path):
    fit(small(), out=tmp_path, epochs=3)
    assert contents(tmp_path).keys() == {*FILES} - {"predictions.csv"}, "what a run writes is what is replaced"
    (tmp_path / "predictions.csv").write_text("of the old run")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="overwrite=true"):
        fit(small(), out=tmp_path)
    fit(small(), out=tmp_path, epochs=1, overwrite=True)
    assert len(records(tmp_path, "epoch")) == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "predictions.csv").exists()
    assert not (tmp_path / ASIDE).exists()
    assert fit(small(), out=tmp_path / "new", epochs=1, overwrite=True).finished, "nothing is there to replace"


def fail(*_: Any) -> Any:
    raise RuntimeError("a mistake")


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "lamb"},
        {"optimizer": lambda groups, lr: None},
        {"test_step": lambda *_: 0.5},
        {"train_step": fail},
        {"weight_decay_rest": -1.0},
    ],
    ids=["name", "no optimizer", "no metrics", "failing", "negative"],
)
def test_a_run_that_is_refused_or_fails_at_once_replaces_nothing(settings: dict[str, Any], tmp_path: Path):
    fit(small(), out=tmp_path)
    before = contents(tmp_path)
    with pytest.raises((ValueError, RuntimeError)):
        fit(small(), out=tmp_path, overwrite=True, **settings)
    assert contents(tmp_path) == before
    assert not (tmp_path / ASIDE).exists()


def test_what_a_killed_process_had_moved_aside_is_moved_back(tmp_path: Path):
    fit(small(), out=tmp_path, epochs=2)
    weights = torch.load(tmp_path / "best.pt", weights_only=True)
    (tmp_path / ASIDE).mkdir()
    for name in FILES:
        if (tmp_path / name).exists():
            (tmp_path / name).rename(tmp_path / ASIDE / name)
    with pytest.raises(ValueError, match="already holds a run"):
        fit(small(), out=tmp_path)
    assert torch.load(tmp_path / "best.pt", weights_only=True).keys() == weights.keys()


@pytest.mark.parametrize("config", [None, "no JSON", json.dumps({"config": 1}), "[]"])
def test_what_is_no_run_folder_is_never_replaced(config: str | None, tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text("mine")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"not a run folder.*out="):
        fit(small(), out=tmp_path, overwrite=True)
    assert contents(tmp_path) == before


def test_the_command_replaces_a_run_and_starts_anew_without_one_to_resume(tmp_path: Path):
    small().save(tmp_path / "graph")
    arguments = ["train", str(tmp_path / "graph"), "model.layers=2", "epochs=1", f"out={tmp_path / 'run'}"]
    status, out, _ = command(*arguments, "resume=true")
    assert status == 0
    assert "nothing to resume" in out
    assert command(*arguments)[0] == 2
    assert command(*arguments, "overwrite=true")[0] == 0
    status, _, err = command(*arguments[:-1], "overwrite=true")
    assert status == 2
    assert "out=FOLDER" in err
