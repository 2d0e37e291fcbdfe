"""`PartialGraph`: degrees and sums of weights of the nodes of a batch equal those of the whole graph."""

from __future__ import annotations

import pytest
import torch

from hopline.core.graph import PartialGraph
from hopline.nn.gcn_norm import weights_of
from tests.support.helpers import random_graph


def test_a_partial_graph_has_the_degrees_and_weight_sums_of_the_whole_graph() -> None:
    graph = random_graph(weight=True, attr=2, loops=True)
    ids = torch.tensor([40, 2, 0, 17, 1, 49])
    weights = torch.stack([weights_of(graph, False, 0.0).total, *weights_of(graph, True, float("nan"))], 1)
    partial = PartialGraph.of(graph.edge, ids, graph.in_degrees(ids), True, weights[ids])
    some_ids = torch.tensor([17, 2, 17])
    assert torch.equal(partial.in_degrees(some_ids), graph.in_degrees(some_ids))
    assert torch.equal(partial.in_degrees(), graph.in_degrees(ids))
    assert partial.edge.keys() == graph.edge.keys()
    assert partial.self_loops.numel() == 1

    for add_loops, fill in ((False, 1.0), (True, 1.0), (True, 2.0)):
        expected = weights_of(graph, add_loops, fill)
        total, loop = partial.weight_sums(some_ids, add_loops, fill)
        assert torch.equal(total, expected.total[some_ids])
        assert torch.equal(loop, expected.loop[some_ids])
    with pytest.raises(AssertionError, match="not of this batch"):
        partial.in_degrees(torch.tensor([3]))
    assert PartialGraph.of({}, ids, ids, False, None).self_loops.numel() == 0
