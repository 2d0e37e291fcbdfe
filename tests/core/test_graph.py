"""`Graph`: sizes, degrees, self-loops, refused arrays, its cache, and the memories that it may be in."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hopline.core.graph import Graph, PartialGraph, checksum
from hopline.data.dataset import Dataset
from hopline.interop.arrays import SharedGraph, shared
from hopline.nn.gcn_norm import weights_of
from hopline.nn.probe import reverse_edges_of_nodes
from hopline.run.compare_methods import first_nodes
from hopline.tables import TensorTable
from tests.support.helpers import graph_of, random_graph


def test_num_nodes_num_edges_and_num_bytes() -> None:
    graph = random_graph(dtype=torch.int32, weight=True, attr=3)
    assert (graph.num_nodes, graph.num_edges) == (50, 300)
    assert graph.num_bytes == 51 * 8 + 300 * 4 + 300 * 8 + 300 * 3 * 8
    assert graph.device == torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_edge_index_is_int64_and_sorted_by_destination(dtype: torch.dtype) -> None:
    graph = random_graph(dtype=dtype)
    src, dst = graph.edge_index()
    assert src.dtype == dst.dtype == torch.int64
    assert torch.equal(dst, dst.sort().values)
    assert torch.equal(torch.bincount(dst, minlength=50), graph.in_degrees())
    assert torch.equal(src, graph.indices.long())


def test_in_degrees_of_some_nodes() -> None:
    graph = random_graph()
    ids = torch.tensor([49, 0, 0, 12])
    assert torch.equal(graph.in_degrees(ids), graph.in_degrees()[ids])


def test_self_loops_are_positions_of_edges() -> None:
    graph = random_graph(loops=True)
    src, dst = graph.edge_index()
    assert torch.equal(graph.self_loops, (src == dst).nonzero().view(-1))
    assert graph.self_loops is graph.self_loops
    assert graph.has_loop is not None
    assert graph.has_loop.nonzero().view(-1).tolist() == sorted(set(src[src == dst].tolist()))
    assert random_graph().has_loop is None
    graph.indices[graph.self_loops] += 1
    assert graph.has_loop is None


def test_a_graph_without_edges_and_one_without_nodes() -> None:
    assert graph_of(torch.empty(0).long(), torch.empty(0).long(), 4).edge_index().shape == (2, 0)
    assert Graph(torch.tensor([0]), torch.empty(0, dtype=torch.int64)).num_nodes == 0


@pytest.mark.parametrize(
    ("indptr", "indices", "edge", "message"),
    [
        (torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0]), {}, "1-D int64"),
        (torch.tensor([[0, 1]]), torch.tensor([0]), {}, "1-D int64"),
        (torch.empty(0, dtype=torch.int64), torch.tensor([0]), {}, "num_nodes \\+ 1 entries"),
        (torch.tensor([0, 1]), torch.tensor([0.0]), {}, "int32 or int64"),
        (torch.tensor([0, 2]), torch.tensor([0]), {}, "ends at 2 but there are 1 edges"),
        (torch.tensor([1, 1]), torch.tensor([0]), {}, "starts at 1"),
        (torch.tensor([0, 1]), torch.tensor([0]), {"weight": torch.ones(2)}, "'weight' has 2 rows for 1 edges"),
        (torch.tensor([0, 1]), torch.tensor([0]), {"weight": torch.ones(1, 1)}, r"one number per edge, not \[1, 1\]"),
    ],
    ids=["int32-indptr", "2-D", "empty", "float-indices", "short", "shifted", "edge-array", "2-D-weight"],
)
def test_arrays_that_do_not_fit_together_are_refused(
    indptr: torch.Tensor, indices: torch.Tensor, edge: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Graph(indptr, indices, edge)


def test_a_graph_is_freed_when_nobody_uses_it() -> None:
    graph = random_graph(loops=True)
    assert graph.self_loops.numel()
    reference = weakref.ref(graph)
    del graph
    gc.collect()
    assert reference() is None


def test_a_cached_value_is_computed_once_and_again_after_a_change_in_place() -> None:
    graph = random_graph(weight=True)
    calls: list[str] = []

    def total() -> float:
        calls.append("total")
        return float(graph.edge["weight"].sum())

    before = graph.get_cached("total", total)
    assert graph.get_cached("total", total) == before
    assert len(calls) == 1

    graph.edge["weight"].mul_(2)

    assert graph.get_cached("total", total) == 2 * before
    assert len(calls) == 2


def test_arrays_made_in_inference_mode_have_versions_too() -> None:
    with torch.inference_mode():
        graph = Graph(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), {"weight": torch.ones(2)})
        assert graph.to("cpu").indptr is graph.indptr
    computed = [graph.get_cached("sum", lambda: float(graph.edge["weight"].sum())) for _ in range(2)]
    assert graph.self_loops.numel() == 0
    with torch.inference_mode():
        graph.edge["weight"].mul_(3)
        graph.indices[0] = 0
    assert [*computed, graph.get_cached("sum", lambda: float(graph.edge["weight"].sum()))] == [2, 2, 6]
    assert graph.self_loops.tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.bfloat16, torch.float64])
def test_a_checksum_is_that_of_all_values_in_their_order(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    values = (torch.arange(120) % 7).to(dtype).view(4, 30)
    expected = checksum(values)
    monkeypatch.setattr("hopline.core.graph.CHUNK_BYTES", 64)
    assert checksum(values) == checksum(values.t().contiguous().t()) == expected
    assert checksum(values[2:], checksum(values[:2])) == expected
    assert checksum(values.flip(0)) != expected
    assert checksum(values[:0]) == 0


def test_a_pickled_graph_has_an_empty_cache() -> None:
    graph = random_graph(weight=True)
    graph.get_cached("nodes", lambda: graph.num_nodes)
    copy = pickle.loads(pickle.dumps(graph))
    assert torch.equal(copy.edge_index(), graph.edge_index())
    assert copy.get_cached("nodes", lambda: -1) == -1


def test_a_pickled_graph_finds_its_own_self_loops() -> None:
    graph = Graph(torch.tensor([0, 1, 2]), torch.tensor([0, 0]))
    # A copy of a copy: then the version counters of the two are equal, though their edges are not.
    graph = pickle.loads(pickle.dumps(graph))
    assert graph.self_loops.tolist() == [0]
    graph.indices[0] = 1
    assert pickle.loads(pickle.dumps(graph)).self_loops.tolist() == []


def test_a_new_field_of_a_graph_reaches_every_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    (label,) = dataclasses.fields(dataclasses.make_dataclass("Labelled", [("label", str)]))
    for kind in (Graph, SharedGraph):
        monkeypatch.setattr(kind, "__init__", _with_label(kind.__init__))
        monkeypatch.setitem(kind.__dataclass_fields__, "label", label)
    monkeypatch.setattr("hopline.device.pinned.pin", lambda array, copy: array)
    graph = Graph(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), label="citations")  # pyright: ignore[reportCallIssue]
    data = Dataset(name="small", graph=graph, tables={"x": TensorTable(torch.ones(2, 1))})

    copies = {
        "to": graph.to("cpu"),
        "pinned": graph.pinned("cpu"),
        "pickle": pickle.loads(pickle.dumps(graph)),
        "shared": shared(graph),
        "pickle of a shared graph": pickle.loads(pickle.dumps(shared(graph))),
        "a shared graph moved": shared(graph).to("cpu"),
        "without edge arrays": data.without_edge_arrays().graph,
        "first nodes": first_nodes(data, 1).graph,
        "a trial with reversed edges": reverse_edges_of_nodes(graph),
    }
    assert {name: vars(copy).get("label") for name, copy in copies.items()} == dict.fromkeys(copies, "citations")


def _with_label(init: Callable[..., None]) -> Callable[..., None]:
    """A graph's `__init__` that takes one more argument."""

    def with_label(self: Graph, *args: Any, label: str = "", **fields: Any) -> None:
        init(self, *args, **fields)
        object.__setattr__(self, "label", label)

    return with_label


def test_moving_a_graph_to_its_own_device_copies_nothing() -> None:
    graph = random_graph(weight=True)
    moved = graph.to("cpu")
    assert torch.equal(moved.edge_index(), graph.edge_index())
    assert moved.edge["weight"] is graph.edge["weight"]
    assert not graph.is_pinned


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pinned", [False, True])
def test_a_graph_on_a_gpu_or_pinned_has_the_same_edges(pinned: bool) -> None:
    graph = random_graph(weight=True, loops=True, dtype=torch.int32)
    moved = graph.pinned("cuda") if pinned else graph.to("cuda")
    assert moved.device.type == "cuda"
    assert moved.is_pinned == pinned
    assert moved.indices.is_pinned() == pinned
    assert torch.equal(moved.edge_index().cpu(), graph.edge_index())
    assert torch.equal(moved.self_loops.cpu(), graph.self_loops)
    assert torch.equal(moved.in_degrees(torch.tensor([0, 4])), graph.in_degrees(torch.tensor([0, 4])))


def test_a_partial_graph_has_the_degrees_and_weight_sums_of_the_whole_graph() -> None:
    graph = random_graph(weight=True, attr=2, loops=True)
    ids = torch.tensor([40, 2, 0, 17, 1, 49])
    weights = torch.stack([weights_of(graph, False, 0.0).total, *weights_of(graph, True, float("nan"))], 1)
    partial = PartialGraph.of(graph.edge, ids, graph.in_degrees(ids), True, weights[ids])
    some_ids = torch.tensor([17, 2, 17])
    assert torch.equal(partial.in_degrees(some_ids), graph.in_degrees(some_ids))
    assert torch.equal(partial.in_degrees(), graph.in_degrees(ids))
    assert partial.edge.keys() == graph.edge.keys()
    assert partial.self_loops.numel() == 1

    for add_loops, fill in ((False, 1.0), (True, 1.0), (True, 2.0)):
        expected = weights_of(graph, add_loops, fill)
        total, loop = partial.weight_sums(some_ids, add_loops, fill)
        assert torch.equal(total, expected.total[some_ids])
        assert torch.equal(loop, expected.loop[some_ids])
    with pytest.raises(AssertionError, match="not of this batch"):
        partial.in_degrees(torch.tensor([3]))
    assert PartialGraph.of({}, ids, ids, False, None).self_loops.numel() == 0
