"""A check that shards are intact, and that together they are one dataset.

Each shard is written to be opened alone, so shards repeat facts about each other. The rows that one shard
reads are also on another shard's list of rows to send. `verify_shards` reads every byte and compares:

    1. files      sizes, headers, checksums; all shards are of one cut
    2. nodes      each node is in exactly one shard; degrees add up to the number of edges
    3. edges      each edge is once in the shard of its destination, in the group of its source's owner
    4. halos      what one shard reads is what the other sends
    5. values     tables, labels and splits
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from hopline import ops
from hopline.data.checks import check_finite, check_indptr, check_labels, check_split, check_table
from hopline.data.store import check_checksums, map_arrays
from hopline.shards.shard import ADVICE, Shard, node_ranges, open_shard, read_shard_record, shard_name
from hopline.util.progress import progress

CHUNK = 1 << 22
"""Nodes or edges that are checked at a time, to limit the memory of temporary arrays."""


def open_shards(folder: str | os.PathLike[str], split: int = 0) -> list[Shard]:
    """Open all shards of a folder. split: which published split is the current one.

    Raises:
        ValueError: A shard is missing or of another cut, or the folder is that of one shard.
    """
    path, _, about = read_shard_record(folder)
    if "rank" in about:
        raise ValueError(f"{folder} is one shard of several: give the folder above it, {path.parent}")
    shards = [open_shard(path, rank, split=split) for rank in range(about["num_shards"])]
    for shard in shards:
        if shard.cut != about["cut"] or shard.num_shards != about["num_shards"]:
            raise ValueError(f"{shard.folder} is of another cut than {path}: copy all shards of one cut, or {ADVICE}")
    return shards


def verify_shards(folder: str | os.PathLike[str]) -> list[str]:
    """Read a whole folder of shards, and check it.

    Memory grows with the number of nodes. Returns a sentence for each thing that was checked.

    Raises:
        ValueError: Something is wrong. The message names the shard or file.
    """
    path, manifest, about = read_shard_record(folder)
    num_nodes = about["num_nodes"]
    num_edges = about["num_edges"]

    shards = open_shards(folder)
    map_arrays(path, manifest)  # refuses wrong sizes and headers
    check_checksums(path, manifest)
    for shard in shards:
        shard_path = path / shard_name(shard.rank)
        _, shard_manifest, _ = read_shard_record(shard_path)
        check_checksums(shard_path, shard_manifest)
    checks = [f"{len(shards)} shards of one cut have their sizes, headers and checksums"]

    first_edges = _check_nodes(shards, num_nodes, num_edges)
    checks.append(f"each of {num_nodes:,} nodes is in one shard, and their degrees make all edges")

    with progress("checking edges", num_edges, "edges", enabled=num_edges > CHUNK) as bar:
        for shard in shards:
            _check_edges(shard, first_edges, bar.advance)
    checks.append(f"each of {num_edges:,} edges is in the shard of its destination, with the owner of its source")

    for shard in shards:
        _check_halo(shard, shards)
        _check_rows(shard)
    return [*checks, "what each shard wants is what the others send", "tables, labels and splits are sound"]


def _require(holds: bool | Tensor, shard: Shard, problem: str) -> None:
    if not bool(holds):
        raise ValueError(f"{shard.folder}: {problem}: {ADVICE}")


def _are_within(numbers: Tensor, stop: int) -> bool:
    return numbers.numel() == 0 or (int(numbers.min()) >= 0 and int(numbers.max()) < stop)


def _check_nodes(shards: list[Shard], num_nodes: int, num_edges: int) -> Tensor:
    """Check that each node is in one shard.

    Returns [num_nodes + 1] int64: the position of each node's first edge in the dataset, from the degrees
    that the shards have.
    """
    # At first, first_edges[v + 1] is the degree of node v, or -1 until a shard with this node was read. The
    # cumulative sum of the degrees is returned.
    first_edges = torch.full((num_nodes + 1,), -1, dtype=torch.int64)
    for shard in shards:
        nodes = shard.nodes
        num_own = int(shard.ptr[shard.rank + 1] - shard.ptr[shard.rank])
        _require(shard.num_own == num_own, shard, f"it has {shard.num_own} nodes, and ptr says {num_own}")
        _require(_are_within(nodes, num_nodes), shard, f"a node is not in 0 .. {num_nodes - 1}")
        check_indptr(shard.indptr, shard.edge_ids.numel(), f"{shard.folder}/indptr.npy")
        is_ascending = (nodes[1:] > nodes[:-1]).all()
        _require(is_ascending and (first_edges[nodes + 1] < 0).all(), shard, "a node is there twice")
        first_edges[nodes + 1] = shard.indptr.diff()
    first_edges[0] = 0
    _require((first_edges >= 0).all(), shards[0], "a node is in no shard")
    first_edges.cumsum_(0)
    total = int(first_edges[-1])
    _require(total == num_edges, shards[0], f"the degrees of all shards make {total} edges, not {num_edges}")
    return first_edges


def _check_edges(shard: Shard, first_edges: Tensor, advance: Callable[[int], None]) -> None:
    """Check that every in-edge of the own nodes is there once, in the right group.

    In the order of `edge_numbers`, the edges of a node must have consecutive ids from first_edges[node] on.
    Each edge must lie in the part of its source's owner, within the range of its destination.

    first_edges: of `_check_nodes`. advance: called with the number of edges that were checked.
    """
    halo_sizes = torch.tensor([shard.layout.halos[_round_of(shard, s)].numel() for s in range(shard.num_shards)])
    for first, last in node_ranges(shard.indptr, CHUNK):
        start = int(shard.indptr[first])
        stop = int(shard.indptr[last])
        dst_rows = torch.repeat_interleave(torch.arange(first, last), shard.indptr[first : last + 1].diff())
        edge_numbers = shard.edge_numbers[start:stop].long()
        _require(_are_within(edge_numbers, shard.edge_ids.numel()), shard, "an edge is out of range")

        expected_ids = first_edges[shard.nodes[dst_rows]] + torch.arange(start, stop) - shard.indptr[dst_rows]
        _require((shard.edge_ids[edge_numbers] == expected_ids).all(), shard, "an edge is missing or there twice")

        owner = torch.bucketize(edge_numbers, shard.part_ptr[1:-1], right=True)
        src_idx = shard.src_idx[edge_numbers]
        _require(((src_idx >= 0) & (src_idx < halo_sizes[owner])).all(), shard, "a source is out of range")

        for s in range(shard.num_shards):
            is_from_s = owner == s
            indptr = shard.layout.parts[_round_of(shard, s)].indptr
            number_in_part = edge_numbers[is_from_s] - shard.part_ptr[s]
            dst = dst_rows[is_from_s]
            is_under_dst = (indptr[dst] <= number_in_part) & (number_in_part < indptr[dst + 1])
            _require(is_under_dst.all(), shard, f"an edge from shard {s} is under another destination")
        advance(stop - start)
    for name, array in shard.edge.items():
        check_finite(array, f"{shard.folder}/edge.{name}.npy")


def _round_of(shard: Shard, sender: int) -> int:
    return (shard.rank - sender) % shard.num_shards


def _check_halo(shard: Shard, shards: list[Shard]) -> None:
    """Check that the rows that a shard reads are those that the others send, and that it knows their ids."""
    for peer in shards:
        if peer.rank == shard.rank:
            continue
        # Both sides count the same round: the one in which the peer's rows go to this shard.
        k = _round_of(shard, peer.rank)
        halo = shard.layout.halos[k]
        sent = peer.layout.sends[k]
        _require(torch.equal(halo, sent), shard, f"it wants other rows than shard {peer.rank} sends")
        _require(_are_within(halo, peer.num_own), shard, f"it wants rows that shard {peer.rank} does not have")
        halo_range = slice(int(shard.halo_ptr[peer.rank]), int(shard.halo_ptr[peer.rank + 1]))
        has_same_ids = torch.equal(ops.gather_rows(peer.nodes, halo), shard.halo_nodes[halo_range])
        _require(has_same_ids, shard, f"it knows the rows of shard {peer.rank} by other ids")


def _check_rows(shard: Shard) -> None:
    def where(array: str) -> str:
        return f"{shard.folder}/{array}.npy"

    for name, table in shard.tables.items():
        _require(len(table) == shard.num_own, shard, f"table {name} has {len(table)} rows")
        check_table(name, table, where)
    if shard.y is not None:
        check_labels(shard.y, shard.task, shard.num_classes, where("y"))
    for k, split in enumerate(shard.all_splits):
        for name, ids in split.items():
            rows = shard.rows_of(ids) if ids.numel() else ids
            check_split(rows, shard.num_own, shard.y, name, where(f"split.{k}.{name}"))
