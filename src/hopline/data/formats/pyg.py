"""Makes datasets from graphs of PyTorch Geometric and SciPy in memory, and PyG's `Data` from datasets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hopline.data.convert import from_edges
from hopline.data.dataset import Dataset, expect_dataset
from hopline.data.options import merge
from hopline.data.paths import default_name

if TYPE_CHECKING:
    from torch_geometric.data import Data

_EDGE_NAMES = {"edge_weight": "weight", "edge_attr": "attr", "edge_type": "type", "edge_time": "time"}
"""Attributes of a PyG `Data` that are edge arrays, and their names in a dataset."""
_NOT_TABLES = ("edge_index", "adj_t", "x", "y", "batch", "ptr", "num_nodes")
"""Attributes of a PyG `Data` that are handled otherwise, or left out."""


def from_pyg(data: Data, **arguments: Any) -> Dataset:
    """Make a dataset from a PyG `Data`.

    Masks become splits, attributes with a row per edge become edge arrays, and attributes with a row per
    node tables.

    Args:
        data: With `edge_index` [2, num_edges] or `adj_t`. Masks may be [num_nodes, k], of which `split=`
            chooses one.
        arguments: Those of `from_edges`. They take precedence over what `data` has.

    Returns:
        The dataset, in memory unless `folder=` is given.

    Raises:
        ValueError: `data` is no `Data`, or has no edges, or does not say how many
            nodes it has.

    Example:
        >>> from torch_geometric.data import Data
        >>> data = hl.from_pyg(Data(x=torch.ones(3, 2), edge_index=torch.tensor([[0, 1], [1, 2]])))
        >>> data.num_nodes, data.num_edges
        (3, 2)
    """
    is_data = any(cls.__name__ == "Data" for cls in type(data).__mro__)  # without importing PyG
    if not is_data:
        expect_dataset(data, "from_pyg", "a torch_geometric.data.Data")
    edge_index, edge = _read_edges(data)
    num_nodes = data.num_nodes
    if num_nodes is None:
        raise ValueError("The PyG data does not say how many nodes it has: set data.num_nodes.")

    masks: dict[str, Tensor] = {}
    tables: dict[str, Tensor] = {}
    num_edges = edge_index.size(1)
    for key, value in data.to_dict().items():
        if not isinstance(value, Tensor) or key in _NOT_TABLES:
            continue
        num_rows = value.size(0) if value.dim() else -1
        if key in _EDGE_NAMES or (key.startswith("edge_") and num_rows == num_edges):
            # `setdefault`: the values of `adj_t` take precedence over `edge_weight`.
            edge.setdefault(_EDGE_NAMES.get(key, key.removeprefix("edge_")), value)
        elif key.endswith("_mask"):
            masks[key] = value
        elif num_rows == num_nodes:
            # If there are as many edges as nodes, an attribute belongs to nodes unless its name says
            # "edge", as in PyG.
            tables[key] = value
        elif key == "time" and num_rows == num_edges:
            edge.setdefault("time", value)

    from_data: dict[str, Any] = {
        "name": default_name(arguments.get("folder"), "pyg"),
        "x": data.x,
        "y": data.y,
        "tables": tables,
        "splits": masks,
        "edge": edge,
        "num_nodes": num_nodes,
        "meta": {"origin": "torch_geometric"},
    }
    return from_edges(edge_index, **merge(from_data, arguments))


def _read_edges(data: Data) -> tuple[Tensor, dict[str, Tensor]]:
    """([2, num_edges] edges, edge arrays) of `edge_index`, or of a transposed adjacency matrix `adj_t`.

    Values of `adj_t` other than one are the edge array "weight".
    """
    if data.edge_index is not None:
        return data.edge_index, {}
    adjacency = getattr(data, "adj_t", None)
    if adjacency is None:
        raise ValueError("The PyG data has no edge_index: give it one, [2, E] with sources first.")
    if isinstance(adjacency, Tensor):
        coo = adjacency.to_sparse_coo().coalesce()
        dst, src = coo.indices()
        weight = coo.values()
    else:
        dst, src, weight = adjacency.coo()
    edge_index = torch.stack([src, dst])
    if weight is None or bool((weight == 1).all()):
        return edge_index, {}
    return edge_index, {"weight": weight}


def to_pyg(dataset: Dataset) -> Data:
    """A PyG `Data` with dense features, int64 edges and masks for the splits."""
    from torch_geometric.data import Data

    node_ids = torch.arange(dataset.num_nodes)
    data = Data(edge_index=dataset.graph.edge_index(), num_nodes=dataset.num_nodes)
    for name, table in dataset.tables.items():
        data[name] = table.read(node_ids)
    for name, array in dataset.graph.edge.items():
        data[f"edge_{name}"] = array.clone()
    if dataset.y is not None:
        data.y = dataset.y.clone()
    for name, mask in split_masks(dataset).items():
        data[name] = mask
    return data


def split_masks(dataset: Dataset) -> dict[str, Tensor]:
    """[num_nodes] bool of each split, by PyG's names: "train_mask", "val_mask", "test_mask"."""
    masks = {}
    for name, ids in dataset.splits.items():
        mask = torch.zeros(dataset.num_nodes, dtype=torch.bool)
        mask[ids] = True
        pyg_name = "val" if name == "valid" else name
        masks[f"{pyg_name}_mask"] = mask
    return masks


def from_scipy(adjacency: Any, **arguments: Any) -> Dataset:
    """Make a dataset from a SciPy sparse matrix whose entry (i, j) is the edge from i to j.

    Args:
        adjacency: [num_nodes, num_nodes]. Values other than one become the edge array "weight".
        arguments: Those of `from_edges`.

    Returns:
        The dataset, in memory unless `folder=` is given.

    Raises:
        ValueError: The matrix is dense or not square.

    Example:
        >>> from scipy.sparse import csr_array
        >>> data = hl.from_scipy(csr_array([[0, 1], [1, 0]]), x=torch.ones(2, 3))
        >>> data.num_edges
        2
    """
    if not hasattr(adjacency, "tocoo") or adjacency.shape[0] != adjacency.shape[1]:
        raise ValueError("from_scipy takes a square sparse matrix: make one with scipy.sparse.csr_array.")
    coo = adjacency.tocoo()
    is_weighted = not bool((coo.data == 1).all())
    from_matrix: dict[str, Any] = {
        "name": default_name(arguments.get("folder"), "scipy"),
        "num_nodes": coo.shape[0],
        "edge": {"weight": torch.as_tensor(coo.data)} if is_weighted else {},
        "meta": {"origin": "scipy"},
    }
    return from_edges(np.stack([coo.row, coo.col]), **merge(from_matrix, arguments))
