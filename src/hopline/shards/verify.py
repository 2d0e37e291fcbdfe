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
        raise ValueError(f"{folder} is one shard of several: give the folder above it")
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
    shards = open_shards(folder)
    map_arrays(path, manifest)
    check_sums(path, manifest)
    for shard in shards:
        here = path / shard_name(shard.rank)
        check_sums(here, read_about(here)[1])
    done = [f"{len(shards)} shards of one cut have their sizes, headers and checksums"]
    first_edges = _check_nodes(shards, about["num_nodes"], about["num_edges"])
    done.append(f"each of {about['num_nodes']:,} nodes is in one shard, and their degrees make all edges")
    with progress("checking edges", about["num_edges"], "edges", enabled=about["num_edges"] > CHUNK) as bar:
        for shard in shards:
            _check_edges(shard, first_edges, bar.advance)
    done.append(
        f"each of {about['num_edges']:,} edges is in the shard of its destination, with the owner of its source"
    )
    for shard in shards:
        _check_halo(shard, shards)
        _check_rows(shard)
    return [*done, "what each shard wants is what the others send", "tables, labels and splits are sound"]


def _require(holds: bool | Tensor, shard: Shard, what: str) -> None:
    if not bool(holds):
        raise ValueError(f"{shard.folder}: {what}: {ADVICE}")


def _check_nodes(shards: list[Shard], num_nodes: int, num_edges: int) -> Tensor:
    """[N + 1] where each node's edges begin in the dataset, from the degrees of all shards."""
    first_edges = torch.full((num_nodes + 1,), -1, dtype=torch.int64)
    for shard in shards:
        nodes = shard.nodes
        inside = nodes.numel() == 0 or (int(nodes.min()) >= 0 and int(nodes.max()) < num_nodes)
        _require(inside and shard.num_own == int(shard.ptr[shard.rank + 1] - shard.ptr[shard.rank]), shard, "nodes")
        check_indptr(shard.indptr, shard.edge_ids.numel(), f"{shard.folder}/indptr.npy")
        _require((nodes[1:] > nodes[:-1]).all() and (first_edges[nodes + 1] < 0).all(), shard, "a node is there twice")
        first_edges[nodes + 1] = shard.indptr.diff()
    first_edges[0] = 0
    _require((first_edges >= 0).all(), shards[0], "a node is in no shard")
    first_edges.cumsum_(0)
    _require(int(first_edges[-1]) == num_edges, shards[0], f"the degrees make {int(first_edges[-1])} edges")
    return first_edges


def _check_edges(shard: Shard, first_edges: Tensor, advance: Callable[[int], None]) -> None:
    """Every in-edge once, in the dataset's order by `at`, under its destination and in the group of its source."""
    counts = torch.tensor([shard.layout.halos[_round(shard, s)].numel() for s in range(shard.num_shards)])
    for first, last in node_ranges(shard.indptr, CHUNK):
        low, high = int(shard.indptr[first]), int(shard.indptr[last])
        rows = torch.repeat_interleave(torch.arange(first, last), shard.indptr[first : last + 1].diff())
        at = shard.at[low:high].long()
        inside = at.numel() == 0 or (int(at.min()) >= 0 and int(at.max()) < shard.edge_ids.numel())
        _require(inside, shard, "an edge is out of range")
        expected = first_edges[shard.nodes[rows]] + torch.arange(low, high) - shard.indptr[rows]
        _require((shard.edge_ids[at] == expected).all(), shard, "an edge is missing or there twice")
        owner = torch.bucketize(at, shard.part_ptr[1:-1], right=True)
        idx = shard.src_idx[at]
        _require(((idx >= 0) & (idx < counts[owner])).all(), shard, "a source is out of range")
        for s in range(shard.num_shards):
            of = owner == s
            indptr, within = shard.layout.parts[_round(shard, s)].indptr, at[of] - shard.part_ptr[s]
            grouped = (indptr[rows[of]] <= within) & (within < indptr[rows[of] + 1])
            _require(grouped.all(), shard, f"an edge from shard {s} is under another destination")
        advance(high - low)
    for name, array in shard.edge.items():
        check_finite(array, f"{shard.folder}/edge.{name}.npy")


def _round(shard: Shard, sender: int) -> int:
    return (shard.rank - sender) % shard.num_shards


def _check_halo(shard: Shard, shards: list[Shard]) -> None:
    for peer in shards:
        if peer.rank == shard.rank:
            continue
        wanted = shard.layout.halos[_round(shard, peer.rank)]
        sent = peer.layout.sends[(shard.rank - peer.rank) % shard.num_shards]
        _require(torch.equal(wanted, sent), shard, f"it wants other rows than shard {peer.rank} sends")
        inside = wanted.numel() == 0 or (int(wanted.min()) >= 0 and int(wanted.max()) < peer.num_own)
        _require(inside, shard, f"it wants rows that shard {peer.rank} does not have")
        of = slice(int(shard.halo_ptr[peer.rank]), int(shard.halo_ptr[peer.rank + 1]))
        known = torch.equal(ops.gather_rows(peer.nodes, wanted), shard.halo_nodes[of])
        _require(known, shard, f"it knows the rows of shard {peer.rank} by other ids")


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
