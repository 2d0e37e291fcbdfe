"""`hopline infer` and `hopline test`: predict with a finished run, and write a file or print the metrics.

The file is written chunk by chunk, in the order of the nodes that were asked for:

    one process                       a shard per rank
    `SavedRun.chunks`: scores         scores of the rank's nodes
        |                                 |  all-to-all, `CHUNK_NODES` ids at a time
        v                                 v
    `_chunks`, in rank 0: (node ids, ids of the user, values)
        |
        v
    `SavedRun.columns`: names and probabilities of classes
        |
        v
    a writer of `WRITERS`
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import torch
from torch import Tensor

from hopline.data.dataset import Dataset
from hopline.data.formats.csv_parquet import columns_of as columns_of_file
from hopline.data.formats.csv_parquet import read_file
from hopline.data.ids import IdMap, checked_ids, original_ids
from hopline.data.nodes import select_nodes
from hopline.device.meter import find_device
from hopline.distributed import launch
from hopline.distributed.all_to_all import Channel
from hopline.distributed.world import World
from hopline.inference import distributed as shard_infer
from hopline.inference import over_shards as shard_by_shard
from hopline.run.saved import CHUNK_NODES, SavedRun, bare_values, load, user_ids
from hopline.run.settings import EvaluateConfig, InferConfig, RunConfig, load_trusted
from hopline.run.train import launch_settings_of, open_data
from hopline.shards.all_shards import AllShards, join_shards
from hopline.shards.data import ShardedData, open_sharded
from hopline.shards.shard import is_shards
from hopline.tables import TensorTable
from hopline.tasks.labels import is_labelled
from hopline.util.files import replacing
from hopline.util.log import logger, print_messages

MAX_METRIC_BYTES = 1 << 30
"""Most bytes of scores that are kept for the metric beside a prediction."""
SPLITS = ("train", "valid", "test")


class Chunk(NamedTuple):
    """Some rows of a prediction."""

    ids: Tensor
    """[m] int64: node numbers."""
    names: np.ndarray
    """[m]: the user's own ids of these nodes."""
    values: Tensor
    """[m, num_outputs] scores, or [m, width] embeddings."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What was written."""

    file: str
    columns: list[str]
    """Names of the columns; empty for .npy."""
    num_rows: int
    metrics: dict[str, float] | None
    """The metric at the labelled nodes among them. None without labels."""


def predict(folder: Path, config: InferConfig) -> Prediction | None:
    """Predict with a run's weights, and write a file. Returns None in ranks other than the first.

    Raises:
        ValueError: The run, its weights or the dataset cannot be used with these settings.
    """
    # Checked before processes are started, each of which would raise the same error.
    find_device(config.device)
    load_trusted(folder, config.trust)
    launch_settings = launch_settings_of(config)
    written = launch.run(predict_rank, launch_settings, str(folder), config, device=config.device)
    return None if written is None else Prediction(**written)


def evaluate(folder: Path, config: EvaluateConfig) -> dict[str, float]:
    """The metrics of a run's weights on a split."""
    device = find_device(config.device)
    with print_messages():
        run = load(folder, weights=config.weights, device=device, trust=config.trust)
        options = {} if config.inference == "sampled" else {"chunk_bytes": config.chunk_bytes}
        return run.evaluate(config.data, config.split, inference=config.inference, show=True, **options)


def predict_rank(world: World, folder: str, config: InferConfig) -> dict[str, Any] | None:
    """Run one rank's part of a prediction.

    The first rank writes the file and returns a `Prediction` as plain data; others return None.
    """
    with print_messages(world.rank == 0):
        run = load(folder, weights=config.weights, device=world.device, trust=config.trust)
        run.check_write(config.write)
        settings = run.settings_for(config.data)
        if config.nodes not in SPLITS and isinstance(settings.split, tuple):
            # The run drew its split among labelled nodes. These nodes need no split, and the graph of data= may
            # have no labels. So the dataset's own first split, if there is one, is opened instead.
            settings = dataclasses.replace(settings, split=0)
        raw = _open(settings, config, world)
        if config.data is None and world.rank == 0:
            run.tell_other_data(raw)
        data = run.fit(raw)
        ids = select_nodes(data, config.nodes if config.nodes in ("all", *SPLITS) else _ids_of_file(data, config.nodes))
        chunks = _chunks(run, data, ids, config, world)
        if world.rank > 0:
            # The loop takes part in the all-to-all calls, which send this rank's rows to the first rank.
            for _ in chunks:
                pass
            return None
        scores = _ScoresForMetric(run, raw, ids.numel(), config)
        file = config.out or Path(folder) / "predictions.csv"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            columns = WRITERS[file.suffix](file, run, scores.watch(chunks), config, ids.numel())
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"cannot write {file} ({reason}): choose another file with out=") from error
        return dataclasses.asdict(Prediction(str(file), columns, ids.numel(), scores.measure()))


def _open(settings: RunConfig, config: InferConfig, world: World) -> Dataset:
    """The dataset as this rank sees it: as a whole, as all shards one by one, or as one shard."""
    if not is_shards(settings.data):
        if world.size > 1:
            raise ValueError(
                f"devices={world.size} is for a dataset in shards: leave it out, or type `hopline "
                f"partition {settings.data} FOLDER shards={world.size}` and give data=FOLDER"
            )
        return open_data(settings)
    if settings.symmetrize:
        raise ValueError(
            "the run has symmetrize=true, which cannot be made of shards: give data= the dataset that was partitioned"
        )
    if isinstance(settings.split, tuple):
        raise ValueError(
            f"the run drew its split, and nodes={config.nodes} cannot be drawn on shards: give data= the dataset that "
            "was partitioned, or set nodes=all"
        )
    if world.size == 1 and config.inference == "exact":
        return AllShards(settings.data, split=settings.split)
    if world.size == 1:
        return join_shards(settings.data, split=settings.split)
    if config.folder is not None:
        raise ValueError("folder= is for one process, which goes over all shards: leave out devices= or folder=")
    return open_sharded(settings.data, world, split=settings.split)


def _ids_of_file(data: Dataset, path: str) -> Tensor:
    """[n] int64: node numbers of the ids in a file, in its order.

    The ids are those of the user (`user_ids`): one per line of a .txt file, in the column "id", or in an .npy file.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"nodes={path} is neither all, train, valid or test nor a file of ids: check the path")
    if file.suffix == ".npy":
        try:
            ids = np.load(file, allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise ValueError(f"{file} cannot be read as .npy ({error}): save it again by numpy.save") from error
        if ids.dtype.kind not in "iufU" or ids.ndim != 1:
            raise ValueError(
                f"{file} holds {ids.dtype} {list(ids.shape)}: save ids [n], of a mask numpy.flatnonzero(mask)"
            )
    elif file.suffix == ".txt":
        ids = np.array(file.read_text().split())
    else:
        names = columns_of_file(file)
        if "id" not in names:
            raise ValueError(
                f"{file} has no column 'id', only {', '.join(names)}: begin it with a line that names it id"
            )
        ids = np.concatenate([chunk["id"] for chunk in read_file(file, columns=["id"], ids=["id"])])
    missing = f"is not in {data.name!r}: leave it out, or give data= a dataset that has it"
    known = IdMap(user_ids(data, torch.arange(data.num_nodes)), missing)
    where = f"{file}, row"
    positions = known.positions(checked_ids(np.asarray(ids), where), where)
    if not positions.size:
        raise ValueError(f"{file} holds no ids: give some, or nodes=all")
    return torch.from_numpy(positions)


def _chunks(run: SavedRun, data: Dataset, ids: Tensor, config: InferConfig, world: World) -> Iterator[Chunk]:
    """The chunks of a prediction, in the order of `ids`. With several ranks, rank 0 gets those of all.

    In ranks other than 0 the chunks are empty, and the caller must iterate over them, since each sends
    rows.
    """
    if isinstance(data, ShardedData | AllShards) and (config.hops is not None or config.write == "embeddings"):
        raise ValueError(
            "hops= and write=embeddings are for a dataset that is not in shards: leave them out, or give data= the "
            "dataset that was partitioned"
        )
    if isinstance(data, ShardedData):
        yield from _sharded_chunks(run, data, config, world)
        return
    options: dict[str, Any] = {}
    if config.inference == "exact":
        options = {"chunk_bytes": config.chunk_bytes, "folder": config.folder}
    if isinstance(data, AllShards):
        is_all = config.nodes == "all"
        read = shard_by_shard.exact_rows(
            run.model, data, None if is_all else ids, device=run.device, show=True, **options
        )
        values = ((chunk_ids, read(chunk_ids)) for chunk_ids in ids.split(CHUNK_NODES))
    else:
        if config.hops is not None:
            options["hops"] = config.hops
        write = run.check_write(config.write)
        values = run.chunks(data, ids, write=write, inference=config.inference, show=True, **options)
    for chunk_ids, rows in values:
        yield Chunk(chunk_ids, user_ids(data, chunk_ids), rows)


def _sharded_chunks(run: SavedRun, data: ShardedData, config: InferConfig, world: World) -> Iterator[Chunk]:
    """The chunks of all ranks' nodes in the order of node ids, in rank 0."""
    shard = data.shard
    if config.inference == "sampled":
        # Ids, or the name of a split, whose ids the loader reads from the shard.
        seeds = torch.arange(data.num_nodes) if config.nodes == "all" else config.nodes
        batches = run.sampled_batches(data, seeds)
        ids, scores, _ = shard_infer.sampled(run.model, data.channel, batches)
        order = ids.argsort()
        ids, scores = ids[order], scores[order]
    else:
        ids = shard.nodes if config.nodes == "all" else shard.splits[config.nodes]
        scores = shard_infer.exact(
            run.model,
            shard,
            data.channel,
            shard.rows_of(ids),
            chunk_bytes=config.chunk_bytes,
            device=world.device,
            show=world.rank == 0,
        )
    # Sampled inference may compute nodes of other ranks. Each rank sends the names of its own.
    names_table = shard.tables.get("node_ids")
    own_names = None if names_table is None else names_table.read(torch.arange(shard.num_own))
    for start in range(0, data.num_nodes, CHUNK_NODES):
        chunk_ids, rows = _gather_to_first(data.channel, ids, scores, start)
        names = chunk_ids.numpy()
        if own_names is not None:
            named, name_rows = _gather_to_first(data.channel, shard.nodes, own_names, start)
            if chunk_ids.numel():
                names = original_ids(TensorTable(name_rows[torch.searchsorted(named, chunk_ids)]))
        yield Chunk(chunk_ids, names, rows)


def _gather_to_first(channel: Channel, ids: Tensor, rows: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """(ascending ids, their rows) of all ranks with start <= id < start + CHUNK_NODES, in rank 0.

    Other ranks get empty tensors. ids: [n] ascending ids of this rank's rows. Every rank must call it.
    """
    low, high = torch.searchsorted(ids, torch.tensor([start, start + CHUNK_NODES])).tolist()
    num_sent = torch.tensor([high - low] + [0] * (channel.size - 1))
    num_received = channel.exchange_counts(num_sent).tolist()
    received_ids = channel.send(ids[low:high], num_sent.tolist(), num_received)
    received_rows = channel.send(rows[low:high], num_sent.tolist(), num_received)
    order = received_ids.argsort()
    return received_ids[order], received_rows[order]


class _ScoresForMetric:
    """Keeps the scores of labelled nodes while they are written, for the metric.

    It keeps none if there are no labels, or classes that the run does not know, or too many scores. A line says so.
    """

    def __init__(self, run: SavedRun, raw: Dataset, num_nodes: int, config: InferConfig) -> None:
        self.run = run
        self.labels: Tensor | None = None
        self.scores: list[Tensor] = []
        self.ids: list[Tensor] = []
        if raw.y is None or config.write == "embeddings":
            return
        try:
            labels = run.inputs.labels(raw)
        except ValueError as error:
            logger.warning(f"no metric is computed: {error}")
            return
        if num_nodes * run.inputs.num_classes * 4 > MAX_METRIC_BYTES:
            logger.info(f"no metric is computed beside so many predictions: type `hopline test {run.folder}`")
            return
        self.labels = labels

    def watch(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """The same chunks."""
        for chunk in chunks:
            if self.labels is not None:
                labels = self.labels[chunk.ids]
                has_label = is_labelled(labels)
                self.ids.append(chunk.ids[has_label])
                self.scores.append(chunk.values[has_label])
            yield chunk

    def measure(self) -> dict[str, float] | None:
        if self.labels is None or not any(len(ids) for ids in self.ids):
            return None
        labels = self.labels[torch.cat(self.ids)]
        return self.run.task.measure(torch.cat(self.scores), labels)


# ---- files


def _write_csv(path: Path, run: SavedRun, chunks: Iterator[Chunk], config: InferConfig, num_rows: int) -> list[str]:
    names: list[str] = []
    with replacing(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text)
        for chunk in chunks:
            columns = run.columns(chunk.names, chunk.values, run.check_write(config.write))
            if not names:
                names = list(columns)
                writer.writerow(names)
            writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
        text.detach()  # flushes, and leaves the file open
    return names


def _write_parquet(path: Path, run: SavedRun, chunks: Iterator[Chunk], config: InferConfig, num_rows: int) -> list[str]:
    names: list[str] = []
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(replacing(path))
        writer = None
        for chunk in chunks:
            table = arrow.table(run.columns(chunk.names, chunk.values, run.check_write(config.write)))
            if writer is None:
                writer = stack.enter_context(parquet.ParquetWriter(file, table.schema))
                names = table.column_names
            writer.write_table(table)
    return names


def _write_npy(path: Path, run: SavedRun, chunks: Iterator[Chunk], config: InferConfig, num_rows: int) -> list[str]:
    """Write the values alone, as one array."""
    first = next(chunks)
    example = bare_values(run.task, first.values, run.check_write(config.write))
    header = {"descr": example.dtype.str, "fortran_order": False, "shape": (num_rows, *example.shape[1:])}
    with replacing(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for chunk in itertools.chain([first], chunks):
            file.write(bare_values(run.task, chunk.values, run.check_write(config.write)).data)
    return []


WRITERS: dict[str, Callable[[Path, SavedRun, Iterator[Chunk], InferConfig, int], list[str]]] = {
    ".csv": _write_csv,
    ".parquet": _write_parquet,
    ".npy": _write_npy,
}
