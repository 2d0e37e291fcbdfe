"""`Shard`: one shard of a dataset on disk, memory-mapped.

A rank opens its own shard and needs no other. The folder of a shard holds arrays (docs/shards.md), which
`open_shard` maps and arranges:

    nodes, indptr, at          in-edges of the own nodes, in the dataset's order: for sampling
    part_ptr, part_indptr,     the same edges grouped by the owner of their sources: for `ShardLayout`,
    src_idx, edge_ids, edge.*  whose parts are slices of these arrays
    halo_*                     rows that this shard reads from each other shard
    send_*                     rows that each other shard reads from this one
    table.*, y, split.*        rows, labels and splits of the own nodes

Edges are stored once, in groups. `at`, here `Shard.edge_numbers`, leads from the dataset's order to the
groups.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hopline import ops
from hopline.core.batch import Part
from hopline.data.manifest import Manifest, read_manifest
from hopline.data.paths import existing
from hopline.data.store import SHARDS, map_arrays, splits_of, tables_of
from hopline.distributed.agreement import Fact, check_same
from hopline.distributed.all_to_all import Channel
from hopline.shards.layout import ShardLayout
from hopline.tables import Table
from hopline.tasks.kinds import LabelKind
from hopline.tasks.labels import LABELS
from hopline.tasks.settings import METRICS_OF

VERSION = 1
"""Version of the format of shards. Those of another version are refused."""
ADVICE = "cut the dataset again by `hopline partition`"
"""What to do about shards that are damaged or do not fit together: the end of their error messages."""


def shard_name(rank: int) -> str:
    return f"shard-{rank}"


def node_ranges(indptr: Tensor, limit: int) -> Iterator[tuple[int, int]]:
    """Split the nodes into ranges (first, stop) of at most `limit` nodes and about `limit` edges.

    indptr: [num_nodes + 1] int64. A node with more than `limit` edges makes a range larger.
    """
    num_nodes = indptr.numel() - 1
    by_edges = torch.searchsorted(indptr, torch.arange(0, int(indptr[-1]), limit))
    by_nodes = torch.arange(0, num_nodes, limit)
    bounds = torch.cat([by_edges, by_nodes, torch.tensor([num_nodes])]).unique()
    yield from itertools.pairwise(bounds.tolist())


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Shard:
    """The nodes that one rank owns: their in-edges, rows, labels and splits.

    `open_shard` makes one. Ids are the dataset's. A node's *position* is its number if the nodes of all
    shards are counted shard after shard: shard s has the positions ptr[s] .. ptr[s + 1] - 1, by ascending
    id.

    Edges are stored in groups, by the owner of their sources: those from shard 0, then from shard 1, and so
    on. The *number* of an edge is its index in this order.

    Example:
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.ones(4, 2))
        >>> hl.shards.cut(data, "shards", 2, how="range")
        >>> shard = hl.shards.open_shard("shards", rank=1)
        >>> shard
        Shard(1 of 2 of 'graph', 2 of 4 nodes, 2 of 4 edges, 1 nodes of others)
        >>> shard.nodes.tolist(), shard.tables["x"].shape
        ([2, 3], (2, 2))
    """

    name: str
    """Name of the dataset."""
    layout: ShardLayout
    """The edges of this shard in parts, by round, and the rows that travel between the shards."""
    num_nodes: int
    """Nodes of all shards."""
    num_edges: int
    """Edges of all shards."""
    indptr: Tensor
    """[num_own + 1] int64: own node i has the edges edge_numbers[indptr[i]:indptr[i + 1]], in the dataset's order."""
    edge_numbers: Tensor
    """[num_own_edges] int32 or int64: the edges' numbers, by destination and in the dataset's order."""
    part_ptr: Tensor
    """[num_shards + 1] int64: edges from shard s have the numbers part_ptr[s] .. part_ptr[s + 1] - 1."""
    src_idx: Tensor
    """[num_own_edges] int32, by number: the source's index among the halo nodes of its owner. For an own
    node it is the local row."""
    edge_ids: Tensor
    """[num_own_edges] int64, by number: the edge's position in the dataset's edge arrays."""
    edge: dict[str, Tensor]
    """[num_own_edges, ...] each, by number: the dataset's edge arrays at these edges, by name."""
    halo_ptr: Tensor
    """[num_shards + 1] int64: halo nodes halo_ptr[s] .. halo_ptr[s + 1] - 1 belong to shard s."""
    halo_nodes: Tensor
    """[num_halo] int64: ids of the halo, the nodes of other shards that edges read, by owner."""
    halo_positions: Tensor
    """[num_halo] int64: positions of the halo nodes, in the order of `halo_nodes`."""
    tables: dict[str, Table] = field(default_factory=dict)
    """By name: a table with one row per own node."""
    y: Tensor | None = None
    """[num_own, ...] labels of the own nodes; None if the dataset has none."""
    splits: dict[str, Tensor] = field(default_factory=dict)
    """By name ("train", "valid", "test"): [n] int64, ascending ids of own nodes in the current split."""
    all_splits: tuple[dict[str, Tensor], ...] = ()
    """One dictionary like `splits` for every published split."""
    task: LabelKind = "single"
    """The kind of labels."""
    num_classes: int = 0
    """Number of classes, or of labels in the multi-label task."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Of the dataset: its origin, its feature columns and class names."""
    cut: str = ""
    """Hash of the dataset and the partition. Only shards of the same cut fit together."""
    folder: Path | None = None
    """The folder of this shard."""

    @property
    def rank(self) -> int:
        return self.layout.rank

    @property
    def num_shards(self) -> int:
        return self.layout.num_shards

    @property
    def ptr(self) -> Tensor:
        """[num_shards + 1] int64: shard s has the positions ptr[s] .. ptr[s + 1] - 1."""
        return self.layout.ptr

    @property
    def nodes(self) -> Tensor:
        """[num_own] int64: ids of the own nodes, ascending."""
        return self.layout.own_ids

    @property
    def num_own(self) -> int:
        return self.layout.num_own

    @property
    def num_features(self) -> int:
        """Width of the table "x"; 0 without one."""
        return self.tables["x"].shape[1] if "x" in self.tables else 0

    @property
    def num_outputs(self) -> int:
        """The number of values that a model predicts per node."""
        return LABELS[self.task].num_outputs(self.num_classes)

    @property
    def metric(self) -> str:
        """The metric that goes with the task."""
        return METRICS_OF[self.task][0]

    @property
    def labels(self) -> Tensor:
        """`y`, or ValueError if the dataset has no labels."""
        if self.y is None:
            raise ValueError(f"dataset {self.name!r} has no labels: cut one that has y")
        return self.y

    def rows_of(self, ids: Tensor) -> Tensor:
        """[n] int64: the local rows of some own nodes, given by their ids."""
        # The clamp keeps an id beyond the largest inside the array; the comparison below then refuses it.
        rows = torch.searchsorted(self.nodes, ids).clamp(max=self.num_own - 1)
        if not torch.equal(self.nodes[rows], ids):
            raise ValueError(f"a node is not of shard {self.rank}: give ids that are in shard.nodes")
        return rows

    def source_ids(self, edge_numbers: Tensor) -> Tensor:
        """[n] int64: the ids of the source nodes of some edges. The argument is that of `sources`."""
        owner = torch.bucketize(edge_numbers, self.part_ptr[1:-1], right=True)
        idx = ops.gather_rows(self.src_idx, edge_numbers).long()
        is_own = owner == self.rank
        ids = torch.empty_like(idx)
        ids[is_own] = ops.gather_rows(self.nodes, idx[is_own])
        ids[~is_own] = ops.gather_rows(self.halo_nodes, (idx + self.halo_ptr[owner])[~is_own])
        return ids

    def sources(self, edge_numbers: Tensor) -> Tensor:
        """[n] int64: the positions of the source nodes of some edges.

        edge_numbers: [n] int64, the numbers of the edges in this shard.
        """
        owner = torch.bucketize(edge_numbers, self.part_ptr[1:-1], right=True)
        idx = ops.gather_rows(self.src_idx, edge_numbers).long()
        own_positions = idx + self.ptr[self.rank]
        if not self.halo_positions.numel():
            return own_positions
        # Of an edge between own nodes, `idx` is a local row and not one of the halo: `where` drops the
        # position that is looked up for it. The clamp keeps that lookup inside the array.
        halo_idx = (idx + self.halo_ptr[owner]).clamp(max=self.halo_positions.numel() - 1)
        other_positions = ops.gather_rows(self.halo_positions, halo_idx)
        return torch.where(owner == self.rank, own_positions, other_positions)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the edges, rows and labels of this shard."""
        arrays = [self.indptr, self.edge_numbers, self.src_idx, self.edge_ids, *self.edge.values()]
        arrays += [part.indptr for part in self.layout.parts]
        if self.y is not None:
            arrays.append(self.y)
        return sum(a.nbytes for a in arrays) + sum(table.num_bytes for table in self.tables.values())

    def __repr__(self) -> str:
        return (
            f"Shard({self.rank} of {self.num_shards} of {self.name!r}, {self.num_own:,} of {self.num_nodes:,} nodes, "
            f"{self.edge_ids.numel():,} of {self.num_edges:,} edges, {self.halo_nodes.numel():,} nodes of others)"
        )


def is_shards(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds the shards of a dataset."""
    path = existing(Path(folder).expanduser())
    return (path / "manifest.json").is_file() and SHARDS in read_manifest(path).meta


def read_shard_record(folder: str | os.PathLike[str]) -> tuple[Path, Manifest, dict[str, Any]]:
    """(path, manifest, its record about shards) of a folder of shards, or of one shard.

    The record has "version", "cut", "num_shards", "num_nodes" and "num_edges". That of one shard has "rank"
    too.
    """
    path = existing(Path(folder).expanduser())
    if not path.is_dir():
        raise ValueError(f"there is no folder {folder}: make it by `hopline partition DATASET {folder} shards=N`")
    manifest = read_manifest(path)
    about = manifest.meta.get(SHARDS)
    if not isinstance(about, dict):
        raise ValueError(f"{folder} holds no shards: make some by `hopline partition {folder} OUT shards=N`")
    if about.get("version") != VERSION:
        raise ValueError(f"{folder} has version {about.get('version')}, this hopline reads {VERSION}: {ADVICE}")
    return path, manifest, about


def open_shard(folder: str | os.PathLike[str], rank: int, *, split: int = 0) -> Shard:
    """Open one shard of a folder made by `hopline partition`. The other shards may be missing.

    Args:
        folder: The folder of all shards, with a folder `shard-RANK` in it.
        rank: The number of the shard.
        split: Which published split is the current one, for datasets that have several.

    Returns:
        The shard, memory-mapped.

    Raises:
        ValueError: There is no such shard or split, or its arrays are damaged or of another version.

    Example:
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> hl.shards.cut(data, "shards", 2, how="range")
        >>> hl.shards.open_shard("shards", rank=0).nodes.tolist()
        [0, 1]
    """
    all_shards_path = existing(Path(folder).expanduser())
    shard_path = all_shards_path / shard_name(rank)
    if not shard_path.is_dir():
        _, _, about = read_shard_record(all_shards_path)
        num_shards = about["num_shards"]
        if 0 <= rank < num_shards:
            raise ValueError(f"there is no shard {rank} in {folder}: it is missing: copy it there")
        raise ValueError(
            f"there is no shard {rank} in {folder}, which has {num_shards}, numbered from 0 to {num_shards - 1}: start "
            f"one process per shard (devices={num_shards})"
        )
    path, manifest, about = read_shard_record(shard_path)
    if about["rank"] != rank:
        raise ValueError(f"{path} holds shard {about['rank']}: rename its folder to {shard_name(about['rank'])}")
    try:
        shard = _assemble(path, manifest, about)
    except KeyError as error:
        raise ValueError(f"the arrays of {path} do not fit together ({error} is missing): {ADVICE}") from error
    except (ValueError, RuntimeError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the arrays of {path} do not fit together ({reason}): {ADVICE}") from error
    # A dataset without splits can be opened with the default, split 0.
    num_splits = max(1, len(shard.all_splits))
    if not 0 <= split < num_splits:
        raise ValueError(f"{folder} has no split {split}: choose from 0 to {num_splits - 1}")
    return replace(shard, splits=shard.all_splits[split]) if shard.all_splits else shard


def _assemble(path: Path, manifest: Manifest, about: dict[str, Any]) -> Shard:
    """A shard from the arrays of its folder. Raises KeyError if one is missing. about: of `read_shard_record`."""
    arrays = map_arrays(path, manifest)
    halo_ptr = arrays["halo_ptr"]
    halo_rows = arrays["halo_rows"]
    owners = torch.repeat_interleave(torch.arange(about["num_shards"]), halo_ptr.diff())
    edge = {name.removeprefix("edge."): array for name, array in arrays.items() if name.startswith("edge.")}
    return Shard(
        name=manifest.name,
        layout=_layout(arrays, edge, about["rank"], about["num_shards"]),
        num_nodes=about["num_nodes"],
        num_edges=about["num_edges"],
        indptr=arrays["indptr"],
        edge_numbers=arrays["at"],
        part_ptr=arrays["part_ptr"],
        src_idx=arrays["src_idx"],
        edge_ids=arrays["edge_ids"],
        edge=edge,
        halo_ptr=halo_ptr,
        halo_nodes=arrays["halo_nodes"],
        halo_positions=halo_rows + arrays["ptr"][owners],
        tables=tables_of(manifest, arrays),
        y=arrays.get("y"),
        all_splits=tuple(splits_of(manifest, arrays)),
        task=manifest.task,
        num_classes=manifest.num_classes,
        meta={key: value for key, value in manifest.meta.items() if key != SHARDS},
        cut=about["cut"],
        folder=path,
    )


def _layout(arrays: dict[str, Tensor], edge: dict[str, Tensor], rank: int, num_shards: int) -> ShardLayout:
    """The layout, with slices of the mapped arrays as parts. Reads nothing of the size of the edges."""

    def part_from(shard: int) -> Part:
        numbers = slice(int(arrays["part_ptr"][shard]), int(arrays["part_ptr"][shard + 1]))
        edge_rows = {name: array[numbers] for name, array in edge.items()}
        return Part(arrays["part_indptr"][shard], arrays["src_idx"][numbers], edge_rows, arrays["edge_ids"][numbers])

    def rows_between(direction: str, shard: int) -> Tensor:
        """[n] int64: rows that this shard reads from another ("halo"), or the other from it ("send")."""
        if shard == rank:
            return torch.arange(arrays["nodes"].numel())
        ptr = arrays[f"{direction}_ptr"]
        return arrays[f"{direction}_rows"][int(ptr[shard]) : int(ptr[shard + 1])]

    senders = [(rank - k) % num_shards for k in range(num_shards)]
    receivers = [(rank + k) % num_shards for k in range(num_shards)]
    return ShardLayout(
        rank=rank,
        num_shards=num_shards,
        ptr=arrays["ptr"],
        own_ids=arrays["nodes"],
        parts=tuple(part_from(shard) for shard in senders),
        halos=tuple(rows_between("halo", shard) for shard in senders),
        sends=tuple(rows_between("send", shard) for shard in receivers),
        degrees=arrays["indptr"].diff(),
    )


def check_fits(shard: Shard, channel: Channel) -> None:
    """Refuse a shard that does not belong to this rank, before the first batch. Collective."""
    if shard.num_shards != channel.size:
        join_advice = ", or open all of them by hl.shards.join(folder)" if channel.size == 1 else ""
        raise ValueError(
            f"there are {shard.num_shards} shards and {channel.size} processes: start one process per shard "
            f"(devices={shard.num_shards}), or cut the dataset again with shards={channel.size}{join_advice}"
        )
    if shard.rank != channel.rank:
        raise ValueError(f"rank {channel.rank} has shard {shard.rank}: open shard {channel.rank} there")
    check_same(channel, {"the cut of the dataset": Fact("", checksum=shard.cut)})
