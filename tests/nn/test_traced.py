"""Modules with a `forward` of their own, taken apart into layers: equal to plain PyG by every method."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, SAGEConv

import hopline as hl
from hopline import ops
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import World
from hopline.nn.traced_probe import KeyedMasks
from tests.nn.traced_ranks import trained
from tests.support.helpers import dataset_of, randint, randn, random_graph
from tests.support.own_modules import HAS_BATCH_NORM, MODULES, NEEDS_ARRAY, Jump, OgbSage, Pushes

NUM_NODES = 60
GRAPH = random_graph(num_nodes=NUM_NODES, num_edges=300, loops=True)
X = randn(NUM_NODES, 8)
NODES = torch.arange(NUM_NODES)
REFUSED_OVER_SHARDS = {
    "optional weights": "leave 'weight' out of the dataset",
    "types": "RGCNConv cannot run over shards",
}
WITHOUT_BATCH_NORM = [name for name in MODULES if name not in HAS_BATCH_NORM]


def data_for(name: str) -> hl.Dataset:
    """The graph, with loops, double edges and nodes without edges, and the edge array that a module takes."""
    count = GRAPH.num_edges
    arrays = {"weight": randn(count, seed=2).abs(), "attr": randn(count, 3, seed=3), "type": randint(0, 2, count)}
    array = NEEDS_ARRAY.get(name)
    edge = {} if array is None else {array: arrays[array]}
    graph = GRAPH.with_arrays(GRAPH.indptr, GRAPH.indices, edge)
    return dataset_of(graph, X, num_classes=4)


def module_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    module = MODULES[name]().double()
    plain(module, data_for(name))  # lazy layers get their parameters
    for buffer_name, buffer in module.named_buffers():
        if buffer_name.endswith("running_mean"):
            buffer.copy_(randn(buffer.numel(), seed=8) / 4)
    return module


def plain(module: nn.Module, data: hl.Dataset) -> Tensor:
    """The outputs of the module at all nodes, by plain PyG."""
    names = {"weight": "edge_weight", "attr": "edge_attr", "type": "edge_type"}
    for part in module.modules():
        if "_cached_edge_index" in vars(part):
            vars(part)["_cached_edge_index"] = None
    return module(X, data.graph.edge_index(), **{names[k]: rows for k, rows in data.graph.edge.items()})


def gradients_of(module: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]


def assert_equal(ours: Tensor | list[Tensor], expected: Tensor | list[Tensor]) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", MODULES)
def test_exact_inference_is_the_forward_of_the_module(name: str, tmp_path: Path):
    data = data_for(name)
    module = module_of(name)
    batch_model = hl.nn.as_batch_model(module)
    expected = plain(module.eval(), data).detach()

    assert isinstance(batch_model, hl.nn.Traced), name
    assert_equal(hl.infer.exact(module, data, chunk_edges=40), expected)
    assert_equal(hl.infer.exact(module, data, [5, 0, 17], chunk_edges=40), expected[[5, 0, 17]])
    assert_equal(hl.infer.exact(module, data, folder=tmp_path, chunk_edges=100), expected)


@pytest.mark.parametrize("name", WITHOUT_BATCH_NORM)
def test_a_batch_of_all_neighbours_is_the_forward_of_the_module(name: str):
    data = data_for(name)
    ours = module_of(name)
    expected = copy.deepcopy(ours)
    batch_model = hl.nn.as_batch_model(ours)
    assert isinstance(batch_model, hl.nn.Traced)
    fanouts = (-1,) * batch_model.num_layers
    (batch,) = hl.Sampled(fanouts=fanouts, batch_size=30).loader(data, "train", model=ours)
    factor = randn(30, 4)

    outputs = batch_model(batch)
    (outputs * factor).sum().backward()
    assert isinstance(batch.key, int)
    with KeyedMasks(expected, batch.key, NODES):
        expected_outputs = plain(expected, data)[batch.seeds]
    (expected_outputs * factor).sum().backward()

    assert_equal(outputs, expected_outputs)
    assert_equal(gradients_of(ours), gradients_of(expected))


AGGREGATIONS = [
    *(pytest.param(name, "sweep", id=f"{name}, sweep") for name in WITHOUT_BATCH_NORM),
    *(pytest.param(name, "sequential", id=f"{name}, sequential") for name in MODULES),
    *(pytest.param(name, "one_shot", id=f"{name}, one_shot") for name in ("GCNII", "uneven branches")),
    *(pytest.param(name, "stored", id=f"{name}, stored") for name in ("GCNII", "batch norms")),
]


@pytest.mark.parametrize(("name", "aggregation"), AGGREGATIONS)
def test_full_batch_training_is_a_loop_in_plain_pyg(name: str, aggregation: Any):
    data = data_for(name)
    ours = module_of(name)
    expected = copy.deepcopy(ours)
    method = hl.FullBatch(num_shards=3, partition="random", aggregation=aggregation)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    train = data.splits["train"]

    if name in REFUSED_OVER_SHARDS and aggregation != "sweep":
        with pytest.raises(ValueError, match=REFUSED_OVER_SHARDS[name]):
            hl.Trainer(ours, data, method, epochs=1, seed=4, show=False, optimizer=torch.optim.SGD, lr=0.1).fit()
        return
    hl.Trainer(ours, data, method, epochs=2, seed=4, show=False, optimizer=torch.optim.SGD, lr=0.1).fit()
    for epoch in (1, 2):
        optimizer.zero_grad()
        with KeyedMasks(expected.train(), ops.derive_key(4, epoch, 0), NODES):
            outputs = plain(expected, data)
        nn.functional.cross_entropy(outputs[train], data.labels[train]).backward()
        optimizer.step()

    assert_equal(list(ours.state_dict().values()), list(expected.state_dict().values()))


@pytest.mark.parametrize("name", MODULES)
def test_history_with_exact_tables_is_the_forward_of_the_module(name: str):
    data = data_for(name)
    module = module_of(name)
    if name == "shared conv":
        with pytest.raises(ValueError, match="computes other rows between two convs in training"):
            hl.Historical(num_parts=2, parts_per_batch=1).loader(data, "train", model=module)
        return
    expected = plain(module.eval(), data).detach()
    method = hl.Historical(num_parts=5, parts_per_batch=2, partition="random", refresh_every=1)
    batch_model = hl.nn.as_batch_model(module)
    num_nodes = 0
    loader = method.loader(data, "train", model=module, seed=4)
    for batch in loader:
        with torch.no_grad():
            assert_equal(batch_model(batch), expected[batch.example_ids])
        num_nodes += batch.num_seeds
        batch.commit()
    assert num_nodes == 30


def test_two_ranks_train_as_one_process():
    full_batch = hl.FullBatch(num_shards=2, partition="random")
    names = ("GCNII", "batch norms", "jump by cat", "uneven branches")
    cases: list[tuple[str, Any]] = [(name, full_batch) for name in names]
    expected = trained(World.alone(), cases)
    sampled = hl.Sampled(batch_size=5)
    historical = hl.Historical(num_parts=4, parts_per_batch=1, partition="random")
    in_ranks = run(
        trained, LaunchSettings(devices=2, timeout_s=120), [*cases, ("GCNII", sampled), ("nested", historical)]
    )
    assert len(in_ranks) == len(cases) + 2
    for ours, weights in zip(in_ranks, expected, strict=False):
        assert_equal(
            [torch.tensor(w, dtype=torch.float64) for w in ours],
            [torch.tensor(w, dtype=torch.float64) for w in weights],
        )


@pytest.mark.parametrize("name", ["GCNII", "jump by cat"])
@pytest.mark.parametrize(
    "method",
    [
        hl.Sampled(batch_size=10),
        hl.Historical(num_parts=5, parts_per_batch=2, partition="random", refresh_every="evaluation"),
        hl.FullBatch(num_shards=3, partition="random"),
    ],
    ids=lambda method: type(method).__name__,
)
def test_a_resumed_run_and_one_in_a_budget_are_the_same_to_the_bit(name: str, method: Any, tmp_path: Path):
    def weights_of(epochs: int, **options: Any) -> list[Tensor]:
        module = module_of(name)
        hl.Trainer(module, data_for(name), method, epochs=epochs, seed=3, show=False, **options).fit()
        return list(module.state_dict().values())

    expected = weights_of(3)
    weights_of(1, out=tmp_path / "run")
    torch.testing.assert_close(weights_of(3, out=tmp_path / "run", resume=True), expected, rtol=0, atol=0)
    assert_equal(weights_of(3, budget="4MiB"), expected)
    if not isinstance(method, hl.Historical):
        torch.testing.assert_close(weights_of(3, evaluate="async"), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "method", "budget"),
    [
        ("jump by max", hl.Sampled(fanouts=(5, 5, 5), batch_size=100), "900KiB"),
        ("GCNII", hl.Historical(num_parts=4, parts_per_batch=4, partition="random"), "5MiB"),
    ],
)
def test_micro_batches_have_the_gradients_of_the_batch(name: str, method: Any, budget: str):
    num_nodes = 400 if isinstance(method, hl.Sampled) else 2000
    graph = random_graph(num_nodes=num_nodes, num_edges=10 * num_nodes, loops=True)
    data = dataset_of(graph, randn(num_nodes, 8), num_classes=4)
    ours = module_of(name)
    expected = copy.deepcopy(ours)
    within = hl.Trainer(ours, data, method, epochs=2, seed=3, show=False, budget=budget).fit()
    hl.Trainer(expected, data, method, epochs=2, seed=3, show=False).fit()
    assert sum(epoch.counters.get("budget.batches_split", 0) for epoch in within.history) > 0
    assert_equal(list(ours.state_dict().values()), list(expected.state_dict().values()))


@pytest.mark.parametrize("name", ["jump", "inception", "own parameters", "sum of convs"])
def test_compensated_history_has_the_gradient_of_the_whole_graph(name: str):
    data = data_for(name)
    ours = Jump(p=0.0).double() if name == "jump" else module_of(name)
    expected = copy.deepcopy(ours)
    train = data.splits["train"]
    nn.functional.cross_entropy(plain(expected, data)[train], data.labels[train]).backward()
    method = hl.Historical(num_parts=4, parts_per_batch=1, partition="random", compensate=True, refresh_every=1)
    options: dict[str, Any] = {"optimizer": torch.optim.SGD, "lr": 1.0, "accumulate": 4, "show": False}
    hl.Trainer(ours, data, method, epochs=1, **options).fit()
    steps = [before - after for before, after in zip(expected.parameters(), ours.parameters(), strict=True)]
    assert_equal([step.detach() for step in steps], gradients_of(expected))


def test_compensation_is_refused_where_convs_read_earlier_layers_at_neighbours():
    method = hl.Historical(num_parts=4, parts_per_batch=1, compensate=True)
    with pytest.raises(ValueError, match="compensate=true is for models whose convs read the rows of the layer before"):
        hl.Trainer(module_of("dense net"), data_for("dense net"), method, epochs=1, show=False).fit()


def test_a_traced_module_draws_and_computes_as_a_list_of_layers_does():
    torch.manual_seed(0)
    module = OgbSage()
    model = hl.nn.GNN(module.convs, norm=list(module.bns), dropout=0.5)
    data = dataset_of(GRAPH, X.float(), num_classes=4)
    method = hl.Sampled(fanouts=(3, 2, 2), batch_size=10)
    for batch in method.loader(data, "train", model=module):
        assert torch.equal(hl.nn.as_batch_model(module)(batch), model(batch).log_softmax(-1))


def test_copies_and_pickles_of_a_traced_model_compute_the_same():
    module = module_of("GCNII").eval()
    model = hl.nn.as_batch_model(module)
    data = data_for("GCNII")
    expected = hl.infer.exact(module, data)
    assert_equal(hl.infer.exact(copy.deepcopy(model), data), expected)
    assert_equal(hl.infer.exact(pickle.loads(pickle.dumps(model)), data), expected)
    assert list(model.module.state_dict()) == list(module.state_dict())


def test_a_changed_setting_of_the_module_is_traced_anew():
    data = data_for("own parameters")
    module = module_of("own parameters").eval()
    before = hl.infer.exact(module, data)
    vars(module)["temperature"] = 4.0
    assert_equal(hl.infer.exact(module, data), before / 2)


class Diverges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(8, 4)

    def forward(self, x, edge_index):
        if x.isnan().any():
            x = x + 1
        return self.conv(x, edge_index)


class Pools(Diverges):
    def forward(self, x, edge_index):
        return self.conv(x, edge_index) - x.mean(dim=0)[:4]


class Counts(Diverges):
    def forward(self, x, edge_index):
        return self.conv(x, edge_index) / (x.size(0) + 1)


class OwnEdges(Diverges):
    def forward(self, x, edge_index):
        return self.conv(x, edge_index.flip(0))


class Noise(Diverges):
    def forward(self, x, edge_index):
        return self.conv(x + torch.rand_like(x) if self.training else x, edge_index)


class OverNodes(Diverges):
    def forward(self, x, edge_index):
        return self.conv(x, edge_index).softmax(0)


class LargeGraphs(Diverges):
    def forward(self, x, edge_index):
        return self.conv(x - x.mean(0) if x.size(0) > 10_000 else x, edge_index)


class Length(Diverges):
    def forward(self, x, edge_index):
        return self.conv(x, edge_index) * (2 if len(x) > 10_000 else 1)


class ManyEdges(Diverges):
    def forward(self, x, edge_index):
        return self.conv(x, edge_index) * (2 if edge_index.shape[1] > 10_000 else 1)


class InChunks(Diverges):
    def forward(self, x, edge_index):
        return torch.cat([rows.softmax(-1) for rows in self.conv(x, edge_index).split(256)])


class FirstNodes(Diverges):
    def forward(self, x, edge_index):
        h = self.conv(x, edge_index)
        return torch.cat([2 * h[i : i + 256] for i in range(0, h.size(0), 256)])


class WeightNorm(Diverges):
    def forward(self, x, edge_index):
        return self.conv(x, edge_index) / self.conv.lin_l.weight.norm().item()


class LargeWeights(Diverges):
    def forward(self, x, edge_index):
        h = self.conv(x, edge_index)
        return h.relu() if self.conv.lin_l.weight.norm().item() > 30 else h


class Keeps(Diverges):
    edges = None

    def forward(self, x, edge_index):
        if self.edges is None:
            self.edges = edge_index
        return self.conv(x, self.edges)


class NodeNorm(Diverges):
    def forward(self, x, edge_index):
        h = self.conv(x, edge_index)
        return (h - h.mean(0, keepdim=True)).relu()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Diverges, r"line \d+ of test_traced.py, `if x.isnan\(\).any\(\):` \(what it does next depends"),
        (Pools, r"something else than a row per node at line \d+ of test_traced.py, `return self.conv"),
        (Counts, "the number of nodes or edges"),
        (OverNodes, "layer by layer it would compute something else"),
        (LargeGraphs, "the number of nodes or edges"),
        (Length, "the number of nodes or edges"),
        (ManyEdges, "the number of nodes or edges"),
        (InChunks, r"a range of nodes at line \d+ of test_traced.py"),
        (FirstNodes, r"a range of nodes at line \d+ of test_traced.py"),
        (WeightNorm, "numbers of its weights"),
        (LargeWeights, "numbers of its weights"),
        (OwnEdges, "changes edge_index before a conv gets it, at line"),
        (Noise, "draws random numbers"),
        (Keeps, r"Keeps.forward changes self\.edges"),
        (NodeNorm, r"something else than a row per node at line \d+ of test_traced.py"),
    ],
)
def test_what_cannot_be_traced_runs_as_a_whole_and_says_why(module: type[nn.Module], message: str):
    assert isinstance(hl.nn.as_batch_model(module()), hl.nn.Whole)
    with pytest.raises(ValueError, match=message):
        hl.nn.Traced(module())


def test_push_and_pull_does_nothing_in_a_traced_module():
    assert isinstance(hl.nn.as_batch_model(Pushes()), hl.nn.Traced)


def test_printing_names_the_layers():
    assert str(hl.nn.as_batch_model(OgbSage(GCNConv))).splitlines() == [
        "Traced(OgbSage: 3 layers",
        "  layer 0: convs.0, bns.0, relu",
        "  layer 1: dropout, convs.1, bns.1, relu",
        "  layer 2: dropout, convs.2, log_softmax)",
    ]
