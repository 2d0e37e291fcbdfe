"""The threads of a loop of the user's own; training steps are tested where methods use them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.nn import GAT, GATConv, GraphSAGE, SAGEConv

import hopline as hl
from tests.runs import small


class OneModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


def test_torch_leaves_the_cores_to_our_threads_where_all_convs_are_fused():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for model in (hl.nn.GNN([SAGEConv(8, 4)]), GraphSAGE(8, 4, 2)):
            with hl.extend.own_threads(model):
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 2
        for model in (hl.nn.GNN([SAGEConv(8, 4), GATConv(4, 4)]), GAT(8, 4, 2), OneModule()):
            with hl.extend.own_threads(model):
                assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_no_gradient_depends_on_it():
    data = small()
    found = []
    for within in (False, True):
        torch.manual_seed(0)
        model = hl.nn.GNN([SAGEConv(8, 16), SAGEConv(16, 4)], dropout=0.3)
        with hl.extend.own_threads(model if within else GAT(8, 4, 2)):
            for batch in hl.Sampled(fanouts=(4, 3), batch_size=50).loader(data, "train", model=model):
                nn.functional.cross_entropy(model(batch), batch.labels).backward()
        found.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
