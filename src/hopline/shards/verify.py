"""A check that shards are intact, and that together they are one dataset."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from hopline import ops
from hopline.data.checks import check_finite, check_indptr, check_labels, check_split, check_table
from hopline.data.store import check_sums, map_arrays
from hopline.shards.shard import ADVICE, Shard, node_ranges, open_shard, read_about, shard_name
from hopline.util.progress import progress

CHUNK = 1 << 22
"""Nodes or edges looked at in one go."""


def open_shards(folder: str | os.PathLike[str]) -> list[Shard]:
    """Every shard of a folder, after a look whether they are of one cut."""
    path, _, about = read_about(folder)
    if "rank" in about:
        raise ValueError(f"{folder} is one shard of several: give the folder above it, {path.parent}")
    shards = [open_shard(path, rank) for rank in range(about["num_shards"])]
    for shard in shards:
        if shard.cut != about["cut"] or shard.num_shards != about["num_shards"]:
            raise ValueError(f"{shard.folder} is of another cut than {path}: copy all shards of one cut, or {ADVICE}")
    return shards


def verify_shards(folder: str | os.PathLike[str]) -> list[str]:
    """Read a whole folder of shards: checksums, every value, and that the shards together are one dataset.

    Memory grows with the nodes. Returns what was checked.
    """
    path, manifest, about = read_about(folder)
    num_nodes = about["num_nodes"]
    num_edges = about["num_edges"]

    shards = open_shards(folder)
    map_arrays(path, manifest)
    check_sums(path, manifest)
    for shard in shards:
        shard_path = path / shard_name(shard.rank)
        _, shard_manifest, _ = read_about(shard_path)
        check_sums(shard_path, shard_manifest)
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
    """[N + 1] where each node's edges begin in the dataset, from the degrees of all shards."""
    first_edges = torch.full((num_nodes + 1,), -1, dtype=torch.int64)
    for shard in shards:
        nodes = shard.nodes
        num_own = int(shard.ptr[shard.rank + 1] - shard.ptr[shard.rank])
        _require(_are_within(nodes, num_nodes) and shard.num_own == num_own, shard, "nodes")
        check_indptr(shard.indptr, shard.edge_ids.numel(), f"{shard.folder}/indptr.npy")
        is_ascending = (nodes[1:] > nodes[:-1]).all()
        _require(is_ascending and (first_edges[nodes + 1] < 0).all(), shard, "a node is there twice")
        first_edges[nodes + 1] = shard.indptr.diff()
    first_edges[0] = 0
    _require((first_edges >= 0).all(), shards[0], "a node is in no shard")
    first_edges.cumsum_(0)
    _require(int(first_edges[-1]) == num_edges, shards[0], f"the degrees make {int(first_edges[-1])} edges")
    return first_edges


def _check_edges(shard: Shard, first_edges: Tensor, advance: Callable[[int], None]) -> None:
    """Every in-edge once, in the dataset's order by `at`, under its destination and in the group of its source."""
    halo_sizes = torch.tensor([shard.layout.halos[_round_of(shard, s)].numel() for s in range(shard.num_shards)])
    for first, last in node_ranges(shard.indptr, CHUNK):
        start = int(shard.indptr[first])
        stop = int(shard.indptr[last])
        rows = torch.repeat_interleave(torch.arange(first, last), shard.indptr[first : last + 1].diff())
        numbers = shard.at[start:stop].long()
        _require(_are_within(numbers, shard.edge_ids.numel()), shard, "an edge is out of range")

        expected_ids = first_edges[shard.nodes[rows]] + torch.arange(start, stop) - shard.indptr[rows]
        _require((shard.edge_ids[numbers] == expected_ids).all(), shard, "an edge is missing or there twice")

        owner = torch.bucketize(numbers, shard.part_ptr[1:-1], right=True)
        src_idx = shard.src_idx[numbers]
        _require(((src_idx >= 0) & (src_idx < halo_sizes[owner])).all(), shard, "a source is out of range")

        for s in range(shard.num_shards):
            is_from_s = owner == s
            indptr = shard.layout.parts[_round_of(shard, s)].indptr
            number_in_part = numbers[is_from_s] - shard.part_ptr[s]
            dst = rows[is_from_s]
            is_under_dst = (indptr[dst] <= number_in_part) & (number_in_part < indptr[dst + 1])
            _require(is_under_dst.all(), shard, f"an edge from shard {s} is under another destination")
        advance(stop - start)
    for name, array in shard.edge.items():
        check_finite(array, f"{shard.folder}/edge.{name}.npy")


def _round_of(shard: Shard, sender: int) -> int:
    return (shard.rank - sender) % shard.num_shards


def _check_halo(shard: Shard, shards: list[Shard]) -> None:
    for peer in shards:
        if peer.rank == shard.rank:
            continue
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
