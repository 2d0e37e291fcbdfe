"""`Batch` and `Block`: frozen, moved as a whole, counted in bytes, and joined into one square block (`union`)."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from hopline.core.batch import Batch, edges_where
from hopline.core.row_handles import Rows
from hopline.tables import TensorTable
from tests.support.helpers import batch_of, edges_of, graph_of, neighbors_of, randn, random_graph

SEEDS = torch.tensor([0, 7, 33, 48])


def make_batch(fanouts: tuple[int, ...] = (2, 3, 4), *, handle: bool = False) -> Batch:
    """A sampled batch at SEEDS with edge weights and attributes; with `handle`, its rows stay in their table."""
    graph = random_graph(weight=True, attr=2, loops=True)
    return batch_of(graph, randn(50, 3), fanouts, SEEDS, handle=handle)


def test_batches_and_blocks_are_frozen() -> None:
    batch = make_batch()
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


def test_num_bytes_counts_tensors_but_not_rows_behind_a_handle() -> None:
    read = make_batch()
    unread = make_batch(handle=True)
    assert isinstance(read.x, torch.Tensor)
    assert read.num_bytes - unread.num_bytes == read.x.numel() * 8
    expected_bytes = read.seeds.numel() * 8 + read.x.numel() * 8
    for block in read.blocks:
        edges = block.num_edges
        expected_bytes += block.num_src * 8 + (block.num_dst + 1) * 8 + edges * 4  # ids, indptr, sources
        expected_bytes += edges * 8 + edges * 8 + edges * 2 * 8  # edge ids, weight, attr
    assert read.num_bytes == expected_bytes


def test_to_the_same_device_is_the_same_batch() -> None:
    batch = make_batch()
    assert batch.to("cpu") is batch


def test_to_a_device_moves_output_idx_even_where_all_other_tensors_are_on_it() -> None:
    on_meta = replace(make_batch().to("meta"), output_idx=torch.arange(2))
    output_idx = on_meta.to("meta").output_idx
    assert output_idx is not None
    assert output_idx.device.type == "meta"


def test_to_another_device_moves_every_tensor_and_no_handle() -> None:
    batch = replace(make_batch(handle=True), y=torch.arange(4), tables={"z": randn(3, 2)})
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
    """The oracle of `union`: node -> its in-edges as (source, weight, attr).

    A node has the edges of the layer nearest to the seeds in which it is a destination.
    """
    edges_by_node: dict[int, list[tuple[int, float, tuple[float, ...]]]] = {}
    for block in reversed(batch.blocks):
        edges_of_block: dict[int, list[tuple[int, float, tuple[float, ...]]]] = {v: [] for v in block.dst_ids.tolist()}
        attributes = zip(block.edge["weight"].tolist(), block.edge["attr"].tolist(), strict=True)
        for (src, dst), (weight, attr) in zip(edges_of(block), attributes, strict=True):
            edges_of_block[dst].append((src, weight, tuple(attr)))
        for node, edges in edges_of_block.items():
            edges_by_node.setdefault(node, edges)
    return edges_by_node


@pytest.mark.parametrize("fanouts", [(3,), (2, 3), (3, 2), (2, 3, 4), (-1, -1), (1, -1, 2)], ids=str)
def test_union_keeps_for_each_node_the_edges_of_the_layer_nearest_to_the_seeds(fanouts: tuple[int, ...]) -> None:
    batch = make_batch(fanouts)
    square = batch.union()
    expected = union_by_hand(batch)
    edges_by_node: dict[int, list[tuple[int, float, tuple[float, ...]]]] = {}
    rows = zip(edges_of(square), square.edge["weight"].tolist(), square.edge["attr"].tolist(), strict=True)
    for (src, dst), weight, attr in rows:
        edges_by_node.setdefault(dst, []).append((src, weight, tuple(attr)))

    assert edges_by_node == {node: edges for node, edges in expected.items() if edges}
    assert torch.equal(square.src_ids, batch.input_ids)
    assert square.num_dst == square.num_src
    assert square.part.indptr.numel() == square.num_src + 1
    assert int(square.part.indptr[-1]) == square.num_edges


def test_union_of_a_seed_without_neighbours_is_the_seed_alone() -> None:
    graph = graph_of(torch.tensor([0]), torch.tensor([1]), 3)
    square = batch_of(graph, None, (2, 2), torch.tensor([2])).union()
    assert (square.num_src, square.num_edges) == (1, 0)


def test_a_handle_keeps_its_table() -> None:
    rows = Rows(TensorTable(randn(5, 2)), torch.tensor([4, 0]))
    assert rows.head(1).table is rows.table
    assert rows.shape == (2, 2)


def test_edges_where_keeps_the_edges_of_the_mask_and_their_arrays() -> None:
    part = make_batch().blocks[0].part
    is_kept = torch.arange(part.num_edges) % 2 == 0
    fewer = edges_where(part, is_kept)
    assert torch.equal(fewer.edge_index, part.edge_index[:, is_kept])
    assert torch.equal(fewer.edge["weight"], part.edge["weight"][is_kept])


def test_a_block_of_several_parts_has_no_single_edge_index_and_says_what_to_read() -> None:
    block = make_batch().blocks[0]
    with pytest.raises(ValueError, match=r"2 parts.*block\.parts"):
        _ = replace(block, parts=2 * block.parts).edge_index
