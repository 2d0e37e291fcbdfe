"""Predict with a finished run, and write an .npy file.

The file is written chunk by chunk, in the order of node ids:

    one process, exact        one process, sampled       a shard per rank
    `exact_rows`: scores      scores of all nodes        scores of the rank's nodes
    of any nodes                                             |
        |                         |                          |  all-to-all, `CHUNK_NODES` ids at a time
        v                         v                          v
    `_predict_chunks`, in rank 0: chunks of classes or scores
        |
        v
    `_write`: the header, then one chunk after the other
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hopline import inference as infer
from hopline.data.dataset import Dataset
from hopline.device.meter import find_device
from hopline.distributed import launch
from hopline.distributed.all_to_all import Channel
from hopline.distributed.world import World
from hopline.inference import distributed as shard_infer
from hopline.inference import over_shards as shard_by_shard
from hopline.inference.over_shards import AllShards
from hopline.methods.sampled.settings import Sampled
from hopline.nn.whole_module import as_batch_model
from hopline.run.models import make_model
from hopline.run.settings import InferConfig, RunConfig, load_trusted
from hopline.run.train import launch_settings_of, load_weights, open_data
from hopline.shards.all_shards import join_shards
from hopline.shards.data import ShardedData, open_sharded
from hopline.shards.shard import is_shards
from hopline.training.evaluation import hops_by_fanouts
from hopline.util.config import from_dict, to_dict

CHUNK_NODES = 1 << 18
"""Nodes whose rows are written at a time. A rule of thumb."""


def predict(folder: Path, config: InferConfig) -> Path | None:
    """Predict with a run's weights. Returns the file that was written; None in ranks other than the first.

    Raises:
        ValueError: The run, its weights or the dataset cannot be used with these settings.
    """
    # Checked before processes are started, each of which would raise the same error.
    find_device(config.device)
    load_trusted(folder, config.trust)
    launch_settings = launch_settings_of(config)
    file = launch.run(predict_rank, launch_settings, str(folder), to_dict(config), device=config.device)
    return None if file is None else Path(file)


def predict_rank(world: World, folder: str, stored: dict[str, Any]) -> str | None:
    """Run one rank's part of a prediction.

    The first rank writes the file and returns its path; others return None.

    stored: an `InferConfig` as plain data, since it may come from another process.
    """
    config = from_dict(InferConfig, stored)
    settings = load_trusted(Path(folder), config.trust)
    settings = dataclasses.replace(settings, data=config.data or settings.data)
    if config.nodes == "all" and isinstance(settings.split, tuple):
        # The run drew its split among labelled nodes. Prediction of all nodes needs no split, and the graph
        # of data= may have no labels. So the dataset's own first split, if there is one, is opened instead.
        settings = dataclasses.replace(settings, split=0)
    data = _open(settings, config, world)
    model = make_model(settings.model, data)
    load_weights(model, _weights_file(Path(folder), config))
    model.to(world.device)

    chunks = _predict_chunks(model, data, settings, config, world)
    if world.rank > 0:
        # The loop takes part in the all-to-all calls, which send this rank's rows to the first rank.
        for _ in chunks:
            pass
        return None
    file = config.out or Path(folder) / "predictions.npy"
    num_rows = data.num_nodes if config.nodes == "all" else data.splits[config.nodes].numel()
    _write(file, chunks, num_rows)
    return str(file)


def _open(settings: RunConfig, config: InferConfig, world: World) -> Dataset:
    """The dataset as this rank sees it: as a whole, as all shards one by one, or as one shard."""
    if not is_shards(settings.data):
        if world.size > 1:
            raise ValueError(
                f"devices={world.size} is for a dataset in shards: leave it out, or type `hopline "
                f"partition {settings.data} FOLDER shards={world.size}` and give data=FOLDER"
            )
        data = open_data(settings)
    elif settings.symmetrize or settings.features != "given":
        raise ValueError(
            f"the run has symmetrize=true or features={settings.features}, which cannot be made of shards: give data= "
            "the dataset that was partitioned"
        )
    elif isinstance(settings.split, tuple):
        raise ValueError(
            f"the run drew its split, and nodes={config.nodes} cannot be drawn on shards: give data= the dataset that "
            "was partitioned, or set nodes=all"
        )
    elif world.size == 1 and config.inference == "exact":
        data = AllShards(settings.data, split=settings.split)
    elif world.size == 1:
        data = join_shards(settings.data, split=settings.split)
    else:
        if config.folder is not None:
            raise ValueError("folder= is for one process, which goes over all shards: leave out devices= or folder=")
        data = open_sharded(settings.data, world, split=settings.split)
    if config.nodes != "all" and config.nodes not in data.splits:
        splits = list(data.splits)
        raise ValueError(f"dataset {data.name!r} has no split {config.nodes!r}: choose nodes=all or one of {splits}")
    return data


def _weights_file(folder: Path, config: InferConfig) -> Path:
    """The file of the weights: best.pt or last.pt of the run, or a file of the user."""
    if isinstance(config.weights, str):
        return folder / f"{config.weights}.pt"
    if not config.weights.is_file():
        raise ValueError(f"there is no file {config.weights}: give weights=best, weights=last or a state_dict file")
    return config.weights


def _predict_chunks(
    model: nn.Module, data: Dataset, settings: RunConfig, config: InferConfig, world: World
) -> Iterator[Tensor]:
    """The rows to write, in the order of node ids. With several ranks, rank 0 gets the rows of all.

    In ranks other than 0 the chunks are empty, and the caller must iterate over them, since each sends
    rows.
    """
    if isinstance(data, ShardedData):
        ids, scores = _predict_shard(model, data, settings, config, world)
        yield from _gather_to_first(data.channel, ids, _select(scores, data, config), data.num_nodes)
        return

    split_ids = None if config.nodes == "all" else data.splits[config.nodes]
    ids = torch.arange(data.num_nodes) if split_ids is None else split_ids
    if config.inference == "sampled":
        method = _sampled_in_order(settings)
        batches = method.loader(data, ids, seed=settings.seed, device=world.device, model=model)
        scores = infer.sampled(model, batches, num_nodes=ids.numel(), show=True)
        yield _select(scores, data, config)
        return

    options: dict[str, Any] = {"chunk_bytes": config.chunk_bytes, "device": world.device, "folder": config.folder}
    if isinstance(data, AllShards):
        if config.hops is not None:
            raise ValueError(
                "hops= is for a dataset that is not in shards: leave it out, or give data= the dataset that was "
                "partitioned"
            )
        read_scores = shard_by_shard.exact_rows(model, data, split_ids, show=True, **options)
    else:
        batch_model = as_batch_model(model)  # a `GNN`, or a `Whole` for a module that is not made of layers
        hops = hops_by_fanouts(batch_model, data, settings.method) if config.hops is None else config.hops
        read_scores = infer.exact_rows(batch_model, data, split_ids, hops=hops, show=True, **options)
    for chunk_ids in ids.split(CHUNK_NODES):
        yield _select(read_scores(chunk_ids), data, config)


def _predict_shard(
    model: nn.Module, data: ShardedData, settings: RunConfig, config: InferConfig, world: World
) -> tuple[Tensor, Tensor]:
    """([n] ascending node ids, [n, C] scores) that this rank computes.

    Exact inference computes a rank's own nodes, sampled inference the seeds that the loader gave to it.
    """
    shard = data.shard
    if config.inference == "sampled":
        # Ids, or the name of a split, whose ids the loader reads from the shard.
        seeds = torch.arange(data.num_nodes) if config.nodes == "all" else config.nodes
        method = _sampled_in_order(settings)
        batches = method.loader(shard, seeds, seed=settings.seed, device=world.device, world=world)
        ids, scores, _ = shard_infer.sampled(model, data.channel, batches)
        order = ids.argsort()
        return ids[order], scores[order]
    ids = shard.nodes if config.nodes == "all" else shard.splits[config.nodes]
    scores = shard_infer.exact(
        model,
        shard,
        data.channel,
        shard.rows_of(ids),
        chunk_bytes=config.chunk_bytes,
        device=world.device,
        show=world.rank == 0,
    )
    return ids, scores


def _sampled_in_order(settings: RunConfig) -> Sampled:
    """The run's method, for batches that hold every seed once, in the order of the seeds."""
    if not isinstance(settings.method, Sampled):
        raise ValueError("inference=sampled needs the fan-outs of a run by method=sampled: set inference=exact")
    return dataclasses.replace(settings.method, shuffle=False, drop_last=False)


def _gather_to_first(channel: Channel, ids: Tensor, rows: Tensor, num_nodes: int) -> Iterator[Tensor]:
    """The rows of all ranks in the order of node ids, chunk by chunk, in rank 0.

    Other ranks get empty chunks.

    ids: [n] ascending ids of this rank's rows. Every rank must iterate to the end, since a chunk is an
    all-to-all.
    """
    for start in range(0, num_nodes, CHUNK_NODES):
        # This rank's rows with start <= id < start + CHUNK_NODES.
        low, high = torch.searchsorted(ids, torch.tensor([start, start + CHUNK_NODES])).tolist()
        num_sent = torch.tensor([high - low] + [0] * (channel.size - 1))
        num_received = channel.exchange_counts(num_sent).tolist()
        received_ids = channel.send(ids[low:high], num_sent.tolist(), num_received)
        received_rows = channel.send(rows[low:high], num_sent.tolist(), num_received)
        yield received_rows[received_ids.argsort()]


def _select(scores: Tensor, data: Dataset, config: InferConfig) -> Tensor:
    """The values to write for [n, C] scores: the scores as float32, or classes."""
    return scores.float() if config.write == "scores" else _classes(scores, data.task)


def _classes(scores: Tensor, task: str) -> Tensor:
    """The classes of [n, C] scores: [n] int64, the class with the largest score.

    With several labels per node they are [n, C] uint8, and with a single output [n] uint8: 1 for a score
    above 0.
    """
    if task == "multi":
        return (scores > 0).to(torch.uint8)
    if scores.size(-1) == 1:
        return (scores > 0).view(-1).to(torch.uint8)
    return scores.argmax(dim=-1)


def _write(path: Path, chunks: Iterator[Tensor], num_rows: int) -> None:
    """Write the rows as one .npy file, chunk by chunk."""
    # The first chunk has run the model. Most errors come before it, and then a file that exists is left as
    # it is.
    first = next(chunks)
    header = {
        "descr": first.numpy().dtype.str,
        "fortran_order": False,
        "shape": (num_rows, *first.shape[1:]),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for chunk in itertools.chain([first], chunks):
                file.write(chunk.contiguous().numpy().data)
    except OSError as error:
        raise ValueError(f"cannot write {path} ({error.strerror or error}): choose another file with out=") from error
