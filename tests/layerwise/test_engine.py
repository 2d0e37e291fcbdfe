"""The layer-wise engine over any pieces of nodes equals plain autograd over the whole graph.

Pieces are random sets of 1, 20, 7 and 32 nodes: neither their order nor their size may matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hopline.core.batch import Batch
from hopline.core.row_handles import Rows
from hopline.core.sampler import NeighborSampler, full_block
from hopline.layerwise.engine import Boundaries, LayerPlan, Layers, Piece
from hopline.tables import TensorTable
from hopline.tables.layers import LayerTables
from tests.support.helpers import GNN_OPTIONS, batch_of, gnn_of, randint, randn, random_graph

NUM_NODES = 60
GRAPH = random_graph(num_nodes=NUM_NODES, num_edges=500)
X = randn(NUM_NODES, 6)
Y = randint(0, 3, NUM_NODES)
SEEDS = torch.arange(0, NUM_NODES, 3)
CPU = torch.device("cpu")


class PiecesOfNodes(LayerPlan[Tensor]):
    """A plan with the same sets of nodes as pieces in every layer. threads: that prepare and write them."""

    def __init__(self, chunks: Sequence[Tensor], key: int | None, threads: int = 0) -> None:
        self.chunks = chunks
        self.key = key
        self.prefetch_pieces = threads
        self.write_queue_pieces = threads
        self.calls: list[str] = []

    def chunks_of(self, l: int) -> Sequence[Tensor]:
        return self.chunks

    def piece(self, l: int, chunk: Tensor) -> Piece:
        block = replace(full_block(NeighborSampler(GRAPH, (-1,)), chunk), key=self.key)
        output_idx = torch.isin(chunk, SEEDS).nonzero().view(-1)
        seeds = chunk[output_idx]
        batch = Batch(seeds, (block,), None, Y[seeds], key=self.key, output_idx=output_idx)
        return Piece(block, block.src_ids, chunk, int(chunk[0]), batch)

    def inputs_of(self, ids: Tensor) -> Rows | Tensor:
        return Rows(TensorTable(X), ids)

    def on_piece_written(self, l: int, piece: Piece) -> None:
        self.calls.append("written")

    def on_layer_end(self, l: int) -> None:
        self.calls.append("completed")

    def on_piece_backward(self, l: int, piece: Piece) -> None:
        self.calls.append("back")


class CrossEntropy:
    """The summed cross-entropy over all seeds, as the objective of backward."""

    summed = 0.0

    def begin(self, layers: Layers[Any]) -> None:
        assert len(list(layers.outputs_at_seeds())) == sum(bool(torch.isin(c, SEEDS).any()) for c in layers.plan.chunks)  # type: ignore[attr-defined]

    def __call__(self, batch: Batch, outputs: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(outputs, batch.labels, reduction="sum")
        self.summed += float(loss.detach())
        return loss


def random_chunks() -> list[Tensor]:
    """All nodes in random order, in four pieces of very different size."""
    order = torch.randperm(NUM_NODES, generator=torch.Generator().manual_seed(1))
    return list(order.split([1, 20, 7, 32]))


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("name", [name for name, (_, options) in GNN_OPTIONS.items() if options.get("norm") != "batch"])
def test_loss_and_gradients_over_pieces_equal_those_of_the_whole_graph(name: str, threads: int):
    model = gnn_of(name).double()
    key = 7
    whole = batch_of(GRAPH, X, (-1,) * model.num_layers, key=key)
    outputs = model(whole)
    expected_loss = nn.functional.cross_entropy(outputs[SEEDS], Y[SEEDS], reduction="sum")
    expected_loss.backward()
    expected_gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    plan = PiecesOfNodes(random_chunks(), key, threads)
    tables = LayerTables(NUM_NODES)
    layers = Layers(model, plan, Boundaries(tables, device=CPU, dtype=torch.float64), key=key)
    with torch.no_grad():
        layers.forward(range(model.num_layers - 1))
    objective = CrossEntropy()
    layers.backward(objective)
    assert objective.summed == pytest.approx(float(expected_loss.detach()), rel=1e-12)
    for parameter, expected_gradient in zip(model.parameters(), expected_gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected_gradient, rtol=1e-10, atol=1e-12)

    hidden = model.num_layers - 1
    assert plan.calls.count("written") == 4 * hidden  # four pieces in every hidden layer
    assert plan.calls.count("completed") == hidden


def test_forward_over_all_layers_equals_the_model_on_the_whole_graph():
    model = gnn_of("plain").double().eval()
    plan = PiecesOfNodes(random_chunks(), None)
    tables = LayerTables(NUM_NODES)
    rows_by_layer: dict[int, Tensor] = {}
    rows = Boundaries(tables, device=CPU, dtype=torch.float64)

    def keep(l: int, piece: Piece, hidden_rows: Tensor) -> None:
        rows_by_layer.setdefault(l, torch.zeros(NUM_NODES, hidden_rows.size(1), dtype=torch.float64))[piece.dst] = (
            hidden_rows
        )

    with torch.no_grad():
        Layers(model, plan, rows, keep=keep).forward(range(model.num_layers))
        expected = model(batch_of(GRAPH, X, (-1,) * model.num_layers))

    torch.testing.assert_close(tables.tables[model.num_layers - 1], expected, rtol=1e-12, atol=1e-12)
    assert rows_by_layer.keys() == set(range(model.num_layers - 1))
    assert all(torch.equal(rows_by_layer[l], tables.tables[l]) for l in rows_by_layer)
