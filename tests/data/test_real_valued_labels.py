"""Real-valued labels are a regression, and whole numbers are classes unless task= says otherwise."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

import hopline as hl
from hopline import infer
from tests.support.helpers import randn
from tests.support.runs import fit, method, sage, small

FLOATS = {"a column": randn(400), "a matrix of one": randn(400, 1), "a matrix": randn(400, 3)}


@pytest.mark.parametrize("shape", FLOATS)
def test_real_numbers_are_a_regression(shape: str):
    pyg_data = small().to_pyg()
    data = hl.from_pyg(Data(x=pyg_data.x, edge_index=pyg_data.edge_index, y=FLOATS[shape]))
    width = 3 if shape == "a matrix" else 1
    assert (data.task, data.metric, data.num_outputs) == ("regression", "rmse", width)
    assert torch.equal(data.labels.reshape(400, width), FLOATS[shape].reshape(400, width))


@pytest.mark.parametrize("source", ["pyg", "npz", "csv"])
def test_floats_with_whole_values_become_classes_and_that_is_said_once(
    source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    edges, y = np.array([[0, 1, 2], [1, 2, 0]]), np.array([0.0, 2.0, 1.0])
    (tmp_path / "edges.csv").write_text("src,dst\n0,1\n1,2\n2,0\n")
    (tmp_path / "nodes.csv").write_text("id,age,label\n0,3,0.0\n1,4,2.0\n2,5,1.0\n")
    np.savez(tmp_path / "graph.npz", edge_index=edges, x=np.ones((3, 1)), y=y)
    make: dict[str, Callable[[], hl.Dataset]] = {
        "pyg": lambda: hl.from_pyg(Data(edge_index=torch.from_numpy(edges), y=torch.from_numpy(y), num_nodes=3)),
        "npz": lambda: hl.open(str(tmp_path / "graph.npz")),
        "csv": lambda: hl.from_csv(tmp_path / "edges.csv", tmp_path / "nodes.csv"),
    }
    with caplog.at_level(logging.WARNING, "hopline"):
        assert make[source]().labels.tolist() == [0, 2, 1]
    assert caplog.text.count("are taken for classes") == 1


def test_real_numbers_are_not_trained_as_zeros_and_ones():
    data = dataclasses.replace(small(), y=FLOATS["a matrix"], task="multi", num_classes=3)
    with pytest.raises(ValueError, match=r"split 'train' has label .*task='regression'"):
        hl.Trainer(sage(data), data, method(), show=False)
    with pytest.raises(ValueError, match="task='regression'"):
        dataclasses.replace(small(), y=FLOATS["a column"])


def test_targets_of_steps_of_the_user_need_no_labels():
    pyg_data = small().to_pyg()
    targets = small().x.read(torch.arange(400)).sum(-1)
    pyg_data.y = None
    data = hl.from_pyg(pyg_data)

    def train_step(model: nn.Module, batch: hl.Batch) -> Tensor:
        return nn.functional.mse_loss(model(batch).view(-1), targets[batch.seeds])

    def test_step(model: nn.Module, data: hl.Dataset, ids: Tensor) -> dict[str, float]:
        return {"score": -float(nn.functional.mse_loss(infer.exact(model, data, ids).view(-1), targets[ids]))}

    model = sage(data, outputs=1)
    result = fit(data, model, train_step=train_step, test_step=test_step, epochs=8)
    assert result.history[-1].loss < result.history[0].loss / 2
    assert result.test == pytest.approx(test_step(model, data, data.splits["test"])["score"])
