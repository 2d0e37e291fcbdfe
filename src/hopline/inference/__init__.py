"""Inference: exact, over all edges and layer by layer; or sampled, as an estimate over drawn edges.

Exact inference computes all nodes, or only those that the requested nodes depend on. A module that is not
made of layers runs on the hops around the nodes (`hops=`), or on the whole graph at once.

`exact`, `exact_rows` and `sampled` are public. The other modules, by the way that they compute:

    layerwise_chunks   layer by layer, over chunks of nodes
    neighborhoods      a module without layers, on the hops around some nodes
    distributed        layer by layer, with a shard per rank
    over_shards        layer by layer, over shards in one process
    resumable          stores the tables of layers in files, from which a killed inference resumes
    cache              stores blocks and sums that the next inference at the same nodes needs again
    captured_forward   replays inference at the same nodes as a CUDA graph

The package imports from `shards` and the packages below it.

A graph owns the cache of the last inference on it (`Graph.get_cached`). The object that evaluates
repeatedly owns the captured inferences (`CapturedInferences`); in a run that is the Trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from hopline import metrics
from hopline.budget.guard import BudgetGuard
from hopline.contract import KeepRows
from hopline.core.batch import Batch
from hopline.core.row_handles import Rows
from hopline.core.sampler import NodeIds
from hopline.data.dataset import Dataset, expect_dataset
from hopline.data.fingerprint import checksum_of, contents_of
from hopline.data.inputs import Inputs
from hopline.data.nodes import select_nodes
from hopline.device.snapshots import eval_mode
from hopline.inference.layerwise_chunks import CHUNK_EDGES, CPU, Chunks
from hopline.inference.neighborhoods import LocalInference, run_whole, whole_bytes
from hopline.inference.resumable import LayerFiles, weights_checksum
from hopline.nn.structure import hash_of_parts, opaque_part, parts_of
from hopline.nn.whole_module import Whole, as_batch_model
from hopline.nn.whole_module_probe import find_hops, find_reach, initialise
from hopline.units.losses import narrow_output_error
from hopline.util.config import format_size, parse_chunk_bytes
from hopline.util.log import logger
from hopline.util.progress import progress

WHOLE_BYTES = 2 << 30
"""A module without layers runs on the whole graph if a float32 feature row per edge takes at most these bytes."""
ReadRows = Callable[[Tensor], Tensor]
"""A function from node ids, [m] int64, to their rows, [m, ...] on the host."""


def exact(
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
) -> Tensor:
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
    read = exact_rows(
        model,
        data,
        ids,
        hops=hops,
        chunk_edges=chunk_edges,
        chunk_bytes=chunk_bytes,
        device=device,
        show=show,
        keep=keep,
        folder=folder,
    )
    return read(select_nodes(data, "all" if ids is None else ids))


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


def sampled(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    num_nodes: int | None = None,
    show: bool = False,
    guard: BudgetGuard | None = None,
) -> Tensor:
    """Return the model's output for the batches' seeds, in their order: an estimate over sampled edges.

    Args:
        model: A `GNN`, a PyG model, or any module with forward(x, edge_index). Its modes are restored
            afterwards.
        batches: Batches such as those of `hl.Sampled(fanouts=(20, 20), shuffle=False).loader(data, ids)`.
        num_nodes: The number of seeds, for the progress bar.
        show: Show progress.
        guard: The guard of training under a budget. Batches that exceed the budget are computed in
            micro-batches.

    Returns:
        [n, num_outputs] on the host, in the model's dtype.

    Raises:
        ValueError: The number of blocks of a batch is not the number of layers of the model.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> data = hl.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.ones(4, 2))
        >>> batches = hl.Sampled(fanouts=(2,), shuffle=False).loader(data, torch.tensor([2, 0]))
        >>> hl.infer.sampled(hl.nn.GNN([SAGEConv(2, 3)]), batches).shape
        torch.Size([2, 3])
    """
    if isinstance(batches, Dataset):
        raise ValueError(
            "sampled inference takes batches, not a Dataset: give it "
            "hl.Sampled(fanouts=(20, 20), shuffle=False).loader(data, ids)"
        )
    batch_model = as_batch_model(model)
    outputs = []
    with (
        evaluating(batch_model),
        progress("inference", num_nodes, "nodes", enabled=show, brief=True) as bar,
    ):
        for batch in batches:
            outputs.append(batch_model(batch).cpu() if guard is None else guard.outputs(batch_model, batch))
            bar.advance(batch.num_seeds)
    return torch.cat(outputs)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode and turn gradients off. Each module's own mode is restored at the end."""
    with eval_mode(model), torch.no_grad():
        yield


def measure(data: Dataset | Inputs, scores: Tensor, labels: Tensor) -> dict[str, float]:
    """The metric of a dataset, or of a run's training data, by name: {metric: value}."""
    if data.task != "multi" and scores.size(-1) == 1:  # a single column is the score of the second of two classes
        if data.num_classes > 2:
            raise ValueError(narrow_output_error(1, data.num_classes))
        scores = scores.squeeze(-1)
        if data.metric == "accuracy":
            scores = (scores > 0).to(labels.dtype)
    return {data.metric: metrics.METRICS[data.metric](scores.float(), labels)}


# ---- modules that are not made of layers. A *part* is the graph within some hops of some nodes.


def whole_rows(
    batch_model: Whole,
    data: Dataset,
    ids: Tensor | None,
    part_hops: int | None,
    *,
    device: torch.device,
    show: bool = False,
    chunk_edges: int | None = None,
    chunk_bytes: int | None = None,
) -> ReadRows:
    """A function from some of `ids` to the outputs of a module without layers.

    part_hops: the hops of the parts that the module runs on; None for the whole graph at once. Without a
    limit on chunks, the whole graph is also used if it is small enough and parts would cost more.
    """
    if part_hops is None:
        if is_too_large(data):
            enough_hops = find_hops(batch_model, data.x, data.graph.edge)
            advice = "" if enough_hops is None else f"give hops={enough_hops}, "
            raise ValueError(
                f"{type(batch_model.module).__name__} has no layers that could be computed one by one, and the whole "
                f"graph is too large for it: {advice}build it as hl.nn.GNN([...convs...]), or set inference=sampled"
            )
        return run_whole(batch_model, data, device).__getitem__
    seeds = torch.arange(data.num_nodes) if ids is None else torch.unique(ids.cpu().long())
    local = LocalInference(batch_model, data, part_hops, device, chunk_edges=chunk_edges, chunk_bytes=chunk_bytes)
    has_limit = chunk_edges is not None or chunk_bytes is not None
    if not has_limit and not is_too_large(data) and local.is_dearer_than_whole(seeds):
        return run_whole(batch_model, data, device).__getitem__
    rows = local.rows(seeds, show)

    def read(node_ids: Tensor) -> Tensor:
        return rows[torch.searchsorted(seeds, node_ids.cpu().long())]

    return read


def part_hops_of(batch_model: Whole, data: Dataset, hops: int | None, limits: list[str]) -> int | None:
    """The hops of the parts that a module runs on. None for the whole graph.

    They are `hops`, or one more if the module also needs all in-edges of the nodes that are `hops` away.

    Raises a ValueError if `hops` is too few, or if there are limits on the size of parts but no hops.

    hops: the hops around a node that the module reads, says the user; None if the user does not say.
    limits: the names of the arguments that the user set to limit the size of parts.
    """
    name = type(batch_model.module).__name__
    if hops is None and limits:
        enough_hops = find_hops(batch_model, data.x, data.graph.edge)
        advice = "leave it out" if enough_hops is None else f"add hops={enough_hops}"
        raise ValueError(
            f"{limits[0]}= needs the number of hops around a node that {name} reads, since it has no layers to compute "
            f"one by one: {advice}, or build it as hl.nn.GNN([...convs...])"
        )
    if hops is None:
        return None
    if isinstance(hops, bool) or not isinstance(hops, int) or hops < 0:
        raise ValueError(f"hops must be a number from 0, not {hops!r}")
    reach = find_reach(batch_model, hops, data.x, data.graph.edge)
    if reach.part_hops is None:
        enough_hops = find_hops(batch_model, data.x, data.graph.edge)
        advice = "" if enough_hops is None or enough_hops <= hops else f"hops={enough_hops}, or "
        raise ValueError(
            f"{name} with hops={hops} would not give its outputs on the whole graph: {reach.reason or reach.refusal}. "
            f"Give {advice}no hops=, which runs it on the whole graph at once"
        )
    return reach.part_hops


def describe_whole(batch_model: Whole, data: Dataset) -> str:
    """A sentence for the log: the memory of one forward pass over the whole graph."""
    return (
        f"exact inference runs {type(batch_model.module).__name__} on the whole graph at once, which takes about "
        f"{format_size(whole_bytes(batch_model, data))}"
    )


def is_too_large(data: Dataset) -> bool:
    """Whether a float32 feature row per edge would take more than `WHOLE_BYTES`."""
    return data.graph.num_edges * data.num_features * 4 > WHOLE_BYTES
