"""Ugly inputs, and what each of them gets: read rightly, or refused in one sentence that says what to type.

`test_ugly_inputs.py` reads every one.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import torch
from scipy import sparse
from torch_geometric.data import Data

import hopline as hl
from hopline.data.convert import from_edges
from hopline.data.dataset import Dataset
from hopline.data.formats.csv_parquet import from_csv
from hopline.data.formats.npz import from_npz
from hopline.data.formats.pyg import from_pyg
from hopline.data.ids import original_ids
from hopline.data.options import Columns
from hopline.run import commands
from hopline.run.settings import ConvertConfig
from hopline.util.config import override


class Case(NamedTuple):
    """One ugly input."""

    name: str
    """The input, in words."""
    read: Callable[[Path], Any]
    """Makes the input in a folder, reads it, and returns what was read."""
    right: Any = None
    """What must be read, where the input is accepted."""
    refused: str = ""
    """Words of the refusal, where it is not."""
    told: str = ""
    """Words of the message that comes with an input that is accepted."""


# ---- how inputs are made


def csv(folder: Path, edges: str | bytes, nodes: str | bytes | None = None, **arguments: Any) -> Dataset:
    """A dataset from the texts of an edge file and a node file."""
    edge_file = write(folder / "edges.csv", edges)
    return from_csv(edge_file, None if nodes is None else write(folder / "nodes.csv", nodes), **arguments)


def tables(folder: Path, edges: dict[str, Any], nodes: Any = None, **arguments: Any) -> Dataset:
    """A dataset from the columns of Parquet files."""
    for name, columns in {"edges": edges, "nodes": nodes}.items():
        if columns is not None:
            table = columns if isinstance(columns, arrow.Table) else arrow.table(columns)
            parquet.write_table(table, folder / f"{name}.parquet")
    return from_csv(folder / "edges.parquet", None if nodes is None else folder / "nodes.parquet", **arguments)


def npz(folder: Path, **arrays: Any) -> Dataset:
    """A dataset from the arrays of an `.npz` file; edges 0 -> 1 -> 2 if there are no others."""
    return from_npz(npz_file(folder, **arrays))


def npz_file(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "graph.npz", allow_pickle=False, **({"edge_index": np.array([[0, 1], [1, 2]])} | arrays))
    return folder / "graph.npz"


def convert_source(folder: Path, source: Path, *overrides: str) -> Dataset:
    """The dataset that `hopline convert SOURCE FOLDER KEY=VALUE ...` writes."""
    return commands.convert(str(source), folder / "out", override(ConvertConfig(), list(overrides)))


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def broken_parquet(folder: Path, break_: Callable[[bytes], bytes], nodes: bool) -> Dataset:
    """Parquet files of which one is damaged."""
    tables(folder, EDGES, {"id": [0, 1, 2], "f": [1.0, 2.0, 3.0]})
    path = folder / ("nodes.parquet" if nodes else "edges.parquet")
    path.write_bytes(break_(path.read_bytes()))
    return from_csv(folder / "edges.parquet", folder / "nodes.parquet")


def data(**fields: Any) -> Dataset:
    """A dataset from a PyG `Data` of 3 nodes and, if there are no others, 2 edges."""
    return from_pyg(Data(**({"edge_index": torch.tensor([[0, 1], [1, 2]]), "num_nodes": 3} | fields)))


# ---- what is read


def ids(dataset: Dataset) -> list[Any]:
    return original_ids(dataset.tables["node_ids"]).tolist()


def x(dataset: Dataset) -> list[Any]:
    return dataset.x.read(torch.arange(dataset.num_nodes)).tolist()


def labels(dataset: Dataset) -> list[int]:
    return dataset.labels.tolist()


def splits(dataset: Dataset) -> dict[str, list[int]]:
    return {name: nodes.tolist() for name, nodes in dataset.splits.items()}


def edge(dataset: Dataset, name: str = "weight") -> list[Any]:
    return dataset.graph.edge[name].tolist()


EDGES = {"src": [0, 1], "dst": [1, 2]}
LINES = "src,dst\n0,1\n1,2\n"
NODES = "id,f\n2,7\n0,5\n1,6\n"
HASHES = ["14695981039346656037", "14695981039346656038"]
HASHED = {name: arrow.array([int(id_)], arrow.uint64()) for name, id_ in zip(EDGES, HASHES, strict=True)}
NEAR = [2**53, 2**53 + 1]
SHUFFLED = arrow.table({"id": [2, 0, 1], "f": [0.2, 0.0, 0.1], "__index_level_0__": [2, 0, 1]}).replace_schema_metadata(
    {"pandas": '{"index_columns": ["__index_level_0__"], "columns": [], "column_indexes": []}'}
)
FEATURES_3 = np.zeros((3, 1), np.float32)
LABELLED_3 = {"x": FEATURES_3, "y": [0, 1, 0]}
FIXED_LISTS = arrow.array([[1.0, 2.0], None, [3.0, 4.0]], arrow.list_(arrow.float32(), 2))
UINT64 = arrow.array([int(HASHES[0])], arrow.uint64())
NEEDS_UTF_8 = "edges.csv is not in UTF-8: save it as UTF-8"

MAPPED = {
    "CSV: ids above 2^53 beside an id with '.0'": (f"src,dst\n{NEAR[0]},{NEAR[1]}\n5.0,7\n", [5, 7, *NEAR]),
    "CSV: dates as ids": ("src,dst\n2020-01-01,2020-01-02\n", ["2020-01-01", "2020-01-02"]),
    "CSV: true and false as ids": ("src,dst\ntrue,false\n", ["false", "true"]),
    "Parquet: true and false as ids": ({"src": [True, False], "dst": [False, False]}, ["false", "true"]),
    "Parquet: uint64 ids above 2^63": (HASHED, HASHES),
    "Parquet: uint64 beside int64": ({"src": arrow.array([-1]), "dst": UINT64}, ["-1", HASHES[0]]),
}
"""By the name of a case: edges read with ids=map, and the ids that they have."""
NOT_MAPPED = {
    "CSV: the ids 'a' and 'a' with a zero byte": (b"src,dst\na,a\x00\n", "holds a zero byte in row 0"),
    "CSV: Latin-1 letters": ("src,dst\nzoë,bob\n".encode("latin-1"), NEEDS_UTF_8),
    "CSV: no edges": ("src,dst\n", "edges.csv holds no edges"),
    "CSV: an endpoint of spaces": ("src,dst\na,  \n", "edge 0: there is no node id"),
    "Parquet: the ids 'a' and 'a' with a zero byte": ({"src": ["a"], "dst": ["a\x00"]}, "holds a zero byte in row 0"),
    "Parquet: a null endpoint": ({"src": ["a", "b"], "dst": ["b", None]}, "edge 1: there is no node id"),
    "Parquet: 0.25, 0.75, 1.5": ({"src": [0.25, 0.75], "dst": [0.75, 1.5]}, "edge 0: node id 0.25 is not a whole"),
    "Parquet: float ids above 2^53": (
        {"src": [1.0, 2.0**60], "dst": [2.0, 3.0]},
        "edge 1: node id 1.152921504606847e+18",
    ),
}
"""Edges refused with ids=map, and words of the refusal."""
CSV_REFUSED = {
    "1_0 as a node number": ("src,dst\n1_0,10\n", None, "edge 0: node id '1_0' is not a number"),
    "a column name twice": (LINES, "id,f,f\n0,1,2\n1,3,4\n2,5,6\n", "nodes.csv has 2 columns 'f': rename one"),
    "UTF-16 (Excel's Unicode text)": (LINES.encode("utf-16"), None, NEEDS_UTF_8),
    "an empty edge file": ("", None, "edges.csv is empty"),
    "an empty node file": (LINES, "", "nodes.csv is empty"),
    "a split that is not known": (
        LINES,
        "id,f,split\n0,1,train\n1,2,tets\n2,3,\n",
        "split 'tets' is not known",
    ),
    "a node file without names": (
        LINES,
        "0,0.5,1\n1,0.1,0\n2,0.2,0\n",
        "the first line of nodes.csv must",
    ),
    "a node file with its first line alone": (LINES, "id,f\n", "nodes.csv holds no nodes: add a row"),
    "a pandas index without an id column, shuffled": (LINES, ",f\n2,7\n0,5\n1,6\n", "holds each node number once"),
    "NaN among the features": (LINES, "id,f,g\n0,1,1\n1,2,\n2,3,3\n", "nodes.csv: column 'g' holds nan in row 1"),
    "a feature too large for float32": (
        LINES,
        "id,f\n0,1\n1,1e300\n2,3\n",
        "nodes.csv: column 'f' holds 1e+300 in row 1",
    ),
}
"""The texts of an edge file and a node file, and words of the refusal."""
LISTS_REFUSED = {
    "a null among feature lists": ([[1.0, 2.0], None, [3.0, 4.0]], "column 'x' has no list in row 1"),
    "a null among lists of a fixed size": (FIXED_LISTS, "column 'x' has no list in row 1"),
    "a null in a feature list": (
        [[1.0, 2.0], [3.0, None], [5.0, 6.0]],
        "nodes.parquet: column 'x' holds nan in row 1, entry 1: fill",
    ),
    "lists of texts as features": ([["a"], ["b"], ["c"]], "column 'x' holds lists of string: store lists of numbers"),
}
"""A column of features in a Parquet file, and words of the refusal."""
NPZ_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "val_mask beside valid_idx": (
        LABELLED_3 | {"val_mask": [False, True, False], "valid_idx": [1]},
        "val_mask and valid_idx",
    ),
    "edge_attr of another length": ({"edge_attr": [[0.5]]}, "Edge array 'attr' has 1 rows for 2 edges"),
    "weight where there are as many nodes as edges": (
        {"x": FEATURES_3, "edge_index": [[0, 1, 2], [1, 2, 0]], "weight": [0.5, 0.25, 0.1]},
        "'weight' has 3 rows, one per node or one per edge",
    ),
    "CSR columns above int32": (
        {"x_data": [1.0], "x_indices": np.array([2**32]), "x_indptr": [0, 1, 1, 1], "x_shape": [3, 2**33]},
        "x_indices holds 4294967296",
    ),
    "sparse features without x_shape": ({"x_data": [1.0], "x_indices": [0], "x_indptr": [0, 1]}, "has no x_shape"),
    "complex features": ({"x": FEATURES_3.astype(np.complex64)}, "'x' holds complex64 where numbers should be"),
    "x of one dimension": ({"x": np.zeros(3)}, "x has shape [3]: give one row per node, [3, 1]"),
    "x a single number": ({"x": np.array(3.0)}, "array 'x' is a single number"),
    "x of texts": ({"x": np.array([["a"], ["b"], ["c"]])}, "'x' holds <U1 where numbers should be"),
    "y of texts": ({"x": FEATURES_3, "y": np.array(["a", "b", "c"])}, "'y' holds <U1 where numbers should be"),
    "edges of one dimension": ({"edge_index": [0, 1]}, "Edges must be whole numbers [2, E]"),
    "edges [E, 2]": ({"edge_index": np.array([[0, 1], [1, 2], [2, 3]])}, "Edges must be whole numbers [2, E]"),
    "no edges, and nothing else": ({"edge_index": np.zeros((2, 0), int)}, "give num_nodes="),
    "a node number of 10^12": ({"edge_index": [[0], [10**12]]}, "Node ids go up to 1000000000000 for only 1 edges"),
    "a mask of 0 and 1": (LABELLED_3 | {"train_mask": [1, 1, 0]}, "make it a boolean mask"),
    "the label infinity": (LABELLED_3 | {"y": [0, 1, np.inf]}, "A label is inf"),
    "a label of 3e8": (LABELLED_3 | {"y": [0, 1, 300_000_000]}, "A label is 300000000"),
}
"""The arrays of an `.npz` file beside edges 0 -> 1 -> 2, and words of the refusal."""


def mapped(folder: Path, edges: Any) -> list[Any]:
    """The ids of edges in a text or in columns, read with ids=map."""
    if isinstance(edges, dict):
        return ids(tables(folder, edges, ids="map"))
    return ids(csv(folder, edges, ids="map"))


CASES = [
    *(Case(f"{name}, ids=map", partial(mapped, edges=edges), right) for name, (edges, right) in MAPPED.items()),
    *(Case(f"{name}, ids=map", partial(mapped, edges=e), refused=words) for name, (e, words) in NOT_MAPPED.items()),
    *(Case(f"CSV: {name}", partial(csv, edges=e, nodes=n), refused=w) for name, (e, n, w) in CSV_REFUSED.items()),
    *(
        Case(f"Parquet: {name}", partial(tables, edges=EDGES, nodes={"id": [0, 1, 2], "x": lists}), refused=words)
        for name, (lists, words) in LISTS_REFUSED.items()
    ),
    *(Case(f"npz: {name}", partial(npz, **arrays), refused=words) for name, (arrays, words) in NPZ_REFUSED.items()),
    # ---- ids
    Case(
        "Parquet, ids=map: uint64 ids above 2^63 in the node file",
        lambda f: ids(
            tables(
                f,
                HASHED,
                {"id": arrow.array([int(h) for h in HASHES], arrow.uint64()), "f": [0.0, 1.0]},
                ids="map",
            )
        ),
        HASHES,
    ),
    Case(
        "Parquet: uint64 ids above 2^63 as node numbers",
        lambda f: tables(f, HASHED),
        refused="edge 0: node id 14695981039346656037 is too large for a node number: let ids=map number the nodes",
    ),
    # ---- the shape of text files
    Case("CSV: UTF-8 with a byte-order mark (Excel)", lambda f: csv(f, b"\xef\xbb\xbf" + LINES.encode()).num_edges, 2),
    Case("CSV: empty lines before the names", lambda f: csv(f, "\n\n" + LINES).num_edges, 2),
    Case("CSV: spaces after commas, in the names too", lambda f: csv(f, LINES.replace(",", ", ")).num_edges, 2),
    Case("edges.CSV on the command line", lambda f: convert_source(f, write(f / "edges.CSV", LINES)).num_edges, 2),
    Case(
        "CSV: a comma after every line", lambda f: x(csv(f, LINES, "id,f,\n0,1,\n1,2,\n2,3,\n")), [[1.0], [2.0], [3.0]]
    ),
    Case("CSV: Windows line ends", lambda f: csv(f, LINES.replace("\n", "\r\n")).num_edges, 2),
    Case(
        "CSV: a truncated .csv.gz",
        lambda f: from_csv(
            write(f / "edges.csv.gz", gzip.compress(b"src,dst\n" + b"0,1\n1,2\n" * 5000)[:-20]), num_nodes=3
        ),
        refused="edges.csv.gz",
    ),
    Case(
        ".tsv on the command line",
        lambda f: convert_source(f, write(f / "edges.tsv", "src\tdst\n0\t1\n")).num_edges,
        1,
    ),
    Case(
        "columns separated by spaces, columns.delimiter=space",
        lambda f: convert_source(f, write(f / "edges.txt", "src dst\n0 1\n"), "columns.delimiter=space").num_edges,
        1,
    ),
    # ---- features
    Case(
        "Parquet: a shuffled pandas frame, whose index is a column",
        lambda f: x(tables(f, EDGES, SHUFFLED)),
        [[0.0], [float(np.float32(0.1))], [float(np.float32(0.2))]],
        told="not taken: __index_level_0__",
    ),
    Case(
        "CSV: a pandas frame with its index, a column without a name",
        lambda f: x(csv(f, LINES, ",id,f\n0,2,7\n1,0,5\n2,1,6\n")),
        [[5.0], [6.0], [7.0]],
        told="not taken: '' (the index of a table)",
    ),
    Case(
        "CSV: a pandas index without an id column, rows in order",
        lambda f: x(csv(f, LINES, "Unnamed: 0,f\n0,5\n1,6\n2,7\n")),
        [[5.0], [6.0], [7.0]],
        told="not taken: Unnamed: 0 (the index of a table)",
    ),
    Case(
        "CSV: decimal commas",
        lambda f: csv(f, LINES.replace(",", ";"), "id;f\n0;0,5\n1;0,7\n2;0,9\n", columns=Columns(delimiter=";")),
        refused="column 'f' holds text",
    ),
    Case(
        "CSV: the label NA among words",
        lambda f: labels(csv(f, LINES, "id,f,label\n0,1,cat\n1,2,NA\n2,3,dog\n")),
        [0, -1, 1],
        told="label 'NA' in row 1",
    ),
    Case(
        "CSV: classes that never occur",
        lambda f: labels(csv(f, LINES, "id,f,label\n0,0.5,100\n1,0.1,300\n2,0.3,\n")),
        [100, 300, -1],
        told="301 classes, of which 2",
    ),
    # ---- edge arrays
    Case(
        "an edge array of no dimension",
        lambda f: from_edges(np.array([[0], [1]]), edge={"weight": np.array(0.5)}),
        refused="Edge array 'weight' is a single number: give one row per edge",
    ),
    Case("edges as uint64", lambda f: from_edges(np.array([[0, 1], [1, 2]], np.uint64)).num_edges, 2),
    Case(
        "edges as uint64 above 2^63",
        lambda f: from_edges(np.array([[0, 2**63], [1, 2]], np.uint64)),
        refused="holds 9223372036854775808",
    ),
    Case(
        ".npy edges with a node file",
        lambda f: x(convert_source(f, _write_npy(f / "e.npy", [[0, 1], [1, 2]]), f"nodes={write(f / 'n.csv', NODES)}")),
        [[5.0], [6.0], [7.0]],
    ),
    Case("edges as big-endian numbers", lambda f: from_edges(np.array([[0, 1], [1, 2]], ">i4")).num_edges, 2),
    Case(
        "a .npy file of edges that is truncated",
        lambda f: from_edges(write(f / "e.npy", _write_npy(f / "e.npy", [[0, 1], [1, 2]]).read_bytes()[:-8])),
        refused="e.npy is damaged",
    ),
    # ---- npz
    Case(
        "npz: valid_mask",
        lambda f: splits(
            npz(f, x=FEATURES_3, y=[0, 1, 0], train_mask=[True, False, False], valid_mask=[False, True, False])
        )["valid"],
        [1],
    ),
    Case(
        "npz: train_idx, valid_idx, test_idx",
        lambda f: splits(npz(f, x=FEATURES_3, y=[0, 1, 0], train_idx=[2], valid_idx=[1], test_idx=[0])),
        {"train": [2], "valid": [1], "test": [0]},
    ),
    Case("npz: edge_time of length E", lambda f: edge(npz(f, x=FEATURES_3, edge_time=[7, 8]), "time"), [7, 8]),
    Case(
        "npz: an array of 5 rows",
        lambda f: npz(f, x=FEATURES_3, extra=np.zeros(5)).num_edges,
        2,
        told="not taken: extra [5]",
    ),
    Case("npz: weight of length E", lambda f: edge(npz(f, x=FEATURES_3, weight=[0.5, 0.25])), [0.5, 0.25]),
    Case(
        "npz: train and test overlap",
        lambda f: splits(npz(f, x=FEATURES_3, y=[0, 1, 0], train_idx=[0, 1], test_idx=[1, 2])),
        {"train": [0, 1], "test": [1, 2]},
        told="splits 'train' and 'test' share 1 node, such as node 1",
    ),
    Case(
        "npz that says 'each edge once', symmetrize=false",
        lambda f: convert_source(f, npz_file(f, meta='{"edges": "each edge once"}'), "symmetrize=false").num_edges,
        2,
    ),
    Case("npz, num_nodes=5", lambda f: convert_source(f, npz_file(f), "num_nodes=5").num_nodes, 5),
    Case(
        "npz of 3 rows, num_nodes=5",
        lambda f: convert_source(f, npz_file(f, x=FEATURES_3), "num_nodes=5"),
        refused="Table 'x' has 3 rows for 5 nodes",
    ),
    Case(
        "a dataset folder, num_nodes=5",
        lambda f: convert_source(f, _save_dataset(f / "data"), "num_nodes=5"),
        refused="num_nodes= cannot be changed in",
    ),
    # ---- PyG, SciPy, tables
    Case(
        "PyG: a node's time where N = E",
        lambda f: list(data(edge_index=torch.tensor([[0, 1, 2], [1, 2, 0]]), time=torch.tensor([7, 8, 9])).tables),
        ["time"],
    ),
    Case("PyG: edge_scale of no dimension", lambda f: data(edge_scale=torch.tensor(2.0)).graph.edge, {}),
    Case(
        "PyG: a mask [N, 1] beside masks [N, 3]",
        lambda f: (
            data(
                x=torch.zeros(3, 1),
                train_mask=torch.eye(3).bool(),
                test_mask=torch.tensor([[False], [False], [True]]),
            )
            .alternatives[1]["test"]
            .tolist()
        ),
        [2],
    ),
    Case(
        "PyG: masks [N, 2] beside masks [N, 4]",
        lambda f: data(train_mask=torch.zeros(3, 2).bool(), test_mask=torch.zeros(3, 4).bool()),
        refused="Split masks describe 2 and 4 splits",
    ),
    Case(
        "PyG: x of one dimension",
        lambda f: data(x=torch.zeros(3)),
        refused="x has shape [3]: give one row per node, [3, 1]",
    ),
    Case("PyG: complex features", lambda f: data(x=torch.zeros(3, 1, dtype=torch.complex64)), refused="complex64"),
    Case(
        "SciPy: complex weights",
        lambda f: hl.from_scipy(sparse.csr_array(np.array([[0, 1j], [0, 0]]))),
        refused="complex128",
    ),
    Case(
        "tables= given to from_csv with ids=map",
        lambda f: sorted(csv(f, LINES, ids="map", tables={"age": np.array([4, 5, 6])}).tables),
        ["age", "node_ids"],
    ),
    Case(
        "hl.table on the CPU: id -1",
        lambda f: hl.table(torch.ones(3, 2), device="cpu").read(torch.tensor([-1])),
        refused="row id -1 is outside 0 .. 2",
    ),
    Case(
        "standardized(): a column of 1000000.1 only",
        lambda f: x(from_edges(np.array([[0, 1], [1, 2]]), x=torch.full((3, 1), 1e6 + 0.1)).standardized()),
        [[0.0], [0.0], [0.0]],
    ),
    Case(
        "Parquet: a categorical of pandas",
        lambda f: labels(
            tables(f, EDGES, {"id": [0, 1, 2], "label": arrow.array(["b", "a", None]).dictionary_encode()})
        ),
        [1, 0, -1],
    ),
    Case(
        "Parquet: a column name twice",
        lambda f: tables(f, EDGES, arrow.table([[0, 1, 2], [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], names=["id", "f", "f"])),
        refused="nodes.parquet has 2 columns 'f': rename one",
    ),
    # ---- damaged Parquet
    *(
        Case(
            f"Parquet: {which} file {how}",
            lambda f, b=b, n=n: broken_parquet(f, b, n),
            refused=f"{file}.parquet cannot be read as Parquet",
        )
        for which, file, n in (("an edge", "edges", False), ("a node", "nodes", True))
        for how, b in (
            ("cut in the middle", lambda raw: raw[: len(raw) // 2]),
            ("of no bytes", lambda raw: b""),
            ("with its middle overwritten", lambda raw: raw[:20] + b"\xff" * 60 + raw[80:]),
        )
    ),
]


def _write_npy(path: Path, rows: Any) -> Path:
    np.save(path, np.array(rows))
    return path


def _save_dataset(folder: Path) -> Path:
    from_edges(np.array([[0, 1], [1, 2]])).save(folder)
    return folder
