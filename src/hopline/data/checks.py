"""Conditions that the numbers of a dataset must meet.

    indptr          runs from 0 to the number of edges and never decreases
    indices         lie in 0 .. num_nodes - 1
    floats          are finite: edge arrays and tables
    labels          have values of their kind (`tasks.labels`)
    splits          are sorted and labelled

Arrays are checked a chunk at a time, so that a mapped array larger than memory can be checked. A check
raises a `ValueError` that names the array, the position and the value. `check_dataset` runs all
of them. `check_nodes` runs those of tables, labels and splits. `check_training` is a cheaper check, which a
`Trainer` runs on its splits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from hopline.tables import SparseTable, Table
from hopline.tasks.labels import LABELS, is_labelled
from hopline.util.progress import progress

if TYPE_CHECKING:
    from hopline.core.examples import Examples
    from hopline.data.dataset import Dataset
    from hopline.data.nodes import NodeData
    from hopline.tasks.kinds import LabelKind

    Nodes = Dataset | NodeData

ELEMENTS_AT_ONCE = 1 << 22
"""Elements of an array that are checked at once, which limits temporary memory."""
SHOWN_BYTES = 1 << 28
"""Least number of bytes for which a progress bar is shown. Fewer are checked before it could be read."""
CHECKED_SPLITS = ("train", "valid", "test")
"""Splits whose nodes must have labels; a split under another name may be for prediction alone."""


def _chunks(array: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows) of consecutive chunks of an array, each of about `ELEMENTS_AT_ONCE` elements."""
    num_rows = max(1, ELEMENTS_AT_ONCE // max(1, array[:1].numel()))
    for start in range(0, array.size(0), num_rows):
        yield start, array[start : start + num_rows]


def check_indptr(indptr: Tensor, num_entries: int, where: str) -> None:
    """Check that a CSR row pointer runs from 0 to the number of entries and never decreases."""
    first = int(indptr[0])
    last = int(indptr[-1])
    if first != 0 or last != num_entries:
        raise ValueError(f"{where} runs from {first} to {last}, not from 0 to {num_entries}: convert again.")
    for start, chunk in _chunks(indptr):
        falls = (chunk[1:] < chunk[:-1]).nonzero()
        falls_at_start = start > 0 and bool(chunk[0] < indptr[start - 1])
        if falls.numel() or falls_at_start:
            entry = start + int(falls[0]) + 1 if falls.numel() else start
            raise ValueError(f"{where} decreases at entry {entry}: convert the graph again.")


def check_ids(ids: Tensor, limit: int, where: str, what: str = "nodes") -> None:
    """Check that all ids lie in 0 .. limit - 1. what: what ids number, for the error message."""
    for start, chunk in _chunks(ids):
        low, high = (int(bound) for bound in chunk.aminmax())
        if low < 0 or high >= limit:
            entry = int(((chunk < 0) | (chunk >= limit)).nonzero()[0])
            raise ValueError(
                f"{where} holds {int(chunk[entry])} at position {start + entry}, "
                f"but there are {limit} {what}: number them from 0 to {limit - 1} and convert again."
            )


def check_finite(values: Tensor, where: str) -> None:
    """Check that no number is NaN or infinite."""
    if not values.dtype.is_floating_point:
        return
    for start, chunk in _chunks(values):
        is_finite = chunk.isfinite()
        if not bool(is_finite.all()):
            row, *columns = (int(i) for i in (~is_finite).nonzero()[0])
            value = float(chunk[(row, *columns)])
            column = f", column {columns[0]}" if columns else ""
            raise ValueError(
                f"{where} holds {value} in row {start + row}{column}: "
                "replace such values, for example by numpy.nan_to_num, and convert again."
            )


def check_labels(y: Tensor, task: LabelKind, num_classes: int, where: str) -> None:
    """Check that all labels have values of their kind."""
    labels = LABELS[task]
    for start, chunk in _chunks(y):
        is_wrong = labels.is_wrong(chunk, num_classes)
        if bool(is_wrong.any()):
            row = int(is_wrong.nonzero()[0, 0])
            value = chunk[row][is_wrong[row]].reshape(-1)[0].item()
            raise ValueError(
                f"{where} holds label {value} at node {start + row}: it must be {labels.allowed(num_classes)}; "
                f"correct the labels or num_classes and convert again{labels.other_task}."
            )


def check_split(ids: Tensor, num_nodes: int, y: Tensor | None, name: str, where: str) -> None:
    """Check that a split is a sorted list of nodes, some perhaps repeated. Those of `CHECKED_SPLITS` have a label."""
    check_ids(ids, num_nodes, where)
    out_of_order = (ids[1:] < ids[:-1]).nonzero()
    if out_of_order.numel():
        node = int(ids[int(out_of_order[0]) + 1])
        raise ValueError(f"{where} is not sorted at node {node}: give the nodes of a split in ascending order.")
    if y is None or name not in CHECKED_SPLITS:
        return
    for start, chunk in _chunks(ids):
        unlabelled = (~is_labelled(y[chunk])).nonzero()
        if unlabelled.numel():
            node = int(ids[start + int(unlabelled[0])])
            raise ValueError(f"{where} has node {node}, which has no label: leave such nodes out of the split.")


def check_table(name: str, table: Table, where: Callable[[str], str]) -> None:
    """Check that the values of a table are finite, and that a sparse table is a CSR matrix.

    A dense table is checked if one tensor holds all its rows (`Table.storage`). Others are not checked.
    where: as in `check_nodes`.
    """
    if isinstance(table, SparseTable):
        check_indptr(table.indptr, table.columns.numel(), where(f"table.{name}.indptr"))
        check_ids(table.columns, table.num_columns, where(f"table.{name}.columns"), "columns")
        check_finite(table.values, where(f"table.{name}.values"))
        return
    storage = table.storage()
    if storage is not None:
        check_finite(storage, where(f"table.{name}"))


def check_nodes(nodes: Nodes, where: Callable[[str], str]) -> list[str]:
    """Check tables, labels and splits. Returns a sentence per check.

    where: Turns the name of an array into the words by which an error message calls it.
    """
    table_bytes = sum(table.num_bytes for table in nodes.tables.values())
    return _run_checks(_node_checks(nodes, where), table_bytes)


def check_dataset(dataset: Dataset, where: Callable[[str], str]) -> list[str]:
    """Check every array of a dataset. Returns a sentence per check. where: as in `check_nodes`."""
    graph = dataset.graph
    checks: dict[str, Callable[[], None]] = {
        "indptr runs over the edges": lambda: check_indptr(graph.indptr, graph.num_edges, where("indptr")),
        "indices are nodes": lambda: check_ids(graph.indices, graph.num_nodes, where("indices")),
    }
    for name, array in graph.edge.items():
        checks[f"edge array {name} is finite"] = partial(check_finite, array, where(f"edge.{name}"))
    return _run_checks(checks | _node_checks(dataset, where), dataset.num_bytes)


def _node_checks(nodes: Nodes, where: Callable[[str], str]) -> dict[str, Callable[[], None]]:
    """The checks of tables, labels and splits, by the sentence that says what each one shows."""
    checks: dict[str, Callable[[], None]] = {}
    for name, table in nodes.tables.items():
        checks[f"table {name} is finite"] = partial(check_table, name, table, where)
    if nodes.y is not None:
        check = partial(check_labels, nodes.y, nodes.task, nodes.num_classes, where("y"))
        checks[f"labels are {LABELS[nodes.task].noun}"] = check
    for k, splits in enumerate(nodes.all_splits):
        for name, ids in splits.items():
            checks[f"split {k} {name} is sorted and labelled"] = partial(
                check_split, ids, nodes.num_nodes, nodes.y, name, where(f"split.{k}.{name}")
            )
    return checks


def _run_checks(checks: dict[str, Callable[[], None]], num_bytes: int) -> list[str]:
    with progress("checking contents", len(checks), "arrays", enabled=num_bytes > SHOWN_BYTES) as bar:
        for check in checks.values():
            check()
            bar.advance()
    return list(checks)


def check_training(data: Dataset, splits: Mapping[str, Examples]) -> None:
    """Check the examples of these splits and the labels of their nodes before training begins.

    Labels of other nodes are not read, and labels of the examples' own are their task's.
    """
    for name, examples in splits.items():
        ids = examples.nodes
        check_ids(ids, data.num_nodes, f"Split {name!r}")
        if data.y is None or examples.y is not None:
            continue
        labels = LABELS[data.task]
        y = data.y[ids.to(data.y.device)].cpu()
        is_wrong = labels.is_wrong(y, data.num_classes)
        is_refused = is_wrong.any(-1) if is_wrong.dim() == 2 else is_wrong
        is_refused |= ~is_labelled(y)
        if bool(is_refused.any()):
            row = int(is_refused.nonzero()[0])
            value = y[row].tolist()
            raise ValueError(
                f"node {int(ids[row])} of split {name!r} has label {value}, and a label must be "
                f"{labels.allowed(data.num_classes)}: correct it, or take the node out of the split{labels.other_task}"
            )
