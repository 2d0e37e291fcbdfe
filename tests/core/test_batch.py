from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from hopline.core.batch import Batch, edges_where
from hopline.core.row_handles import Rows
from hopline.tables import TensorTable
from tests.helpers import batch_of, edges_of, graph_of, neighbors_of, randn, random_graph

SEEDS = torch.tensor([0, 7, 33, 48])


def sampled(fanouts: tuple[int, ...] = (2, 3, 4), *, handle: bool = False) -> Batch:
    graph = random_graph(weight=True, attr=2, loops=True)
    return batch_of(graph, randn(50, 3), fanouts, SEEDS, handle=handle)


def test_a_batch_cannot_be_changed() -> None:
    batch = sampled()
    with pytest.raises(FrozenInstanceError):
        batch.seeds = SEEDS  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        batch.blocks[0].num_dst = 3  # type: ignore[misc]


def test_edge_index_is_int64_whatever_is_stored() -> None:
    for dtype in (torch.int32, torch.int64):
        block = batch_of(random_graph(dtype=dtype), None, (3,)).blocks[0]
        assert block.part.src_idx.dtype == torch.int32
        assert block.edge_index.dtype == torch.int64
        assert torch.equal(block.edge_index[0], block.part.src_idx.long())
        assert torch.equal(torch.bincount(block.edge_index[1], minlength=50), block.part.indptr.diff())


def test_num_bytes_counts_what_is_held_and_not_what_is_only_pointed_at() -> None:
    read = sampled()
    unread = sampled(handle=True)
    assert isinstance(read.x, torch.Tensor)
    assert read.num_bytes - unread.num_bytes == read.x.numel() * 8
    held = read.seeds.numel() * 8 + read.x.numel() * 8
    for block in read.blocks:
        edges = block.num_edges
        held += block.num_src * 8 + (block.num_dst + 1) * 8 + edges * 4  # ids, indptr, sources
        held += edges * 8 + edges * 8 + edges * 2 * 8  # edge ids, weight, attr
    assert read.num_bytes == held


def test_to_the_same_device_is_the_same_batch() -> None:
    batch = sampled()
    assert batch.to("cpu") is batch


def test_to_a_device_moves_output_idx_where_all_else_is_there_already() -> None:
    on_meta = replace(sampled().to("meta"), output_idx=torch.arange(2))
    output_idx = on_meta.to("meta").output_idx
    assert output_idx is not None
    assert output_idx.device.type == "meta"


def test_to_another_device_moves_every_tensor_and_no_handle() -> None:
    batch = replace(sampled(handle=True), y=torch.arange(4), tables={"z": randn(3, 2)})
    moved = batch.to("meta")
    assert moved.x is batch.x
    assert moved.seeds.is_meta
    assert moved.y is not None
    assert moved.y.is_meta
    assert moved.tables["z"].is_meta  # type: ignore[union-attr]
    for block in moved.blocks:
        part = block.part
        assert part.edge_ids is not None
        assert all(t.is_meta for t in (block.src_ids, part.indptr, part.src_idx, part.edge_ids))
        assert all(rows.is_meta for rows in block.edge.values())
    assert [b.num_dst for b in moved.blocks] == [b.num_dst for b in batch.blocks]
    assert moved.key == batch.key


def test_sampling_factor_is_degree_over_sampled() -> None:
    graph = random_graph()
    block = batch_of(graph, None, (3,), SEEDS).blocks[0]
    expected = [
        max(1, len(neighbors_of(graph, v))) / max(1, min(3, len(neighbors_of(graph, v)))) for v in SEEDS.tolist()
    ]
    assert block.sampling_factor.tolist() == expected


# ---- union


def union_by_hand(batch: Batch) -> dict[int, list[tuple[int, float, tuple[float, ...]]]]:
    """Each node's in-edges (source, weight, attr): those of the layer nearest to the seeds in which it has any say."""
    kept: dict[int, list[tuple[int, float, tuple[float, ...]]]] = {}
    for block in reversed(batch.blocks):
        own: dict[int, list[tuple[int, float, tuple[float, ...]]]] = {v: [] for v in block.dst_ids.tolist()}
        attributes = zip(block.edge["weight"].tolist(), block.edge["attr"].tolist(), strict=True)
        for (src, dst), (weight, attr) in zip(edges_of(block), attributes, strict=True):
            own[dst].append((src, weight, tuple(attr)))
        for node, edges in own.items():
            kept.setdefault(node, edges)
    return kept


@pytest.mark.parametrize("fanouts", [(3,), (2, 3), (3, 2), (2, 3, 4), (-1, -1), (1, -1, 2)], ids=str)
def test_union_keeps_for_each_node_the_edges_of_the_layer_nearest_to_the_seeds(fanouts: tuple[int, ...]) -> None:
    batch = sampled(fanouts)
    square = batch.union()
    expected = union_by_hand(batch)
    found: dict[int, list[tuple[int, float, tuple[float, ...]]]] = {}
    rows = zip(edges_of(square), square.edge["weight"].tolist(), square.edge["attr"].tolist(), strict=True)
    for (src, dst), weight, attr in rows:
        found.setdefault(dst, []).append((src, weight, tuple(attr)))
    assert found == {node: edges for node, edges in expected.items() if edges}
    assert torch.equal(square.src_ids, batch.input_ids)
    assert square.num_dst == square.num_src
    assert square.part.indptr.numel() == square.num_src + 1
    assert int(square.part.indptr[-1]) == square.num_edges


def test_union_of_seeds_without_neighbours() -> None:
    graph = graph_of(torch.tensor([0]), torch.tensor([1]), 3)
    square = batch_of(graph, None, (2, 2), torch.tensor([2])).union()
    assert (square.num_src, square.num_edges) == (1, 0)


def test_union_edges_exist_in_the_graph() -> None:
    graph = random_graph()
    for src, dst in edges_of(batch_of(graph, None, (2, 4), SEEDS).union()):
        assert src in neighbors_of(graph, dst)


def test_a_handle_keeps_its_table() -> None:
    rows = Rows(TensorTable(randn(5, 2)), torch.tensor([4, 0]))
    assert rows.head(1).table is rows.table
    assert rows.shape == (2, 2)


def test_edges_where_a_mask_is_true() -> None:
    part = sampled().blocks[0].part
    kept = torch.arange(part.num_edges) % 2 == 0
    fewer = edges_where(part, kept)
    assert torch.equal(fewer.edge_index, part.edge_index[:, kept])
    assert torch.equal(fewer.edge["weight"], part.edge["weight"][kept])
