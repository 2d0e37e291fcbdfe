"""Edge lists into datasets: in memory, or in chunks straight into a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from io import BufferedRandom
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hopline import ops
from hopline.core.graph import Graph
from hopline.data.arrays import as_bytes
from hopline.data.dataset import Dataset, as_table
from hopline.data.edges import (
    Edges,
    EdgeSource,
    check_same_arrays,
    common_dtype,
    edge_chunks,
    empty_edges,
    exactly,
    group,
    index_dtype,
    join,
    prepare,
)
from hopline.data.nodes import NodeData, node_data
from hopline.data.options import EdgeOptions, edge_options
from hopline.data.paths import default_name
from hopline.data.splits import draw_split
from hopline.data.store import open_folder, write_nodes
from hopline.data.writer import FolderWriter, writing
from hopline.tasks.kinds import LabelKind
from hopline.util.progress import progress

MAX_IDLE_RATIO = 1000
"""Nodes per edge beyond which ids are taken for names rather than numbers, unless num_nodes= says otherwise."""
NUM_BUCKETS = 1 << 12
"""Destination ranges into which each run is cut; they are joined again into groups of one chunk's size."""
WIDENED_ROWS = 1 << 20
"""Rows of an edge array that are held in memory when its type changes."""


def from_edges(
    edges: EdgeSource,
    *,
    folder: str | os.PathLike[str] | None = None,
    num_nodes: int | None = None,
    edge: Mapping[str, Any] | None = None,
    x: Any = None,
    tables: Mapping[str, Any] | None = None,
    y: Any = None,
    splits: Mapping[str, Any] | None = None,
    task: LabelKind | None = None,
    num_classes: int | None = None,
    name: str | None = None,
    meta: Mapping[str, Any] | None = None,
    split: int = 0,
    split_shares: Sequence[float] | None = None,
    **options: Any,
) -> Dataset:
    """Make a dataset from edges and what is known about the nodes.

    With `folder` the graph is grouped on disk in bounded memory and opened from there.

    Args:
        edges: [2, num_edges] of integers, sources first; or an `.npy` file of them; or an iterable of such chunks.
        folder: Write the dataset there. Default: keep it in memory.
        num_nodes: Default: the number of rows of `x`, `tables` or `y`, else one more than the largest id.
        edge: Edge arrays by name, such as "weight" [num_edges] or "attr" [num_edges, d].
        x: [num_nodes, num_features] features: a tensor, an array, a SciPy or torch sparse matrix, or a `Table`.
            Integers become float32.
        tables: Further rows per node, by name.
        y: [num_nodes] class numbers, -1 for none; [num_nodes, num_labels] of zeros and ones; or numbers to predict,
            [num_nodes] or [num_nodes, k], NaN for none.
        splits: "train", "valid" and "test" as ids or bool masks; masks [num_nodes, k] are k splits.
        task: Kind of labels: "single", "multi", "binary" or "regression". Default: whole numbers are classes, zeros
            and ones with two dimensions are several labels, also as floats, and other floats are a regression.
        num_classes: Default: one more than the largest class; in a regression the numbers per node.
        name: Default: the folder's.
        meta: Where the dataset comes from, in plain JSON values.
        split: Which of several splits is the current one.
        split_shares: Shares of train, valid and test nodes, drawn as by `random_split`, in place of `splits`.
        options: symmetrize=, self_loops= ("keep", "remove", "add"), duplicates= ("keep", "remove"), chunk_edges=.

    Returns:
        The dataset, in memory or mapped from `folder`.

    Raises:
        ValueError: An id is out of range, an array has the wrong number of rows, a value is not finite, or an option
            does not exist.

    Example:
        >>> edges = torch.tensor([[0, 1, 2], [1, 2, 3]])
        >>> data = hl.from_edges(edges, x=torch.ones(4, 2), y=torch.tensor([0, 1, 0, 1]), symmetrize=True)
        >>> data
        Dataset('graph', 4 nodes, 6 symmetric edges, 2 features, 2 classes, ...)
    """
    how = edge_options(options)
    count = _count_nodes(edges, num_nodes, [x, *(tables or {}).values(), y], how)
    own_splits = splits if split_shares is None else None
    nodes = node_data(count, x=x, tables=tables, y=y, splits=own_splits, task=task, num_classes=num_classes)
    name = name or default_name(folder, "graph")
    about = dict(meta or {})
    if how.symmetrize:
        about["symmetric"] = True
    if split_shares is not None:
        drawn, about["split"] = draw_split(nodes.y, split_shares)
        nodes = replace(nodes, all_splits=(drawn,))
    if folder is not None:
        _write(edges, edge, nodes, how, folder, name, about)
        return open_folder(folder, split=split)
    degrees, grouped = group(join(list(_prepared(edges, edge, count, how)), count), 0, count, how)
    indptr = torch.zeros(count + 1, dtype=torch.int64)
    torch.cumsum(degrees, 0, out=indptr[1:])
    dataset = Dataset(
        name=name,
        graph=Graph(indptr, grouped.src, grouped.edge),
        tables=nodes.tables,
        y=nodes.y,
        splits=nodes.all_splits[0] if nodes.all_splits else {},
        alternatives=nodes.all_splits if len(nodes.all_splits) > 1 else (),
        task=nodes.task,
        num_classes=nodes.num_classes,
        meta=about,
    )
    return dataset.with_split(split)


def _count_nodes(edges: EdgeSource, num_nodes: int | None, rows: list[Any], options: EdgeOptions) -> int:
    """The number of nodes: given, or that of the rows, or one more than the largest id."""
    if num_nodes is not None:
        if num_nodes < 1:
            raise ValueError(f"num_nodes is {num_nodes}: give a positive number.")
        return num_nodes
    for table in rows:
        if table is None:
            continue
        shape = getattr(table, "shape", None)
        return len(as_table(table)) if not shape else int(shape[0])  # which refuses a single number
    if isinstance(edges, Iterator):
        raise ValueError("The number of nodes is not known before the last chunk: give num_nodes=.")
    largest, num_edges = -1, 0
    for index, _ in edge_chunks(edges, None, options.chunk_edges):
        largest = max(largest, int(index.max()) if index.numel() else -1)
        num_edges += index.size(1)
    if largest < 0:
        raise ValueError("There are no edges, so the number of nodes is not known: give num_nodes=.")
    if largest > MAX_IDLE_RATIO * (num_edges + 1):
        raise ValueError(
            f"Node ids go up to {largest} for only {num_edges} edges: number the nodes from 0 (for a CSV or Parquet "
            f"file ids=map does it), or say that it is meant with num_nodes={largest + 1}."
        )
    return largest + 1


def _prepared(
    edges: EdgeSource,
    edge: Mapping[str, Any] | None,
    num_nodes: int,
    options: EdgeOptions,
    *,
    shown: bool = False,
) -> Iterator[Edges]:
    """Checked and completed chunks, with progress."""
    offset = 0
    total = edges.shape[1] if hasattr(edges, "shape") else None
    with progress("reading edges", total, "edges", enabled=shown) as bar:
        for index, arrays in edge_chunks(edges, edge, options.chunk_edges):
            yield prepare(index, arrays, num_nodes, offset, options)
            offset += index.size(1)
            bar.advance(index.size(1))


def _write(
    edges: EdgeSource,
    edge: Mapping[str, Any] | None,
    nodes: NodeData,
    options: EdgeOptions,
    folder: str | os.PathLike[str],
    name: str,
    meta: dict[str, Any],
) -> None:
    with FolderWriter(folder) as out:
        columns = write_nodes(out, nodes.tables, nodes.y, nodes.all_splits)
        with Runs(out.scratch(), nodes.num_nodes) as runs:
            for piece in _prepared(edges, edge, nodes.num_nodes, options, shown=True):
                with writing(out.folder):
                    runs.add(piece)
            num_edges = write_graph(out, runs, options)
        out.commit(
            name=name,
            num_nodes=nodes.num_nodes,
            num_edges=num_edges,
            task=nodes.task,
            num_classes=nodes.num_classes,
            num_splits=len(nodes.all_splits),
            tables=columns,
            meta=meta,
        )


def write_graph(out: FolderWriter, runs: Runs, options: EdgeOptions) -> int:
    """Group the edges of all runs, a range of destinations at a time; returns how many there are."""
    out.array("indptr", torch.int64)
    out.array("indices", index_dtype(runs.num_nodes))
    for name, sample in runs.sample.edge.items():
        out.array(f"edge.{name}", sample.dtype, tuple(sample.shape[1:]))
    out.append("indptr", torch.zeros(1, dtype=torch.int64))
    total = 0
    with progress("grouping edges", runs.num_edges, "edges") as bar:
        for first, last in runs.groups(options.chunk_edges):
            low, high = first * runs.width, min(last * runs.width, runs.num_nodes)
            piece = runs.read(first, last)
            bar.advance(piece.src.numel())
            degrees, piece = group(piece, low, high, options)
            out.append("indptr", degrees.cumsum(0) + total)
            out.append("indices", piece.src)
            for name, array in piece.edge.items():
                out.append(f"edge.{name}", array)
            total += piece.src.numel()
    return total


class Runs:
    """Edges on disk as runs: each run is one chunk, ordered by the destination range its edges fall in.

    One file per column; the edges of neighbouring ranges lie together in every run, so any group of ranges
    takes one read per run.
    """

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder = folder
        self.num_nodes = num_nodes
        self.num_edges = 0
        self.width = max(1, -(-num_nodes // NUM_BUCKETS))
        self.num_buckets = -(-num_nodes // self.width)
        self.sample = empty_edges(num_nodes)
        self._starts: list[Tensor] = []
        self._files: list[BufferedRandom] = []

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            with suppress(OSError):  # on a full disk, what is still buffered does not fit either
                file.close()

    def add(self, edges: Edges) -> None:
        """Append one run."""
        if not self._starts:
            self.sample = Edges(edges.src[:0], edges.dst[:0], {n: a[:0] for n, a in edges.edge.items()})
            names = ["src", "dst", *(f"edge.{name}" for name in edges.edge)]
            self._files = [(self.folder / name).open("w+b") for name in names]
        check_same_arrays(self.sample, edges)
        for name, array in edges.edge.items():
            self._widen(name, array.dtype)
        starts, order = ops.group_by_key(edges.dst // self.width, self.num_buckets)
        # By name: the arrays of a chunk may come in another order.
        arrays = [exactly(edges.edge[name], sample.dtype, name) for name, sample in self.sample.edge.items()]
        for file, column in zip(self._files, [edges.src, edges.dst, *arrays], strict=True):
            file.write(as_bytes(column[order]))
            file.flush()
        self._starts.append(starts + self.num_edges)
        self.num_edges += edges.src.numel()

    def _widen(self, name: str, dtype: torch.dtype) -> None:
        """Write an edge array anew if the next chunk has fractions where all so far had whole numbers."""
        sample = self.sample.edge[name]
        new_dtype = common_dtype([sample.dtype, dtype])
        if new_dtype == sample.dtype:
            return
        column = 2 + list(self.sample.edge).index(name)
        new = (self.folder / f"edge.{name}.{new_dtype}").open("w+b")
        with self._files[column] as old:
            self._files[column] = new
            old.seek(0)
            for start in range(0, self.num_edges, WIDENED_ROWS):
                piece = torch.empty((min(WIDENED_ROWS, self.num_edges - start), *sample.shape[1:]), dtype=sample.dtype)
                old.readinto(as_bytes(piece))
                new.write(as_bytes(exactly(piece, new_dtype, name)))
        self.sample.edge[name] = sample.to(new_dtype)

    def groups(self, limit: int) -> Iterator[tuple[int, int]]:
        """Ranges of buckets with at most `limit` edges and nodes each (one bucket at least)."""
        sizes = torch.zeros(self.num_buckets, dtype=torch.int64)
        for starts in self._starts:
            sizes += starts.diff()
        first, held = 0, 0
        for bucket, size in enumerate(sizes.tolist()):
            if bucket > first and (held + size > limit or (bucket + 1 - first) * self.width > limit):
                yield first, bucket
                first, held = bucket, 0
            held += size
        if first < self.num_buckets:
            yield first, self.num_buckets

    def read(self, first: int, last: int) -> Edges:
        """All edges into the buckets first .. last - 1, in the order of their chunks."""
        spans = [(int(starts[first]), int(starts[last])) for starts in self._starts]
        total = sum(stop - start for start, stop in spans)
        columns = []
        for i, sample in enumerate([self.sample.src, self.sample.dst, *self.sample.edge.values()]):
            column = torch.empty((total, *sample.shape[1:]), dtype=sample.dtype)
            row_bytes = sample.dtype.itemsize * column[:1].numel() if total else 0
            filled = 0
            for start, stop in spans:
                self._files[i].seek(start * row_bytes)
                self._files[i].readinto(as_bytes(column[filled : filled + stop - start]))
                filled += stop - start
            columns.append(column)
        return Edges(columns[0], columns[1], dict(zip(self.sample.edge, columns[2:], strict=True)))
