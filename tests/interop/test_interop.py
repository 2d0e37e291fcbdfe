"""A sampler and a feature store alone: their results, and the same memory in another process."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hopline as hl
from hopline import interop
from hopline.interop import Sample, Sampler
from tests.support.helpers import generator, random_graph
from tests.support.runs import small


@pytest.fixture
def data() -> hl.Dataset:
    return small()


def same_samples(one: Sample, other: Sample) -> bool:
    pairs = [(one.n_id, other.n_id)]
    for a, b in zip(one.adjs, other.adjs, strict=True):
        pairs += [(a.edge_index, b.edge_index), (a.e_id, b.e_id)]
    return all(torch.equal(interop.from_any(a), interop.from_any(b)) for a, b in pairs)


def test_a_sample_is_what_pygs_old_sampler_gave(data: hl.Dataset):
    seeds = data.splits["train"][:20]
    n_id, batch_size, adjs = Sampler(data, (5, 3)).sample(seeds)
    assert batch_size == 20
    assert torch.equal(n_id[:20], seeds)
    assert n_id.unique().numel() == n_id.numel()
    assert adjs[0].size[0] == n_id.numel()
    assert adjs[0].size[1] == adjs[1].size[0]
    assert adjs[1].size[1] == 20
    for (edge_index, e_id, size), fanout in zip(adjs, (3, 5), strict=True):
        source, target = edge_index
        assert edge_index.dtype == torch.int64
        assert int(target.max()) < size[1]
        assert int(torch.bincount(target).max()) <= fanout
        assert torch.equal(data.graph.indices[e_id].long(), n_id[source])
        edge_target = torch.bucketize(e_id, data.graph.indptr, right=True) - 1
        assert torch.equal(edge_target, n_id[target])


@pytest.mark.parametrize("is_sorted", [False, True])
def test_e_id_indexes_the_edges_that_were_given(is_sorted: bool):
    edge_index = random_graph(50, 300, loops=True).edge_index()
    if not is_sorted:
        edge_index = edge_index[:, torch.randperm(edge_index.size(1), generator=generator(5))]
    graph = interop.graph_from_edges(edge_index, num_nodes=50, edge={"weight": torch.rand(edge_index.size(1))})
    assert ("e_id" in graph.edge) is not is_sorted, "no array for what is known"
    samplers = [Sampler(one, (4, -1), seed=2) for one in (graph, interop.shared(graph))]
    for sampler in [*samplers, pickle.loads(pickle.dumps(samplers[0]))]:
        n_id, _, adjs = sampler.sample(torch.arange(9))
        for adj in adjs:
            assert torch.equal(edge_index[:, adj.e_id], n_id[adj.edge_index])

    batch = next(
        iter(hl.Sampled(fanouts=(3,), batch_size=9).loader(hl.Dataset(name="edges", graph=graph), torch.arange(9)))
    )
    (block,) = interop.batch_to(batch, "torch")["blocks"]  # type: ignore[index]
    assert list(block["edge"]) == ["weight"]
    if not is_sorted:
        assert torch.equal(edge_index[:, block["e_id"].long()], batch.input_ids[block["edge_index"]])
        with pytest.raises(ValueError, match="another name"):
            interop.graph_from_edges(edge_index, edge={"e_id": torch.arange(edge_index.size(1))})


@pytest.mark.parametrize("replace", [False, True])
def test_a_repeated_seed_is_a_row_of_its_own_with_the_same_edges(data: hl.Dataset, replace: bool):
    """As of PyG's old NeighborSampler and torch-quiver, whose n_id keep repeated seeds."""

    def outputs(seeds: list[int]) -> Tensor:
        """The seeds' rows after three layers that sum."""
        n_id, batch_size, adjs = Sampler(data, (4, 3, 2), seed=1, replace=replace).sample(seeds)
        assert n_id[:batch_size].tolist() == seeds
        assert n_id[batch_size:].unique().numel() == n_id.numel() - batch_size
        h = data.x.read(n_id).double()
        for edge_index, e_id, (num_src, num_dst) in adjs:
            assert h.size(0) == num_src
            assert torch.equal(data.graph.indices[e_id].long(), n_id[edge_index[0]])
            assert bool((edge_index[1].diff() >= 0).all()), "sorted by destination"
            h = h[:num_dst] + torch.zeros(num_dst, h.size(1), dtype=h.dtype).index_add(
                0, edge_index[1], h[edge_index[0]]
            )
        return h

    distinct = [7, 3, 12, 30]
    expected = outputs(distinct)
    for seeds in ([7, 3, 7, 12, 30, 3, 3], [30, 30, 12, 7, 3, 30]):
        torch.testing.assert_close(outputs(seeds), expected[[distinct.index(seed) for seed in seeds]])
    assert outputs([5, 5]).size(0) == 2


def test_the_edges_of_a_layer_move_to_a_device_as_in_pyg(data: hl.Dataset):
    adjs = Sampler(data, (4, 3)).sample([1, 2]).adjs
    moved = [adj.to("meta", non_blocking=True) for adj in adjs]
    assert all(adj.edge_index.is_meta and adj.e_id.is_meta for adj in moved)
    assert [adj.size for adj in moved] == [adj.size for adj in adjs]
    with pytest.raises(ValueError, match="to='torch'"):
        Sampler(data, (4,), to="numpy").sample([1]).adjs[0].to("cpu")


def test_features_have_the_sizes_of_a_tensor():
    features = interop.table(np.zeros((5, 3)))
    assert (features.size(), features.size(0), features.size(-1), features.dim()) == (torch.Size([5, 3]), 5, 3, 2)


def test_features_may_have_a_cache_on_a_device(data: hl.Dataset):
    x = data.x.read(torch.arange(data.num_nodes))
    features = interop.table(hl.table(x, device_cache="20%", graph=data.graph, device="cpu"), to="numpy")
    assert np.array_equal(features[[5, 3, 5]], x[[5, 3, 5]])


def test_every_call_draws_anew_and_equal_steps_draw_the_same(data: hl.Dataset):
    seeds = torch.arange(50)
    sampler = Sampler(data.graph, [4], seed=3)
    first = sampler.sample(seeds)
    second = sampler.sample(seeds)
    assert not same_samples(first, second)
    assert sampler.step == 2
    sampler.step = 1
    assert same_samples(sampler.sample(seeds), second)
    assert same_samples(Sampler(data, (4,), seed=3).sample(seeds), first)
    assert not same_samples(Sampler(data, (4,), seed=4).sample(seeds), first)


def test_fanouts_can_be_changed_between_calls(data: hl.Dataset):
    sampler = Sampler(data, (2,))
    seeds = torch.arange(30)
    assert len(sampler.sample(seeds).adjs) == 1
    sampler.fanouts = [-1, 2]
    outer, inner = sampler.sample(seeds).adjs
    assert inner.edge_index.size(1) == int(data.graph.in_degrees(seeds).sum())
    assert int(torch.bincount(outer.edge_index[1]).max()) == 2
    with pytest.raises(ValueError, match="fan-out"):
        sampler.fanouts = (0,)
    assert sampler.fanouts == (-1, 2)


@pytest.mark.parametrize("kind", [list, np.asarray, torch.Tensor.int, torch.Tensor.numpy])
def test_seeds_may_be_any_array(data: hl.Dataset, kind: Any):
    seeds = torch.tensor([3, 1, 2])
    expected = Sampler(data, (4, 4)).sample(seeds)
    assert same_samples(Sampler(data, (4, 4)).sample(kind(seeds)), expected)


def test_samples_come_in_the_framework_and_type_asked_for(data: hl.Dataset):
    sampler = Sampler(data, (4, 4), to="numpy", index_dtype=torch.int32)
    n_id, _, adjs = sampler.sample([1, 2])
    arrays = [n_id, *(array for adj in adjs for array in adj[:2])]
    assert all(isinstance(array, np.ndarray) and array.dtype == np.int32 for array in arrays)
    assert all(array.ctypes.data % 64 == 0 for array in arrays if array.size)
    assert np.array_equal(Sampler(data, (4, 4)).sample([1, 2]).n_id, n_id)
    again = Sample(n_id, 2, adjs).to("torch")
    assert again.n_id.data_ptr() == n_id.ctypes.data
    assert same_samples(again, Sample(n_id, 2, adjs))


def test_padded_samples_have_one_shape_and_the_same_edges(data: hl.Dataset):
    plain = Sampler(data, (4, 3))
    padded = Sampler(data, (4, 3), pad=True)
    for seeds in (torch.arange(5), torch.arange(100, 105)):
        n_id, _, adjs = plain.sample(seeds)
        filled = padded.sample(seeds)
        assert filled.n_id.tolist() == n_id.tolist() + [0] * (100 - n_id.numel())
        assert [adj.size for adj in filled.adjs] == [(100, 25), (25, 5)]
        assert [adj.e_id.numel() for adj in filled.adjs] == [75, 20]
        for adj, full in zip(adjs, filled.adjs, strict=True):
            real = full.edge_index[1] < full.size[1]
            assert torch.equal(full.edge_index[:, real], adj.edge_index)
            assert torch.equal(full.e_id[real], adj.e_id)
    assert padded.sample(torch.arange(200)).n_id.numel() == data.num_nodes
    with pytest.raises(ValueError, match="in place of -1"):
        padded.fanouts = (-1,)


def test_what_a_sampler_cannot_take_says_so(data: hl.Dataset, monkeypatch: pytest.MonkeyPatch):
    sampler = Sampler(data, (4,))
    with pytest.raises(ValueError, match="distinct"):
        Sampler(data, (4,), pad=True).sample([1, 1])
    with pytest.raises(ValueError, match="not a node"):
        sampler.sample([400])
    with pytest.raises(ValueError, match="mask"):
        sampler.sample(torch.ones(400, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"interop\.graph"):
        Sampler([1, 2], (4,))
    with pytest.raises(ValueError, match="choose from"):
        Sampler(data, (4,), to="theano")
    with pytest.raises(ValueError, match="index_dtype"):
        Sampler(data, (4,), index_dtype=torch.int16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device"):
        Sampler(data, (4,), device="cuda")


def test_many_threads_draw_each_step_once(data: hl.Dataset):
    seeds = torch.arange(60)
    alone = Sampler(data, (3, 3))
    expected = {tuple(alone.sample(seeds).adjs[1].e_id.tolist()) for _ in range(12)}
    sampler = Sampler(data, (3, 3))
    ours = set()

    def work() -> None:
        for _ in range(3):
            ours.add(tuple(sampler.sample(seeds).adjs[1].e_id.tolist()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ours == expected


def test_features_take_ids_of_any_kind_and_share_the_array():
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    features = interop.table(rows)
    assert features.storage().data_ptr() == rows.ctypes.data  # type: ignore[union-attr]
    for ids in ([2, 0], np.array([2, 0]), torch.tensor([2, 0], dtype=torch.int32)):
        assert features[ids].tolist() == rows[[2, 0]].tolist()
    assert interop.table(torch.from_numpy(rows), to="numpy")[[1]].tolist() == rows[[1]].tolist()
    features.write([0], np.full((1, 3), 5, dtype=np.float32))
    assert rows[0].tolist() == [5, 5, 5]
    assert (features.shape, len(features), features.dtype) == ((4, 3), 4, torch.float32)
    with pytest.raises(IndexError):
        features[[4]]


def test_a_read_only_array_is_not_written():
    rows = np.zeros((3, 2))
    rows.flags.writeable = False
    features = interop.table(rows, to="numpy")
    with pytest.raises(TypeError, match="read-only"):
        features.write([0], np.ones((1, 2)))
    assert features[[0]].tolist() == [[0, 0]]


def test_features_are_a_table_like_any_other(data: hl.Dataset):
    table = interop.table(data.x)
    assert table.below is data.x
    ids = torch.arange(5)
    assert torch.equal(table.read(ids), data.x.read(ids))
    assert table.num_bytes == data.x.num_bytes
    assert table.read_csr(ids) is None


def test_features_have_the_version_and_the_concurrent_view_of_the_table_below():
    class WithView(hl.extend.TensorTable):
        def concurrent_view(self) -> hl.extend.Table:
            return hl.extend.TensorTable(self.rows + 1)

    below = WithView(torch.zeros(3, 2))
    features = interop.table(below, to="numpy")
    before = features.version
    assert before is not None
    assert before == below.version
    features.write([0], torch.zeros(1, 2))
    assert features.version != before
    assert features.concurrent_view()[torch.tensor([1])].tolist() == [[1, 1]]


def test_a_graph_shares_its_arrays_and_a_scipy_matrix_its_own():
    indptr = np.array([0, 1, 3])
    indices = np.array([1, 0, 1], dtype=np.int32)
    graph = interop.graph(indptr, indices, {"weight": np.ones(3)})
    assert graph.indptr.data_ptr() == indptr.ctypes.data
    assert graph.indices.data_ptr() == indices.ctypes.data
    assert list(graph.edge) == ["weight"]
    with pytest.raises(ValueError, match="graph_from_edges"):
        interop.graph(indptr)


def test_scipy_matrices_are_edges_from_row_to_column():
    sparse = pytest.importorskip("scipy.sparse")
    matrix = sparse.csr_array(np.array([[0, 1, 0], [0, 0, 1], [0, 1, 0]]))
    for form in (matrix, matrix.tocsc()):
        assert interop.graph(form).edge_index().tolist() == [[0, 2, 1], [1, 1, 2]]
    columns = matrix.tocsc()
    assert interop.graph(columns).indices.data_ptr() == columns.indices.ctypes.data
    with pytest.raises(ValueError, match="square"):
        interop.graph(matrix[:2])
    assert interop.table(matrix)[[2]].tolist() == [[0, 1, 0]]


def test_edges_of_any_framework_become_a_graph():
    edges = np.array([[0, 1, 2, 0], [2, 0, 0, 1]])
    graph = interop.graph_from_edges(edges, num_nodes=4, edge={"time": [5, 6, 7, 8]})
    assert graph.edge_index().tolist() == [[1, 2, 0, 0], [0, 0, 1, 2]]
    assert graph.edge["time"].tolist() == [6, 7, 8, 5]
    assert interop.graph_from_edges(edges).num_nodes == 3
    assert interop.graph_from_edges(torch.empty(2, 0, dtype=torch.int64)).num_nodes == 0
    with pytest.raises(ValueError, match="ids go from 0 to 1"):
        interop.graph_from_edges(edges, num_nodes=2)
    with pytest.raises(ValueError, match="sources first"):
        interop.graph_from_edges(edges.T)


def test_a_batch_becomes_a_plain_dict(data: hl.Dataset):
    batch = next(iter(hl.Sampled(fanouts=(3, 2), batch_size=32).loader(data, "train")))
    plain = interop.batch_to(batch, "numpy")
    assert isinstance(plain, dict)
    assert np.array_equal(plain["n_id"], batch.input_ids)
    assert np.array_equal(plain["seeds"], batch.seeds)
    assert np.array_equal(plain["x"], data.x.read(batch.input_ids))
    assert np.array_equal(plain["y"], batch.labels)
    for one, block in zip(plain["blocks"], batch.blocks, strict=True):
        assert np.array_equal(one["edge_index"], block.edge_index)
        assert one["size"] == (block.num_src, block.num_dst)
    sample = Sampler(data, (3,)).sample([1, 2])
    assert isinstance(interop.batch_to(sample, "numpy"), Sample)


def test_a_graph_and_a_table_are_copied_once_and_a_folder_never(data: hl.Dataset, tmp_path: Path):
    one = Sampler(data, (3,))
    two = Sampler(data, (5,))
    pickle.dumps(one)
    pickle.dumps(two)
    assert one.graph is two.graph
    assert one.graph is interop.shared(data.graph)
    assert interop.shared(one.graph) is one.graph
    data.save(tmp_path / "folder")
    opened = hl.open(str(tmp_path / "folder"))
    twin = interop.shared(opened.graph)
    if Path("/proc/self/maps").exists():
        assert twin.indices.data_ptr() == opened.graph.indices.data_ptr()
    back = pickle.loads(pickle.dumps(Sampler(opened, (3,))))
    assert torch.equal(back.graph.indices, data.graph.indices)
    interop.release()


def test_pickling_keeps_every_setting_and_the_step(data: hl.Dataset):
    sampler = Sampler(data, (3, 2), seed=5, replace=True, to="numpy", index_dtype=torch.int32)
    sampler.sample([1])
    back = pickle.loads(pickle.dumps(sampler))
    assert (back.fanouts, back.seed, back.step, back.framework) == ((3, 2), 5, 1, "numpy")
    assert same_samples(back.sample([4, 5]), sampler.sample([4, 5]))
    interop.release()


def test_a_graph_that_was_changed_in_place_is_shared_anew():
    graph = random_graph(weight=True)
    before = interop.shared(graph)
    graph.edge["weight"].mul_(2)
    after = pickle.loads(pickle.dumps(interop.shared(graph)))
    assert torch.equal(after.edge["weight"], graph.edge["weight"])
    assert torch.equal(before.edge["weight"] * 2, graph.edge["weight"])


def test_tables_of_both_kinds_are_shared_with_their_rights():
    dense = torch.eye(3)
    tables: list[Any] = [hl.extend.TensorTable(dense, read_only=True), hl.extend.SparseTable.from_dense(dense)]
    for table in tables:
        back = pickle.loads(pickle.dumps(interop.shared(table)))
        assert torch.equal(back.read(torch.arange(3)), dense)
        with pytest.raises(TypeError, match="read-only"):
            back.write(torch.tensor([0]), dense[:1])
    writable = interop.shared(hl.extend.TensorTable(dense))
    back: Any = pickle.loads(pickle.dumps(writable))
    back.write(torch.tensor([0]), torch.full((1, 3), 4.0))
    assert isinstance(writable.rows, Tensor)
    assert writable.rows[0].tolist() == [4, 4, 4]
    with pytest.raises(TypeError, match="a graph or a table"):
        interop.shared({"x": dense})
    interop.release()
