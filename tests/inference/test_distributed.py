"""Inference over the shards of one rank equals inference over the whole graph. `shards/ranks.py` has several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch_geometric.nn import GCNConv, SAGEConv

import hopline as hl
from hopline.core.partition import make_partition
from hopline.inference.distributed import evaluate, exact
from hopline.shards.write import cut
from hopline.units.job import examples_of
from tests.shards.test_write import rich
from tests.support.helpers import usual_task
from tests.support.own_modules import opaque


def test_inference_over_one_shard_equals_that_over_the_whole_graph(tmp_path: Path) -> None:
    data = rich()
    cut(data, make_partition(data.graph, 1, "range"), tmp_path / "shards")
    sharded = hl.shards.open(tmp_path / "shards")
    model = hl.nn.GNN([GCNConv(4, 6), SAGEConv(6, 5)]).double()
    expected = hl.infer.exact(model, data)
    torch.testing.assert_close(exact(model, sharded.shard, chunk_edges=30), expected)

    expected_accuracy = (expected.argmax(1) == data.labels)[data.splits["test"]].double().mean()
    task = usual_task(5)
    examples = examples_of(task, sharded, "test")
    assert evaluate(model, sharded, task, examples, None) == {"accuracy": pytest.approx(float(expected_accuracy))}

    batches = hl.Sampled(fanouts=(-1, -1), batch_size=7, shuffle=False).loader(sharded.shard, "test")
    assert evaluate(model, sharded, task, examples, batches) == {"accuracy": pytest.approx(float(expected_accuracy))}
    with pytest.raises(ValueError, match=r"has no layers.*hl.nn.GNN"):
        exact(ModelWithoutLayers(), sharded.shard)


class ModelWithoutLayers(nn.Module):
    """A model that is not made of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(4, 5)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        x = opaque(x)
        return self.conv(x, edge_index)
