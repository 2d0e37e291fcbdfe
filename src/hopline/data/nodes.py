"""Features, labels and splits in the forms they come in, brought to the one form a `Dataset` has."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hopline.core.sampler import NodeIds, as_node_ids
from hopline.data.arrays import as_tensor
from hopline.data.checks import CHECKED_SPLITS, check_nodes
from hopline.data.dataset import Dataset, as_table
from hopline.ops import derive_key
from hopline.ops.random import draw
from hopline.tables import SparseTable, Table, TensorTable
from hopline.tasks.kinds import LabelKind
from hopline.tasks.labels import LABELS, normalize_labels
from hopline.util.log import logger

KNOWN_TASKS: dict[str, LabelKind] = {"tolokers": "binary", "minesweeper": "binary", "questions": "binary"}
"""Two-class graphs that are scored by ROC-AUC by convention, which their files do not say."""

SplitSets = tuple[dict[str, Tensor], ...]


@dataclass(frozen=True, kw_only=True)
class NodeData:
    """Everything of a dataset but its graph."""

    num_nodes: int
    tables: dict[str, Table]
    y: Tensor | None
    """Labels as a `Dataset` holds them."""
    all_splits: SplitSets
    """Every split, the first being the default."""
    task: LabelKind
    num_classes: int
    """Number of classes, of labels in the multi-label task, or of numbers per node in a regression."""


def node_data(
    num_nodes: int,
    *,
    x: Any = None,
    tables: Mapping[str, Any] | None = None,
    y: Any = None,
    splits: Mapping[str, Any] | None = None,
    task: LabelKind | None = None,
    num_classes: int | None = None,
) -> NodeData:
    """Features, labels and splits in any accepted form, checked."""
    labels = None
    if y is not None:
        given = as_tensor(y, "y")
        labels, kind = normalize_labels(given, task)
        if task is None and not LABELS[kind].are_numbers and given.is_floating_point():
            logger.warning(
                f"labels are floating-point numbers with whole values, and are taken for classes (task={kind!r}): for "
                "numbers to predict set task='regression'"
            )
        task = kind
    task = task or "single"
    found = {name: as_table(rows, name) for name, rows in (tables or {}).items()}
    if x is not None:
        found = {"x": _floating(as_table(x)), **found}
        _check_width(found["x"])
    for name, table in found.items():
        if len(table) != num_nodes:
            raise ValueError(f"Table {name!r} has {len(table)} rows for {num_nodes} nodes: give one row per node.")
    if labels is not None and labels.size(0) != num_nodes:
        raise ValueError(f"There are {labels.size(0)} labels for {num_nodes} nodes: give one per node, -1 for none.")
    all_splits = split_sets(splits or {}, num_nodes)
    _tell_overlaps(all_splits)
    nodes = NodeData(
        num_nodes=num_nodes,
        tables=found,
        y=labels,
        all_splits=all_splits,
        task=task,
        num_classes=_count_classes(labels, task) if num_classes is None else num_classes,
    )
    check_nodes(nodes, lambda array: f"Array {array!r}")
    return nodes


def _tell_overlaps(all_splits: SplitSets) -> None:
    """Nodes that are trained on say nothing about the others; a few graphs are meant to be so, so they are taken."""
    for number, splits in enumerate(all_splits):
        for one, other in itertools.combinations([name for name in CHECKED_SPLITS if name in splits], 2):
            shared = _common(splits[one], splits[other])
            if shared.numel():
                count = f"{shared.numel()} node{'s' * (shared.numel() > 1)}"
                of = f" (of split {number})" if len(all_splits) > 1 else ""
                logger.warning(
                    f"splits {one!r} and {other!r}{of} share {count}, such as node {int(shared[0])}: scores count "
                    "them twice; give each node to one split, or draw them anew with split=0.6,0.2,0.2"
                )


def _common(ids: Tensor, others: Tensor) -> Tensor:
    """The ids that are among others, all of them sorted."""
    if not others.numel():
        return others
    at = torch.searchsorted(others, ids).clamp(max=others.numel() - 1)
    return ids[others[at] == ids]


def _check_width(x: Table) -> None:
    if len(x.shape) < 2:
        raise ValueError(
            f"x has shape {list(x.shape)}: give one row per node, [{len(x)}, 1] for one feature (x[:, None])."
        )


def _floating(table: Table) -> Table:
    """Features are numbers to compute with: whole numbers become float32."""
    if table.dtype.is_floating_point:
        return table
    if isinstance(table, SparseTable):
        return SparseTable(table.indptr, table.columns, table.values.float(), table.num_columns)
    return TensorTable(table.read(torch.arange(len(table))).float())


def split_name(name: str) -> str:
    """Our name of a split that a source calls "val", "train_mask" and the like."""
    short = name.removesuffix("_mask").removesuffix("_idx")
    return "valid" if short in ("val", "validation", "dev") else short


def check_split_names(names: Iterable[str]) -> None:
    """Refuse two arrays for one split, such as "val_mask" and "valid_idx"."""
    seen: dict[str, str] = {}
    for name in names:
        ours = split_name(name)
        if ours in seen:
            raise ValueError(f"{seen[ours]} and {name} both describe the split {ours!r}: leave one of them out.")
        seen[ours] = name


def node_ids(selection: Any, num_nodes: int) -> Tensor:
    """Sorted int64 node ids from a boolean mask [N] or from ids in any order."""
    chosen = as_tensor(selection)
    if chosen.dtype == torch.bool:
        if chosen.shape != (num_nodes,):
            raise ValueError(f"A split mask has shape {list(chosen.shape)}: give one entry per node, {num_nodes}.")
        return chosen.nonzero().reshape(-1)
    if chosen.dtype.is_floating_point or chosen.dim() != 1:
        raise ValueError("A split must be a boolean mask over the nodes or a 1-D list of node ids.")
    if chosen.numel() == num_nodes > 2 and 0 <= int(chosen.min()) <= int(chosen.max()) <= 1:
        raise ValueError("A split holds a 0 or 1 for each node: make it a boolean mask, by mask.bool() or != 0.")
    return chosen.long().sort().values


def select_nodes(data: Dataset, nodes: NodeIds | str) -> Tensor:
    """[n] int64: the nodes that a user asks for. nodes: "all", the name of a split, ids, or a bool mask."""
    if not isinstance(nodes, str):
        return as_node_ids(nodes, data.num_nodes)
    if nodes == "all":
        return torch.arange(data.num_nodes)
    names = [name for name, ids in data.splits.items() if ids.numel()]
    if nodes not in names:
        raise ValueError(f"there is no split {nodes!r}: choose one of {', '.join([*names, 'all'])}")
    return data.splits[nodes]


def split_sets(masks: Mapping[str, Any], num_nodes: int) -> SplitSets:
    """All splits that masks or ids describe: masks [N, k] or [k, N] describe k of them, masks [N] one."""
    check_split_names(name for name, mask in masks.items() if mask is not None)
    given = {split_name(name): as_tensor(mask, f"split {name!r}") for name, mask in masks.items() if mask is not None}
    # A column [N, 1] is one mask, as [N] is.
    given = {name: mask[:, 0] if mask.dim() == 2 and mask.size(1) == 1 else mask for name, mask in given.items()}
    counts = {name: _count(mask, num_nodes) for name, mask in given.items() if mask.dim() != 1}
    if len(set(counts.values())) > 1:
        (one, few), (other, many) = sorted(counts.items(), key=lambda item: item[1])[:: len(counts) - 1]
        raise ValueError(
            f"Split masks describe {few} and {many} splits ({one!r} and {other!r}): give all of them as many, or [N]."
        )
    count = max(counts.values(), default=min(1, len(given)))
    sets: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name, mask in given.items():
        if mask.dim() == 2 and mask.size(0) != num_nodes:
            mask = mask.t()
        for k in range(count):
            # A test mask shared by all splits, as in WikiCS, is repeated.
            column = mask if mask.dim() == 1 else mask[:, k]
            sets[k][name] = node_ids(column, num_nodes)
    return tuple(sets)


def _count(mask: Tensor, num_nodes: int) -> int:
    if mask.dim() != 2 or num_nodes not in mask.shape:
        raise ValueError(f"Split masks have shape {list(mask.shape)}: give [N] or [N, k] for N = {num_nodes} nodes.")
    return mask.size(1) if mask.size(0) == num_nodes else mask.size(0)


def usual_split(
    y: Any, task: LabelKind | None, per_class: tuple[int, int] = (20, 30), seed: int = 0
) -> tuple[dict[str, Tensor], str] | None:
    """(splits, a sentence for `meta`) of a labelled graph whose file has none; None without a class per node."""
    labels = class_labels(y, task)
    if labels is None or not bool((labels >= 0).any()):
        return None
    train, valid = per_class
    sentence = f"{train} train and {valid} valid nodes per class by seed {seed}, the rest test"
    splits = per_class_split(labels, num_train=train, num_valid=valid, seed=seed)
    return splits, f"{sentence} (others: split=0.6,0.2,0.2)"


def per_class_split(y: Tensor, *, num_train: int = 20, num_valid: int = 30, seed: int = 0) -> dict[str, Tensor]:
    """A seeded split with so many training and validation nodes per class; other labelled nodes are test."""
    order = torch.argsort(draw(derive_key(seed), torch.arange(y.numel()), 0), stable=True)
    order = order[y[order] >= 0]
    labels = y[order].unique(return_inverse=True)[1]  # numbered anew: what is no class is refused later
    by_class = torch.argsort(labels, stable=True)
    counts = torch.bincount(labels)
    first = counts.cumsum(0) - counts
    rank = torch.arange(order.numel()) - first[labels[by_class]]
    nodes = order[by_class]
    parts = {
        "train": rank < num_train,
        "valid": (rank >= num_train) & (rank < num_train + num_valid),
        "test": rank >= num_train + num_valid,
    }
    return {name: nodes[part].sort().values for name, part in parts.items()}


def class_labels(y: Any, task: LabelKind | None) -> Tensor | None:
    """[N] int64: labels that are one class per node. None for labels of another kind, or none."""
    if y is None:
        return None
    labels, kind = normalize_labels(as_tensor(y, "y"), task)
    return None if LABELS[kind].has_columns else labels


def _count_classes(y: Tensor | None, task: LabelKind) -> int:
    return 0 if y is None else LABELS[task].count(y)
