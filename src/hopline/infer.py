"""Inference: exact, layer by layer over the whole graph or over what some nodes need; or sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from hopline import metrics
from hopline.batch import Batch, Block, Part
from hopline.data.dataset import Dataset
from hopline.guard import Guard
from hopline.layer_files import LayerFiles, fingerprint
from hopline.layerwise import CHUNK_EDGES, CPU, KeepRows, Layerwise, read_on
from hopline.nn.whole import Whole, as_walkable
from hopline.progress import progress
from hopline.sampling import check_ids
from hopline.validate import checked_bytes

WHOLE_BYTES = 2 << 30
"""A model without layers is run on the whole graph up to this size of its edge matrix."""
ReadRows = Callable[[Tensor], Tensor]
"""From node ids to their rows."""


def exact(
    model: nn.Module,
    data: Dataset,
    ids: Tensor | None = None,
    *,
    chunk_edges: int | None = None,
    chunk_bytes: int | str | None = None,
    device: torch.device | str = "cpu",
    show: bool = False,
    keep: KeepRows | None = None,
    folder: Path | str | None = None,
) -> Tensor:
    """The model's output for `ids` (all nodes by default), over every edge, in evaluation mode: [n, ...].

    Each layer is computed for all nodes it is needed at before the next one starts, in chunks of about `chunk_edges`
    edges (a million, more on a GPU), or as large as `chunk_bytes` ("2GiB") let them be beside the hidden rows; these
    are kept in tables, on the host or on a device with room. keep: is given the rows of every layer but the last, which
    are then computed at all nodes. folder: keeps the hidden rows there, and the same call goes on from them if it was
    killed.
    """
    read = exact_rows(
        model,
        data,
        ids,
        chunk_edges=chunk_edges,
        chunk_bytes=chunk_bytes,
        device=device,
        show=show,
        keep=keep,
        folder=folder,
    )
    return read(torch.arange(data.num_nodes) if ids is None else ids)


def exact_rows(
    model: nn.Module,
    data: Dataset,
    ids: Tensor | None = None,
    *,
    chunk_edges: int | None = None,
    chunk_bytes: int | str | None = None,
    device: torch.device | str = "cpu",
    show: bool = False,
    keep: KeepRows | None = None,
    folder: Path | str | None = None,
) -> ReadRows:
    """The same, where the output is read piece by piece: a function from some of `ids` to their rows, on the host."""
    check_wanted(ids, data.num_nodes)
    most = checked_bytes(chunk_bytes)
    walk = as_walkable(model)
    with evaluating(walk):
        if isinstance(walk, Whole):
            if folder is not None:
                raise ValueError(
                    f"{type(walk.module).__name__} has no layers to go on from: leave out folder=, or use hl.nn.GNN"
                )
            return _whole(walk, data, torch.device(device)).__getitem__
        walk.check_blocks(data.num_features, data.graph.edge)
        files = None
        if folder is not None:
            if keep is not None:
                raise ValueError("rows that are in folder= already would not come to keep=: give one of them")
            about = f"{data.name} ({data.num_nodes} nodes, {data.num_edges} edges, {data.num_features} features)"
            files = LayerFiles(Path(folder), identity(model, about, ids, chunk_edges, most))
        work = Layerwise(walk, data, chunk_edges, torch.device(device), keep, chunk_bytes=most, files=files)
        return partial(read_on, CPU, work.outputs(ids, show))


def check_wanted(ids: Tensor | None, num_nodes: int) -> None:
    """Refuse what are no nodes to infer at."""
    if ids is not None:
        check_ids(ids, num_nodes)
    if ids is not None and ids.numel() == 0:
        raise ValueError("there are no nodes to infer at: give ids that are not empty, or none for all nodes")


def identity(
    model: nn.Module, dataset: str, ids: Tensor | None, chunk_edges: int | None, chunk_bytes: int | None
) -> dict[str, str]:
    """What must be the same for inference to go on from a folder."""
    return {
        "dataset": dataset,
        "weights": fingerprint(model),
        "nodes": "all" if ids is None else fingerprint(ids),
        "chunks": f"{chunk_edges or CHUNK_EDGES} edges" if chunk_bytes is None else f"{chunk_bytes} bytes",
    }


def sampled(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    num_nodes: int | None = None,
    show: bool = False,
    guard: Guard | None = None,
) -> Tensor:
    """The model's output for the batches' seeds, in their order: an estimate over sampled edges.

    batches: for example `Sampled(fanouts=(20, 20), shuffle=False).loader(data, ids)`; num_nodes: for the progress bar;
    guard: of training under a budget, within which batches that would take more are computed in pieces.
    """
    walk = as_walkable(model)
    outputs = []
    with (
        evaluating(walk),
        progress("inference", num_nodes, "nodes", enabled=show, brief=True) as bar,
    ):
        for batch in batches:
            outputs.append(walk(batch).cpu() if guard is None else guard.outputs(walk, batch))
            bar.advance(batch.num_seeds)
    return torch.cat(outputs)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; each module's own mode comes back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def measure(data: Dataset, scores: Tensor, labels: Tensor) -> dict[str, float]:
    """The metric that goes with the dataset's task."""
    if data.task == "binary" and scores.size(-1) == 1:
        scores = scores.squeeze(-1)
    return {data.metric: metrics.METRICS[data.metric](scores.float(), labels)}


def _whole(walk: Whole, data: Dataset, device: torch.device) -> Tensor:
    graph = data.graph
    edge_bytes = graph.num_edges * data.num_features * 4
    if edge_bytes > WHOLE_BYTES:
        raise ValueError(
            f"{type(walk.module).__name__} has no layers that could be computed one by one, and the whole graph is too "
            "large for it: build it as hl.nn.GNN([...convs...]), or set inference=sampled"
        )
    part = Part(graph.indptr, graph.indices, graph.edge).to(device)
    block = Block(torch.arange(graph.num_nodes, device=device), graph.num_nodes, (part,), graph)
    return walk.on_block(read_on(device, data.x, block.src_ids), block).cpu()
