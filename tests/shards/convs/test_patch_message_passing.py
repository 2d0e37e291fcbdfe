"""Patched convs run over shards, and are unpatched after the call, also after an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hopline.shards.convs.edges import ConvEdges
from hopline.shards.convs.messages import CannotSplit
from hopline.shards.convs.patch_message_passing import FetchMode, patch_convs
from hopline.shards.layout import contiguous_layout
from hopline.shards.transports import LocalTransport
from tests.support.helpers import randn, random_graph

GRAPH = random_graph(30, 150)
LAYOUT = contiguous_layout(GRAPH, torch.tensor([0, 9, 20, 30]))


def run(module: nn.Module, mode: FetchMode, *args: Any) -> Any:
    with patch_convs(module, ConvEdges.of(LAYOUT), LocalTransport(LAYOUT), mode, 1, 2000):
        return module(*args, None)


class UpdateConv(pyg.MessagePassing):
    """A conv whose `update` reads rows and the number of nodes."""

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        return self.propagate(edge_index, x=(x, 2 * x), y=x)

    def message(self, x_j: Tensor, x_i: Tensor) -> Tensor:
        return x_j * x_i

    def update(self, inputs: Tensor, y: Tensor, dim_size: int) -> Tensor:
        return inputs + y / dim_size


class Aggregated(UpdateConv):
    """`UpdateConv` with an `aggregate` of its own, which reads edges."""

    def aggregate(self, inputs: Tensor, index: Tensor, x_j: Tensor, dim_size: int) -> Tensor:  # type: ignore[override]
        return torch.zeros(dim_size, 4, dtype=inputs.dtype).index_add(0, index, inputs * x_j.cos())


@pytest.mark.parametrize("mode", ["sequential", "stored", "one_shot"])
def test_update_gets_what_it_asks_for(mode: FetchMode) -> None:
    conv = UpdateConv()
    x = randn(30, 4)
    torch.testing.assert_close(run(conv, mode, x), conv(x, GRAPH.edge_index()))


def test_an_aggregate_of_its_own_runs_on_all_edges_only() -> None:
    conv = Aggregated()
    x = randn(30, 4)
    for mode in ("stored", "one_shot"):
        torch.testing.assert_close(run(conv, mode, x), conv(x, GRAPH.edge_index()))
    with pytest.raises(CannotSplit, match="the aggregate of Aggregated"):
        run(conv, "sequential", x)


def test_convs_inside_a_module_run_too() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = pyg.SAGEConv(4, 4).double()
            self.second = pyg.GraphConv(4, 2).double()

        def forward(self, x: Tensor, edge_index: Any) -> Tensor:
            return self.second(self.first(x, edge_index).relu(), edge_index)

    module = Two()
    x = randn(30, 4)
    torch.testing.assert_close(run(module, "sequential", x), module(x, GRAPH.edge_index()))


def test_propagate_is_put_back_also_after_an_error() -> None:
    conv = pyg.SAGEConv(4, 4)
    conv.decomposed_layers = 2  # PyG itself puts another propagate on such an instance
    pygs_propagate = conv.__dict__["propagate"]
    with pytest.raises(RuntimeError):
        run(conv, "sequential", torch.randn(30, 5))
    assert conv.__dict__["propagate"] is pygs_propagate
    assert "edge_updater" not in conv.__dict__


def test_hooks_on_messages_are_refused_and_others_run() -> None:
    conv = pyg.SAGEConv(4, 4).double()
    calls = []
    conv.register_forward_hook(lambda *_: calls.append(True))
    run(conv, "sequential", randn(30, 4))
    assert calls == [True]
    conv.register_message_forward_hook(lambda module, inputs, out: out)
    with pytest.raises(CannotSplit, match="hooks"):
        run(conv, "sequential", randn(30, 4))
