"""Dropped edges, and the penalty on layers that noise moves far."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hopline.core.batch import Block
from hopline.core.sampler import NeighborSampler
from hopline.methods.historical.regularise import drop_edges, spreads
from hopline.nn import GNN
from tests.helpers import batch_of, edges_of, gnn_of, randn, random_graph

GRAPH = random_graph(num_nodes=50, num_edges=2000, weight=True)
X = randn(50, 6)


def block_of(nodes: Tensor) -> Block:
    return NeighborSampler(GRAPH, (-1,), edge_ids=True).sample(nodes, 0)[0]


def ids_of(block: Block) -> Tensor:
    assert block.part.edge_ids is not None
    return block.part.edge_ids


def test_about_the_share_of_edges_is_dropped_and_others_keep_what_they_carry():
    block = block_of(torch.arange(50))
    fewer = drop_edges(block, 0.8, key=3)
    assert 300 < fewer.num_edges < 500
    assert set(edges_of(fewer)) <= set(edges_of(block))
    assert torch.equal(fewer.edge["weight"], GRAPH.edge["weight"][ids_of(fewer)])
    assert torch.equal(fewer.src_ids, block.src_ids)
    assert int(fewer.part.indptr[-1]) == fewer.num_edges
    assert drop_edges(block, 0.0, key=3).num_edges == block.num_edges
    assert drop_edges(block, 1.0, key=3).num_edges == 0


def test_an_edge_is_kept_or_dropped_in_every_block_of_a_step():
    all_nodes, some = block_of(torch.arange(50)), block_of(torch.tensor([7, 0, 3]))
    kept = set(ids_of(drop_edges(all_nodes, 0.5, key=3)).tolist())
    assert set(ids_of(drop_edges(some, 0.5, key=3)).tolist()) == kept & set(ids_of(some).tolist())
    assert set(ids_of(drop_edges(all_nodes, 0.5, key=4)).tolist()) != kept


def test_sums_by_degree_stay_right_on_average():
    conv = pyg.GCNConv(6, 6).double()
    model = GNN([conv])
    whole = batch_of(GRAPH, X, (-1,))
    block = block_of(torch.arange(50))
    with torch.no_grad():
        expected = model(whole)
        found = [model(replace(whole, blocks=(drop_edges(block, 0.3, key),))) for key in range(300)]
    many = GRAPH.in_degrees() > 10  # where hardly any draw leaves none of them
    mean = torch.stack(found).mean(0)
    assert float((mean - expected)[many].norm() / expected[many].norm()) < 0.06  # 0.3 without the factor


class Doubled(nn.Module):
    """A conv of one's own row, twice as large."""

    out_channels = 6

    def forward(self, x: Tensor | tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:
        return 2 * (x[1] if isinstance(x, tuple) else x)


def test_a_linear_layer_moves_by_its_factor_times_the_noise():
    model = GNN([Doubled(), Doubled(), Doubled()], act=None)
    batch = batch_of(GRAPH, X, (-1, -1, -1))
    with spreads(model) as found:
        model(batch)
    assert len(found) == 2  # the first layer reads nothing that could be stale
    expected = 2 * 0.1 * 6**0.5  # about the length of six standard normal numbers
    assert all(0.85 * expected < float(one) < 1.05 * expected for one in found)
    assert float(found[0]) != float(found[1])
    with spreads(model, noise=0.0) as found:
        model(batch)
    assert [float(one) for one in found] == [0, 0]


@pytest.mark.parametrize("name", ["plain", "batch-norm", "gcn2", "everything"])
def test_gradients_flow_and_the_walk_is_what_it_was(name: str):
    model = gnn_of(name)
    batch = batch_of(GRAPH, X, (-1,) * model.num_layers)
    plain = model(batch)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(state)
    with spreads(model) as found:
        again = model(batch)
    torch.testing.assert_close(again, plain)
    torch.stack(found).mean().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.convs[1].parameters() if p.dim() > 1)
    assert "layer" not in vars(model)
    assert all(module.training for module in model.modules())


def test_the_noise_is_keyed_and_there_is_none_in_evaluation():
    model = gnn_of("plain")
    batch = batch_of(GRAPH, X, (-1,) * 3, key=5)
    values = []
    for key in (5, 5, 6):
        with spreads(model) as found:
            model(batch_of(GRAPH, X, (-1,) * 3, key=key))
        values.append([one.item() for one in found])
    assert values[0] == values[1]
    assert values[0] != values[2]
    model.eval()
    with spreads(model) as found:
        model(batch)
    assert found == []
    model.train()
    with spreads(model, wanted=False) as found:
        model(batch)
    assert found == []
