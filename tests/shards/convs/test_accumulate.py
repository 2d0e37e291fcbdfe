"""Reductions that are accumulated chunk by chunk equal torch's over all edges, with their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch_geometric.utils import scatter, softmax

from hopline.core.partition import make_partition
from hopline.shards.convs.accumulate import Accumulators, ReductionSpec, gradient_of_rows
from hopline.shards.convs.edges import ConvEdges
from hopline.shards.convs.messages import ChunkReductions, Reduction
from hopline.shards.layout import virtual_layout
from tests.support.helpers import randint, randn, random_graph

GRAPH = random_graph(30, 150)
EDGES = ConvEdges.of(virtual_layout(GRAPH, make_partition(GRAPH, 3, "random", seed=1)))
DST = EDGES.destinations()
CPU = torch.device("cpu")


def accumulate_in_chunks(how: str, rows: Tensor, max_edges: int = 9) -> Accumulators:
    """Reduce rows over all edges, chunk by chunk."""
    accumulators = Accumulators([ReductionSpec(how, tuple(rows.shape[1:]), rows.dtype)], None, 30, CPU)
    for k in range(3):
        for chunk in EDGES.chunks(k, max_edges):
            accumulators.add(chunk, ChunkReductions([Reduction(rows[chunk.edges], how)], [0]))
    accumulators.close(EDGES.degrees)
    return accumulators


@pytest.mark.parametrize("how", ["sum", "max", "min"])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3)], ids=str)
def test_reductions_in_pieces_are_those_of_all_edges(how: str, shape: tuple[int, ...]) -> None:
    rows = randn(150, *shape)
    torch.testing.assert_close(accumulate_in_chunks(how, rows).reduced[0], scatter(rows, DST, 0, 30, how))


@pytest.mark.parametrize("how", ["sum", "max", "min"])
@pytest.mark.parametrize("low", [-1, 0, -2], ids=["mixed", "not negative", "not positive"])
def test_gradients_are_torchs_with_ties_at_zero_too(how: str, low: int) -> None:
    rows = (randint(0, 3, 150 * 4, seed=2) + low).view(150, 4).double().requires_grad_()
    gradient = randn(30, 4)
    (scatter(rows, DST, 0, 30, how) * gradient).sum().backward()
    accumulators = accumulate_in_chunks(how, rows.detach())
    ties = accumulators.ties[0]
    ours = torch.empty_like(rows)
    for k in range(3):
        for chunk in EDGES.chunks(k, 9):
            record = Reduction(rows.detach()[chunk.edges], how)
            extremes = None if ties is None else accumulators.reduced[0]
            ours[chunk.edges] = gradient_of_rows(chunk, record, gradient, extremes, ties)
    torch.testing.assert_close(ours, rows.grad)


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_a_softmax_in_pieces_is_that_of_all_edges(scale: float) -> None:
    """With logits so large that e^logit is more than a number holds, which the running maximum takes care of."""
    logits = scale * randn(150, 2)
    values = randn(150, 2, 3, seed=1)
    weights = ReductionSpec("sum", (2,), torch.float64)
    accumulators = Accumulators([ReductionSpec("sum", (2, 3), torch.float64)], weights, 30, CPU)
    for k in range(3):
        for chunk in EDGES.chunks(k, 9):
            e = (logits[chunk.edges] - accumulators.raise_max_logit(chunk, logits[chunk.edges])[chunk.dst]).exp()
            accumulators.add(chunk, ChunkReductions([Reduction(e[:, :, None] * values[chunk.edges], "sum")], [0], e))
    assert accumulators.weight_sum is not None
    expected = scatter(softmax(logits, DST, num_nodes=30)[:, :, None] * values, DST, 0, 30, "sum")
    torch.testing.assert_close(accumulators.reduced[0] / (accumulators.weight_sum[:, :, None] + 1e-16), expected)
