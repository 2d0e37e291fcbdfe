"""Writing a dataset as shards on disk, in memory that grows with the nodes alone.

    1. deal          one scan over the dataset. Every node's rows, labels and in-edges are appended to the
                     scratch files of the shard that owns the node.
    2. find_halo     for each shard: which sources of its edges other shards own
    3. write_*       for each shard: its folder, from its scratch files, which are then deleted. On the way
                     edges are grouped by the owner of their source.

Memory is about 30 bytes per node. Edges and features are read and written in chunks. While shards are
written, the disk holds the rows twice: in scratch files and in shards.

A node's *position* is its number if the nodes of all shards are counted shard after shard, by ascending id.
"""

from __future__ import annotations

import hashlib
import itertools
import math
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
"""Nodes or edges handled at a time. A node with more in-edges makes a chunk larger."""


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
    """Partition a dataset into shards, one folder each, as `hopline partition` does.

    It is exported as `hl.shards.cut`. `cut` of this module takes a partition that is already made.

    Memory grows with the nodes, and with `how="metis"` with the edges. Shards that are in the folder
    already are replaced in one step.

    Args:
        data: The dataset.
        folder: For the shards.
        num_shards: One for each rank that will train.
        how: "metis" leaves fewest edges between shards, "streaming" takes a graph of any size, "random" and
            "range" (by node id) do not read the edges.
        labels: [num_nodes] integers, a community per node, in place of `how`.
        seed: Of "metis", "streaming" and "random".
        show: Whether to show progress.

    Raises:
        ValueError: There are fewer nodes than shards, `how` is not known, or METIS is not installed.

    Example:
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.ones(4, 2))
        >>> hl.shards.cut(data, "shards", 2, how="range")
        >>> hl.shards.open_shard("shards", rank=1).num_own
        2
    """
    partition = make_partition(data.graph, num_shards, how, labels, seed, show=show)
    cut(data, partition, folder, show=show)


def cut(data: Dataset, partition: Partition, folder: str | os.PathLike[str], *, show: bool = False) -> None:
    """Write a dataset as one shard per part. Shards that the folder holds are replaced in one step.

    Raises:
        ValueError: The partition has another number of nodes, or the shards cannot be written.
    """
    if partition.num_nodes != data.num_nodes:
        raise ValueError(
            f"the partition is of {partition.num_nodes} nodes, the dataset has {data.num_nodes}: "
            "make it by make_partition(data.graph, ...)"
        )
    check_edges(data.graph)
    num_shards = partition.num_parts
    # `writing` turns an OSError, such as a full disk, into a ValueError that says what to do.
    with FolderWriter(folder) as out, writing(out.folder):
        writer = _ShardWriter(data, partition, out.scratch(), show)
        writer.deal()
        halos = [writer.find_halo(rank) for rank in range(num_shards)]
        about = {
            "version": VERSION,
            "cut": _cut_id(data, partition),
            "num_shards": num_shards,
            "num_nodes": data.num_nodes,
            "num_edges": data.num_edges,
        }
        with progress("writing shards", data.num_edges, "edges", enabled=show) as bar:
            for rank in range(num_shards):
                halo = halos[rank]
                num_own = int(writer.ptr[rank + 1] - writer.ptr[rank])
                num_own_edges = int(halo.edge_counts.sum())
                with FolderWriter(out.temporary / shard_name(rank)) as shard:
                    columns = writer.write_nodes(shard, rank)
                    writer.write_halo(shard, rank, halos)
                    writer.write_edges(shard, rank, halo, bar)
                    _commit(shard, data, num_own, num_own_edges, columns, {**about, "rank": rank})
                writer.delete_scratch(rank)

        out.add("ptr", writer.ptr)
        out.add("edge_counts", torch.stack([halo.edge_counts for halo in halos]))
        out.add("halo_counts", torch.stack([halo.ptr.diff() for halo in halos]))
        about |= {"how": partition.how, "settings": dict(partition.settings)}
        _commit(out, data, data.num_nodes, data.num_edges, {}, about)


def _cut_id(data: Dataset, partition: Partition) -> str:
    """A hash of the partition and of everything in the dataset. Shards with the same hash fit together."""
    digest = hashlib.blake2b(fingerprint(data).encode(), digest_size=16)
    digest.update(as_bytes(partition.part_of))
    return digest.hexdigest()


def _commit(
    out: FolderWriter,
    data: Dataset,
    num_nodes: int,
    num_edges: int,
    columns: dict[str, int],
    about: dict[str, Any],
) -> None:
    """Write the manifest of a folder and put the folder in place.

    columns: by table, the number of columns of a sparse one, and -1 of a dense one.
    about: the manifest's record about shards (`shard.read_shard_record`).
    """
    out.commit(
        name=data.name,
        num_nodes=num_nodes,
        num_edges=num_edges,
        task=data.task,
        num_classes=data.num_classes,
        num_splits=len(data.all_splits),
        tables=columns,
        meta={**data.meta, SHARDS: about},
    )


@dataclass(frozen=True)
class _Halo:
    """The sources of one shard's edges that other shards own."""

    positions: Tensor
    """[num_halo] int64, ascending and therefore by owner. A memory-mapped scratch file."""
    ptr: Tensor
    """[num_shards + 1] int64: positions[ptr[s]:ptr[s + 1]] belong to shard s."""
    edge_counts: Tensor
    """[num_shards] int64: the number of edges from each shard, the own one included."""


class _RowFiles:
    """Scratch files of rows, one per array and receiver. Rows are appended, and read back by memory map."""

    def __init__(self, folder: Path, num_receivers: int) -> None:
        self.folder = folder
        self.num_receivers = num_receivers
        self._templates: dict[str, Tensor] = {}
        """By array: a tensor without rows, in the dtype and row shape of the array."""
        self._sizes: dict[str, list[int]] = {}
        folder.mkdir(exist_ok=True)

    def deal(self, name: str, rows: Tensor, ptr: Tensor) -> None:
        """Append rows[ptr[r]:ptr[r + 1]] to the file of each receiver r. ptr: [num_receivers + 1]."""
        for receiver, (first, stop) in enumerate(itertools.pairwise(ptr.tolist())):
            self.append(name, receiver, rows[first:stop])

    def append(self, name: str, receiver: int, rows: Tensor) -> None:
        """Append rows to the file of one receiver."""
        if name not in self._templates:
            self._templates[name] = rows.new_empty((0, *rows.shape[1:]))
            self._sizes[name] = [0] * self.num_receivers
        if rows.size(0):
            with self._path(name, receiver).open("ab") as file:
                file.write(as_bytes(rows.contiguous()))
            self._sizes[name][receiver] += rows.size(0)

    def read(self, name: str, receiver: int) -> Tensor:
        """All rows of one receiver, memory-mapped."""
        template = self._templates[name]
        shape = torch.Size((self._sizes[name][receiver], *template.shape[1:]))
        if not shape.numel():  # an empty file cannot be mapped
            return template.new_empty(shape)
        with self._path(name, receiver).open("rb") as file:
            # By its descriptor, since torch takes no path that is not UTF-8. Not by Python's `mmap`, which would
            # keep a descriptor open for each of many shards.
            path = f"/dev/fd/{file.fileno()}"
            return torch.from_file(path, shared=False, size=shape.numel(), dtype=template.dtype).view(shape)

    def names(self) -> set[str]:
        return set(self._templates)

    def delete(self, name: str, receiver: int) -> None:
        self._path(name, receiver).unlink(missing_ok=True)

    def _path(self, name: str, receiver: int) -> Path:
        return self.folder / f"{name}-{receiver}"


class _ShardWriter:
    """The steps in which a dataset becomes shards, and the arrays that they share. Used once, by `cut`.

    It owns the files in `scratch`. The dataset and the folders that it writes belong to the caller.
    """

    def __init__(self, data: Dataset, partition: Partition, scratch: Path, show: bool) -> None:
        self.data = data
        self.part_of = partition.part_of
        self.ptr = partition.ptr
        self.show = show
        self.num_shards = partition.num_parts
        self.position = _positions(partition)
        self.src_idx_by_position = torch.zeros(data.num_nodes, dtype=torch.int32)
        """[num_nodes] int32, by position: `src_idx` of edges from that node, in the shard being written.

        For a node of the halo it is the index among the halo nodes of the same owner. For an own node it is
        the local row. Positions that the shard does not read hold leftovers of earlier shards."""
        self.scratch = scratch
        self.row_files = _RowFiles(scratch / "dealt", self.num_shards)

    # ---- one scan over everything

    def deal(self) -> None:
        """Append the rows of every node to the files of its shard, in the order of node ids."""
        data = self.data
        graph = data.graph
        with progress("dealing edges", data.num_edges, "edges", enabled=self.show) as bar:
            for first, last in node_ranges(graph.indptr, CHUNK):
                self._deal_edges(graph, first, last)
                bar.advance(int(graph.indptr[last] - graph.indptr[first]))
        rows_by_name: dict[str, Table | Tensor] = {f"table.{name}": table for name, table in data.tables.items()}
        if data.y is not None:
            rows_by_name["y"] = data.y
        with progress("dealing rows", len(rows_by_name) * data.num_nodes, "rows", enabled=self.show) as bar:
            for name, all_rows in rows_by_name.items():
                self._deal_rows(name, all_rows, bar)
        for k, split in enumerate(data.all_splits):
            for name, ids in split.items():
                ptr, order = ops.group_by_key(self.part_of[ids], self.num_shards)
                self.row_files.deal(f"split.{k}.{name}", ids[order], ptr)

    def _deal_edges(self, graph: Graph, first: int, last: int) -> None:
        """Deal the nodes first .. last - 1 and their in-edges."""
        node_ptr, order = ops.group_by_key(self.part_of[first:last], self.num_shards)
        nodes = order + first
        # edge_ids index the dataset's edge arrays.
        starts, edge_ids = ops.row_entries(graph.indptr, nodes)
        edge_ptr = starts[node_ptr]
        self.row_files.deal("nodes", nodes, node_ptr)
        self.row_files.deal("degrees", starts.diff(), node_ptr)
        self.row_files.deal("first_edges", graph.indptr[nodes], node_ptr)
        sources = ops.gather_rows(self.position, ops.gather_rows(graph.indices, edge_ids))
        self.row_files.deal("sources", sources, edge_ptr)
        for name, array in graph.edge.items():
            self.row_files.deal(f"edge.{name}", ops.gather_rows(array, edge_ids), edge_ptr)

    def _deal_rows(self, name: str, all_rows: Table | Tensor, bar: Progress) -> None:
        """Deal the rows of a table, or the labels, of all nodes."""
        # An upper bound: 8 bytes per element, and 8 for the node's id.
        row_bytes = 8 * (1 + math.prod(all_rows.shape[1:]))
        num_rows = max(1, min(CHUNK, BYTES_AT_ONCE // row_bytes))
        for ids in torch.arange(self.data.num_nodes).split(num_rows):
            ptr, order = ops.group_by_key(self.part_of[int(ids[0]) : int(ids[-1]) + 1], self.num_shards)
            nodes = ids[order]
            if isinstance(all_rows, SparseTable):
                starts, columns, values = all_rows.read_csr(nodes)
                self.row_files.deal(f"{name}.counts", starts.diff(), ptr)
                self.row_files.deal(f"{name}.columns", columns, starts[ptr])
                self.row_files.deal(f"{name}.values", values, starts[ptr])
            else:
                rows = ops.gather_rows(all_rows, nodes) if isinstance(all_rows, Tensor) else all_rows.read(nodes)
                self.row_files.deal(name, rows, ptr)
            bar.advance(ids.numel())

    # ---- one shard after the other

    def find_halo(self, rank: int) -> _Halo:
        """The sources of a shard's edges that other shards own."""
        is_source = torch.zeros(self.data.num_nodes, dtype=torch.bool)
        edge_counts = torch.zeros(self.num_shards, dtype=torch.int64)
        for sources in self.row_files.read("sources", rank).split(CHUNK):
            is_source[sources.long()] = True
            edge_counts += torch.bincount(self._owners(sources), minlength=self.num_shards)
        is_source[int(self.ptr[rank]) : int(self.ptr[rank + 1])] = False
        # Memory-mapped and not in memory: the halos of all shards are held until the last shard is written.
        self.row_files.append("halo", rank, is_source.nonzero().view(-1))
        positions = self.row_files.read("halo", rank)
        return _Halo(positions, torch.searchsorted(positions, self.ptr), edge_counts)

    def _owners(self, positions: Tensor) -> Tensor:
        """[n] int64: the shards that own the nodes at some positions."""
        return torch.bucketize(positions, self.ptr[1:-1], right=True)

    def write_nodes(self, out: FolderWriter, rank: int) -> dict[str, int]:
        """Write ids, tables, labels and splits of a shard's own nodes.

        Returns, by table, the number of columns of a sparse one, and -1 of a dense one.
        """
        out.add("ptr", self.ptr)
        out.add("nodes", self.row_files.read("nodes", rank))
        columns: dict[str, int] = {}
        for name, table in self.data.tables.items():
            if isinstance(table, SparseTable):
                columns[name] = table.num_columns
                out.add(f"table.{name}.indptr", _starts(self.row_files.read(f"table.{name}.counts", rank)))
                for array in ("columns", "values"):
                    out.add(f"table.{name}.{array}", self.row_files.read(f"table.{name}.{array}", rank))
            else:
                columns[name] = -1
                out.add(f"table.{name}", self.row_files.read(f"table.{name}", rank))
        if self.data.y is not None:
            out.add("y", self.row_files.read("y", rank))
        for k, split in enumerate(self.data.all_splits):
            for name in split:
                out.add(f"split.{k}.{name}", self.row_files.read(f"split.{k}.{name}", rank))
        return columns

    def write_halo(self, out: FolderWriter, rank: int, halos: list[_Halo]) -> None:
        """Write which rows of each peer this shard reads, and which of its own rows each peer reads."""
        halo = halos[rank]
        out.add("halo_ptr", halo.ptr)
        out.array("halo_rows", torch.int64)
        out.array("halo_nodes", torch.int64)
        out.array("send_rows", torch.int64)
        for peer, peer_halo in enumerate(halos):
            rows = halo.positions[int(halo.ptr[peer]) : int(halo.ptr[peer + 1])] - self.ptr[peer]
            out.append("halo_rows", rows)
            out.append("halo_nodes", ops.gather_rows(self.row_files.read("nodes", peer), rows))
            sent_positions = peer_halo.positions[int(peer_halo.ptr[rank]) : int(peer_halo.ptr[rank + 1])]
            out.append("send_rows", sent_positions - self.ptr[rank])
        send_counts = torch.stack([peer_halo.ptr[rank + 1] - peer_halo.ptr[rank] for peer_halo in halos])
        out.add("send_ptr", _starts(send_counts))

    def write_edges(self, out: FolderWriter, rank: int, halo: _Halo, bar: Progress) -> None:
        """Write the in-edges of a shard's nodes, grouped by the owner of their source.

        Edges are numbered group after group, from 0 over all groups. The array `at` lists these numbers in
        the order of destinations, and for each destination in the dataset's order.
        """
        own_range = slice(int(self.ptr[rank]), int(self.ptr[rank + 1]))
        self.src_idx_by_position[own_range] = torch.arange(own_range.stop - own_range.start, dtype=torch.int32)
        for first, stop in itertools.pairwise(halo.ptr.tolist()):
            self.src_idx_by_position[halo.positions[first:stop]] = torch.arange(stop - first, dtype=torch.int32)

        indptr = _starts(self.row_files.read("degrees", rank))
        part_ptr = _starts(halo.edge_counts)
        out.add("indptr", indptr)
        out.add("part_ptr", part_ptr)
        # int32 if the numbers fit. The + 1 is not needed: it matters at 2**31 - 1 edges alone.
        out.array("at", index_dtype(int(indptr[-1]) + 1))
        # Degrees within each group, shifted by one. Their cumulative sum is the indptr of each group.
        counts = torch.zeros(self.num_shards, indptr.numel(), dtype=torch.int64)
        group_files = _RowFiles(self.scratch / "groups", self.num_shards)
        next_numbers = part_ptr[:-1].clone()
        for first, last in node_ranges(indptr, CHUNK):
            chunk_counts = counts[:, first + 1 : last + 1]
            group_ptr, numbers = self._group(rank, indptr, first, last, group_files, chunk_counts, next_numbers)
            out.append("at", numbers)
            next_numbers += group_ptr.diff()
            bar.advance(numbers.numel())
        out.add("part_indptr", counts.cumsum_(1))

        for name in ("src_idx", "edge_ids", *(f"edge.{name}" for name in self.data.graph.edge)):
            groups = [group_files.read(name, peer) for peer in range(self.num_shards)]
            out.array(name, groups[0].dtype, tuple(groups[0].shape[1:]))
            for group in groups:
                out.append(name, group)
        shutil.rmtree(group_files.folder)

    def _group(
        self,
        rank: int,
        indptr: Tensor,
        first: int,
        last: int,
        group_files: _RowFiles,
        counts: Tensor,
        next_numbers: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Append the in-edges of the own nodes first .. last - 1 to the files of their groups.

        indptr: [num_own + 1] int64.
        counts: [num_shards, last - first] int64, the edges of each node in each group. Added to in place.
        next_numbers: [num_shards] int64, the number that the next edge of each group gets.

        Returns ([num_shards + 1] int64, offsets of the groups among these edges; [n] int64, the number of
        each edge).
        """
        start = int(indptr[first])
        stop = int(indptr[last])
        sources = self.row_files.read("sources", rank)[start:stop]
        owners = self._owners(sources)
        group_ptr, order = ops.group_by_key(owners, self.num_shards)
        degrees = indptr[first : last + 1].diff()
        rows = torch.repeat_interleave(torch.arange(last - first), degrees)
        counts += torch.bincount(owners * (last - first) + rows, minlength=counts.numel()).view(counts.shape)

        group_files.deal("src_idx", ops.gather_rows(self.src_idx_by_position, sources[order]), group_ptr)
        # A node's edges are consecutive both in the dataset and in the scratch files, in the same order. So
        # an edge's id in the dataset is its index in the scratch files plus a constant of the node.
        id_offsets = self.row_files.read("first_edges", rank)[first:last] - indptr[first:last]
        group_files.deal("edge_ids", (torch.arange(start, stop) + id_offsets[rows])[order], group_ptr)
        for name in self.data.graph.edge:
            edge_rows = ops.gather_rows(self.row_files.read(f"edge.{name}", rank), order + start)
            group_files.deal(f"edge.{name}", edge_rows, group_ptr)

        # i counts all edges of this chunk in the order of groups. Edge i, in group g, is the
        # (i - group_ptr[g])-th of its group in this chunk. So its number is
        # next_numbers[g] + i - group_ptr[g].
        numbers = torch.empty_like(order)
        offsets = torch.repeat_interleave(next_numbers - group_ptr[:-1], group_ptr.diff())
        numbers[order] = torch.arange(stop - start) + offsets
        return group_ptr, numbers

    def delete_scratch(self, rank: int) -> None:
        """Delete the scratch files of a written shard. Later shards still read its nodes and its halo."""
        for name in self.row_files.names() - {"nodes", "halo"}:
            self.row_files.delete(name, rank)


def _positions(partition: Partition) -> Tensor:
    """[num_nodes] int32 or int64: each node's position.

    `partition.position` has the same values, but would stay in memory as long as the partition does.
    """
    _, order = ops.group_by_key(partition.part_of, partition.num_parts)
    position = torch.empty(order.numel(), dtype=index_dtype(order.numel()))
    position[order] = torch.arange(order.numel(), dtype=position.dtype)
    return position


def _starts(counts: Tensor) -> Tensor:
    """[n + 1] int64: the cumulative sum of counts [n], with a 0 before it."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
