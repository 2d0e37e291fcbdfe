"""Edge lists: cut into chunks, checked, completed and grouped by destination."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from hopline import ops
from hopline.data.arrays import as_tensor, read_npy_header
from hopline.data.checks import check_finite
from hopline.data.options import EdgeOptions
from hopline.util.files import check_file

EdgeChunk = Any
"""Edges [2, n] (sources first) as a tensor or array, or (edges, {name: array with n rows})."""
EdgeSource = Any
"""Edges [2, E], an `.npy` file of them, or an iterable of chunks."""


class Edges(NamedTuple):
    """A piece of an edge list."""

    src: Tensor
    dst: Tensor
    edge: dict[str, Tensor]

    def select(self, which: Tensor) -> Edges:
        """The edges at these positions, or where this mask is true."""
        return Edges(self.src[which], self.dst[which], {name: a[which] for name, a in self.edge.items()})


def index_dtype(num_nodes: int) -> torch.dtype:
    """How node ids are stored: int32 as long as they fit."""
    return torch.int32 if num_nodes < 2**31 else torch.int64


def edge_chunks(
    source: EdgeSource, edge: Mapping[str, Any] | None, chunk_edges: int
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Cut any edge source into ([2, n], edge arrays) with n at most `chunk_edges`.

    edge: arrays over the edges of all chunks, beside those that come with the chunks.
    """
    whole = _edge_arrays(edge or {})
    if isinstance(source, str | Path):
        chunks: Iterable[EdgeChunk] = npy_edges(source, chunk_edges)
    else:
        chunks = [source] if isinstance(source, Tensor | np.ndarray) else source
    offset = 0
    for chunk in chunks:
        index, arrays = chunk if isinstance(chunk, tuple) and isinstance(chunk[1], Mapping) else (chunk, {})
        index = as_tensor(index, "edge_index")
        if index.dim() != 2 or index.size(0) != 2 or index.dtype.is_floating_point or index.dtype == torch.bool:
            raise ValueError(
                f"Edges must be whole numbers [2, E], sources first, not {list(index.shape)} {index.dtype}."
            )
        num_edges = index.size(1)
        columns = _edge_arrays(cast(Mapping[str, Any], arrays))
        for name, array in columns.items():
            if name in whole:
                raise ValueError(f"Edge array {name!r} comes with the chunks and by edge=: give one of them.")
            if array.size(0) != num_edges:
                raise _wrong_length(name, array, num_edges)
        columns |= {name: array[offset : offset + num_edges] for name, array in whole.items()}
        offset += num_edges
        for name, array in whole.items():
            if array.size(0) < offset:
                raise _wrong_length(name, array, offset)
        for start in range(0, num_edges, chunk_edges):
            stop = start + chunk_edges
            yield index[:, start:stop], {name: a[start:stop] for name, a in columns.items()}
    for name, array in whole.items():
        if array.size(0) != offset:
            raise _wrong_length(name, array, offset)


def _edge_arrays(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    found = {name: as_tensor(array, f"edge array {name!r}") for name, array in arrays.items()}
    for name, array in found.items():
        if not array.dim():
            raise ValueError(f"Edge array {name!r} is a single number: give one row per edge.")
    return found


def _wrong_length(name: str, array: Tensor, num_edges: int) -> ValueError:
    return ValueError(f"Edge array {name!r} has {array.size(0)} rows for {num_edges} edges: give one row per edge.")


def npy_edges(path: str | Path, chunk_edges: int) -> Iterator[Tensor]:
    """Chunks [2, n] of an `.npy` file of edges [2, E] or [E, 2]."""
    check_file(Path(path))
    # By plain reads, not by a map: mapped pages count as resident memory.
    with Path(path).open("rb") as file:
        try:
            shape, fortran, dtype = read_npy_header(file)
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}): write it again.") from error
        if len(shape) != 2 or 2 not in shape or fortran or dtype.kind not in "iu":
            raise ValueError(f"{path} must hold whole numbers [2, E] in C order, not {list(shape)} {dtype}.")
        start, by_row = file.tell(), shape[0] == 2
        num_edges = shape[1] if by_row else shape[0]
        for first in range(0, num_edges, chunk_edges):
            count = min(chunk_edges, num_edges - first)
            rows = []
            for row in range(2 if by_row else 1):
                position = row * num_edges + first if by_row else 2 * first
                file.seek(start + position * dtype.itemsize)
                rows.append(np.fromfile(file, dtype, count if by_row else 2 * count))
            if any(row.size != (count if by_row else 2 * count) for row in rows):
                raise ValueError(f"{path} is damaged (it ends before edge {first + count}): write it again.")
            yield as_tensor(np.stack(rows) if by_row else rows[0].reshape(count, 2).T, str(path))


def prepare(index: Tensor, edge: dict[str, Tensor], num_nodes: int, offset: int, options: EdgeOptions) -> Edges:
    """Check a chunk, then add reversed edges and drop self-loops as the options say."""
    if index.numel():
        low, high = (int(v) for v in index.aminmax())
        if low < 0 or high >= num_nodes:
            position = int(((index < 0) | (index >= num_nodes)).any(0).nonzero()[0])
            source, target = (int(v) for v in index[:, position])
            raise ValueError(
                f"Edge {offset + position} goes from {source} to {target}, but there are {num_nodes} nodes: "
                "correct it, give the right num_nodes, or number the nodes from 0."
            )
    for name, array in edge.items():
        check_finite(array, f"Edge array {name!r} (from edge {offset})")
    src, dst = index.to(index_dtype(num_nodes))
    edges = Edges(src, dst, edge)
    if options.symmetrize:
        # Each edge is followed by its reverse, so that chunks of any size give the same graph.
        both = (
            torch.stack([edges.src, edges.dst], 1).reshape(-1),
            torch.stack([edges.dst, edges.src], 1).reshape(-1),
        )
        edges = Edges(*both, {name: a.repeat_interleave(2, 0) for name, a in edge.items()})
        repeated = edges.src == edges.dst
        repeated[::2] = False
        edges = edges.select(~repeated) if bool(repeated.any()) else edges
    if options.self_loops == "remove":
        edges = edges.select(edges.src != edges.dst)
    return edges


def group(edges: Edges, low: int, high: int, options: EdgeOptions) -> tuple[Tensor, Edges]:
    """(degrees, edges by destination) of all edges into the nodes low .. high - 1, in their order."""
    if options.self_loops == "add":
        edges = _add_self_loops(edges, low, high)
    if options.duplicates == "remove":
        key = (edges.dst.long() - low) * (1 << 32) + edges.src
        key, order = torch.sort(key, stable=True)
        first = torch.ones(key.numel(), dtype=torch.bool)
        first[1:] = key[1:] != key[:-1]
        edges = edges.select(order[first].sort().values)
    indptr, order = ops.group_by_key(edges.dst - low, high - low)
    return indptr.diff(), edges.select(order)


def _add_self_loops(edges: Edges, low: int, high: int) -> Edges:
    missing = torch.ones(high - low, dtype=torch.bool)
    missing[(edges.dst[edges.src == edges.dst] - low).long()] = False
    nodes = (missing.nonzero().reshape(-1) + low).to(edges.dst.dtype)
    edge = {
        name: torch.cat([a, torch.full((nodes.numel(), *a.shape[1:]), int(name == "weight"), dtype=a.dtype)])
        for name, a in edges.edge.items()
    }
    return Edges(torch.cat([edges.src, nodes]), torch.cat([edges.dst, nodes]), edge)


def empty_edges(num_nodes: int) -> Edges:
    """No edges, in the storage type of a graph of that size."""
    none = torch.empty(0, dtype=index_dtype(num_nodes))
    return Edges(none, none, {})


def check_same_arrays(first: Edges, other: Edges) -> None:
    """Refuse chunks that do not carry the same edge arrays."""
    for name in first.edge.keys() | other.edge.keys():
        shapes = [e.edge[name].shape[1:] if name in e.edge else None for e in (first, other)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"Not all chunks have the edge array {name!r} in one shape: give every chunk the same.")


def common_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The type of an edge array whose chunks have these: a floating-point one as soon as one of them is."""
    return functools.reduce(torch.promote_types, dtypes)


def exactly(rows: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Rows of an edge array in the type of its other chunks, whose numbers must not change by it."""
    if rows.dtype == dtype:
        return rows
    new = rows.to(dtype)
    changed = new.to(rows.dtype) != rows
    if bool(changed.any()):
        value = rows[changed][0].item()
        raise ValueError(
            f"Edge array {name!r} holds {value} in one chunk, and fractions in another make all of it "
            f"{str(dtype).removeprefix('torch.')}, which cannot hold that number: put them into an array each."
        )
    return new


def join(pieces: list[Edges], num_nodes: int) -> Edges:
    """One edge list from its pieces, which must have the same edge arrays."""
    if not pieces:
        return empty_edges(num_nodes)
    for piece in pieces:
        check_same_arrays(pieces[0], piece)
    dtypes = {name: common_dtype(p.edge[name].dtype for p in pieces) for name in pieces[0].edge}
    edge = {name: torch.cat([exactly(p.edge[name], to, name) for p in pieces]) for name, to in dtypes.items()}
    return Edges(torch.cat([p.src for p in pieces]), torch.cat([p.dst for p in pieces]), edge)
