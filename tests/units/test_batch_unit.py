"""`own_threads` in a custom loop: torch leaves the cores to hopline's threads, and gradients stay the same.

Training steps themselves are tested with the methods that use them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.nn import GAT, GATConv, GraphSAGE, SAGEConv

import hopline as hl
from tests.support.own_modules import opaque
from tests.support.runs import small


class ModuleWithoutLayers(nn.Module):
    """A module whose convs hopline cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = opaque(x)
        return self.conv(x, edge_index)


def test_own_threads_sets_torch_to_one_thread_where_all_convs_are_fused():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for model in (hl.nn.GNN([SAGEConv(8, 4)]), GraphSAGE(8, 4, 2)):
            with hl.extend.own_threads(model):
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 2
        for model in (hl.nn.GNN([SAGEConv(8, 4), GATConv(4, 4)]), GAT(8, 4, 2), ModuleWithoutLayers()):
            with hl.extend.own_threads(model):
                assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_gradients_do_not_depend_on_own_threads():
    data = small()
    gradients = []
    for has_own_threads in (False, True):
        torch.manual_seed(0)
        model = hl.nn.GNN([SAGEConv(8, 16), SAGEConv(16, 4)], dropout=0.3)
        with hl.extend.own_threads(model if has_own_threads else GAT(8, 4, 2)):
            for batch in hl.Sampled(fanouts=(4, 3), batch_size=50).loader(data, "train", model=model):
                nn.functional.cross_entropy(model(batch), batch.labels).backward()
        gradients.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
