"""Replaying a conv's messages on a chunk of edges: its arguments, and the reductions it makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
import torch_geometric.utils as pyg_utils
from torch import Tensor
from torch_geometric.nn.aggr import DegreeScalerAggregation, MultiAggregation, SoftmaxAggregation

from hopline.shards.convs.edges import Chunk
from hopline.shards.convs.messages import CannotSplit, DeferredEdgeUpdate, Inputs, finish, plan, replay, unsqueeze_like
from tests.support.helpers import randn

CHUNK = Chunk(slice(0, 5), slice(0, 3), torch.tensor([0, 1, 2, 1, 0]), torch.tensor([0, 0, 1, 1, 2]))
DEGREES = torch.tensor([2, 2, 1])


class CopyConv(pyg.MessagePassing):
    """A conv whose messages are the source rows."""


def max_logits(logits: Tensor) -> Tensor:
    """[3, ...] the largest logit of each destination's edges."""
    return pyg_utils.scatter(logits, CHUNK.dst, 0, 3, "max")


def test_arguments_are_told_apart_by_their_names() -> None:
    conv = pyg.PNAConv(4, 4, ["mean"], ["identity"], torch.tensor([1, 2]), edge_dim=2)
    x = randn(3, 4)
    attr = randn(5, 2)
    inputs = Inputs()
    call = plan(conv, "message", {"x": x, "edge_attr": attr}, inputs, 5, 3)
    assert {name: getattr(value, "role", None) for name, value in call.arguments.items()} == {
        "x_i": "destination",
        "x_j": "source",
        "edge_attr": "edge",
    }
    assert inputs.source[0] is inputs.destination[0] is x


def test_edge_updates_are_run_where_their_edges_are() -> None:
    conv = pyg.GATConv(4, 4).double()
    inputs = Inputs()
    alpha = DeferredEdgeUpdate({"alpha": (randn(3, 1), randn(3, 1, seed=1)), "edge_attr": None})
    call = plan(conv, "message", {"x": (randn(3, 1, 4), None), "alpha": alpha}, inputs, 5, 3)
    assert call.arguments["alpha"].function == "edge_update"
    assert (len(inputs.source), len(inputs.destination)) == (2, 1)
    rows: dict[Any, list[Tensor]] = {
        "source": [t[CHUNK.src] for t in inputs.source],
        "destination": [t[CHUNK.dst] for t in inputs.destination],
        "edge": [],
        "constant": [],
    }
    ours = replay(conv, call, rows, CHUNK, DEGREES, max_logits)
    assert ours.softmax_weights is not None
    sums = [pyg_utils.scatter(t, CHUNK.dst, 0, 3, "sum") for t in (ours.reductions[0].rows, ours.softmax_weights)]
    edge_index = torch.stack([CHUNK.src, CHUNK.dst])
    expected = conv.propagate(
        edge_index, x=(inputs.source[0], None), alpha=conv.edge_updater(edge_index, **alpha.kwargs), size=(3, 3)
    )
    plain = finish(conv, ours.reduce_order, sums[:1], sums[1], DEGREES)
    torch.testing.assert_close(plain, expected)


AGGREGATIONS: list[Any] = [
    "sum",
    "mean",
    "max",
    "min",
    "var",
    "std",
    ["mean", "var", "std", "max", "sum"],
    SoftmaxAggregation(t=0.5),
    pyg.aggr.PowerMeanAggregation(p=2.0),
    MultiAggregation(["mean", "max"], mode="proj", mode_kwargs={"in_channels": 4, "out_channels": 4}),
    DegreeScalerAggregation(["mean", "std"], ["identity", "amplification", "attenuation"], torch.tensor([1, 3, 2])),
]


@pytest.mark.parametrize("aggr", AGGREGATIONS, ids=str)
def test_an_aggregation_is_what_it_makes_of_its_reductions(aggr: Any) -> None:
    conv = CopyConv(aggr).double()
    x = randn(3, 4)
    inputs = Inputs()
    call = plan(conv, "message", {"x": x}, inputs, 5, 3)
    rows: dict[Any, list[Tensor]] = {"source": [x[CHUNK.src]], "destination": [], "edge": [], "constant": []}
    recorded = replay(conv, call, rows, CHUNK, DEGREES, max_logits)
    reduced = [pyg_utils.scatter(r.rows, CHUNK.dst, 0, 3, r.how) for r in recorded.reductions]
    weight_sum = (
        None
        if recorded.softmax_weights is None
        else pyg_utils.scatter(recorded.softmax_weights, CHUNK.dst, 0, 3, "sum")
    )
    out = finish(conv, recorded.reduce_order, reduced, weight_sum, DEGREES)
    torch.testing.assert_close(out, conv.aggr_module(x[CHUNK.src], CHUNK.dst, dim_size=3))


def test_rows_that_are_reduced_twice_alike_are_recorded_once() -> None:
    conv = CopyConv(["mean", "sum", "std"]).double()
    inputs = Inputs()
    call = plan(conv, "message", {"x": randn(3, 4)}, inputs, 5, 3)
    rows: dict[Any, list[Tensor]] = {"source": [randn(5, 4)], "destination": [], "edge": [], "constant": []}
    recorded = replay(conv, call, rows, CHUNK, DEGREES, max_logits)
    assert (len(recorded.reductions), recorded.reduce_order) == (2, [0, 0, 0, 1])


@pytest.mark.parametrize("aggr", ["mul", "median", "lstm", None])
def test_what_cannot_be_split_says_so(aggr: str | None) -> None:
    conv = CopyConv(aggr, aggr_kwargs={"in_channels": 4, "out_channels": 4} if aggr == "lstm" else None).double()
    call = plan(conv, "message", {"x": randn(3, 4)}, Inputs(), 5, 3)
    rows: dict[Any, list[Tensor]] = {"source": [randn(5, 4)], "destination": [], "edge": [], "constant": []}
    with pytest.raises(CannotSplit, match=r"all edges of a node|'mul'"):
        replay(conv, call, rows, CHUNK, DEGREES, max_logits)


def test_an_argument_that_nobody_gives_is_named() -> None:
    with pytest.raises(CannotSplit, match="message asks for x_j"):
        plan(CopyConv(), "message", {}, Inputs(), 5, 3)
    with pytest.raises(CannotSplit, match=r"x_j has shape \[1, 3, 4\]"):
        plan(CopyConv(), "message", {"x": randn(1, 3, 4)}, Inputs(), 5, 3)


def test_pyg_itself_is_left_alone() -> None:
    conv = CopyConv(SoftmaxAggregation())
    before = dict(conv.aggr_module.__dict__)
    call = plan(conv, "message", {"x": randn(3, 4)}, Inputs(), 5, 3)
    rows: dict[Any, list[Tensor]] = {"source": [randn(5, 4)], "destination": [], "edge": [], "constant": []}
    replay(conv, call, rows, CHUNK, DEGREES, max_logits)
    assert dict(conv.aggr_module.__dict__) == before
    assert type(conv.aggr_module).forward.__globals__["softmax"] is pyg_utils.softmax


def test_unsqueeze_like_adds_dimensions_at_the_end() -> None:
    assert unsqueeze_like(torch.zeros(3, 2), torch.zeros(3, 2, 4, 5)).shape == (3, 2, 1, 1)
