"""`hl.infer`: evaluation mode, modules without layers, the order of rows, samples, and `keep=`.

That layer-wise inference equals plain PyG is `equivalence/test_7_layerwise.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GraphSAGE, SAGEConv

import hopline as hl
from hopline import infer
from hopline.device.snapshots import evaluating
from hopline.inference import without_layers
from tests.support.own_modules import opaque
from tests.support.runs import method, sage, small


class Plain(nn.Module):
    """One conv with dropout, whose layers hopline cannot see."""

    def __init__(self, data: hl.Dataset) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = SAGEConv(data.num_features, data.num_classes)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = opaque(x)
        return self.drop(self.conv(x, edge_index))


@pytest.mark.parametrize("kind", ["gnn", "pyg", "plain"])
def test_inference_runs_in_evaluation_mode_and_restores_the_mode_of_each_module(kind: str):
    data = small()
    models: dict[str, nn.Module] = {
        "gnn": sage(data, dropout=0.5, norm="batch"),
        "pyg": GraphSAGE(data.num_features, 8, 2, data.num_classes, dropout=0.5, norm="batch"),
        "plain": Plain(data),
    }
    model = models[kind].train()
    frozen = next(m for m in model.modules() if isinstance(m, SAGEConv))
    frozen.eval()
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    first = infer.exact(model, data)
    second = infer.exact(model, data)

    assert torch.equal(first, second)
    assert not first.requires_grad
    assert model.training
    assert not frozen.training
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())


def test_a_module_without_layers_on_too_large_a_graph_is_refused_with_what_to_write(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(without_layers, "WHOLE_BYTES", 1000)
    with pytest.raises(ValueError, match=r"Plain .*hops=1.*hl\.nn\.GNN.*inference=sampled"):
        infer.exact(Plain(small()), small())


def test_a_module_without_layers_cannot_resume_from_a_folder(tmp_path: Path):
    with pytest.raises(ValueError, match=r"Plain .*leave out folder="):
        infer.exact(Plain(small()), small(), folder=tmp_path)


@pytest.mark.parametrize("name", ["list", "array", "unsigned", "range", "mask", "array mask", "split", "all"])
def test_nodes_are_given_as_ids_a_mask_or_the_name_of_a_split(name: str):
    data = small()
    model = sage(data)
    ids = data.splits["test"]
    mask = torch.zeros(data.num_nodes, dtype=torch.bool)
    mask[ids] = True
    forms: dict[str, Any] = {
        "list": ids.tolist(),
        "array": ids.numpy(),
        "unsigned": ids.numpy().astype("uint16"),
        "range": range(data.num_nodes),
        "mask": mask,
        "array mask": mask.numpy(),
        "split": "test",
        "all": "all",
    }
    expected_ids = torch.arange(data.num_nodes) if name in ("range", "all") else ids
    assert torch.equal(infer.exact(model, data, forms[name]), infer.exact(model, data, expected_ids))
    methods = {
        "sampled": method(shuffle=False),
        "historical": hl.Historical(num_parts=2, parts_per_batch=2),
        "full": hl.FullBatch(),
    }
    for how in methods.values():
        seeds = torch.cat([batch.seeds for batch in how.loader(data, forms[name], model=model)])
        assert torch.equal(seeds.sort().values, expected_ids)
    if name != "all":  # as in PyG, None is all
        seeds = torch.cat([b.n_id[: b.batch_size] for b in hl.NeighborLoader(data, [2], forms[name], batch_size=50)])
        assert torch.equal(seeds, expected_ids)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ("tset", "choose one of train, valid, test, all"),
        ([], "no nodes to infer at"),
        (["p1"], r"write \[0, 1, 2\]"),
        ([[0, 1], [2]], r"write \[0, 1, 2\]"),
        ([0.5], "1-D int64"),
        ([400], "from 0 to 399"),
        ([True, False], "one entry per node"),
    ],
)
def test_what_names_no_nodes_is_refused(nodes: Any, words: str):
    with pytest.raises(ValueError, match=words):
        infer.exact(sage(small()), small(), nodes)


def test_a_graph_of_pyg_is_refused_with_what_to_write():
    graph: Any = small().to_pyg()
    with pytest.raises(ValueError, match=r"hl.from_pyg\(data\)"):
        infer.exact(sage(small()), graph)
    with pytest.raises(ValueError, match=r"\.loader\(data, ids\)"):
        infer.sampled(sage(small()), small())  # type: ignore[arg-type]


def test_the_mean_of_sampled_outputs_approaches_the_exact_output():
    data = small()
    model = sage(data)
    ids = data.splits["test"]
    exact = infer.exact(model, data, ids)
    loader = method(fanouts=(2, 2), shuffle=False).loader(data, ids, model=model)
    one_sample = infer.sampled(model, loader)
    mean_of_samples = torch.stack([infer.sampled(model, loader) for _ in range(20)]).mean(dim=0)

    assert not torch.equal(one_sample, exact)
    # The error of a mean of 20 samples is about sqrt(20) = 4.5 times smaller, but for the bias of the ReLU.
    assert (mean_of_samples - exact).norm() < (one_sample - exact).norm() / 2


def test_keep_is_called_with_the_hidden_rows_of_all_nodes():
    data = small()
    rows_by_layer = {}
    model = sage(data, dropout=0.5)
    ids = torch.tensor([7, 3])

    def keep(l: int, nodes: Tensor, h: Tensor) -> None:
        rows_by_layer.setdefault(l, torch.full((data.num_nodes, h.size(1)), float("nan")))[nodes] = h

    scores = infer.exact(model, data, ids, chunk_edges=50, keep=keep)
    assert torch.equal(scores, infer.exact(model, data, ids))
    assert sorted(rows_by_layer) == list(range(model.num_layers - 1))

    src, dst = data.graph.edge_index()
    with evaluating(model):
        expected = torch.relu(model.convs[0](data.x[torch.arange(data.num_nodes)], torch.stack([src, dst])))
    torch.testing.assert_close(rows_by_layer[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_zeros_and_ones_are_no_node_ids(dtype: torch.dtype):
    data = small()
    mask = torch.arange(data.num_nodes) % 3 == 0
    for give in (
        lambda: hl.infer.exact(sage(data), data, mask.to(dtype)),
        lambda: hl.NeighborLoader(data, [2], input_nodes=mask.to(dtype)),
        lambda: hl.Sampled(fanouts=(2, 2)).loader(data, mask.to(dtype)),
    ):
        with pytest.raises(ValueError, match=r"mask\.bool"):
            give()
