"""`Dataset`: a graph with its tables, labels and splits.

A `Trainer` is given a dataset. Making one checks shapes and dtypes alone; `validate` reads and checks every
number. The arrays are in memory, or mapped from a folder, whose pages are read when they are touched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hopline.core.graph import Graph
from hopline.data.arrays import as_tensor
from hopline.data.checks import check_dataset
from hopline.data.manifest import is_array_name
from hopline.tables import SparseTable, Table, TensorTable
from hopline.tasks.kinds import TASKS, LabelKind
from hopline.tasks.labels import LABELS, is_labelled
from hopline.tasks.settings import METRICS_OF, LabelFacts
from hopline.util.config import format_size

if TYPE_CHECKING:
    from torch_geometric.data import Data

    from hopline.distributed.agreement import Fact

MAX_COMPARED_EDGES = 1 << 22
"""Most edges that are read to find out whether the graph is symmetric: about a second."""
MAX_SHOWN = 200
"""Most characters of an entry of `meta` that `Dataset.describe` shows."""


NOT_DATASETS = {
    "Data": ": give it hl.from_pyg(data)",
    "HeteroData": ", and typed graphs are not supported yet: make nodes of one type by "
    "hl.from_pyg(data.to_homogeneous())",
    "TemporalData": ", and graphs with time are not supported yet: leave time out by "
    "hl.from_edges(torch.stack([data.src, data.dst]), x=..., y=...)",
    **dict.fromkeys(
        ("list", "tuple"), ": join graphs by hl.from_pyg(torch_geometric.data.Batch.from_data_list(graphs))"
    ),
    "str": ": open it by hl.open(...)",
    "object": ": make one by hl.open, hl.from_pyg or hl.from_edges",
}
"""What to write in place of an object that is no dataset, by the name of its class or a base class."""


def expect_dataset(data: Any, taker: str, takes: str = "a hopline Dataset") -> None:
    """Raise ValueError if `data` is no `Dataset`, with what to write. taker: a name such as "Trainer"."""
    if not isinstance(data, Dataset):
        advice = next(NOT_DATASETS[cls.__name__] for cls in type(data).__mro__ if cls.__name__ in NOT_DATASETS)
        raise ValueError(f"{taker} takes {takes}, not a {type(data).__name__}{advice}")


@dataclass(kw_only=True, eq=False, repr=False)
class Dataset:
    """A graph with the tables, labels and splits of its nodes, in memory or mapped from a folder.

    `hl.open` and `hl.from_*` make one. `save` writes it to a folder, `to_pyg` makes a PyG `Data` of it, and
    `normalized`, `standardized` and `one_hot` return a dataset with other features. These share all other
    arrays.

    Raises:
        ValueError: A table or `y` has not one row per node, `y` does not fit `task`, or a split is not a
            1-D int64 tensor.

    Example:
        >>> data = hl.Dataset(
        ...     name="ring",
        ...     graph=hl.Graph(indptr=torch.tensor([0, 1, 2, 3]), indices=torch.tensor([2, 0, 1])),
        ...     tables={"x": hl.extend.TensorTable(torch.eye(3))},
        ...     y=torch.tensor([0, 1, 0]),
        ...     splits={"train": torch.tensor([0, 1])},
        ...     num_classes=2,
        ... )
        >>> data.num_nodes, data.num_features, data.metric
        (3, 3, 'accuracy')
    """

    name: str
    """Name of the dataset, for messages and reports."""
    graph: Graph
    """The in-edges of every node, with their edge arrays."""
    tables: dict[str, Table] = field(default_factory=dict)
    """Tables by name, each with one row per node. Models read the table "x"."""
    y: Tensor | None = None
    """[N] int64 with -1 for unlabelled nodes, [N, C] of zeros and ones in the multi-label task, or [N] or [N, k] float
    with NaN for unknown numbers in a regression."""
    splits: dict[str, Tensor] = field(default_factory=dict)
    """The current split: [n] int64 sorted node ids of "train", "valid" and "test". Any may be missing."""
    alternatives: tuple[dict[str, Tensor], ...] = ()
    """All published splits if there are several, else empty.

    `with_split` makes another one the current split.
    """
    task: LabelKind = "single"
    """Kind of labels: "single" (one class per node), "multi" (several labels), "binary" (a yes or no) or "regression"
    (numbers)."""
    num_classes: int = 0
    """Number of classes, of labels in the multi-label task, or of numbers per node in a regression."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Origin of the dataset, in plain JSON values."""
    folder: Path | None = None
    """The folder whose files are mapped: processes that open it share one copy. None if made in memory."""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task is {self.task!r}: choose one of {', '.join(TASKS)}.")
        for name in [*self.tables, *self.graph.edge, *self.splits]:
            if not is_array_name(name):
                raise ValueError(f"{name!r} cannot name an array: use letters, digits, '_' and '-' only.")
        for name, table in self.tables.items():
            if len(table) != self.num_nodes:
                raise ValueError(
                    f"Table {name!r} has {len(table)} rows for {self.num_nodes} nodes: give one row per node."
                )
        if self.y is not None:
            if self.y.size(0) != self.num_nodes:
                raise ValueError(
                    f"There are {self.y.size(0)} labels for {self.num_nodes} nodes: give one per node, -1 for none."
                )
            LABELS[self.task].check_shape(self.y, self.num_nodes, self.num_classes)
        for splits in (self.splits, *self.alternatives):
            for name, ids in splits.items():
                if ids.dtype != torch.int64 or ids.dim() != 1:
                    raise ValueError(
                        f"Split {name!r} must be a 1-D int64 tensor of node ids, not "
                        f"{_shape_text(ids.shape, ids.dtype)}: make ids of a mask by mask.nonzero().view(-1)."
                    )

    @property
    def num_nodes(self) -> int:
        return self.graph.num_nodes

    @property
    def num_edges(self) -> int:
        return self.graph.num_edges

    @property
    def x(self) -> Table:
        """The table "x". Raises a `ValueError` that says what to type if there is none."""
        if "x" not in self.tables:
            raise ValueError(
                f"Dataset {self.name!r} has no features: convert it with nodes=FILE that has some, or in Python set "
                "tables['x'] = TensorTable(rows), or learn embeddings by features=one_hot model.linear=true."
            )
        return self.tables["x"]

    @property
    def labels(self) -> Tensor:
        """`y`. Raises a `ValueError` that says what to type if there are no labels."""
        if self.y is None:
            raise self._no_labels_error()
        return self.y

    @property
    def train_ids(self) -> Tensor:
        """[n] int64: the training nodes. Raises a `ValueError` that says what to type if there are none."""
        ids = self.splits.get("train")
        if ids is not None and ids.numel():
            return ids
        # A dataset in shards has classes but no `y` here: each rank has the labels of its own shard.
        if not self.num_classes if self.y is None else not bool(is_labelled(self.y).any()):
            raise self._no_labels_error()
        raise ValueError(
            f"Dataset {self.name!r} has no training nodes: draw some with split=0.6,0.2,0.2 (in Python "
            "hl.random_split(data)), or give it a 'train' split."
        )

    def label_facts(self, ids: Tensor) -> LabelFacts:
        """What a task is told about the labels of these nodes: those of a split, for example."""
        y = None if self.y is None else self.y[ids.to(self.y.device)]
        return LabelFacts(kind=self.task, num_classes=self.num_classes, train=y)

    def _no_labels_error(self) -> ValueError:
        return ValueError(
            f"Dataset {self.name!r} has no labels: convert it with nodes=FILE that has a label column "
            "(columns.label=NAME if it is called otherwise), or in Python give y=."
        )

    @property
    def num_features(self) -> int:
        """Width of the table "x"; 0 if there is none."""
        return self.x.shape[1] if "x" in self.tables else 0

    @property
    def num_outputs(self) -> int:
        """Width of a model's output: a number per class or target, and one score per node in the binary task."""
        return LABELS[self.task].num_outputs(self.num_classes)

    @property
    def metric(self) -> str:
        """Name of the metric that goes with the labels: "accuracy", "micro_f1", "roc_auc" or "rmse"."""
        return METRICS_OF[self.task][0]

    @property
    def edge_arrays(self) -> Mapping[str, Tensor]:
        """The graph's edge arrays by name. Those of a dataset in shards are of one shard."""
        return self.graph.edge

    @property
    def all_splits(self) -> tuple[dict[str, Tensor], ...]:
        """Every published split, or the current split alone if there are no others."""
        return self.alternatives or ((self.splits,) if self.splits else ())

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, on a device, in host memory or in files."""
        arrays = [ids for splits in self.all_splits for ids in splits.values()]
        if self.y is not None:
            arrays.append(self.y)
        array_bytes = sum(array.numel() * array.element_size() for array in arrays)
        table_bytes = sum(table.num_bytes for table in self.tables.values())
        return array_bytes + self.graph.num_bytes + table_bytes

    @property
    def is_symmetric(self) -> bool | None:
        """Whether every edge has its reverse. None if that is not known, and there are too many edges to look."""
        if self.meta.get("symmetric") is True:  # as the conversion made it
            return True
        return self.graph.is_symmetric if self.num_edges <= MAX_COMPARED_EDGES else None

    def __repr__(self) -> str:
        direction = {True: "symmetric ", False: "directed ", None: ""}[self.is_symmetric]
        return (
            f"Dataset({self.name!r}, {self.num_nodes:,} nodes, {self.num_edges:,} {direction}edges, "
            f"{self.num_features} features, {LABELS[self.task].describe(self.num_classes)}, "
            f"{format_size(self.num_bytes)})"
        )

    def describe(self) -> str:
        """A text of several lines: the sizes, edge arrays, tables, labels, the current split, and `meta`."""
        lines = [repr(self)]
        for name, array in self.graph.edge.items():
            lines.append(f"  edge {name}: {_shape_text(array.shape, array.dtype)}")
        for name, table in self.tables.items():
            kind = ", sparse" if isinstance(table, SparseTable) else ""
            lines.append(f"  table {name}: {_shape_text(table.shape, table.dtype)}{kind}")
        if self.y is not None:
            lines.append(f"  labels: {_shape_text(self.y.shape, self.y.dtype)}, task {self.task}, {self.metric}")
        sizes = ", ".join(f"{name} {ids.numel():,}" for name, ids in self.splits.items())
        num_splits = f" (one of {len(self.alternatives)})" if len(self.alternatives) > 1 else ""
        lines.append(f"  split: {sizes or 'none'}{num_splits}")
        lines += [f"  {key}: {_shortened(value)}" for key, value in self.meta.items()]
        return "\n".join(lines)

    def with_fields(self, **fields: Any) -> Dataset:
        """A copy with other values of some fields."""
        return replace(self, **fields)

    def with_split(self, k: int) -> Dataset:
        """A dataset with the k-th published split, counted from 0, as the current one."""
        num_splits = max(1, len(self.alternatives))
        if not 0 <= k < num_splits:
            raise ValueError(f"Dataset {self.name!r} has no split {k}: choose from 0 to {num_splits - 1}.")
        return replace(self, splits=self.alternatives[k]) if self.alternatives else self

    def without_edge_arrays(self) -> Dataset:
        """A dataset with the edges alone, so that no conv uses weights, features or types of edges."""
        return replace(self, graph=self.graph.with_arrays(self.graph.indptr, self.graph.indices, {}))

    def normalized(self, table: str = "x") -> Dataset:
        """A dataset with each row of a table divided by its sum, or by 1 if the sum is less than 1."""
        return self._with_features(table, normalize(self.tables[table]), {"kind": "normalized"})

    def one_hot(self, table: str = "x") -> Dataset:
        """A dataset whose features are the identity matrix [num_nodes, num_nodes], stored sparse.

        A first linear layer then learns an embedding per node.
        """
        identity = SparseTable(
            indptr=torch.arange(self.num_nodes + 1),
            columns=torch.arange(self.num_nodes),
            values=torch.ones(self.num_nodes),
            num_columns=self.num_nodes,
        )
        return self._with_features(table, identity, {"kind": "one_hot", "nodes": self._nodes_checksum()})

    def _nodes_checksum(self) -> str | None:
        """A checksum of the ids that nodes had in their file, in their order. None without such ids."""
        from hopline.data.fingerprint import table_checksum

        return table_checksum(self.tables["node_ids"]) if "node_ids" in self.tables else None

    def standardized(self, table: str = "x") -> Dataset:
        """A dataset with a table whose columns have mean 0 and standard deviation 1, dense and in memory.

        A column that has the same value at all nodes becomes 0.
        """
        rows = self.tables[table].read(torch.arange(self.num_nodes))
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        mean = rows.mean(0)
        deviation = (rows - mean).std(0)
        # The mean of equal numbers is rounded, and so is their deviation from it.
        deviation[(rows == rows[:1]).all(0)] = 0
        standardized = TensorTable(standardize(rows, mean, deviation))
        features = {"kind": "standardized", "mean": mean.tolist(), "deviation": deviation.tolist()}
        return self._with_features(table, standardized, features)

    def _with_features(self, table: str, rows: Table, features: dict[str, Any]) -> Dataset:
        """A dataset with another table. `meta` says how "x" was made, for predictions on other data."""
        from hopline.data.fingerprint import table_checksum

        meta = self.meta
        if table == "x":
            is_made_of_x = features["kind"] != "one_hot"
            # The table as it was, by which a run knows its training data again.
            of = {"of": table_checksum(self.tables["x"])} if is_made_of_x else {}
            meta = {**meta, "features": features | of}
        return self.with_fields(tables={**self.tables, table: rows}, meta=meta)

    def validate(self) -> list[str]:
        """Check every number: ranges of indices and labels, NaN, splits. Returns a sentence per check."""
        return check_dataset(self, lambda array: f"Array {array!r} of dataset {self.name!r}")

    def map_features(self, function: Callable[[Table], Table]) -> Dataset:
        """A dataset whose features are `function(x)`, which computes each row from the same row of `x`."""
        return self.with_fields(tables={**self.tables, "x": function(self.x)})

    def contents(self) -> dict[str, str]:
        """Checksums of the arrays by name, by which a run knows its training data again (`contents_of`)."""
        from hopline.data.fingerprint import contents_of

        return contents_of(self)

    def facts(self) -> dict[str, Fact]:
        """The arrays by name, as ranks compare them before they train together. No array is read whole."""
        from hopline.data.fingerprint import facts_of

        return facts_of(self)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the dataset to a folder. If that fails or is killed, a dataset that the folder held is still whole."""
        from hopline.data.store import save

        save(self, folder)

    def to_pyg(self) -> Data:
        """A PyG `Data` with dense features, int64 edges and masks for the splits."""
        from hopline.data.formats.pyg import to_pyg

        return to_pyg(self)


def normalize(table: Table) -> Table:
    """A table with each row divided by its sum, or by 1 if the sum is less than 1. A sparse one stays sparse."""
    if not isinstance(table, SparseTable):
        rows = table.read(torch.arange(len(table)))
        return TensorTable(rows / rows.sum(-1, keepdim=True).clamp(min=1.0))
    row_of_entry = torch.repeat_interleave(torch.arange(len(table)), table.indptr.diff())
    sums = torch.zeros(len(table), dtype=table.dtype).index_add_(0, row_of_entry, table.values).clamp(min=1.0)
    return SparseTable(
        indptr=table.indptr,
        columns=table.columns,
        values=table.values / sums[row_of_entry],
        num_columns=table.num_columns,
    )


def standardize(rows: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Rows with the mean of each column subtracted, divided by its deviation. A deviation of 0 gives 0.

    rows: [n, num_columns]. mean, deviation: [num_columns].
    """
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    mean = mean.to(rows)
    deviation = deviation.to(rows)
    scaled = (rows - mean) / torch.where(deviation > 0, deviation, 1)
    return scaled.masked_fill(deviation == 0, 0)


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."


def _shape_text(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def as_table(rows: Any, name: str = "x") -> Table:
    """Rows as a table, without a copy if possible.

    rows: A table, a tensor, an array, or a sparse matrix of torch or SciPy.
    name: Name of the table, for error messages.
    """
    table = _as_table(rows, name)
    if table.dtype.is_complex:
        as_tensor(torch.empty(0, dtype=table.dtype), f"table {name!r}")  # raises the usual error
    if not table.shape:
        raise ValueError(f"Table {name!r} is a single number: give one row per node.")
    return table


def _as_table(rows: Any, name: str) -> Table:
    """Rows as a table. Complex numbers and single numbers are not refused yet."""
    if isinstance(rows, Table):
        return rows
    if isinstance(rows, Tensor) and rows.layout == torch.strided:
        return TensorTable(as_tensor(rows, f"table {name!r}"))
    if isinstance(rows, Tensor) and rows.layout == torch.sparse_csr:
        return SparseTable(
            indptr=rows.crow_indices().long(),
            columns=rows.col_indices(),
            values=rows.values(),
            num_columns=rows.size(1),
        )
    if isinstance(rows, Tensor):
        # Other sparse layouts go through COO, not through torch's CSR, which warns that it is in beta.
        coo = rows.to_sparse_coo().coalesce()
        row, column = coo.indices()
        indptr = torch.zeros(rows.size(0) + 1, dtype=torch.int64)
        indptr[1:] = torch.bincount(row, minlength=rows.size(0)).cumsum(0)
        return SparseTable(indptr=indptr, columns=column, values=coo.values(), num_columns=rows.size(1))
    if hasattr(rows, "tocsr"):
        csr = rows.tocsr()
        what = f"table {name!r}"
        return SparseTable(
            indptr=as_tensor(csr.indptr, what).long(),
            columns=as_tensor(csr.indices, what),
            values=as_tensor(csr.data, what),
            num_columns=csr.shape[1],
        )
    return TensorTable(as_tensor(rows, f"table {name!r}"))
