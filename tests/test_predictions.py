"""Predictions of a finished run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hopline as hl
from hopline import infer, run
from hopline.models import make_model
from hopline.predictions import InferConfig, _classes, predict
from hopline.run import RunConfig
from tests.runs import quick, small


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A quick run on a small graph in a folder."""
    return quick(tmp_path)


@pytest.fixture
def done(config: RunConfig) -> Path:
    """The folder of a finished run."""
    folder = run.train(config).folder
    assert folder is not None
    return folder


def predictions(folder: Path, **settings: Any) -> np.ndarray:
    return np.load(predict(folder, InferConfig(**settings)), allow_pickle=False)


def test_predictions_are_those_of_the_best_weights(config: RunConfig, done: Path):
    data = hl.open(config.data)
    model = make_model(config.model, data)
    model.load_state_dict(torch.load(done / "best.pt", weights_only=True))
    scores = infer.exact(model, data)
    np.testing.assert_allclose(predictions(done, write="scores"), scores.numpy(), rtol=1e-5, atol=1e-6)
    classes = predictions(done)
    assert classes.dtype == np.int64
    np.testing.assert_array_equal(classes, scores.argmax(dim=-1).numpy())
    np.testing.assert_array_equal(predictions(done, nodes="test"), classes[data.splits["test"].numpy()])


def test_predictions_of_the_test_nodes_have_the_accuracy_of_the_run(config: RunConfig):
    finished = run.train(config)
    assert finished.folder is not None
    data = hl.open(config.data)
    assert data.y is not None
    right = predictions(finished.folder, nodes="test") == data.y[data.splits["test"]].numpy()
    assert right.mean() == pytest.approx(finished.test)


def test_predictions_by_sampling_and_by_the_last_weights(done: Path, tmp_path: Path):
    out = tmp_path / "new" / "scores.npy"
    sampled = predictions(done, inference="sampled", weights="last", write="scores", nodes="valid", out=out)
    assert out.exists()
    assert sampled.shape == (80, 4)
    assert not (done / "predictions.npy").exists()


@pytest.mark.parametrize(
    ("task", "outputs", "shape", "dtype"),
    [
        ("single", 4, (3,), np.int64),
        ("multi", 4, (3, 4), np.uint8),
        ("binary", 2, (3,), np.int64),
        ("binary", 1, (3,), np.uint8),
    ],
)
def test_classes_follow_the_task(task: str, outputs: int, shape: tuple[int, ...], dtype: type):
    classes = _classes(torch.randn(3, outputs), task).numpy()
    assert (classes.shape, classes.dtype) == (shape, dtype)


def test_a_split_that_the_data_lacks_is_named(done: Path, tmp_path: Path):
    bare = dataclasses.replace(small(), splits={})
    bare.save(tmp_path / "bare")
    with pytest.raises(ValueError, match=r"has no split 'test': choose nodes=all"):
        predictions(done, nodes="test", data=str(tmp_path / "bare"))
    assert predictions(done, data=str(tmp_path / "bare")).shape == (400,)


def test_predictions_that_cannot_be_written_name_the_file(done: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"cannot write .*config.json/p.npy \(.+\): choose another file"):
        predictions(done, out=done / "config.json" / "p.npy")

    def short(*_: Any, **__: Any) -> None:
        raise OSError("400 requested and 12 written")

    monkeypatch.setattr(np, "save", short)
    with pytest.raises(ValueError, match=r"cannot write .*predictions.npy \(the disk is full\): choose another"):
        predictions(done)
