"""The two sampling operators, called as PyG calls them: results, what they depend on, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hopline.pyg.operators import hetero_neighbor_sample, neighbor_sample
from tests.support.helpers import randint

NUM_NODES = 60
WRITES = ("author", "writes", "paper")
CITES = ("paper", "cites", "paper")
REVERSE = ("paper", "rev_writes", "author")


def random_csc(num_sources: int, num_destinations: int, num_edges: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    destinations = randint(0, num_destinations, num_edges, seed=seed).sort().values
    counts = torch.bincount(destinations, minlength=num_destinations)
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]), randint(
        0, num_sources, num_edges, seed + 1
    )


COLPTR, ROW = random_csc(NUM_NODES, NUM_NODES, 400)
GRAPHS = {WRITES: random_csc(40, 60, 300, 1), CITES: random_csc(60, 60, 200, 2), REVERSE: random_csc(60, 40, 300, 3)}


def typed(seeds: dict[str, Tensor], **options: Any):
    """`hetero_neighbor_sample` on GRAPHS, as PyG calls it. `num_neighbors` may be a list for all relations."""
    names = {"__".join(relation): graph for relation, graph in GRAPHS.items()}
    fanouts = options.pop("num_neighbors", [3, 2])
    return torch.ops.pyg.hetero_neighbor_sample(
        ["paper", "author"],
        list(GRAPHS),
        {name: colptr for name, (colptr, _) in names.items()},
        {name: row for name, (_, row) in names.items()},
        seeds,
        fanouts if isinstance(fanouts, dict) else dict.fromkeys(names, fanouts),
        csc=True,
        **options,
    )


def test_the_sampled_edges_are_edges_of_the_graph():
    seeds = torch.tensor([7, 3, 50])
    row, col, node, edge, nodes_per_hop, edges_per_hop = torch.ops.pyg.neighbor_sample(
        COLPTR, ROW, seeds, [4, 2], csc=True
    )
    assert torch.equal(node[:3], seeds)
    assert torch.equal(ROW[edge], node[row])
    destination = torch.arange(NUM_NODES).repeat_interleave(COLPTR.diff())
    assert torch.equal(destination[edge], node[col])
    assert nodes_per_hop[0] == 3
    assert sum(nodes_per_hop) == node.numel() == node.unique().numel()
    assert sum(edges_per_hop) == edge.numel()


def test_without_csc_ends_are_swapped():
    torch.manual_seed(1)
    row, col, *_ = neighbor_sample(COLPTR, ROW, torch.tensor([5]), [3], csc=True)
    torch.manual_seed(1)
    other_row, other_col, *_ = neighbor_sample(COLPTR, ROW, torch.tensor([5]), [3])
    assert torch.equal(row, other_col)
    assert torch.equal(col, other_row)


def test_typed_edges_are_edges_of_their_relations():
    seeds = {"paper": torch.tensor([3, 9]), "author": torch.tensor([39])}
    row, col, node, edge, nodes_per_hop, edges_per_hop = typed(seeds)
    assert {*row} == {"__".join(relation) for relation in GRAPHS}
    for relation, (colptr, source) in GRAPHS.items():
        name = "__".join(relation)
        assert torch.equal(source[edge[name]], node[relation[0]][row[name]])
        destination = torch.arange(colptr.numel() - 1).repeat_interleave(colptr.diff())
        assert torch.equal(destination[edge[name]], node[relation[2]][col[name]])
        assert sum(edges_per_hop[name]) == edge[name].numel() > 0
    assert nodes_per_hop["paper"][0] == 2
    assert torch.equal(node["author"][:1], torch.tensor([39]))


def test_a_fanout_is_per_relation():
    names = ["__".join(relation) for relation in GRAPHS]
    *_, edges_per_hop = typed(
        {"paper": torch.tensor([3])}, num_neighbors=dict(zip(names, ([2, 0], [0, 1], [-1, -1]), strict=True))
    )
    degree = int(GRAPHS[WRITES][0][4] - GRAPHS[WRITES][0][3])
    assert edges_per_hop[names[0]] == [min(2, degree), 0]
    assert edges_per_hop[names[1]] == [0, 0]  # no paper but the seed was reached after the first hop
    assert edges_per_hop[names[2]][0] == 0
    assert edges_per_hop[names[2]][1] > 0


def test_torch_manual_seed_decides_the_draws():
    def sample(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.cat([torch.ops.pyg.neighbor_sample(COLPTR, ROW, torch.arange(20), [2])[3] for _ in range(2)])

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))
    first, second = sample(1).chunk(2)
    assert first.shape != second.shape or not torch.equal(first, second)


def test_disjoint_rows_are_pairs_of_a_seed_and_a_node():
    seeds = {"author": torch.tensor([1, 1]), "paper": torch.tensor([2])}
    node = typed(seeds, disjoint=True)[2]
    assert node["author"][:2].tolist() == [[0, 1], [1, 1]]
    assert node["paper"][0].tolist() == [2, 2]
    assert node["paper"].unique(dim=0).size(0) == node["paper"].size(0)


def test_without_edge_ids_there_are_none():
    assert neighbor_sample(COLPTR, ROW, torch.tensor([5]), [3], return_edge_id=False)[3] is None
    assert typed({"paper": torch.tensor([3])}, return_edge_id=False)[3] is None


def test_results_have_the_dtype_of_the_seeds():
    seeds = torch.tensor([5], dtype=torch.int32)
    row, _, node, edge, *_ = torch.ops.pyg.neighbor_sample(COLPTR.int(), ROW.int(), seeds, [3])
    assert {row.dtype, node.dtype, edge.dtype} == {torch.int32}


def test_no_tensor_of_the_graph_is_copied_or_changed():
    colptr, row = COLPTR.clone(), ROW.clone()
    neighbor_sample(colptr, row, torch.arange(20), [3, 3])
    assert torch.equal(colptr, COLPTR)
    assert torch.equal(row, ROW)


def timed_graph() -> tuple[Tensor, Tensor, Tensor]:
    """(colptr, row, edge_time), ascending within each row, with ties."""
    time = randint(0, 10, 400, seed=9)
    destination = torch.arange(NUM_NODES).repeat_interleave(COLPTR.diff())
    order = torch.argsort(destination * 100 + time, stable=True)
    return COLPTR, ROW[order], time[order]


@pytest.mark.parametrize("strategy", ["uniform", "last"])
def test_every_hop_keeps_to_the_time_of_its_seed(strategy: str):
    colptr, row, time = timed_graph()
    seeds = torch.arange(NUM_NODES)
    seed_time = randint(0, 10, NUM_NODES, seed=4)
    options: dict[str, Any] = {"csc": True, "disjoint": True, "temporal_strategy": strategy}
    _, col, node, edge, *_ = neighbor_sample(colptr, row, seeds, [3, 3], edge_time=time, seed_time=seed_time, **options)
    assert (time[edge] <= seed_time[node[col, 0]]).all()
    assert (time[edge] == seed_time[node[col, 0]]).any()  # equal times are eligible, as in pyg-lib


def test_node_times_bound_sources_and_stand_in_for_seed_times():
    author_time = randint(0, 10, 40, seed=2)
    paper_time = randint(0, 10, 60, seed=3)
    name = "__".join(WRITES)
    colptr, row = GRAPHS[WRITES]
    destination = torch.arange(60).repeat_interleave(colptr.diff())
    row = row[torch.argsort(destination * 100 + author_time[row], stable=True)]
    seeds = {"paper": torch.arange(60)}
    graph = (["paper", "author"], [WRITES], {name: colptr}, {name: row}, seeds, {name: [4]})
    times = {"paper": paper_time, "author": author_time}
    _, _, node, *_ = hetero_neighbor_sample(*graph, node_time_dict=times, csc=True, disjoint=True)
    example, author = node["author"].t()
    assert author.numel() > 0
    assert (author_time[author] <= paper_time[example]).all()


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "directed": ({"directed": False}, RuntimeError, "Undirected subgraphs"),
    "strategy": ({"temporal_strategy": "first"}, RuntimeError, "No valid temporal strategy"),
    "times without disjoint": ({"edge_time": ROW, "seed_time": ROW[:2]}, RuntimeError, "disjoint subgraphs"),
    "two times": ({"edge_time": ROW, "node_time": COLPTR, "disjoint": True}, RuntimeError, "Only one of"),
    "no seed time": ({"edge_time": ROW, "disjoint": True}, RuntimeError, "Seed time needs"),
    "float times": ({"edge_time": ROW.float(), "seed_time": ROW[:2], "disjoint": True}, ValueError, "int64"),
    "too few times": ({"edge_time": ROW[:9], "seed_time": ROW[:2], "disjoint": True}, ValueError, "9 numbers"),
    "seed times": ({"edge_time": ROW * 0, "seed_time": ROW[:1], "disjoint": True}, ValueError, "1 times for 2 seeds"),
    "integer weights": ({"edge_weight": ROW}, ValueError, "edge_weight"),
    "too few weights": ({"edge_weight": torch.ones(3)}, ValueError, "3 numbers"),
    "negative weights": ({"edge_weight": -torch.ones(400)}, ValueError, "weight"),
    "seed out of range": ({"seed": torch.tensor([0, 60])}, ValueError, "outside the graph"),
    "negative seed": ({"seed": torch.tensor([0, -1])}, ValueError, "outside the graph"),
    "matrix": ({"seed": torch.zeros(2, 2, dtype=torch.int64)}, ValueError, "1-D"),
    "float seeds": ({"seed": torch.zeros(2)}, ValueError, "int32 or int64"),
    "strided": ({"col": torch.stack([ROW, ROW], 1)[:, 0]}, ValueError, "Non-contiguous"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_an_error_and_never_a_crash(case: str):
    changed, error, message = REFUSED[case]
    arguments = {"rowptr": COLPTR, "col": ROW, "seed": torch.tensor([5, 6]), "num_neighbors": [2, 2], **changed}
    with pytest.raises(error, match=message):
        torch.ops.pyg.neighbor_sample(**arguments)


def test_typed_input_that_does_not_fit_together_is_refused():
    paper = {"paper": torch.tensor([3])}
    names = ["__".join(relation) for relation in GRAPHS]
    with pytest.raises(ValueError, match=f"num_neighbors_dict has no relation {names[2]}"):
        typed(paper, num_neighbors={name: [2] for name in names[:2]})
    with pytest.raises(ValueError, match="hops"):
        typed(paper, num_neighbors=dict(zip(names, ([2], [2, 2], [2]), strict=True)))
    with pytest.raises(ValueError, match="venue"):
        typed({"venue": torch.tensor([3])})
    with pytest.raises(ValueError, match="empty"):
        typed({})
    with pytest.raises(RuntimeError, match="Edge temporal sampling needs to create disjoint"):
        typed(paper, edge_time_dict={names[0]: GRAPHS[WRITES][1]}, seed_time_dict=paper)
    with pytest.raises(ValueError, match="seeds of paper have no time"):
        typed(paper, node_time_dict={"author": torch.zeros(40, dtype=torch.int64)}, disjoint=True)


def test_seeds_that_are_no_nodes_and_empty_seeds_are_told_apart():
    row, col, node, edge, nodes_per_hop, edges_per_hop = neighbor_sample(COLPTR, ROW, ROW[:0], [3, 3])
    assert row.numel() == col.numel() == node.numel() == 0
    assert edge is not None
    assert edge.numel() == 0
    assert (nodes_per_hop, edges_per_hop) == ([0, 0, 0], [0, 0])
    out = typed({"paper": ROW[:0], "author": torch.tensor([3])})
    assert out[2]["author"][0] == 3


def test_uniform_draws_over_calls_are_uniform():
    colptr = torch.tensor([0, 6])
    torch.manual_seed(0)
    seeds = torch.zeros(3000, dtype=torch.int64)
    edge = neighbor_sample(colptr, torch.zeros(6, dtype=torch.int64), seeds, [2])[3]
    assert edge is not None
    counts = torch.bincount(edge[: 2 * 3000], minlength=6).double()
    assert float(((counts - 1000) ** 2 / 1000).sum()) * 5 / 4 < 25.7  # chi-square, 5 degrees of freedom, 1e-4


def test_the_generator_of_the_caller_advances_by_one_number():
    torch.manual_seed(3)
    neighbor_sample(COLPTR, ROW, torch.tensor([1]), [2, 2, 2])
    after = torch.rand(1)
    torch.manual_seed(3)
    limits = torch.iinfo(torch.int64)
    torch.randint(limits.min, limits.max, ())
    assert torch.equal(after, torch.rand(1))
