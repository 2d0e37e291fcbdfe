"""Small graphs, batches and models in float64, and plain PyG as the oracle. Everything is seeded.

graphs     random_graph (irregular on purpose), graph_of
batches    batch_of, dataset_of
models     CONVS and GNN_OPTIONS by name; conv_of, stack_of, gnn_of
oracle     stock, stock_layers, plain_gnn: PyG on a whole graph or on the square of a block
checks     assert_close, assert_same_gradients, assert_same_batches: ours against expected
"""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hopline.budget.guard import BudgetGuard
from hopline.budget.plan import Plan
from hopline.contract import Method, Work
from hopline.core.batch import Batch, Block
from hopline.core.graph import Graph
from hopline.core.row_handles import Rows
from hopline.core.sampler import NeighborSampler
from hopline.data.dataset import Dataset
from hopline.nn import GNN
from hopline.nn.conv_adapter import edge_arguments
from hopline.tables import TensorTable
from hopline.tasks.kinds import LabelKind
from hopline.tasks.own_steps import OwnSteps
from hopline.tasks.settings import DEFAULT_TASKS, LabelFacts
from hopline.tasks.task import Task, TrainStep

KERNEL_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""The device of tests of Triton kernels: a GPU, or the CPU, where Triton's interpreter runs them."""


def generator(seed: int) -> torch.Generator:
    """A torch generator on the CPU with a seed."""
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers, drawn in float64 and then rounded to `dtype`."""
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def randint(low: int, high: int, size: int, seed: int = 0) -> Tensor:
    """[size] int64 in [low, high)."""
    return torch.randint(low, high, (size,), generator=generator(seed))


def graph_of(src: Tensor, dst: Tensor, num_nodes: int, **edge: Tensor) -> Graph:
    """A graph from a list of edges in any order."""
    order = torch.argsort(dst, stable=True)
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(dst, minlength=num_nodes).cumsum(0)
    return Graph(indptr, src[order], {name: rows[order] for name, rows in edge.items()})


def random_graph(
    num_nodes: int = 50,
    num_edges: int = 300,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.int64,
    weight: bool = False,
    attr: int = 0,
    loops: bool = False,
) -> Graph:
    """A graph that is irregular on purpose.

    It has double edges and a hub (node 0). The last three nodes have no in-edges, and the very last no edge at all.
    loops: some nodes have an edge to themselves, node 2 has three.
    """
    src = randint(0, num_nodes - 1, num_edges, seed)
    dst = randint(0, num_nodes - 3, num_edges, seed + 1)
    dst[: num_edges // 5] = 0
    src = torch.where(src == dst, (src + 1) % (num_nodes - 1), src)
    if loops:
        loop_nodes = torch.tensor([0, 1, 2, 2, 2, num_nodes // 2])
        src = torch.cat([src, loop_nodes])
        dst = torch.cat([dst, loop_nodes])
    edge = {}
    if weight:
        edge["weight"] = torch.rand(src.numel(), generator=generator(seed + 2), dtype=torch.float64) + 0.1
    if attr:
        edge["attr"] = randn(src.numel(), attr, seed=seed + 3)
    graph = graph_of(src, dst, num_nodes, **edge)
    return Graph(graph.indptr, graph.indices.to(dtype), graph.edge)


def batch_of(
    graph: Graph,
    x: Tensor | None,
    fanouts: Sequence[int],
    seeds: Tensor | None = None,
    *,
    key: int = 1,
    handle: bool = False,
    replacement: bool = False,
    scale_sums: bool = False,
) -> Batch:
    """A batch at the seeds (all nodes by default); with `handle`, x stays unread."""
    seeds = torch.arange(graph.num_nodes) if seeds is None else seeds
    blocks = NeighborSampler(graph, fanouts, replace=replacement, edge_ids=True).sample(seeds, key)
    blocks = tuple(replace(block, scale_sums=scale_sums) for block in blocks)
    ids = blocks[0].src_ids
    rows = None
    if x is not None:
        rows = Rows(TensorTable(x), ids) if handle else x[ids]
    return Batch(seeds, blocks, rows, None, key=key)


def dataset_of(graph: Graph, x: Tensor, num_classes: int = 3, seed: int = 9) -> Dataset:
    """A dataset with random labels whose first half are training nodes."""
    half = graph.num_nodes // 2
    return Dataset(
        name="test",
        graph=graph,
        tables={"x": TensorTable(x)},
        y=randint(0, num_classes, graph.num_nodes, seed),
        splits={"train": torch.arange(half), "test": torch.arange(half, graph.num_nodes)},
        num_classes=num_classes,
    )


def mlp(*widths: int) -> nn.Sequential:
    """Linear, tanh, linear."""
    return nn.Sequential(nn.Linear(widths[0], widths[1]), nn.Tanh(), nn.Linear(widths[1], widths[-1]))


def pna(a: int, b: int, **options: Any) -> nn.Module:
    """A PNAConv for a fixed histogram of degrees."""
    histogram = torch.tensor([3, 10, 20, 10, 5])
    return pyg.PNAConv(a, b, ["mean", "max", "std"], ["identity", "amplification"], histogram, **options)


CONVS: dict[str, Callable[[int, int], nn.Module]] = {
    "sage-mean": lambda a, b: pyg.SAGEConv(a, b),
    "sage-max": lambda a, b: pyg.SAGEConv(a, b, aggr="max"),
    "sage-sum": lambda a, b: pyg.SAGEConv(a, b, aggr="sum"),
    "sage-project": lambda a, b: pyg.SAGEConv(a, b, project=True),
    "sage-normalize": lambda a, b: pyg.SAGEConv(a, b, normalize=True),
    "sage-no-root": lambda a, b: pyg.SAGEConv(a, b, root_weight=False, bias=False),
    "sage-std": lambda a, b: pyg.SAGEConv(a, b, aggr="std"),
    "gcn": lambda a, b: pyg.GCNConv(a, b),
    "gcn-improved": lambda a, b: pyg.GCNConv(a, b, improved=True),
    "gcn-no-loops": lambda a, b: pyg.GCNConv(a, b, add_self_loops=False),
    "gcn-no-norm": lambda a, b: pyg.GCNConv(a, b, normalize=False),
    "gin": lambda a, b: pyg.GINConv(mlp(a, 5, b), train_eps=True),
    "gat": lambda a, b: pyg.GATConv(a, b, heads=2, concat=False),
    "gat-no-loops": lambda a, b: pyg.GATConv(a, b, add_self_loops=False),
    "gat-edges": lambda a, b: pyg.GATConv(a, b, edge_dim=2),
    "gatv2": lambda a, b: pyg.GATv2Conv(a, b, heads=2, concat=False),
    "gatv2-edges": lambda a, b: pyg.GATv2Conv(a, b, edge_dim=2, share_weights=True),
    "pna": pna,
    "pna-edges": lambda a, b: pna(a, b, edge_dim=2),
    "transformer": lambda a, b: pyg.TransformerConv(a, b, heads=2, concat=False, beta=True),
    "transformer-edges": lambda a, b: pyg.TransformerConv(a, b, edge_dim=2),
    "graph": lambda a, b: pyg.GraphConv(a, b),
    "graph-mean": lambda a, b: pyg.GraphConv(a, b, aggr="mean"),
    "graph-max": lambda a, b: pyg.GraphConv(a, b, aggr="max"),
    "edge": lambda a, b: pyg.EdgeConv(mlp(2 * a, 5, b)),
    "gine-edges": lambda a, b: pyg.GINEConv(mlp(a, 5, b), edge_dim=2),
}
"""Name -> function of the widths that makes a conv. Names in "-edges" read edge attributes of width 2."""
NORMALISED = [name for name in CONVS if name.startswith("gcn") and name != "gcn-no-norm"]
"""Names of CONVS whose normalisation over sampled edges differs from PyG's, which takes sampled degrees."""


def conv_of(name: str, a: int, b: int, seed: int = 0) -> nn.Module:
    """A conv of CONVS in float64, with first weights of a seed."""
    torch.manual_seed(seed)
    return CONVS[name](a, b).double()


def stack_of(name: str, *widths: int) -> list[nn.Module]:
    """One conv per pair of neighbouring widths."""
    return [conv_of(name, a, b, seed) for seed, (a, b) in enumerate(itertools.pairwise(widths))]


def _sage(*widths: int) -> list[nn.Module]:
    """SAGE layers of some widths."""
    return stack_of("sage-mean", *widths)


GNN_OPTIONS: dict[str, tuple[list[nn.Module], dict[str, Any]]] = {
    "plain": (_sage(6, 8, 8, 3), {}),
    "no-activation": (_sage(6, 8, 3), {"act": None}),
    "elu": (_sage(6, 8, 3), {"act": "elu"}),
    "module-activation": (_sage(6, 8, 3), {"act": nn.PReLU().double()}),
    "batch-norm": (_sage(6, 8, 8, 3), {"norm": "batch"}),
    "layer-norm": (_sage(6, 8, 8, 3), {"norm": "layer"}),
    "act-first": (_sage(6, 8, 8, 3), {"norm": "layer", "act_first": True}),
    "residual": (_sage(6, 8, 8, 3), {"residual": True}),
    "residual-first": (_sage(6, 8, 8, 3), {"residual": True, "residual_first": True, "norm": "layer"}),
    "residual-at-the-input": (_sage(6, 6, 3), {"residual": True}),
    "jk-last": (_sage(6, 8, 8), {"jk": "last", "norm": "batch", "head": nn.Linear(8, 3)}),
    "jk-cat": (_sage(6, 8, 8), {"jk": "cat", "norm": "layer", "head": nn.Linear(16, 3)}),
    "jk-of-the-encoder": (
        _sage(8, 8, 8),
        {"jk": "cat", "jk_encoder": True, "encoder": nn.Linear(6, 8), "head": nn.Linear(24, 3)},
    ),
    "jk-max": (_sage(6, 8, 8), {"jk": "max", "head": nn.Linear(8, 3)}),
    "jk-lstm": (_sage(6, 8, 8), {"jk": "lstm", "head": nn.Linear(8, 3)}),
    "head": (_sage(6, 8, 8), {"head": nn.Linear(8, 3)}),
    "encoder": (_sage(8, 8, 3), {"encoder": nn.Linear(6, 8)}),
    "initial-residual": (
        _sage(8, 8, 8),
        {"encoder": nn.Linear(6, 8), "initial_residual": 0.2, "head": nn.Linear(8, 3)},
    ),
    "initial-residual-of-the-input": (_sage(6, 6, 6), {"initial_residual": 0.2}),
    "appnp": (
        [pyg.APPNP(K=1, alpha=0.0) for _ in range(3)],
        {"encoder": mlp(6, 8, 3), "initial_residual": 0.1, "act": None},
    ),
    "gcn2": (
        [pyg.GCN2Conv(8, 0.1, 0.5, layer).double() for layer in (1, 2, 3)],
        {"encoder": nn.Linear(6, 8), "head": nn.Linear(8, 3), "dropout": 0.5},
    ),
    "everything": (
        _sage(8, 8, 8, 8),
        {
            "encoder": nn.Linear(6, 8),
            "initial_residual": 0.1,
            "residual": True,
            "norm": "batch",
            "act_first": True,
            "jk": "cat",
            "head": nn.Linear(24, 3),
            "dropout": 0.5,
            "input_dropout": 0.3,
        },
    ),
}


def gnn_of(name: str) -> GNN:
    """A GNN of GNN_OPTIONS in float64, with parameters of its own."""
    torch.manual_seed(0)
    convs, options = GNN_OPTIONS[name]
    return twin(GNN(convs, **options).double())  # type: ignore[return-value]


def with_running_means(model: GNN) -> GNN:
    """The model in evaluation, with running means that a new batch norm does not have."""
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None:
            norm.running_mean.copy_(randn(norm.num_features, seed=8) / 4)
    return model.eval()


def plain_gnn(model: GNN, x: Tensor, graph: Graph) -> Tensor:
    """The oracle: a GNN in evaluation, written out in plain PyG over the whole graph."""
    act = model.act if model.act is not None else lambda v: v
    if model.encoder is not None:
        x = act(model.encoder(x))
    x0 = x
    outputs = [x] * model.jk_encoder
    last = len(model.convs) - 1
    for l, conv in enumerate(model.convs):
        before = x
        x = conv(x, x0, graph.edge_index()) if isinstance(conv, pyg.GCN2Conv) else stock(conv, x, graph)
        if model.initial_residual and not isinstance(conv, pyg.GCN2Conv):
            x = (1 - model.initial_residual) * x + model.initial_residual * x0
        if l < last or model.acts_last:
            has_shortcut = model.residual and x.shape == before.shape
            shortcut = before if has_shortcut else torch.zeros_like(x)
            x = model.norms[l](act(x) if model.act_first else x)
            if model.residual_first:
                x = x + shortcut
            if not model.act_first:
                x = act(x)
            if not model.residual_first:
                x = x + shortcut
        outputs.append(x)
    if hasattr(model, "jk"):
        x = model.jk(outputs)
    return model.lin(x) if hasattr(model, "lin") else x


def neighbors_of(graph: Graph, node: int) -> list[int]:
    """The sources of the in-edges of a node, in order."""
    return graph.indices[int(graph.indptr[node]) : int(graph.indptr[node + 1])].tolist()


def edges_of(block: Block) -> list[tuple[int, int]]:
    """A block's edges as pairs of global node ids."""
    src, dst = block.edge_index
    return list(zip(block.src_ids[src].tolist(), block.src_ids[dst].tolist(), strict=True))


def stock(conv: nn.Module, x: Tensor, block: Block | Graph) -> Tensor:
    """The conv as PyG runs it, on a whole graph or on the square of a block (all its sources as nodes)."""
    if isinstance(block, Graph):
        (block,) = NeighborSampler(block, (-1,)).sample(torch.arange(block.num_nodes), 0)
    out = conv(x, block.edge_index, **edge_arguments(conv, block.edge, x.dtype))
    return out[: block.num_dst]


def stock_layers(convs: Sequence[nn.Module], x: Tensor, blocks: Sequence[Block] | Graph) -> Tensor:
    """Convs with ReLU between, as plain PyG."""
    for l, conv in enumerate(convs):
        x = stock(conv, x, blocks if isinstance(blocks, Graph) else blocks[l])
        x = x.relu() if l < len(convs) - 1 else x
    return x


def twin(model: nn.Module) -> nn.Module:
    """A deep copy of a model, without gradients."""
    other = copy.deepcopy(model)
    other.zero_grad(set_to_none=True)
    return other


def backward(out: Tensor, seed: int = 77) -> None:
    """Backward of a random projection of the output, the same for equal shapes."""
    (out * randn(*out.shape, seed=seed, dtype=out.dtype)).sum().backward()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Name -> gradient of a parameter; zeros for a parameter without one."""
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def assert_close(ours: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Equal within a tolerance, both absolute and relative; NaN equals NaN."""
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_same_gradients(ours: nn.Module, expected: nn.Module, tolerance: float = 1e-10) -> None:
    """Gradients of two models are equal within a tolerance, and not all zero."""
    our_gradients = gradients(ours)
    expected_gradients = gradients(expected)
    assert list(our_gradients) == list(expected_gradients)
    assert any(bool(g.any()) for g in expected_gradients.values())
    for name in our_gradients:
        torch.testing.assert_close(
            our_gradients[name],
            expected_gradients[name],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def assert_same_batches(ours: Batch, expected: Batch) -> None:
    """Equal to the bit: seeds, edges, edge arrays, rows, labels."""
    assert torch.equal(ours.seeds, expected.seeds)
    assert ours.key == expected.key
    assert len(ours.blocks) == len(expected.blocks)
    for our_block, expected_block in zip(ours.blocks, expected.blocks, strict=True):
        assert our_block.num_dst == expected_block.num_dst
        assert torch.equal(our_block.src_ids, expected_block.src_ids)
        assert torch.equal(our_block.part.indptr, expected_block.part.indptr)
        assert torch.equal(our_block.part.src_idx, expected_block.part.src_idx)
        assert our_block.edge.keys() == expected_block.edge.keys()
        assert all(torch.equal(our_block.edge[name], expected_block.edge[name]) for name in our_block.edge)
    for our_rows, expected_rows in ((ours.x, expected.x), (ours.y, expected.y)):
        if isinstance(expected_rows, Tensor):
            assert isinstance(our_rows, Tensor)
            assert torch.equal(our_rows, expected_rows)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of threads of torch within."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def guarded(work: Work, method: Method, guard: BudgetGuard) -> Work:
    """Have the steps of a method keep to the limit of a guard. The plan predicts nothing."""
    sizes = {"step_bytes": 0.0, "min_step_bytes": 0.0, "steps": 1, "count": 1, "covers": "steps of {}"}
    return work.guarded(guard, Plan(method=method, items=(), limits={}, compute_place="host", **sizes))


def shared_memory_of_hopline() -> set[str]:
    """Names of hopline's files in shared memory and among temporary files. Those of other programs do not count."""
    folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return {str(path) for folder in folders for path in folder.glob("hopline-*")}


def usual_task(num_classes: int, kind: LabelKind = "single") -> Task:
    """The default task of labels of a kind."""
    return DEFAULT_TASKS[kind].bind(LabelFacts(kind=kind, num_classes=num_classes))


def own_task(train_step: TrainStep) -> Task:
    """A task whose loss is a function of the test's."""
    return OwnSteps(usual_task(0), train_step, None)
