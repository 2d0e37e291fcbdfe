"""How far noise on a layer's input moves its output, measured while a model runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from hopline.core.batch import Batch
from hopline.layerwise.engine import Recorder
from hopline.nn import GNN, smoothness
from tests.support.helpers import batch_of, gnn_of, randn, random_graph

GRAPH = random_graph(num_nodes=50, num_edges=2000, weight=True)
X = randn(50, 6)


def attach_recorder(batch: Batch, recorder: Recorder) -> Batch:
    """The batch with a recorder on its blocks."""
    return replace(batch, blocks=tuple(replace(block, layer_hooks=recorder) for block in batch.blocks))


def measure_spreads(model: GNN, batch: Batch) -> list[Tensor]:
    """The spreads that a recorder measures while the model runs."""
    recorder = Recorder(measures=True)
    model(attach_recorder(batch, recorder))
    return recorder.spreads


class DoublingConv(nn.Module):
    """A conv that ignores neighbours and doubles a node's own row."""

    out_channels = 6

    def forward(self, x: Tensor | tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:
        return 2 * (x[1] if isinstance(x, tuple) else x)


def test_a_linear_layer_moves_by_its_factor_times_the_noise(monkeypatch: pytest.MonkeyPatch):
    model = GNN([DoublingConv(), DoublingConv(), DoublingConv()], act=None)
    batch = batch_of(GRAPH, X, (-1, -1, -1))
    ours = measure_spreads(model, batch)
    assert len(ours) == 2  # the first layer reads nothing that could be stale
    expected = 2 * 0.1 * 6**0.5  # about the length of six standard normal numbers
    assert all(0.85 * expected < float(one) < 1.05 * expected for one in ours)
    assert float(ours[0]) != float(ours[1])
    monkeypatch.setattr(smoothness, "NOISE", 0.0)
    assert [float(one) for one in measure_spreads(model, batch)] == [0, 0]


@pytest.mark.parametrize("name", ["plain", "batch-norm", "gcn2", "everything"])
def test_gradients_flow_and_the_walk_is_what_it_was(name: str):
    model = gnn_of(name)
    batch = batch_of(GRAPH, X, (-1,) * model.num_layers)
    plain = model(batch)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(state)
    recorder = Recorder(measures=True)
    while_recording = model(attach_recorder(batch, recorder))
    measured = recorder.spreads
    torch.testing.assert_close(while_recording, plain)
    torch.stack(measured).mean().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.convs[1].parameters() if p.dim() > 1)
    assert all(module.training for module in model.modules())


def test_the_noise_is_keyed_and_there_is_none_in_evaluation():
    model = gnn_of("plain")
    batch = batch_of(GRAPH, X, (-1,) * 3, key=5)
    values = []
    for key in (5, 5, 6):
        measured = measure_spreads(model, batch_of(GRAPH, X, (-1,) * 3, key=key))
        values.append([spread.item() for spread in measured])
    assert values[0] == values[1]
    assert values[0] != values[2]
    model.eval()
    assert measure_spreads(model, batch) == []
    model.train()
    recorder = Recorder()
    model(attach_recorder(batch, recorder))
    assert recorder.spreads == []
