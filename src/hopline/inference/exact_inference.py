"""`exact` and `exact_rows`: the outputs of a model over every edge, for all nodes or for some.

A model made of layers is computed layer by layer (`layerwise_chunks`). A module without layers runs on the hops
around the nodes or on the whole graph (`without_layers`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from hopline.contract import KeepRows
from hopline.core.row_handles import Rows
from hopline.core.sampler import NodeIds
from hopline.data.dataset import Dataset, expect_dataset
from hopline.data.fingerprint import checksum_of, contents_of
from hopline.data.nodes import select_nodes
from hopline.device.snapshots import evaluating
from hopline.inference.layerwise_chunks import CHUNK_EDGES, CPU, Chunks
from hopline.inference.resumable import LayerFiles, weights_checksum
from hopline.inference.without_layers import ReadRows, describe_whole, part_hops_of, whole_rows
from hopline.nn.structure import hash_of_parts, opaque_part, parts_of
from hopline.nn.whole_module import Whole, as_batch_model
from hopline.nn.whole_module_probe import initialise
from hopline.util.config import parse_chunk_bytes
from hopline.util.log import logger

P = ParamSpec("P")
T = TypeVar("T")


def exact_rows(
    model: nn.Module,
    data: Dataset,
    ids: NodeIds | str | None = None,
    *,
    hops: int | None = None,
    chunk_edges: int | None = None,
    chunk_bytes: int | str | None = None,
    device: torch.device | str = "cpu",
    show: bool = False,
    keep: KeepRows | None = None,
    folder: Path | str | None = None,
) -> ReadRows:
    """Compute as `exact` does, and return a function that reads rows of the output.

    The whole output then need not be in memory at once.

    Arguments and errors are those of `exact`.

    Returns:
        A function from some of `ids`, [m] int64, to their rows, [m, num_outputs] on the host.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.ones(4, 2))
        >>> read = hl.infer.exact_rows(hl.nn.GNN([SAGEConv(2, 3)]), data)
        >>> read(torch.tensor([3, 1])).shape
        torch.Size([2, 3])
    """
    expect_dataset(data, "exact inference")
    ids = check_node_ids(data, ids)
    max_bytes = parse_chunk_bytes(chunk_bytes)
    batch_model = as_batch_model(model)
    with evaluating(batch_model):
        if isinstance(batch_model, Whole):
            if folder is not None:
                raise ValueError(
                    f"{type(batch_model.module).__name__} has no layers to resume from: leave out folder=, or use "
                    "hl.nn.GNN"
                )
            if keep is not None:
                raise ValueError(
                    f"{type(batch_model.module).__name__} has no layers whose rows keep= could be given: leave out "
                    "keep=, or use hl.nn.GNN"
                )
            initialise(batch_model, data.x, data.graph.edge)
            limits = {"chunk_edges": chunk_edges, "chunk_bytes": max_bytes}
            limit_names = [name for name, limit in limits.items() if limit is not None]
            part_hops = part_hops_of(batch_model, data, hops, limit_names)
            if part_hops is None and show:
                logger.info(describe_whole(batch_model, data))
            return whole_rows(batch_model, data, ids, part_hops, device=torch.device(device), show=show, **limits)
        if hops is not None:
            raise ValueError(
                f"hops= is for a module that is not made of layers, and {type(model).__name__} is: leave it out"
            )
        batch_model.check_blocks(data.num_features, data.graph.edge)
        files = None
        if folder is not None:
            if keep is not None:
                raise ValueError("rows that are in folder= already would not come to keep=: give one of them")
            files = LayerFiles(Path(folder), identity(model, contents_of(data), ids, chunk_edges, max_bytes))
        work = Chunks(batch_model, data, chunk_edges, torch.device(device), keep, chunk_bytes=max_bytes, files=files)
        outputs = work.outputs(ids, show)
        return lambda node_ids: Rows(outputs, node_ids).read_on(CPU)


def _with_arguments_of(documented: Callable[P, Any]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """A decorator for a function that passes its arguments on to `documented`: it shows the same signature."""

    def decorate(function: Callable[..., T]) -> Callable[P, T]:
        returned = inspect.signature(function).return_annotation
        signature = inspect.signature(documented).replace(return_annotation=returned)
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return decorate


@_with_arguments_of(exact_rows)
def exact(model: nn.Module, data: Dataset, ids: NodeIds | str | None = None, **options: Any) -> Tensor:
    """Return the model's output for `ids`, over every edge, in evaluation mode.

    Each layer is computed in chunks, for all nodes that need it, before the next one starts. Hidden
    embeddings are stored in tables, on the device if it has enough free memory, else on the host.

    A module that is not made of layers runs on the whole graph at once. With `hops` it runs on the hops
    around chunks of `ids` instead. Too few hops are found by a trial on a tiny graph, and refused.

    Args:
        model: A `GNN`, a PyG model, or any module with forward(x, edge_index). Its modes are restored
            afterwards.
        data: The dataset, with features.
        ids: The nodes, as ids (a tensor, an array or a list), as a bool mask, or as the name of a split. Default: all.
        hops: The number of hops around a node that the output of a module without layers depends on.
        chunk_edges: Edges per chunk. Default: a million, more on a GPU.
        chunk_bytes: Memory for chunks apart from the hidden embeddings, such as "2GiB", in place of
            `chunk_edges`.
        device: The device to compute on. The model must be on it.
        show: Show progress.
        keep: Called as keep(layer, ids, rows) with the embeddings of every layer but the last, at all nodes.
        folder: A folder for the hidden embeddings. After a kill, the same call resumes from its files.

    Returns:
        [n, num_outputs] on the host, in the order of `ids`, in the model's dtype.

    Raises:
        ValueError: `ids` is empty, or an entry is no node. A conv cannot run on blocks. An argument does not
            go with the model, or with another argument.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.ones(4, 2))
        >>> model = hl.nn.GNN([SAGEConv(2, 8), SAGEConv(8, 3)])
        >>> hl.infer.exact(model, data).shape
        torch.Size([4, 3])
        >>> hl.infer.exact(model, data, torch.tensor([2, 0])).shape
        torch.Size([2, 3])
    """
    read = exact_rows(model, data, ids, **options)
    return read(select_nodes(data, "all" if ids is None else ids))


def check_node_ids(data: Dataset, nodes: NodeIds | str | None) -> Tensor | None:
    """[n] int64: the nodes that a user asks for. None stands for all. Raises a ValueError if there are none."""
    if nodes is None:
        return None
    ids = select_nodes(data, nodes)
    if ids.numel() == 0:
        raise ValueError("there are no nodes to infer at: give ids that are not empty, or none for all nodes")
    return ids


def identity(
    model: nn.Module, contents: Mapping[str, str], ids: Tensor | None, chunk_edges: int | None, chunk_bytes: int | None
) -> dict[str, str]:
    """Names and values of all that must be equal for inference to resume from a folder (`LayerFiles`).

    contents: names and checksums of the dataset's contents.
    """
    chunks = f"{chunk_edges or CHUNK_EDGES} edges" if chunk_bytes is None else f"{chunk_bytes} bytes"
    parts = parts_of(as_batch_model(model))
    opaque = opaque_part(parts)
    if opaque is not None:
        raise ValueError(
            f"folder= compares the model with that of an earlier call, and {opaque} of {type(model).__name__} cannot "
            "be compared: leave out folder=, or give its class a __getstate__ that returns plain values"
        )
    return {
        **contents,
        "model": hash_of_parts(parts),
        "weights": weights_checksum(model),
        "nodes": "all" if ids is None else checksum_of(ids),
        "chunks": chunks,
    }
