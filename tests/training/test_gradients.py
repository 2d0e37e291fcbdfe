"""`Trainer(gradients=)`: how ranks combine their gradients, by default by the sum."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hopline as hl
from hopline.distributed.gradients import Gradients
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import RankSpec, World
from hopline.training.inputs import check_gradients
from hopline.util.errors import RankError
from tests.support.runs import fit, losses, method, sage, small
from tests.training.gradient_ranks import (
    WAYS,
    AverageEvery,
    LargestWithFeedback,
    LocalSGD,
    TopK,
    average,
    idle,
    plain,
    summed,
    train,
    twice,
)

TWO = LaunchSettings(devices=2, timeout_s=30)
ALONE = World.alone()


def over_ranks(way: str, how: str = "share", /, **changes: Any) -> dict[str, Any]:
    return run(train, TWO, way, how, changes)


def assert_close(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    assert ours["losses"] == pytest.approx(expected["losses"], abs=1e-12)
    assert ours["weights"] == pytest.approx(expected["weights"], abs=1e-12)


def test_the_sum_as_a_function_is_the_default_to_the_bit() -> None:
    changes: dict[str, Any] = {"accumulate": 2, "clip_norm": 0.5, "optimizer": "adam"}
    assert over_ranks("function", "uneven", **changes) == over_ranks("default", "uneven", **changes)


@pytest.mark.parametrize("clip_norm", [None, 0.4])
def test_weights_averaged_every_third_step_are_those_of_plain_torch(clip_norm: float | None) -> None:
    ours = over_ranks("local 3", clip_norm=clip_norm)
    assert_close(ours, plain(twice, AverageEvery(3), average, clip_norm=clip_norm))
    assert ours["weights"] != pytest.approx(over_ranks("default", clip_norm=clip_norm)["weights"], abs=1e-6)


@pytest.mark.parametrize("how", ["share", "uneven"])
def test_weights_averaged_after_every_step_of_sgd_are_those_of_the_sum(how: str) -> None:
    assert_close(over_ranks("local 1", how), train(ALONE, "default", how, {}))


@pytest.mark.parametrize("clip_norm", [None, 0.4])
def test_largest_entries_with_feedback_are_those_of_plain_torch(clip_norm: float | None) -> None:
    ours = over_ranks("top few", clip_norm=clip_norm)  # clipped after they are combined
    assert_close(ours, plain(LargestWithFeedback(0.1), idle, idle, clip_norm=clip_norm))
    assert ours["weights"] != pytest.approx(over_ranks("default", clip_norm=clip_norm)["weights"], abs=1e-6)


def test_all_entries_are_the_sum_also_where_a_rank_has_no_unit() -> None:
    assert_close(over_ranks("top all", "uneven", accumulate=4), train(ALONE, "default", "uneven", {"accumulate": 4}))


@pytest.mark.parametrize("way", ["local 3", "top few"])
def test_a_killed_run_is_resumed_to_the_bit(way: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"accumulate": 2, "clip_norm": 0.5, "optimizer": "adam", "checkpoint_s": 0.0}
    whole = over_ranks(way, **changes, out=str(tmp_path / "whole"))
    with pytest.raises(RankError, match="rank 1"):  # step 5 of 6: one after the second epoch has begun
        over_ranks(way, **changes, out=str(tmp_path / "cut"), kill=[1, 5])
    assert over_ranks(way, **changes, out=str(tmp_path / "cut")) == whole
    for other in ("default", "top all"):
        with pytest.raises(ValueError, match=r"another run: gradients is"):
            over_ranks(other, **changes, out=str(tmp_path / "cut"))
    with pytest.raises(ValueError, match=r"2 ranks .*has 1: start 2"):
        train(ALONE, way, "share", {**changes, "out": str(tmp_path / "cut")})


def test_a_function_has_no_state_so_another_number_of_ranks_resumes(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    over_ranks("function", epochs=1, out=out)
    assert_close(train(ALONE, "function", "share", {"out": out}), train(ALONE, "default", "share", {}))


def test_ranks_that_drift_apart_are_refused() -> None:
    with pytest.raises(ValueError, match=r"epoch 1 .*different weights"):
        over_ranks("nothing")


def test_a_state_that_no_checkpoint_can_keep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"NotPlain\.state_dict"):
        train(ALONE, "not plain", "share", {"out": str(tmp_path / "run")})


# ---- one process


@pytest.mark.parametrize("way", ["function", "local 3", "top all"])
def test_combining_gradients_changes_nothing_in_one_process(way: str) -> None:
    assert_close(train(ALONE, way, "share", {}), train(ALONE, "default", "share", {}))


def test_one_process_sums_nothing_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("called for one process")

    for name in ("begin", "combine", "after_step", "after_epoch"):
        monkeypatch.setattr(Gradients, name, refuse)
    assert "exchange" not in fit(small()).history[0].stages


def test_fitting_twice_begins_anew() -> None:
    data = small()
    trainer = hl.Trainer(sage(data), data, method(), gradients=TopK(share=0.1), epochs=2, show=False)
    first = losses(trainer.fit())
    before = trainer.gradients.state_dict()
    trainer.model.load_state_dict(sage(data).state_dict())
    assert losses(trainer.fit()) == first
    assert torch.equal(trainer.gradients.state_dict()["rest"], before["rest"])


def test_one_process_that_was_resumed_remembers_what_was_left_out(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"checkpoint_s": 0.0, "optimizer": "adam"}
    whole = train(ALONE, "top few", "share", changes)
    train(ALONE, "top few", "share", {**changes, "epochs": 1, "out": str(tmp_path)})
    assert train(ALONE, "top few", "share", {**changes, "out": str(tmp_path)}) == whole


def test_config_and_report_name_the_gradients_setting(tmp_path: Path) -> None:
    for name, gradients, expected in (
        ("usual", None, {"kind": "sum"}),
        ("function", summed, {"kind": "summed"}),
        ("object", LocalSGD(every=5), {"kind": "LocalSGD", "every": 5}),
    ):
        fit(small(), gradients=gradients, epochs=1, out=tmp_path / name)
        stored = json.loads((tmp_path / name / "config.json").read_text())
        assert stored["config"]["gradients"] == expected
        assert ("gradients.kind" in stored["changed"]) == (gradients is not None)
        page = (tmp_path / name / "report.html").read_text()
        assert ("LocalSGD" in page) == (name == "object")


# ---- refusals


@pytest.mark.parametrize(
    ("gradients", "sentence"),
    [
        ("mean", r"gradients must be a function of \(parameters, world\), or an object of .*, not 'mean'"),
        (LocalSGD, r"gradients must be an object, not the class LocalSGD: write LocalSGD\(...\)"),
        (lambda parameters: None, "gradients must be a function of"),
        (3, "gradients must be a function of"),
    ],
)
def test_what_combines_nothing_is_refused(gradients: Any, sentence: str) -> None:
    data = small()
    with pytest.raises(ValueError, match=sentence):
        hl.Trainer(sage(data), data, gradients=gradients)


def test_ranks_of_full_batch_cannot_step_apart() -> None:
    pair = World(RankSpec(rank=0, size=2))
    with pytest.raises(ValueError, match=r"gradients=LocalSGD\(...\) .*hl\.Sampled"):
        check_gradients(LocalSGD(), hl.FullBatch(), pair)
    assert check_gradients(TopK(), hl.FullBatch(), pair).share == 0.05  # type: ignore[attr-defined]


def test_functions_that_do_not_say_what_they_take_are_believed() -> None:
    assert check_gradients(WAYS["function"](), hl.Sampled(), ALONE).local is False
    check_gradients(print, hl.Sampled(), ALONE)  # type: ignore[arg-type]
