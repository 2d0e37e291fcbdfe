"""Norms and other modules between convs: each row by itself, or refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hopline.nn.gnn import GNN
from hopline.nn.probe import probe_graph
from hopline.nn.row_wise import check_row_wise, describe_module, mixing_in_training, mixing_module
from hopline.shards.convs.runner import ShardConvs, run_conv
from hopline.shards.layout import contiguous_layout
from tests.support.helpers import mlp, randn


class Centring(nn.Module):
    """A user's own norm, which subtracts the mean over the rows it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class CentringInTraining(Centring):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else x


class OwnLayerNorm(nn.LayerNorm):
    """A user's own norm of each row by itself, of a type that hopline does not know."""


def gnn(norm: nn.Module | None = None, **options: Any) -> GNN:
    convs = [pyg.SAGEConv(6, 8), pyg.SAGEConv(8, 3)]
    return GNN(convs, norm=None if norm is None else [norm], dropout=0.5, **options)


OVER_NODES = [
    pyg.GraphNorm(8),
    pyg.PairNorm(),
    pyg.InstanceNorm(8),
    pyg.GraphSizeNorm(),
    pyg.MeanSubtractionNorm(),
    pyg.LayerNorm(8),
    nn.Sequential(pyg.GraphNorm(8)),
    nn.Sequential(nn.Linear(8, 8), Centring()),
    Centring(),
    nn.BatchNorm1d(8, track_running_stats=False),
    pyg.BatchNorm(8, track_running_stats=False),
]


@pytest.mark.parametrize("norm", OVER_NODES, ids=describe_module)
def test_a_norm_over_the_nodes_present_is_refused_by_name(norm: nn.Module) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"{describe_module(norm)} averages over all nodes") + ".*mode='node'"
    ):
        check_row_wise(gnn(norm), 6, {})


@pytest.mark.parametrize(
    "norm",
    [
        pyg.BatchNorm(8),
        nn.BatchNorm1d(8),
        pyg.LayerNorm(8, mode="node"),
        nn.LayerNorm(8),
        nn.Identity(),
        nn.Sequential(nn.LayerNorm(8), nn.GELU()),
        OwnLayerNorm(8),
        pyg.DiffGroupNorm(8, 2),
        CentringInTraining(),
    ],
    ids=describe_module,
)
def test_a_norm_of_one_node_at_a_time_is_taken(norm: nn.Module) -> None:
    check_row_wise(gnn(norm), 6, {})


def test_encoders_heads_and_activations_are_checked_too() -> None:
    places = [
        {"encoder": nn.Sequential(nn.Linear(6, 6), Centring())},
        {"act": lambda x: x - x.mean(0)},
        {"head": nn.Sequential(Centring(), nn.Linear(3, 3))},
    ]
    for options in places:
        assert mixing_module(gnn(**options), 6, {}) is not None, options
    fine = gnn(encoder=nn.Sequential(nn.Linear(6, 6), OwnLayerNorm(6)), act=nn.Hardswish(), head=OwnLayerNorm(3))
    assert mixing_module(fine, 6, {}) is None


def test_an_encoder_of_whole_numbers_is_taken() -> None:
    class Embed(nn.Embedding):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, 0])

    check_row_wise(gnn(encoder=Embed(5, 6), norm=OwnLayerNorm(8)), 1, {})


def test_batch_norms_of_several_ranks_are_refused_with_what_to_use() -> None:
    with pytest.raises(ValueError, match=r"SyncBatchNorm .*BatchNorm1d"):
        check_row_wise(gnn(nn.SyncBatchNorm(8)), 6, {})


def test_a_norm_that_cannot_be_called_with_rows_is_named() -> None:
    with pytest.raises(ValueError, match=r"layer 0 cannot .*MessageNorm"):
        check_row_wise(gnn(pyg.MessageNorm()), 6, {})


@pytest.mark.parametrize(
    ("norm", "alone", "over_ranks"),
    [
        (nn.BatchNorm1d(8), True, False),
        (pyg.BatchNorm(8), True, False),
        (CentringInTraining(), True, True),
        (nn.Sequential(CentringInTraining()), True, True),
        (nn.LayerNorm(8), False, False),
        (OwnLayerNorm(8), False, False),
    ],
)
def test_norms_that_mix_rows_in_training_are_found(norm: nn.Module, alone: bool, over_ranks: bool) -> None:
    assert (mixing_in_training(gnn(norm), 6, {}) is not None) == alone
    assert (mixing_in_training(gnn(norm), 6, {}, over_ranks=True) is not None) == over_ranks


def test_norms_inside_of_convs_mix_rows_in_training_too() -> None:
    for inner, mixes in [(nn.BatchNorm1d(8), True), (CentringInTraining(), True), (nn.Dropout(0.5), False)]:
        conv = pyg.GINConv(nn.Sequential(nn.Linear(6, 8), inner))
        model = GNN([conv, pyg.GATConv(8, 3, dropout=0.5)])
        assert (mixing_in_training(model, 6, {}) is not None) == mixes


def test_a_conv_of_several_hops_needs_all_rows_at_once() -> None:
    assert isinstance(mixing_in_training(GNN([pyg.TAGConv(6, 3)]), 6, {}), pyg.TAGConv)
    assert mixing_in_training(GNN([pyg.TAGConv(6, 3)]), 6, {}, over_ranks=True) is None


def test_the_model_itself_is_left_as_it_was() -> None:
    model = GNN([pyg.GINConv(mlp(6, 8, 8)), pyg.GCNConv(-1, 3)], norm=[CentringInTraining()]).train()
    before = {name: value.clone() for name, value in model.convs[0].state_dict().items()}
    state = torch.get_rng_state()
    check_row_wise(model, 6, {})
    mixing_in_training(model, 6, {})
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.convs[0].state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


class ObservingConv(pyg.SAGEConv):
    """A conv that records the size of its messages in training."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels)
        self.register_buffer("seen", torch.zeros(()))

    def message(self, x_j: Tensor) -> Tensor:
        if self.training:
            self.seen += x_j.detach().abs().mean()
        return x_j


def test_a_module_that_changes_its_buffers_needs_all_rows_at_once() -> None:
    assert isinstance(mixing_in_training(GNN([ObservingConv(6, 3)]), 6, {}), ObservingConv)
    graph = probe_graph({})
    layout = contiguous_layout(graph, torch.tensor([0, 5, 12]))
    with pytest.raises(ValueError, match=r"ObservingConv cannot .*shards.*buffers"):
        run_conv(ObservingConv(4, 3).double().train(), randn(12, 4), ShardConvs.of(layout))
    at_once = ShardConvs.of(layout, mode="one_shot")
    assert run_conv(ObservingConv(4, 3).double().train(), randn(12, 4), at_once).shape == (12, 3)
