"""Random walks, METIS, sorting and grouped products through the classes of PyG that use them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch_geometric
from torch_geometric.data import Data
from torch_geometric.loader import ClusterData, ClusterLoader
from torch_geometric.nn import HeteroDictLinear, HeteroLinear, Node2Vec, RGCNConv
from torch_geometric.utils import dropout_path, index_sort

import hopline.pyg
from hopline.pyg.matrices import COUNTED
from tests.support.helpers import assert_close, randint, randn

EDGE_INDEX = torch.stack([randint(0, 60, 300), randint(0, 60, 300, 1)])


def test_node2vec_learns_from_walks_by_p_and_q():
    edge_index = torch.cat([EDGE_INDEX, EDGE_INDEX.flip(0)], dim=1)
    model = Node2Vec(edge_index, 8, walk_length=6, context_size=3, p=2.0, q=0.5, num_nodes=60)
    (positive, negative) = next(iter(model.loader(batch_size=20)))
    assert positive.shape == (20 * 4, 3)
    model.loss(positive, negative).backward()
    edges = {tuple(edge) for edge in edge_index.t().tolist()}
    assert all((a, b) in edges for walk in positive.tolist() for a, b in pairwise(walk))


def test_dropout_path_drops_the_edges_of_walks():
    torch.manual_seed(0)
    kept, mask = dropout_path(EDGE_INDEX, p=0.2, num_nodes=60)
    assert 0 < kept.size(1) < 300
    assert torch.equal(kept, EDGE_INDEX[:, mask])


def test_cluster_data_divides_two_cliques_where_they_meet():
    pairs = [(a + shift, b + shift) for shift in (0, 10) for a in range(10) for b in range(10) if a != b]
    edge_index = torch.tensor([*pairs, (9, 10), (10, 9)]).t()
    data = Data(x=torch.arange(20).view(-1, 1), edge_index=edge_index, num_nodes=20)
    clusters: Any = ClusterData(data, num_parts=2, log=False)
    parts = sorted(sorted(clusters[i].x.view(-1).tolist()) for i in range(2))
    assert parts == [[*range(10)], [*range(10, 20)]]
    assert sum(batch.num_nodes for batch in ClusterLoader(clusters, batch_size=1)) == 20


def test_metis_takes_directed_graphs_and_loops_and_refuses_what_it_cannot_do():
    rowptr = torch.tensor([0, 2, 3, 3, 3])
    col = torch.tensor([0, 1, 2])
    metis = torch.ops.pyg.metis
    assert sorted(metis(rowptr, col, 2, None, None, False).unique().tolist()) == [0, 1]
    heavy = metis(rowptr, col, 2, torch.tensor([1, 1, 1, 3]), None, True)
    assert (heavy == heavy[3]).sum() == 1
    with pytest.raises(ValueError, match="num_partitions"):
        metis(rowptr, col, 5)
    with pytest.raises(ValueError, match="edge_weight"):
        metis(rowptr, col, 2, None, col, False)
    with pytest.raises(ValueError, match="edge index is out of range"):
        metis(rowptr, col + 9, 2)


@pytest.mark.parametrize("size", [0, 10, COUNTED])
def test_sorted_indices_keep_the_order_of_equal_values(size: int):
    values = randint(0, max(1, size // 3), size)
    ours, order = index_sort(values, max_value=max(1, size // 3))
    expected = torch.sort(values, stable=True)
    assert torch.equal(ours, expected.values)
    assert torch.equal(order, expected.indices)


def test_negative_values_and_large_ones_are_sorted_too():
    values = randint(-(2**62), 2**62, COUNTED)
    assert torch.equal(index_sort(values)[0], values.sort().values)


def test_products_of_segments_and_groups_have_the_gradients_of_a_loop():
    rows = randn(9, 4).requires_grad_()
    matrices = randn(3, 4, 5, seed=1).requires_grad_()
    ptr = torch.tensor([0, 4, 4, 9])
    ours = torch.ops.pyg.segment_matmul(rows, ptr, matrices)
    expected = torch.cat([rows[:4] @ matrices[0], rows[4:] @ matrices[2]])
    assert_close(ours, expected)
    weight = randn(9, 5, seed=2)
    gradients = torch.autograd.grad((ours * weight).sum(), (rows, matrices))
    for our, other in zip(gradients, torch.autograd.grad((expected * weight).sum(), (rows, matrices)), strict=True):
        assert_close(our, other)
    left, right = [randn(2, 3), randn(0, 4)], [randn(3, 5), randn(4, 1)]
    for our, a, b in zip(torch.ops.pyg.grouped_matmul(left, right), left, right, strict=True):
        assert_close(our, a @ b)
    with pytest.raises(ValueError, match="ascend"):
        torch.ops.pyg.segment_matmul(rows, torch.tensor([0, 5, 4, 9]), matrices)
    with pytest.raises(ValueError, match="one for each"):
        torch.ops.pyg.segment_matmul(rows, torch.tensor([0, 9]), matrices)


def test_typed_linear_layers_are_the_same_with_products_of_ours():
    torch.manual_seed(0)
    layer = HeteroLinear(4, 5, num_types=3, is_sorted=True)
    kinds = randint(0, 3, 20).sort().values
    rows = randn(20, 4, dtype=torch.float32)
    by_type = {str(i): randn(i + 1, 4, dtype=torch.float32) for i in range(12)}
    dict_layer = HeteroDictLinear(dict.fromkeys(by_type, 4), 5)
    expected, expected_dict = layer(rows, kinds), dict_layer(by_type)
    hopline.pyg.use(matmul=True)
    assert_close(layer(rows, kinds), expected, 1e-5)
    for name, out in dict_layer(by_type).items():
        assert_close(out, expected_dict[name], 1e-5)


@pytest.mark.parametrize("matmul", [False, True])
def test_layers_are_compiled_by_torchscript(matmul: bool):
    hopline.pyg.use(matmul=matmul)
    layer = HeteroLinear(4, 5, num_types=3)
    kinds = randint(0, 3, 20)
    rows = randn(20, 4, dtype=torch.float32)
    assert_close(torch.jit.script(layer)(rows, kinds), layer(rows, kinds), 1e-5)


def test_rgcn_keeps_its_mean_per_relation_unless_products_are_asked_for(monkeypatch: pytest.MonkeyPatch):
    # Else PyG decides by the sizes, and small ones are never multiplied segment by segment.
    monkeypatch.setattr(torch_geometric.backend, "use_segment_matmul", True)
    conv = RGCNConv(4, 5, num_relations=3, aggr="mean").double()
    kinds = randint(0, 3, 300, 5)
    rows = randn(60, 4)
    expected = rows @ conv.root + conv.bias
    for relation in range(3):
        source, destination = EDGE_INDEX[:, kinds == relation]
        summed = torch.zeros(60, 4, dtype=torch.float64).index_add_(0, destination, rows[source])
        counts = torch.bincount(destination, minlength=60).clamp(min=1)
        expected = expected + (summed / counts[:, None]) @ conv.weight[relation]
    assert_close(conv(rows, EDGE_INDEX, kinds), expected)
    hopline.pyg.use(matmul=True)
    assert float((conv(rows, EDGE_INDEX, kinds) - expected).detach().abs().max()) > 0.01
