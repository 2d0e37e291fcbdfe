"""Reads DGL's binary files without DGL: tensors by name (`node_feat.dgl`), and a graph (`graph.dgl`).

All numbers are little-endian. A list is its length (uint64) and its entries, a text is its length and its bytes:

    array      magic, 0, device (2 x int32), dimensions (int32), dtype, shape (int64 each), number of bytes, data
    tensors    magic, how many, list of (name, array)
    graph      magic, version 2, kind 2, number of graphs, zeros up to byte 4096, where the graph begins,
               list of (name, array): labels, then the graph (`_read_structure`), its node and edge tensors,
               its types, and where it began

Each part of the structure begins with a magic number of its own. `graph_serialize.cc`, `heterograph_serialize.cc`,
`tensor_serialize.cc`, `unit_graph.cc` and `ndarray.cc` of DGL write these files; they have no checksums. What does not
fit together is refused, and no array is allocated that is larger than the file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from hopline.data.arrays import as_tensor
from hopline.util.files import check_file

TENSORS = 0xDD5A9FBE3FA2443F
GRAPHS = 0xDD2E4FF046B4A13F
ARRAY = 0xDD5E40F096B4A13F
TYPED_GRAPH = 0xDD589FBE35224ABF
TYPES = 0xDD3C5FFE20046ABF
"""Of the graph whose nodes are node types and whose edges are edge types."""
RELATION = 0xDD2E60F0F6B4A127
COO = 0xDD61FFD305DFF127
CSR = 0xDD6CD31205DFF127
GRAPHS_AT = 4096
"""Where the part of a graph file begins that is not its head, in bytes."""
DTYPES = {
    (code, 8 * size): np.dtype(f"<{kind}{size}")
    for code, kind, sizes in ((0, "i", (1, 2, 4, 8)), (1, "u", (1, 2, 4, 8)), (2, "f", (2, 4, 8)))
    for size in sizes
}
"""(DGL's code, bits) -> dtype."""
BFLOAT16 = (4, 16)


@dataclass(frozen=True)
class PartGraph:
    """The graph of one part: its own nodes and edges and those of the halo, by local id."""

    src: Tensor
    """[num_edges] int64"""
    dst: Tensor
    """[num_edges] int64"""
    node_data: dict[str, Tensor]
    """Arrays of num_nodes rows, by name."""
    edge_data: dict[str, Tensor]
    """Arrays of num_edges rows, by name."""


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that `dgl.data.utils.save_tensors` wrote, by name."""
    check_file(path)
    with path.open("rb") as file:
        stream = _Stream(file, path)
        stream.expect(TENSORS, "a file of tensors by DGL")
        count = stream.number()
        tensors = stream.tensors()
        stream.check(len(tensors) == count and stream.num_left == 0, "its number of tensors")
    return tensors


def read_graph(path: Path) -> PartGraph:
    """The graph of a file that `dgl.save_graphs` wrote, which must be one, of one node and one edge type."""
    check_file(path)
    with path.open("rb") as file:
        stream = _Stream(file, path)
        stream.expect(GRAPHS, "a graph file by DGL")
        version, kind, num_graphs = (stream.number() for _ in range(3))
        if (version, kind, num_graphs) != (2, 2, 1):
            raise ValueError(
                f"{path} holds {num_graphs} graphs of kind {kind} in version {version} of DGL's format, and hopline "
                "reads one graph of kind 2 in version 2: partition the graph again with DGL 2.1."
            )
        stream.take(GRAPHS_AT - stream.at)  # the rest of the head says nothing
        start = stream.number()
        stream.tensors()  # labels of graphs
        stream.check(start == stream.at, "where its graph begins")
        num_nodes, src, dst = _read_structure(stream)
        data = []
        for num_rows in (num_nodes, src.numel()):
            stream.check(stream.number() == 1, "its types")
            data.append(stream.tensors())
            wrong = [name for name, rows in data[-1].items() if rows.shape[:1] != (num_rows,)]
            stream.check(not wrong, f"the length of {wrong[0] if wrong else ''!r}")
        for _ in range(2):  # names of node and edge types
            stream.check(stream.number() == 1, "its types")
            stream.text()
        # A list of one number, as a text of 16 bytes, and the length of that text.
        stream.check([stream.number() for _ in range(4)] == [16, 1, start, 16] and not stream.num_left, "its end")
    return PartGraph(src, dst, *data)


def _read_structure(stream: _Stream) -> tuple[int, Tensor, Tensor]:
    """(number of nodes, sources, destinations) of a graph, in the order of its edge ids."""
    stream.expect(TYPED_GRAPH, "a graph")
    _read_types(stream)
    stream.check(stream.number() == 1, "its types")
    stream.expect(RELATION, "the edges of a graph")
    saved_formats = stream.number()
    stream.number()  # formats that DGL may make of it
    stream.check(saved_formats >> 32 == 1 and 0 < saved_formats & 0xFFFFFFFF < 8, "its formats")
    shapes: list[tuple[int, int]] = []
    edges: list[tuple[Tensor, Tensor]] = []
    for bit in (1, 2, 4):  # COO, rows by source (CSR), rows by destination (CSC)
        if saved_formats & bit:
            _read_types(stream)
            num_rows, num_columns, rows, columns = _read_matrix(stream, COO if bit == 1 else CSR)
            shapes.append((num_rows, num_columns))
            edges.append((columns, rows) if bit == 4 else (rows, columns))
    num_nodes = stream.number() if stream.number() == 1 else -1
    stream.check(all(shape == (num_nodes, num_nodes) for shape in shapes), "its number of nodes")
    same = all(torch.equal(one, other) for pair in edges[1:] for one, other in zip(pair, edges[0], strict=True))
    stream.check(same, "its formats, which have other edges")
    return num_nodes, *edges[0]


def _read_types(stream: _Stream) -> None:
    """Skip the graph of types, which must have one node and one edge."""
    stream.expect(TYPES, "the types of a graph")
    num_rows, num_columns, rows, columns = _read_matrix(stream, CSR)
    has_one_type = (num_rows, num_columns) == (1, 1) and rows.tolist() == columns.tolist() == [0]
    stream.check(has_one_type, "its types, of which hopline reads one for nodes and one for edges")


def _read_matrix(stream: _Stream, magic: int) -> tuple[int, int, Tensor, Tensor]:
    """(number of rows, of columns, row, column of each entry) of a sparse matrix, in the order of edge ids."""
    stream.expect(magic, "a matrix")
    num_columns, num_rows = stream.number(), stream.number()
    rows, columns, edge_ids = (stream.ids() for _ in range(3))
    if magic == CSR:
        degrees = rows.diff()
        fits = rows.numel() == num_rows + 1 and rows[0] == 0 and rows[-1] == columns.numel() and (degrees >= 0).all()
        stream.check(bool(fits), "its rows")
        rows = torch.repeat_interleave(torch.arange(num_rows), degrees)
    stream.take(2 if magic == COO else 1)  # whether entries are sorted
    stream.check(rows.numel() == columns.numel(), "its edges")
    for ends, limit in ((rows, num_rows), (columns, num_columns)):
        stream.check(not ends.numel() or 0 <= int(ends.min()) <= int(ends.max()) < limit, "the ends of its edges")
    if edge_ids.numel():
        order = edge_ids.argsort()
        stream.check(torch.equal(edge_ids[order], torch.arange(rows.numel())), "the ids of its edges")
        rows, columns = rows[order], columns[order]
    return num_rows, num_columns, rows, columns


class _Stream:
    """A file that is read from its beginning. What it says is compared with its size before it is believed."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file = file
        self.path = path
        self.at = 0
        """Bytes that were read."""
        self.num_left = os.fstat(file.fileno()).st_size
        """Bytes that were not."""

    def check(self, is_right: bool, what: str) -> None:
        """Refuse the file unless `is_right`."""
        if not is_right:
            raise ValueError(f"{self.path} is damaged ({what}): copy it again, or partition the graph again.")

    def take(self, num_bytes: int) -> bytes:
        self.check(0 <= num_bytes <= self.num_left, f"it ends after {self.at + self.num_left} bytes")
        taken = self.file.read(num_bytes)
        self.check(len(taken) == num_bytes, "it becomes shorter while it is read")
        self.at += num_bytes
        self.num_left -= num_bytes
        return taken

    def number(self, size: int = 8) -> int:
        """The next whole number of `size` bytes."""
        return int.from_bytes(self.take(size), "little")

    def expect(self, magic: int, what: str) -> None:
        """Read the magic number with which something begins."""
        self.check(self.number() == magic, f"at byte {self.at - 8} there is not {what}")

    def text(self) -> str:
        try:
            return self.take(self.number()).decode()
        except UnicodeDecodeError:
            raise ValueError(f"{self.path} is damaged (a name): copy it again, or partition the graph again.") from None

    def tensors(self) -> dict[str, Tensor]:
        """The next list of named arrays."""
        found: dict[str, Tensor] = {}
        for _ in range(self.number()):  # a wrong number soon comes to the end of the file
            name = self.text()
            self.check(name not in found, f"{name!r} is there twice")
            found[name] = self.array()
        return found

    def ids(self) -> Tensor:
        """The next array, which must be [n] whole numbers, as int64."""
        array = self.array()
        self.check(array.dim() == 1 and array.dtype in (torch.int32, torch.int64), "ids are whole numbers")
        return array.long()

    def array(self) -> Tensor:
        """The next array."""
        self.expect(ARRAY, "an array")
        reserved, device, number, num_dims = (self.number(size) for size in (8, 4, 4, 4))
        code, bits, lanes = (self.number(size) for size in (1, 1, 2))
        self.check((reserved, device, number) == (0, 1, 0) and num_dims <= 8, "the head of an array")
        kind = (code, bits)
        dtype = np.dtype("<i2") if kind == BFLOAT16 else DTYPES.get(kind)
        if dtype is None or lanes != 1:
            raise ValueError(
                f"{self.path} has an array of DGL's type {code}, {bits} bits, {lanes} lanes: store numbers."
            )
        shape = [self.number() for _ in range(num_dims)]
        num_bytes = self.number()
        self.check(num_bytes == prod(shape) * dtype.itemsize and max(shape, default=0) < 2**60, "the size of an array")
        values = as_tensor(np.frombuffer(self.take(num_bytes), dtype).reshape(shape), str(self.path))
        return values.view(torch.bfloat16) if kind == BFLOAT16 else values
