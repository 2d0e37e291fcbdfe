"""On a CPU a gradient has the same bits in every run.

Of torch's ops that add up what falls on one place, one does so in any order: `index_put(accumulate=True)` of float32 in
several threads, which is also the gradient of `rows[ids]`. So nothing of ours may call it with ids that repeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hopline as hl
from hopline import ops
from hopline.contract import Job, Method
from hopline.core.batch import Batch
from hopline.core.examples import Examples
from hopline.nn import GNN
from hopline.nn.conv_adapter import convolve
from hopline.tables import SparseTable
from tests.shards.cases import SUITE
from tests.support.helpers import batch_of, dataset_of, generator, own_task, randn, random_graph

METHODS: dict[str, Method] = {
    "historical": hl.Historical(num_parts=2, parts_per_batch=1, partition="range"),
    "compensated": hl.Historical(num_parts=2, parts_per_batch=1, partition="range", compensate=True),
    "sweep": hl.FullBatch(num_shards=2, partition="range", aggregation="sweep"),
    "sequential": hl.FullBatch(num_shards=2, partition="range", aggregation="sequential"),
    "one_shot": hl.FullBatch(num_shards=2, partition="range", aggregation="one_shot"),
    "tree": hl.Sampled(fanouts=(3, 3), layout="tree", workers=0),
}


class UnorderedSums(TorchDispatchMode):
    """Records calls that add up float32 numbers in any order, those of backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if "index_put" in func._schema.name:
            index = [i for i in args[1] if i is not None]
            accumulates = named.get("accumulate", args[3] if len(args) > 3 else False)
            if accumulates and args[0].dtype == torch.float32 and index[0].dtype != torch.bool:
                places = torch.stack(torch.broadcast_tensors(*index)).flatten(1)
                if places.unique(dim=1).size(1) < places.size(1):
                    self.calls.append(f"{func} at {places.size(1)} places of {list(args[0].shape)}")
        return func(*args, **named)


def summed(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("name", SUITE)
def test_no_conv_adds_up_in_any_order(name: str) -> None:
    edges = name.endswith("-edges")
    graph = random_graph(weight=not edges, attr=2 if edges else 0, loops=True)
    graph = hl.Graph(graph.indptr, graph.indices, {name: rows.float() for name, rows in graph.edge.items()})
    torch.manual_seed(0)
    conv = SUITE[name](6, 6).float()
    block = batch_of(graph, None, (-1,)).blocks[0]
    rows = randn(block.num_src, 6).float().requires_grad_()
    if name in ("tag", "sg"):
        pytest.skip("several hops in a layer, which blocks refuse")
    with UnorderedSums() as watch:
        convolve(conv, rows, block).square().sum().backward()
    assert rows.grad is not None
    assert watch.calls == []


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("name", ["graph-max", "gat", "pna"])
def test_no_method_adds_up_in_any_order(name: str, method: Method) -> None:
    graph = random_graph(weight=True, loops=True)
    graph = hl.Graph(graph.indptr, graph.indices, {"weight": graph.edge["weight"].float()})
    data = dataset_of(graph, randn(50, 6).float())
    torch.manual_seed(0)
    model = GNN([SUITE[name](6, 6).float(), SUITE[name](6, 6).float()], encoder=nn.Linear(6, 6))
    job = Job(
        data=data,
        model=model,
        module=model,
        examples=Examples(torch.arange(50)),
        task=own_task(summed),
        say=lambda _: None,
    )
    with UnorderedSums() as watch:
        for unit in method.bind(job).units(1):
            unit.forward_backward(unit.size)
            unit.commit()
    assert all(p.grad is not None for p in model.convs.parameters())
    assert watch.calls == []


def test_learned_rows_and_repeated_columns_are_added_up_in_order() -> None:
    rows = randn(5, 3).float().requires_grad_()
    ids = torch.tensor([0, 4, 0, 0, 1])
    stored = SparseTable(
        torch.tensor([0, 3, 4]), torch.tensor([1, 1, 1, 0]).int(), torch.tensor([1.0, 2.0, 4.0, 8.0]), 2
    )
    with UnorderedSums() as watch:
        ops.gather_rows(rows, ids).sum().backward()
        dense = stored.read(torch.tensor([1, 0]))
    assert rows.grad is not None
    assert rows.grad[:, 0].tolist() == [3, 1, 0, 0, 1]
    assert dense.tolist() == [[8, 0], [0, 7]]
    assert watch.calls == []


def test_weighted_maxima_have_the_same_gradient_in_every_run() -> None:
    """Wide rows and many edges, so that torch takes both of its threads."""
    graph = random_graph(500, 20_000)
    weight = torch.rand(graph.num_edges, generator=generator(1))
    block = batch_of(hl.Graph(graph.indptr, graph.indices, {"weight": weight}), None, (-1,)).blocks[0]
    conv = pyg.GraphConv(300, 4, aggr="max")
    x = randn(500, 300).float()
    gradients = []
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(5):
            rows = x[block.src_ids].requires_grad_()
            gradients.append(
                torch.autograd.grad(convolve(conv, rows, block).square().sum(), [rows, *conv.parameters()])
            )
    finally:
        torch.set_num_threads(threads)
    for again in gradients[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, gradients[0], strict=True))


def test_the_watch_sees_what_adds_up_in_any_order() -> None:
    rows = randn(5, 3).float().requires_grad_()
    with UnorderedSums() as watch:
        rows[torch.tensor([0, 4, 0])].sum().backward()
        rows[torch.tensor([0, 4, 1])].sum().backward()
    assert len(watch.calls) == 1
