"""PyG's own loaders on our operators: what their batches hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader
from torch_geometric.nn import GraphConv, GraphSAGE, SAGEConv, to_hetero
from torch_geometric.sampler import NegativeSampling
from torch_geometric.testing import MyFeatureStore, MyGraphStore
from torch_geometric.utils import k_hop_subgraph

from tests.support.helpers import randint

NUM_NODES = 80
CITES = ("paper", "cites", "paper")
WRITES = ("author", "writes", "paper")
REVERSE = ("paper", "rev_writes", "author")


def homogeneous() -> Any:
    """Rows that say which node and which edge they are of."""
    edge_index = torch.stack([randint(0, NUM_NODES, 500), randint(0, NUM_NODES, 500, 1)])
    return Data(
        x=torch.arange(NUM_NODES).view(-1, 1), edge_index=edge_index, edge_attr=torch.arange(500), num_nodes=NUM_NODES
    )


def typed() -> Any:
    data = HeteroData()
    data["paper"].x = torch.arange(60).view(-1, 1)
    data["author"].x = torch.arange(40).view(-1, 1)
    data[CITES].edge_index = torch.stack([randint(0, 60, 200), randint(0, 60, 200, 1)])
    data[WRITES].edge_index = torch.stack([randint(0, 40, 300, 2), randint(0, 60, 300, 3)])
    data[REVERSE].edge_index = data[WRITES].edge_index.flip(0)
    for number, relation in enumerate((CITES, WRITES, REVERSE)):
        data[relation].edge_attr = torch.arange(data[relation].num_edges) + 1000 * number
    return data


def assert_edges_of(data: Any, batch: Any, source: Tensor, destination: Tensor, first: int = 0) -> None:
    """Each edge of a store of the batch is that of the graph which its edge_attr names."""
    expected = data.edge_index[:, batch.edge_attr - first]
    assert torch.equal(source.view(-1)[batch.edge_index[0]], expected[0])
    assert torch.equal(destination.view(-1)[batch.edge_index[1]], expected[1])


@pytest.mark.parametrize("subgraph_type", ["directional", "bidirectional"])
@pytest.mark.parametrize("replace", [False, True])
def test_untyped_batches_hold_edges_of_the_graph(subgraph_type: str, replace: bool):
    data = homogeneous()
    loader = NeighborLoader(data, [4, 2], batch_size=20, subgraph_type=subgraph_type, replace=replace)
    assert len(loader) == 4
    for number, batch in enumerate(loader):
        assert batch.input_id.tolist() == [*range(20 * number, 20 * number + 20)]
        assert torch.equal(batch.n_id[:20], batch.input_id)
        assert torch.equal(batch.x.view(-1), batch.n_id)
        if subgraph_type == "directional":
            assert_edges_of(data, batch, batch.n_id, batch.n_id)
            most = 20 * 4 + int(batch.num_sampled_nodes[1]) * 2
            assert 0 < batch.num_edges <= most
        else:
            pairs = {tuple(pair) for pair in data.edge_index.t().tolist()}
            ours = {tuple(pair) for pair in batch.n_id[batch.edge_index].t().tolist()}
            assert all((a, b) in pairs or (b, a) in pairs for a, b in ours)
            assert ours == {(b, a) for a, b in ours}


def test_typed_batches_hold_edges_of_every_relation():
    data = typed()
    fanouts = {CITES: [3, 3], WRITES: [2, 0], REVERSE: [-1, 1]}
    for batch in NeighborLoader(data, fanouts, input_nodes=("paper", torch.arange(0, 60, 2)), batch_size=10):
        for number, relation in enumerate((CITES, WRITES, REVERSE)):
            stores = (batch[relation[0]].x, batch[relation[2]].x)
            assert_edges_of(data[relation], batch[relation], *stores, first=1000 * number)
        assert batch["paper"].batch_size == 10
        assert set(batch["author"].num_sampled_nodes[1:]) != {0}


def test_a_model_on_all_neighbours_equals_the_model_on_the_graph():
    data = homogeneous()
    data.x = torch.randn(NUM_NODES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    first, second = GraphConv(4, 8).double(), SAGEConv(8, 3).double()
    expected = second(first(data.x, data.edge_index).relu(), data.edge_index)
    loader = NeighborLoader(data, [-1, -1], batch_size=16)
    for batch in loader:
        ours = second(first(batch.x, batch.edge_index).relu(), batch.edge_index)[: batch.batch_size]
        assert torch.allclose(ours, expected[batch.input_id], rtol=0, atol=1e-12)


def test_a_typed_model_on_all_neighbours_equals_the_model_on_the_graph():
    data = typed()
    for name, store in data.node_items():
        store.x = torch.randn(store.num_nodes, 4, generator=torch.Generator().manual_seed(len(name))).double()

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = SAGEConv((4, 4), 8)
            self.second = SAGEConv((8, 8), 3)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.second(self.first(x, edge_index).relu(), edge_index)

    model = to_hetero(Net(), data.metadata()).double()
    expected = model(data.x_dict, data.edge_index_dict)["paper"]
    for batch in NeighborLoader(data, [-1, -1], input_nodes="paper", batch_size=16):
        ours = model(batch.x_dict, batch.edge_index_dict)["paper"][: batch["paper"].batch_size]
        assert torch.allclose(ours, expected[batch["paper"].input_id], rtol=0, atol=1e-12)


def test_trimmed_layers_compute_what_whole_batches_do():
    """PyG's `trim_to_layer` relies on the counts of each hop, and on rows and edges that come hop by hop."""
    data = homogeneous()
    data.x = torch.randn(NUM_NODES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = GraphSAGE(4, 8, num_layers=3, out_channels=2).double()
    for batch in NeighborLoader(data, [4, 3, 2], batch_size=16):
        whole = model(batch.x, batch.edge_index)[: batch.batch_size]
        counts = (batch.num_sampled_nodes, batch.num_sampled_edges)
        trimmed = model(
            batch.x, batch.edge_index, num_sampled_nodes_per_hop=counts[0], num_sampled_edges_per_hop=counts[1]
        )
        assert torch.allclose(trimmed[: batch.batch_size], whole, rtol=0, atol=1e-12)


def test_a_typed_timed_link_model_learns():
    """The loop of PyG's examples and of RelBench: negatives, times, `to_hetero`, an optimizer."""
    torch.manual_seed(0)
    data = typed()
    for name, store in data.node_items():
        store.x = torch.randn(store.num_nodes, 8, generator=torch.Generator().manual_seed(len(name)))
    for relation, store in data.edge_items():
        store.time = randint(0, 50, store.num_edges, len(relation[1]))
        del store.edge_attr
    labels = data[WRITES].edge_index
    loader = LinkNeighborLoader(
        data, [4, 4], edge_label_index=(WRITES, labels), edge_label_time=data[WRITES].time - 1, time_attr="time",
        neg_sampling=NegativeSampling("binary"), batch_size=100, shuffle=True,
    )  # fmt: skip
    encoder = to_hetero(GraphSAGE(8, 16, num_layers=2), data.metadata())
    optimizer = torch.optim.Adam(encoder.parameters(), lr=0.01)
    losses = []
    for _ in range(8):
        total = 0.0
        for batch in loader:
            optimizer.zero_grad()
            out = encoder(batch.x_dict, batch.edge_index_dict)
            source, destination = batch[WRITES].edge_label_index
            scores = (out["author"][source] * out["paper"][destination]).sum(-1)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, batch[WRITES].edge_label)
            loss.backward()
            optimizer.step()
            total += float(loss.detach())
        losses.append(total)
    assert losses[-1] < 0.9 * losses[0]


def test_disjoint_batches_have_a_tree_for_every_seed():
    for batch in NeighborLoader(homogeneous(), [4, 2], batch_size=20, disjoint=True):
        assert torch.equal(batch.batch[:20], torch.arange(20))
        assert torch.equal(batch.batch[batch.edge_index[0]], batch.batch[batch.edge_index[1]])
        reached = k_hop_subgraph(torch.arange(20), 2, batch.edge_index, num_nodes=batch.num_nodes)[0]
        assert reached.numel() == batch.num_nodes


@pytest.mark.parametrize("strategy", ["uniform", "last"])
@pytest.mark.parametrize("by_node", [False, True])
def test_temporal_batches_keep_to_the_time_of_their_seeds(strategy: str, by_node: bool):
    data = homogeneous()
    data.time = randint(0, 9, NUM_NODES if by_node else 500, 7)
    seed_time = randint(0, 9, NUM_NODES, 8)
    loader = NeighborLoader(
        data, [5, 5], batch_size=20, time_attr="time", input_time=seed_time, temporal_strategy=strategy
    )
    for batch in loader:
        bound = batch.seed_time[batch.batch]
        if by_node:
            is_source = torch.arange(batch.num_nodes) >= 20
            assert (batch.time[is_source] <= bound[is_source]).all()
        else:
            assert (batch.time <= bound[batch.edge_index[1]]).all()
        assert batch.num_edges > 0


def test_the_last_neighbours_of_a_batch_are_the_latest_that_are_eligible():
    data = homogeneous()
    data.time = randint(0, 9, 500, 7)
    options: dict[str, Any] = {"time_attr": "time", "input_time": torch.full((NUM_NODES,), 5)}
    batch = next(iter(NeighborLoader(data, [2], batch_size=NUM_NODES, temporal_strategy="last", **options)))
    for node in range(NUM_NODES):
        eligible = data.time[(data.edge_index[1] == node) & (data.time <= 5)]
        ours = batch.time[batch.edge_index[1] == node]
        assert ours.sort().values.tolist() == eligible.sort().values[-2:].tolist()


def test_weighted_batches_follow_the_weights():
    data = homogeneous()
    data.weight = (torch.arange(500) % 2).double()
    loader = NeighborLoader(data, [1, 1], batch_size=20, weight_attr="weight")
    degree = torch.bincount(data.edge_index[1], minlength=NUM_NODES)
    for batch in loader:
        is_cut = degree[batch.n_id[batch.edge_index[1]]] > 1
        assert (batch.weight[is_cut] == 1).all()
        assert is_cut.any()


@pytest.mark.parametrize("mode", ["binary", "triplet"])
@pytest.mark.parametrize("is_typed", [False, True])
def test_link_batches_name_the_ends_of_their_edges(mode: str, is_typed: bool):
    data = typed() if is_typed else homogeneous()
    edges = data[WRITES].edge_index if is_typed else data.edge_index
    labels = (WRITES, edges[:, :60]) if is_typed else edges[:, :60]
    negative = NegativeSampling(mode, amount=2)
    for batch in LinkNeighborLoader(data, [3, 2], edge_label_index=labels, neg_sampling=negative, batch_size=20):
        store = batch[WRITES] if is_typed else batch
        sources, destinations = (batch["author"].n_id, batch["paper"].n_id) if is_typed else (batch.n_id, batch.n_id)
        if mode == "binary":
            positive = store.edge_label_index[:, :20]
            assert store.edge_label_index.size(1) == 60
        else:
            source = batch["author"].src_index if is_typed else batch.src_index
            target = batch["paper"].dst_pos_index if is_typed else batch.dst_pos_index
            positive = torch.stack([source, target])
        ours = torch.stack([sources[positive[0]], destinations[positive[1]]])
        assert torch.equal(ours, edges[:, store.input_id])


def test_link_batches_with_times_sample_the_past_and_the_edge_itself():
    """At equal times the edge that is predicted is eligible, as in pyg-lib: the page says so."""
    data = homogeneous()
    data.time = torch.arange(500)
    loader = LinkNeighborLoader(
        data, [-1], edge_label_index=data.edge_index, edge_label_time=data.time, time_attr="time", batch_size=50
    )
    for batch in loader:
        bound = batch.edge_label_time[batch.batch]
        assert (batch.time <= bound[batch.edge_index[1]]).all()
        assert {*batch.edge_label_time.tolist()} <= {*batch.time.tolist()}


def test_remote_stores_are_sampled_too():
    data = typed()
    features, graph = MyFeatureStore(), MyGraphStore()
    for name, store in data.node_items():
        features.put_tensor(store.x, group_name=name, attr_name="x", index=None)
    for relation, store in data.edge_items():
        size = (data[relation[0]].num_nodes, data[relation[2]].num_nodes)
        graph.put_edge_index(tuple(store.edge_index), edge_type=relation, layout="coo", size=size)
    for batch in NeighborLoader((features, graph), [3, 2], input_nodes=("paper", torch.arange(20)), batch_size=10):
        sources = batch["author"].x.view(-1)[batch[WRITES].edge_index[0]]
        destinations = batch["paper"].x.view(-1)[batch[WRITES].edge_index[1]]
        pairs = {tuple(pair) for pair in data[WRITES].edge_index.t().tolist()}
        assert all(pair in pairs for pair in zip(sources.tolist(), destinations.tolist(), strict=True))


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.spawn)])
def test_workers_sample_and_draw_differently(context: str):
    data = homogeneous()
    loader = NeighborLoader(
        data, [2, 2], input_nodes=torch.zeros(80, dtype=torch.int64), batch_size=20, num_workers=2,
        multiprocessing_context=context,
    )  # fmt: skip
    torch.manual_seed(0)
    first = [batch.edge_attr for batch in loader]
    torch.manual_seed(0)
    again = [batch.edge_attr for batch in loader]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({tuple(edges.tolist()) for edges in first}) == 4
