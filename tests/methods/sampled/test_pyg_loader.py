"""`hl.NeighborLoader` keeps what PyG's loader promises; plain PyG on the whole graph is the oracle.

`check_batch` states all that must hold of a batch. Further claims: draws are uniform, a seed repeats an epoch for any
number of threads, and an argument that would change batches is refused.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData, TemporalData
from torch_geometric.loader import NeighborLoader as PyGNeighborLoader
from torch_geometric.nn import GATConv, GraphConv, GraphSAGE, SAGEConv
from torch_geometric.utils import trim_to_layer

import hopline as hl
from hopline.core.sampler import NeighborSampler
from hopline.data.placement import place
from tests.support.helpers import dataset_of, generator, randn, random_graph
from tests.test_examples import neighbor_loader_works

NUM_NODES = 50
WORKERS = [0, 2]


def irregular_data(*, shuffled: bool = True) -> Any:
    """Double edges, self-loops, a hub, nodes without in-edges and one without any; edges in any order."""
    edge_index = random_graph(NUM_NODES, 300, loops=True).edge_index()
    if shuffled:
        edge_index = edge_index[:, torch.randperm(edge_index.size(1), generator=generator(5))]
    num_edges = edge_index.size(1)
    return Data(
        x=randn(NUM_NODES, 6),
        edge_index=edge_index,
        y=torch.arange(NUM_NODES)[:, None].float(),
        train_mask=torch.arange(NUM_NODES) % 3 != 0,
        edge_attr=randn(num_edges, 2, seed=1),
        edge_weight=randn(num_edges, seed=2).abs(),
        position=np.arange(NUM_NODES, dtype=np.float32),
        node_index=torch.arange(2 * NUM_NODES).view(2, NUM_NODES),  # PyG joins it along its last dimension
        name="ugly",
        temperature=torch.tensor(3.0),
    )


def batches(
    data: Any, num_neighbors: list[int], input_nodes: Any = None, *, batch_size: int = 7, **arguments: Any
) -> list[Any]:
    """All batches of one epoch of `hl.NeighborLoader`, with seed 0."""
    return list(hl.NeighborLoader(data, num_neighbors, input_nodes, batch_size=batch_size, seed=0, **arguments))


def check_batch(batch: Any, data: Any, num_neighbors: list[int]) -> None:
    """All that must hold of a batch: ids, edges, rows, and as many draws per hop as the fan-out allows."""
    n_id = batch.n_id
    e_id = batch.e_id
    assert n_id.unique().numel() == n_id.numel() == batch.num_nodes
    assert batch.edge_index.dtype == n_id.dtype == e_id.dtype == torch.int64
    assert torch.equal(n_id[batch.edge_index], data.edge_index[:, e_id]), "each edge is the one that e_id names"
    assert e_id.unique().numel() == e_id.numel()
    for key in ("x", "y", "train_mask"):
        assert torch.equal(batch[key], data[key][n_id])
    for key in ("edge_attr", "edge_weight"):
        assert torch.equal(batch[key], data[key][e_id])
    assert torch.equal(batch.position, torch.from_numpy(data.position)[n_id])
    assert torch.equal(batch.node_index, data.node_index[:, n_id])
    assert (batch.name, batch.temperature) == ("ugly", torch.tensor(3.0))

    hops = batch.num_sampled_nodes
    assert (len(hops), len(batch.num_sampled_edges)) == (len(num_neighbors) + 1, len(num_neighbors))
    assert hops[0] == batch.batch_size == batch.input_id.numel()
    assert sum(hops) == n_id.numel()
    assert sum(batch.num_sampled_edges) == e_id.numel()
    in_degree = torch.bincount(data.edge_index[1], minlength=NUM_NODES)[n_id]
    sampled = torch.bincount(batch.edge_index[1], minlength=n_id.numel())
    first_node = first_edge = 0
    for hop, fanout in enumerate(num_neighbors):
        nodes = slice(first_node, first_node + hops[hop])
        expected_draws = in_degree[nodes] if fanout < 0 else in_degree[nodes].clamp(max=fanout)
        assert torch.equal(sampled[nodes], expected_draws), "each node draws as many in-edges as it has and may"
        edges = batch.edge_index[:, first_edge : first_edge + batch.num_sampled_edges[hop]]
        assert bool(((edges[1] >= nodes.start) & (edges[1] < nodes.stop)).all()), "at the hop that follows its own"
        reached = edges[0][edges[0] >= nodes.stop]
        assert torch.equal(reached.unique(), torch.arange(nodes.stop, nodes.stop + hops[hop + 1]))
        first_node = nodes.stop
        first_edge = first_edge + edges.size(1)
    assert not sampled[first_node:].any(), "the outermost nodes draw nothing"


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("num_neighbors", [[3], [4, 2], [2, 4], [-1, 3], [2, -1, 1], [-1, -1]])
@pytest.mark.parametrize("shuffled", [False, True])
def test_batches_are_samples_of_the_graph(num_neighbors: list[int], workers: int, shuffled: bool):
    data = irregular_data(shuffled=shuffled)
    sampled_batches = batches(data, num_neighbors, shuffle=True, num_workers=workers)
    assert [batch.batch_size for batch in sampled_batches] == [7] * 7 + [1]
    for batch in sampled_batches:
        check_batch(batch, data, num_neighbors)
    assert torch.equal(
        torch.cat([b.n_id[: b.batch_size] for b in sampled_batches]).sort().values, torch.arange(NUM_NODES)
    )


@pytest.mark.parametrize("conv", [SAGEConv, GraphConv])
@pytest.mark.parametrize("trimmed", [False, True])
def test_all_neighbours_give_the_outputs_of_the_whole_graph(conv: Any, trimmed: bool):
    data = irregular_data()
    convs = [conv(6, 5).double(), conv(5, 4).double()]
    expected = convs[1](convs[0](data.x, data.edge_index).relu(), data.edge_index)
    for batch in batches(data, [-1, -1]):
        x = batch.x
        edge_index = batch.edge_index
        for layer, module in enumerate(convs):
            if trimmed:
                counts = batch.num_sampled_nodes, batch.num_sampled_edges
                x, edge_index, _ = trim_to_layer(layer, *counts, x, edge_index)
            x = module(x, edge_index)
            x = x.relu() if layer == 0 else x
        torch.testing.assert_close(x[: batch.batch_size], expected[batch.n_id[: batch.batch_size]])


def test_edge_arrays_and_trimming_work_in_pyg_models():
    data = irregular_data()
    conv = GATConv(6, 3, edge_dim=2).double()
    expected_of_conv = conv(data.x, data.edge_index, data.edge_attr)
    model = GraphSAGE(6, 8, 2, 3).double()
    expected_of_model = model(data.x, data.edge_index)
    for batch in batches(data, [-1, -1]):
        seeds = batch.n_id[: batch.batch_size]
        out = conv(batch.x, batch.edge_index, batch.edge_attr)[: batch.batch_size]
        torch.testing.assert_close(out, expected_of_conv[seeds])
        counts = {
            "num_sampled_nodes_per_hop": batch.num_sampled_nodes,
            "num_sampled_edges_per_hop": batch.num_sampled_edges,
        }
        out = model(batch.x, batch.edge_index, **counts)[: batch.batch_size]
        torch.testing.assert_close(out, expected_of_model[seeds])


@pytest.mark.filterwarnings("ignore:.*pyg-lib")
@pytest.mark.parametrize("num_neighbors", [[-1], [-1, -1], [-1, -1, -1]])
@pytest.mark.parametrize("seeds", ["all", "mask", "ids"])
def test_all_neighbours_give_the_batches_of_pygs_loader(num_neighbors: list[int], seeds: str):
    if not neighbor_loader_works():
        pytest.skip("needs pyg-lib or torch-sparse, as in .venv-pyg")
    data = irregular_data()
    input_nodes = {"all": None, "mask": data.train_mask, "ids": torch.tensor([40, 3, 49, 47, 0])}[seeds]
    theirs = list(PyGNeighborLoader(data, num_neighbors, input_nodes, batch_size=7))
    for ours, pygs in zip(batches(data, num_neighbors, input_nodes), theirs, strict=True):
        missing = {"num_nodes", "num_sampled_nodes", "num_sampled_edges"} - set(pygs.keys())  # torch-sparse's
        assert set(ours.keys()) == set(pygs.keys()) | missing
        assert (ours.batch_size, ours.name) == (pygs.batch_size, pygs.name)
        assert torch.equal(ours.input_id, pygs.input_id)
        assert torch.equal(ours.n_id[: ours.batch_size], pygs.n_id[: pygs.batch_size])
        # PyG sorts the in-edges of a node in another order, and so finds its neighbours in another.
        for batch in (ours, pygs):
            batch.ends = batch.n_id[batch.edge_index].T
        for order_by, keys in {
            "n_id": ("n_id", "x", "y", "train_mask", "position"),
            "e_id": ("e_id", "ends", "edge_attr", "edge_weight"),
        }.items():
            for key in keys:
                first, second = (batch[key][batch[order_by].argsort()] for batch in (ours, pygs))
                assert torch.equal(first, second), key
                assert first.dtype == second.dtype


def test_nodes_are_drawn_once_even_where_later_hops_draw_more():
    """A node found only by drawing again at a seed would be reached by no edge of the batch."""
    data = Data(edge_index=torch.stack([torch.arange(1, 21), torch.zeros(20, dtype=torch.int64)]), num_nodes=21)
    (batch,) = batches(data, [3, 15], [0])
    assert (batch.num_sampled_nodes, batch.num_sampled_edges) == ([1, 3, 0], [3, 0])


@pytest.mark.parametrize("replace", [False, True])
def test_a_hub_draws_its_neighbours_uniformly(replace: bool):
    degree = 12
    fanout = 5
    epochs = 3000
    data = Data(edge_index=torch.stack([torch.arange(1, degree + 1), torch.zeros(degree, dtype=torch.int64)]))
    data.num_nodes = degree + 1
    loader = hl.NeighborLoader(data, [fanout], [0], replace=replace, num_workers=0)
    counts = torch.zeros(degree)
    pairs = torch.zeros(degree, degree)
    for batch in itertools.chain.from_iterable(loader for _ in range(epochs)):
        assert batch.e_id.numel() == fanout
        assert replace or batch.e_id.unique().numel() == fanout
        counts += torch.bincount(batch.e_id, minlength=degree)
        drawn = batch.e_id.unique()
        pairs[drawn[:, None], drawn] += 1
    expected = epochs * fanout / degree
    # Sum over cells of (count - mean)^2 / variance is nearly chi-squared; 45 is above its 0.9999 quantile for 12.
    variance = expected * (1 - 1 / degree if replace else 1 - fanout / degree)
    assert float(((counts - expected) ** 2 / variance).sum()) < 45

    if not replace:
        expected_pairs = epochs * fanout * (fanout - 1) / (degree * (degree - 1))
        pair_counts = pairs[~torch.eye(degree, dtype=torch.bool)]
        assert float((pair_counts - expected_pairs).abs().max()) < 5 * expected_pairs**0.5, (
            "pairs of neighbours are equally frequent too"
        )


def test_epochs_differ_and_a_seed_repeats_them_for_any_number_of_threads():
    data = irregular_data()

    def edge_ids_of_epochs(seed: int, workers: int) -> list[list[Tensor]]:
        loader = hl.NeighborLoader(data, [3, 2], batch_size=8, shuffle=True, seed=seed, num_workers=workers)
        return [[batch.e_id for batch in loader] for _ in range(2)]

    first, second = edge_ids_of_epochs(0, 0)
    assert not all(map(torch.equal, first, second))
    again = edge_ids_of_epochs(0, 3)
    assert all(map(torch.equal, [*first, *second], [*again[0], *again[1]]))
    assert not all(map(torch.equal, first, edge_ids_of_epochs(1, 0)[0]))


def test_without_a_seed_an_epoch_draws_one_number_of_torch_which_repeats_it():
    data = irregular_data()
    loaders = [hl.NeighborLoader(data, [3, 2], batch_size=8, shuffle=True, num_workers=workers) for workers in (0, 3)]

    def epochs(loader: hl.NeighborLoader, seed: int) -> list[list[list[int]]]:
        torch.manual_seed(seed)
        return [[[*batch.input_id.tolist(), *batch.e_id.tolist()] for batch in loader] for _ in range(2)]

    first, second = epochs(loaders[0], 0)
    assert [batch[:8] for batch in first] != [batch[:8] for batch in second], "another order"
    assert [first, second] == epochs(loaders[0], 0) == epochs(loaders[1], 0)
    assert epochs(loaders[0], 1)[0] not in (first, second)

    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_()  # as torch's DataLoader does
    expected = torch.get_rng_state()
    torch.manual_seed(0)
    list(loaders[1])
    assert torch.equal(torch.get_rng_state(), expected)
    list(hl.NeighborLoader(data, [2], batch_size=8, shuffle=True, seed=7))
    assert torch.equal(torch.get_rng_state(), expected), "an explicit seed leaves torch alone"


def test_seeds_come_in_order_as_ids_as_a_mask_or_all():
    data = irregular_data()
    ids = torch.tensor([40, 3, 49, 47, 0])  # some without in-edges
    for input_nodes in (ids, ids.int(), ids.tolist()):
        first, second = batches(data, [2], input_nodes, batch_size=3)
        assert torch.equal(torch.cat([first.n_id[:3], second.n_id[:2]]), ids)
        assert torch.equal(torch.cat([first.input_id, second.input_id]), torch.arange(5)), "positions in the ids"
    masked = batches(data, [2], data.train_mask)
    seeds = torch.cat([batch.n_id[: batch.batch_size] for batch in masked])
    assert torch.equal(seeds, data.train_mask.nonzero().view(-1))
    assert torch.equal(torch.cat([batch.input_id for batch in masked]), seeds), "positions in the mask"

    all_batches = batches(data, [2])
    assert torch.equal(torch.cat([batch.input_id for batch in all_batches]), torch.arange(NUM_NODES))


def test_drop_last_leaves_out_the_last_batch():
    loader = hl.NeighborLoader(irregular_data(), [2], batch_size=8, drop_last=True)
    assert (len(loader), len(list(loader)), len(loader.dataset), loader.batch_size) == (6, 6, 50, 8)
    assert len(hl.NeighborLoader(irregular_data(), [2], batch_size=8)) == 7


def test_a_graph_without_features_and_edges_gives_batches_of_seeds():
    data = Data(edge_index=torch.empty(2, 0, dtype=torch.int64), num_nodes=3)
    (batch,) = batches(data, [2, 2])
    assert "x" not in batch
    assert (batch.num_nodes, batch.num_sampled_nodes, batch.num_sampled_edges) == (3, [3, 0, 0], [0, 0])
    assert batch.edge_index.shape == (2, 0)


def test_a_transform_is_called_in_order_in_the_thread_that_iterates():
    first_ids = []

    def mark(batch: Data) -> Data:
        first_ids.append(int(batch.input_id[0]))
        batch.marked = True
        return batch

    marked_batches = batches(irregular_data(), [3], transform=mark, num_workers=2)
    assert all(batch.marked for batch in marked_batches)
    assert first_ids == list(range(0, NUM_NODES, 7))


def test_layer_wise_inference_of_pyg_scripts_works():
    """As in PyG's Reddit example: the loader's own data without features, and with ids of its own."""
    data = irregular_data()
    loader = hl.NeighborLoader(copy.copy(data), [-1], None, batch_size=16, shuffle=False, persistent_workers=True)
    del loader.data.x, loader.data.y
    loader.data.num_nodes = data.num_nodes
    loader.data.n_id = torch.arange(data.num_nodes) + 100
    conv = SAGEConv(6, 3).double()
    rows = []
    for batch in loader:
        assert "x" not in batch
        rows.append(conv(data.x[batch.n_id - 100], batch.edge_index)[: batch.batch_size])
    torch.testing.assert_close(torch.cat(rows), conv(data.x, data.edge_index))

    assert data.x is not None, "a copy of the Data is its own"


def test_nothing_of_the_data_is_copied_and_loaders_share_their_edges():
    data = irregular_data()
    first, second = (hl.NeighborLoader(data, [2], batch_size=2) for _ in range(2))
    assert first._edges is second._edges
    assert first._columns().node["x"].table.storage().data_ptr() == data.x.data_ptr()  # type: ignore[union-attr]

    data.edge_index[:, 0] = 1
    changed = hl.NeighborLoader(data, [-1], [1], batch_size=2)
    assert changed._edges is not first._edges

    (batch,) = changed
    assert 0 in batch.e_id, "edges that were changed in place are grouped anew"


@pytest.mark.parametrize("how", ["numpy", "data", "inference"])
def test_edges_that_were_changed_past_torch_are_grouped_anew(how: str):
    data = irregular_data()
    if how == "inference":
        with torch.inference_mode():
            data.edge_index = data.edge_index.clone()
    first = hl.NeighborLoader(data, [2], batch_size=2)
    if how == "numpy":
        data.edge_index.numpy()[:, 0] = 1
    elif how == "data":
        data.edge_index.data[:, 0] = 1
    else:
        with torch.inference_mode():
            data.edge_index[:, 0] = 1
    second = hl.NeighborLoader(data, [-1], [1], batch_size=2)
    (batch,) = second
    assert 0 in batch.e_id
    assert second._edges is not first._edges
    assert hl.NeighborLoader(data, [3], batch_size=2)._edges is second._edges


def test_a_dataset_gives_the_batches_of_its_pyg_data():
    graph = random_graph(NUM_NODES, 300, loops=True, weight=True, attr=2)
    dataset = dataset_of(graph, randn(NUM_NODES, 6))
    data = dataset.to_pyg()
    settings: dict[str, Any] = {"batch_size": 9, "shuffle": True, "seed": 0}
    pairs = list(
        zip(
            hl.NeighborLoader(dataset, [3, 2], "train", **settings),
            hl.NeighborLoader(data, [3, 2], dataset.splits["train"], **settings),
            strict=True,
        )
    )
    assert pairs
    for ours, theirs in pairs:
        assert set(ours.keys()) == set(theirs.keys())
        for key in ours.keys():  # noqa: SIM118
            torch.testing.assert_close(ours[key], theirs[key], msg=key)


def test_sparse_features_come_as_dense_rows_of_a_dataset():
    data = irregular_data()
    dense = (randn(NUM_NODES, 6) > 1).double()
    data.x = dense.to_sparse_coo()
    with pytest.raises(ValueError, match=r"data\.x .*hl\.from_pyg\(data\)"):
        batches(data, [2])
    sparse = hl.from_pyg(Data(x=data.x, edge_index=data.edge_index))
    for batch in batches(sparse, [2]):
        assert torch.equal(batch.x, dense[batch.n_id])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"subgraph_type": "induced"}, "no subgraph_type=.*sampled edges alone"),
        ({"disjoint": True}, "no disjoint="),
        ({"directed": False}, "no directed="),
        ({"weight_attr": "edge_weight"}, "no weight_attr=.*uniformly"),
        ({"time_attr": "time"}, "no time_attr="),
        ({"input_time": torch.arange(3)}, "no input_time="),
        ({"generator": torch.Generator()}, "give seed="),
        ({"sampler": [1, 2], "shuffle": True}, "mutually exclusive"),
        ({"num_workers": -1}, "num_workers must be"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"input_nodes": [1, 2, 1]}, "more than once"),
        ({"input_nodes": [NUM_NODES]}, "not a node"),
        ({"input_nodes": torch.ones(3, dtype=torch.bool)}, r"a mask must be \[50\]"),
        ({"input_nodes": "train"}, "no split 'train'"),
        ({"num_neighbors": {}}, "one whole number per hop"),
        ({"num_neighbors": []}, "one whole number per hop"),
        ({"num_neighbors": [2.5]}, "one whole number per hop"),
        ({"num_neighbors": [-1], "replace": True}, "takes all neighbours"),
    ],
)
def test_arguments_that_would_change_batches_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        hl.NeighborLoader(irregular_data(), arguments.pop("num_neighbors", [2]), **arguments)


def test_arguments_that_change_no_batch_are_accepted():
    ignored_arguments = {
        "persistent_workers": True,
        "pin_memory": True,
        "prefetch_factor": 4,
        "filter_per_worker": True,
    }
    ignored_arguments |= {"subgraph_type": "directional", "disjoint": False, "time_attr": None, "is_sorted": False}
    plain = batches(irregular_data(), [3])
    other = batches(irregular_data(), [3], **ignored_arguments)
    assert all(torch.equal(a.e_id, b.e_id) for a, b in zip(plain, other, strict=True))


def test_an_unknown_argument_gets_a_suggestion():
    with pytest.raises(TypeError, match=r"'batchsize'.*'batch_size'"):
        hl.NeighborLoader(irregular_data(), [2], batchsize=3)


def test_data_of_other_kinds_is_refused():
    others: list[tuple[Any, str]] = [
        (HeteroData(), r"\.to_homogeneous\(\)"),
        (TemporalData(src=torch.tensor([0])), "with time.*hl.from_edges"),
        ([irregular_data()], "Batch.from_data_list"),
    ]
    for other, words in others:
        with pytest.raises(ValueError, match=words):
            hl.NeighborLoader(other, [2])
    with pytest.raises(ValueError, match="no edge_index"):
        hl.NeighborLoader(Data(x=torch.ones(3, 1)), [2])
    with pytest.raises(ValueError, match="not a node"):
        hl.NeighborLoader(Data(edge_index=torch.tensor([[0], [7]]), num_nodes=3), [2])
    data = irregular_data()
    data.names = [str(node) for node in range(NUM_NODES)]
    with pytest.raises(ValueError, match=r"data\.names is a list"):
        batches(data, [2])


def test_leaving_an_epoch_ends_its_threads():
    loader = hl.NeighborLoader(irregular_data(), [3], batch_size=2, num_workers=2)
    for _ in range(3):
        assert next(iter(loader)).batch_size == 2


def test_a_subgraph_has_the_draws_of_the_blocks():
    """With fan-outs that do not grow, the hops of a subgraph are those of the blocks, without repetition."""
    graph = random_graph(NUM_NODES, 300, loops=True)
    sampler = NeighborSampler(graph, (4, 2), edge_ids=True, one_list=True)
    seeds = torch.tensor([3, 0, 49, 20])
    blocks = sampler.sample(seeds, 7)
    union = hl.Batch(seeds, blocks, None, None).union()
    subgraph = sampler.sample_subgraph(seeds, 7)
    assert torch.equal(subgraph.node_ids, union.src_ids)
    assert torch.equal(subgraph.edge_index, union.edge_index)

    assert union.part.edge_ids is not None
    assert torch.equal(subgraph.edge_ids, union.part.edge_ids)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("moved", [(), ("x", "y"), ("x", "y", "edge_index"), None])
def test_batches_come_to_the_gpu(moved: tuple[str, ...] | None):
    data = irregular_data()
    del data.position  # PyG leaves NumPy's arrays where they are
    data_on_gpu = copy.copy(data).to("cuda", *(moved or ())) if moved != () else data
    device = "cuda" if moved == () else None
    for _ in range(2):
        for batch in batches(data_on_gpu, [3, 2], data.train_mask, shuffle=True, device=device):
            assert all(value.is_cuda for value in batch.to_dict().values() if isinstance(value, Tensor))
            on_host = batch.cpu()
            on_host.position = torch.from_numpy(irregular_data().position)[on_host.n_id]
            check_batch(on_host, irregular_data(), [3, 2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("placement", [{}, {"features": "pinned"}, {"graph": "host"}, {"graph": "pinned"}])
def test_a_placed_dataset_gives_the_batches_of_the_host(placement: dict[str, Any]):
    dataset = dataset_of(random_graph(NUM_NODES, 300, loops=True, weight=True), randn(NUM_NODES, 6))
    placed = place(dataset, hl.Placement(**placement), "cuda")
    settings: dict[str, Any] = {"batch_size": 9, "shuffle": True, "seed": 0}
    loader_of_placed = hl.NeighborLoader(placed, [3, 2], "train", device="cuda", **settings)
    for expected, ours in zip(hl.NeighborLoader(dataset, [3, 2], "train", **settings), loader_of_placed, strict=True):
        assert ours["x"].is_cuda
        for key in expected.keys():  # noqa: SIM118
            value = ours[key]
            assert torch.equal(expected[key], value.cpu()) if isinstance(value, Tensor) else expected[key] == value
