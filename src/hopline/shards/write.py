"""Cutting a dataset into shards on disk: one scan deals its rows out, then each shard is made alone.

Memory grows with the nodes (about 30 bytes each) and not with the edges or the features, which are read and written in
chunks. The disk holds the rows twice while the work goes on.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hopline import ops
from hopline.core.graph import Graph
from hopline.core.partition import Partition, check_edges, make_partition
from hopline.data.arrays import BYTES_AT_ONCE, as_bytes
from hopline.data.dataset import Dataset
from hopline.data.edges import index_dtype
from hopline.data.fingerprint import fingerprint
from hopline.data.store import SHARDS
from hopline.data.writer import FolderWriter, writing
from hopline.shards.shard import VERSION, node_ranges, shard_name
from hopline.tables import SparseTable, Table
from hopline.util.progress import Progress, progress

CHUNK = 1 << 22
"""Nodes or edges handled at a time; a node with more in-edges is a chunk of its own."""


def cut_into(
    data: Dataset,
    folder: str | os.PathLike[str],
    num_shards: int,
    *,
    how: str = "metis",
    labels: Tensor | None = None,
    seed: int = 0,
    show: bool = False,
) -> None:
    """Cut a dataset into shards, one folder each, as `hopline partition` does.

    Memory grows with the nodes, and with `how="metis"` with the edges. Shards that are in the folder already are
    replaced in one step.

    Args:
        data: The dataset.
        folder: For the shards.
        num_shards: One for each rank that will train.
        how: "metis" cuts fewest edges, "streaming" takes a graph of any size, "random" and "range" (by node id) do not
            look at the edges.
        labels: [num_nodes] a community per node, in place of `how`.
        seed: Of "metis", "streaming" and "random".
        show: Show progress.

    Raises:
        ValueError: There are fewer nodes than shards, `how` is not known, or METIS is not installed.

    Example:
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.ones(4, 2))
        >>> hl.shards.cut(data, "shards", 2, how="range")
        >>> hl.shards.open_shard("shards", rank=1).num_own
        2
    """
    cut(data, make_partition(data.graph, num_shards, how, labels, seed, show=show), folder, show=show)


def cut(data: Dataset, partition: Partition, folder: str | os.PathLike[str], *, show: bool = False) -> None:
    """Write a dataset as one shard per part; shards that are already in the folder are replaced in one step."""
    if partition.num_nodes != data.num_nodes:
        raise ValueError(f"the partition is of {partition.num_nodes} nodes, the dataset has {data.num_nodes}")
    check_edges(data.graph)
    with FolderWriter(folder) as out, writing(out.folder):
        work = _Cut(data, partition, out.scratch(), show)
        work.deal()
        halos = [work.find_halo(rank) for rank in range(partition.num_parts)]
        about = {"version": VERSION, "cut": _cut_id(data, partition), "num_shards": partition.num_parts}
        about |= {"num_nodes": data.num_nodes, "num_edges": data.num_edges}
        with progress("writing shards", data.num_edges, "edges", enabled=show) as bar:
            for rank in range(partition.num_parts):
                with FolderWriter(out.temporary / shard_name(rank)) as shard:
                    columns = work.write_nodes(shard, rank)
                    work.write_halo(shard, rank, halos)
                    work.write_edges(shard, rank, halos[rank], bar)
                    _commit(shard, data, work.shard_sizes(rank, halos[rank]), columns, {**about, "rank": rank})
                work.forget(rank)
        out.add("ptr", work.ptr)
        out.add("edge_counts", torch.stack([halo.edge_counts for halo in halos]))
        out.add("halo_counts", torch.stack([halo.ptr.diff() for halo in halos]))
        about |= {"how": partition.how, "settings": dict(partition.settings)}
        _commit(out, data, (data.num_nodes, data.num_edges), {}, about)


def _cut_id(data: Dataset, partition: Partition) -> str:
    """What shards of one cut have in common, and no others: the parts, and all that the dataset holds."""
    digest = hashlib.blake2b(fingerprint(data).encode(), digest_size=16)
    digest.update(as_bytes(partition.part_of))
    return digest.hexdigest()


def _commit(
    out: FolderWriter, data: Dataset, sizes: tuple[int, int], columns: dict[str, int], about: dict[str, Any]
) -> None:
    out.commit(
        name=data.name,
        num_nodes=sizes[0],
        num_edges=sizes[1],
        task=data.task,
        num_classes=data.num_classes,
        num_splits=len(data.all_splits),
        tables=columns,
        meta={**data.meta, SHARDS: about},
    )


@dataclass(frozen=True)
class _Halo:
    """The sources of one shard's edges."""

    positions: Tensor
    """[H] those that other shards own, by their places: sorted, so by owner."""
    ptr: Tensor
    """[P + 1] where each owner's begin."""
    edge_counts: Tensor
    """[P] edges from each owner."""


class _Dealt:
    """Rows of named arrays, one file per array and receiver, read again by memory map."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self._like: dict[str, Tensor] = {}
        self._sizes: dict[str, list[int]] = {}
        folder.mkdir(exist_ok=True)

    def deal(self, name: str, rows: Tensor, ends: Tensor) -> None:
        """Receiver i gets rows[ends[i]:ends[i + 1]], behind what it has."""
        for to, (first, last) in enumerate(itertools.pairwise(ends.tolist())):
            self.give(name, to, rows[first:last])

    def give(self, name: str, to: int, rows: Tensor) -> None:
        if name not in self._like:
            self._like[name], self._sizes[name] = rows.new_empty((0, *rows.shape[1:])), [0] * self.count
        if rows.size(0):
            with self._path(name, to).open("ab") as file:
                file.write(as_bytes(rows.contiguous()))
            self._sizes[name][to] += rows.size(0)

    def read(self, name: str, to: int) -> Tensor:
        like = self._like[name]
        shape = (self._sizes[name][to], *like.shape[1:])
        if not torch.Size(shape).numel():
            return like.new_empty(shape)
        path = str(self._path(name, to))
        return torch.from_file(path, shared=False, size=torch.Size(shape).numel(), dtype=like.dtype).view(shape)

    def names(self) -> set[str]:
        return set(self._like)

    def forget(self, name: str, to: int) -> None:
        self._path(name, to).unlink(missing_ok=True)

    def _path(self, name: str, to: int) -> Path:
        return self.folder / f"{name}-{to}"


class _Cut:
    """The steps of a cut, and what they share.

    A node's place is its number when all shards stand one behind the other, the nodes of each in ascending order.
    """

    def __init__(self, data: Dataset, partition: Partition, scratch: Path, show: bool) -> None:
        self.data, self.part_of, self.ptr, self.show = data, partition.part_of, partition.ptr, show
        self.num_shards = partition.num_parts
        self.position = _positions(partition)
        self.slot = torch.zeros(data.num_nodes, dtype=torch.int32)
        """By place: a source's number among those of one owner, as far as the current shard has edges from it."""
        self.scratch, self.dealt = scratch, _Dealt(scratch / "dealt", self.num_shards)

    def shard_sizes(self, rank: int, halo: _Halo) -> tuple[int, int]:
        return int(self.ptr[rank + 1] - self.ptr[rank]), int(halo.edge_counts.sum())

    # ---- one scan over everything

    def deal(self) -> None:
        """Every row to the file of its owner, in the order of the nodes."""
        data, graph = self.data, self.data.graph
        with progress("dealing edges", data.num_edges, "edges", enabled=self.show) as bar:
            for first, last in node_ranges(graph.indptr, CHUNK):
                self._deal_edges(graph, first, last)
                bar.advance(int(graph.indptr[last] - graph.indptr[first]))
        rows: dict[str, Table | Tensor] = {f"table.{name}": table for name, table in data.tables.items()}
        rows |= {} if data.y is None else {"y": data.y}
        with progress("dealing rows", len(rows) * data.num_nodes, "rows", enabled=self.show) as bar:
            for name, source in rows.items():
                self._deal_rows(name, source, bar)
        for k, split in enumerate(data.all_splits):
            for name, ids in split.items():
                ends, order = ops.group_edges(self.part_of[ids], self.num_shards)
                self.dealt.deal(f"split.{k}.{name}", ids[order], ends)

    def _deal_edges(self, graph: Graph, first: int, last: int) -> None:
        ends, order = ops.group_edges(self.part_of[first:last], self.num_shards)
        nodes = order + first
        starts, edge_ids = ops.row_positions(graph.indptr, nodes)
        self.dealt.deal("nodes", nodes, ends)
        self.dealt.deal("degrees", starts.diff(), ends)
        self.dealt.deal("first_edges", graph.indptr[nodes], ends)
        self.dealt.deal(
            "places", ops.gather_rows(self.position, ops.gather_rows(graph.indices, edge_ids)), starts[ends]
        )
        for name, array in graph.edge.items():
            self.dealt.deal(f"edge.{name}", ops.gather_rows(array, edge_ids), starts[ends])

    def _deal_rows(self, name: str, source: Table | Tensor, bar: Progress) -> None:
        row_bytes = 8 * (1 + source[:1].numel() if isinstance(source, Tensor) else 1 + sum(source.shape[1:]))
        for ids in torch.arange(self.data.num_nodes).split(max(1, min(CHUNK, BYTES_AT_ONCE // row_bytes))):
            ends, order = ops.group_edges(self.part_of[int(ids[0]) : int(ids[-1]) + 1], self.num_shards)
            nodes = ids[order]
            if isinstance(source, SparseTable):
                starts, columns, values = source.read_csr(nodes)
                self.dealt.deal(f"{name}.counts", starts.diff(), ends)
                self.dealt.deal(f"{name}.columns", columns, starts[ends])
                self.dealt.deal(f"{name}.values", values, starts[ends])
            else:
                rows = ops.gather_rows(source, nodes) if isinstance(source, Tensor) else source.read(nodes)
                self.dealt.deal(name, rows, ends)
            bar.advance(ids.numel())

    # ---- one shard after the other

    def find_halo(self, rank: int) -> _Halo:
        """Which sources a shard needs from whom."""
        seen = torch.zeros(self.data.num_nodes, dtype=torch.bool)
        counts = torch.zeros(self.num_shards, dtype=torch.int64)
        for positions in self.dealt.read("places", rank).split(CHUNK):
            seen[positions.long()] = True
            counts += torch.bincount(self._owners(positions), minlength=self.num_shards)
        seen[int(self.ptr[rank]) : int(self.ptr[rank + 1])] = False
        self.dealt.give("halo", rank, seen.nonzero().view(-1))
        positions = self.dealt.read("halo", rank)
        return _Halo(positions, torch.searchsorted(positions, self.ptr), counts)

    def _owners(self, positions: Tensor) -> Tensor:
        return torch.bucketize(positions, self.ptr[1:-1], right=True)

    def write_nodes(self, out: FolderWriter, rank: int) -> dict[str, int]:
        """What is known of a shard's own nodes; returns what the manifest says about the tables."""
        out.add("ptr", self.ptr)
        out.add("nodes", self.dealt.read("nodes", rank))
        columns: dict[str, int] = {}
        for name, table in self.data.tables.items():
            columns[name] = table.num_columns if isinstance(table, SparseTable) else -1
            if isinstance(table, SparseTable):
                out.add(f"table.{name}.indptr", _starts(self.dealt.read(f"table.{name}.counts", rank)))
                for part in ("columns", "values"):
                    out.add(f"table.{name}.{part}", self.dealt.read(f"table.{name}.{part}", rank))
            else:
                out.add(f"table.{name}", self.dealt.read(f"table.{name}", rank))
        if self.data.y is not None:
            out.add("y", self.dealt.read("y", rank))
        for k, split in enumerate(self.data.all_splits):
            for name in split:
                out.add(f"split.{k}.{name}", self.dealt.read(f"split.{k}.{name}", rank))
        return columns

    def write_halo(self, out: FolderWriter, rank: int, halos: list[_Halo]) -> None:
        """Which rows of each peer this shard reads, and which of its own each peer does."""
        halo = halos[rank]
        out.add("halo_ptr", halo.ptr)
        out.array("halo_rows", torch.int64)
        out.array("halo_nodes", torch.int64)
        out.array("send_rows", torch.int64)
        for peer, other in enumerate(halos):
            rows = halo.positions[int(halo.ptr[peer]) : int(halo.ptr[peer + 1])] - self.ptr[peer]
            out.append("halo_rows", rows)
            out.append("halo_nodes", ops.gather_rows(self.dealt.read("nodes", peer), rows))
            out.append("send_rows", other.positions[int(other.ptr[rank]) : int(other.ptr[rank + 1])] - self.ptr[rank])
        out.add("send_ptr", _starts(torch.stack([other.ptr[rank + 1] - other.ptr[rank] for other in halos])))

    def write_edges(self, out: FolderWriter, rank: int, halo: _Halo, bar: Progress) -> None:
        """The in-edges of a shard's nodes by owner of the source; and where each is, by destination."""
        own = slice(int(self.ptr[rank]), int(self.ptr[rank + 1]))
        self.slot[own] = torch.arange(own.stop - own.start, dtype=torch.int32)
        for first, last in itertools.pairwise(halo.ptr.tolist()):
            self.slot[halo.positions[first:last]] = torch.arange(last - first, dtype=torch.int32)
        indptr = _starts(self.dealt.read("degrees", rank))
        part_ptr = _starts(halo.edge_counts)
        out.add("indptr", indptr)
        out.add("part_ptr", part_ptr)
        out.array("at", index_dtype(int(indptr[-1]) + 1))
        counts = torch.zeros(self.num_shards, indptr.numel(), dtype=torch.int64)
        groups, filled = _Dealt(self.scratch / "groups", self.num_shards), part_ptr[:-1].clone()
        for first, last in node_ranges(indptr, CHUNK):
            ends, at = self._group(rank, indptr, first, last, groups, counts[:, first + 1 : last + 1], filled)
            out.append("at", at)
            filled += ends.diff()
            bar.advance(at.numel())
        out.add("part_indptr", counts.cumsum_(1))
        for name in ("src_idx", "edge_ids", *(f"edge.{name}" for name in self.data.graph.edge)):
            pieces = [groups.read(name, peer) for peer in range(self.num_shards)]
            out.array(name, pieces[0].dtype, tuple(pieces[0].shape[1:]))
            for piece in pieces:
                out.append(name, piece)
        shutil.rmtree(groups.folder)

    def _group(
        self, rank: int, indptr: Tensor, first: int, last: int, groups: _Dealt, counts: Tensor, filled: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Deal the in-edges of some nodes to their groups; (ends of the groups, each edge's place among all)."""
        low, high = int(indptr[first]), int(indptr[last])
        positions = self.dealt.read("places", rank)[low:high]
        owners = self._owners(positions)
        ends, order = ops.group_edges(owners, self.num_shards)
        degrees = indptr[first : last + 1].diff()
        rows = torch.repeat_interleave(torch.arange(last - first), degrees)
        counts += torch.bincount(owners * (last - first) + rows, minlength=counts.numel()).view(counts.shape)
        groups.deal("src_idx", ops.gather_rows(self.slot, positions[order]), ends)
        first_edges = self.dealt.read("first_edges", rank)[first:last] - indptr[first:last]
        groups.deal("edge_ids", (torch.arange(low, high) + first_edges[rows])[order], ends)
        for name in self.data.graph.edge:
            groups.deal(f"edge.{name}", ops.gather_rows(self.dealt.read(f"edge.{name}", rank), order + low), ends)
        at = torch.empty_like(order)
        at[order] = torch.arange(high - low) + torch.repeat_interleave(filled - ends[:-1], ends.diff())
        return ends, at

    def forget(self, rank: int) -> None:
        """Free the disk of what a finished shard has of its own; the nodes and halos are still asked for."""
        for name in self.dealt.names() - {"nodes", "halo"}:
            self.dealt.forget(name, rank)


def _positions(partition: Partition) -> Tensor:
    """[N] each node's place; not `partition.position`, which would stay in memory with the order it is made from."""
    order = ops.group_edges(partition.part_of, partition.num_parts)[1]
    position = torch.empty(order.numel(), dtype=index_dtype(order.numel()))
    position[order] = torch.arange(order.numel(), dtype=position.dtype)
    return position


def _starts(counts: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
