"""`NeighborLoader`: PyG's loader on hopline's sampler and threads, for a training script that uses PyG's.

One batch goes through these stages:

    sample (thread)          gather (thread)            move (thread)       finish (caller's thread)
    nodes and edges     ->   rows of attributes    ->   to the GPU, if ->   rows of attributes on the GPU,
    around the seeds         in host memory             there is one        then `transform`

A batch has the attributes of PyG's batch, with the rows of its own nodes and edges. Rows are read from the
tensors of the Data, which are neither copied nor converted. The in-edges of all nodes are grouped once (12
bytes per edge, 4 if `edge_index` is sorted by destination), and loaders of one `edge_index` share them.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from hopline import ops
from hopline.core.graph import Graph, checksum
from hopline.core.sampler import NeighborSampler, NodeIds, Subgraph, as_node_ids, check_ids
from hopline.data.dataset import Dataset, expect_dataset
from hopline.data.fingerprint import ids_fact
from hopline.data.formats.pyg import split_masks
from hopline.device.meter import find_device, with_index
from hopline.distributed.agreement import check_same
from hopline.distributed.world import World
from hopline.methods.sampled.seed_loader import RankExamples, SeedLoader
from hopline.methods.sampled.settings import Sampled
from hopline.pipeline.stages import Pipeline, Stage
from hopline.pipeline.transfer import Mover
from hopline.tables import Table, TensorTable
from hopline.units.rank_facts import settings_facts
from hopline.util.config import nearest

IGNORED = frozenset(
    {
        "persistent_workers",
        "pin_memory",
        "pin_memory_device",
        "prefetch_factor",
        "filter_per_worker",
        "worker_init_fn",
        "multiprocessing_context",
        "timeout",
        "in_order",
        "is_sorted",
        "temporal_strategy",
        "collate_fn",
        "dataset",
    }
)
"""PyG's arguments on which no batch depends. PyG itself drops the last two."""

_PYG = "keep torch_geometric.loader.NeighborLoader for it"
REFUSED: Mapping[str, tuple[Any, str]] = {
    "input_time": (None, _PYG),
    "time_attr": (None, _PYG),
    "weight_attr": (None, f"neighbours are drawn uniformly; {_PYG}"),
    "subgraph_type": ("directional", f"a batch has the sampled edges alone; {_PYG}"),
    "directed": (True, f"a batch has the sampled edges alone; {_PYG}"),
    "disjoint": (False, f"seeds share their neighbours; {_PYG}"),
    "neighbor_sampler": (None, _PYG),
    "transform_sampler_output": (None, "use transform=, which gets the finished batch"),
    "custom_cls": (None, "batches are of the class of the Data"),
    "input_id": (None, "batch.input_id are positions in input_nodes"),
    "generator": (None, "give seed="),
}
"""By name, PyG's arguments that would change batches: (value that changes nothing, advice otherwise)."""


class NeighborLoader(SeedLoader):
    """Batches of a PyG graph by neighbour sampling, in place of `torch_geometric.loader.NeighborLoader`.

    Each batch is a `Data` as PyG's loader makes it: x, edge_index, y, all other attributes by node and
    edge, batch_size, n_id, e_id, input_id, num_sampled_nodes and num_sampled_edges. The seeds are the first
    nodes.

    Threads prefetch batches, and every epoch draws anew. Loaders with the same `seed` draw the same,
    whatever the number of threads. A loader belongs to one thread. It reads the attributes of `data` when
    an epoch begins, so they may be set and deleted between epochs. The edges are those that `data` had when
    the loader was made.

    The loader is a `torch.utils.data.DataLoader`, so Lightning, Fabric and Accelerate divide its seeds among
    ranks as they divide those of PyG's loader. In a loop of your own, `world` or `sampler` does. Without them
    each rank gets all seeds.

    Args:
        data: A PyG `Data`, or a dataset, whose batches have what `data.to_pyg()` would have.
        num_neighbors: In-edges drawn per node, one number per hop, that of the seeds first. -1 takes all.
        input_nodes: The seeds, as ids (a tensor, an array or a list), as a bool mask, or as the name of a dataset's
            split. Default: all nodes.
        batch_size: Seeds per batch.
        shuffle: Whether the seeds have a new order in each epoch.
        drop_last: Whether to leave out the last batch of an epoch if it is not full.
        replace: Whether neighbours are drawn with replacement.
        transform: Called with each batch, in order, in the thread that iterates.
        num_workers: Threads (not processes) that prepare batches. 0: the thread that iterates does.
        seed: Seed of every random draw, together with the epoch. Default: each epoch draws one from torch's default
            generator, so `torch.manual_seed` decides, as with PyG's loader. That of rank 0 counts in a `world`.
        device: The device of the batches. Default: the GPU that `data` has tensors on, else the CPU.
        world: The ranks that share the seeds of each step, such as `hl.World.current()`.
        sampler: Positions in `input_nodes`, in place of `shuffle`. They may repeat.
        batch_sampler: Lists of such positions, in place of `batch_size`, `shuffle` and `drop_last`.
        pyg_arguments: Other arguments of PyG's loader. Those on which no batch depends do nothing.

    Raises:
        ValueError: An argument of PyG would change batches or has a wrong value, a seed is no node, `data` is of
            another type, or ranks of a `world` were given different seeds.
        TypeError: PyG's loader has no such argument.

    Example:
        >>> from torch_geometric.data import Data
        >>> data = Data(x=torch.ones(4, 2), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> loader = hl.NeighborLoader(data, [2, 2], input_nodes=torch.tensor([0, 2]), batch_size=1)
        >>> batch = next(iter(loader))
        >>> batch.batch_size, batch.n_id.tolist(), list(batch.x.shape)
        (1, [0, 3, 2], [3, 2])
    """

    def __init__(
        self,
        data: Data | Dataset,
        num_neighbors: Sequence[int],
        input_nodes: NodeIds | str | None = None,
        *,
        batch_size: int = 1,
        shuffle: bool | None = False,
        drop_last: bool = False,
        replace: bool = False,
        transform: Callable[[Data], Data] | None = None,
        num_workers: int | Literal["auto"] = "auto",
        seed: int | None = None,
        device: torch.device | str | None = None,
        world: World | None = None,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[list[int]] | None = None,
        **pyg_arguments: Any,
    ) -> None:
        _check_arguments(pyg_arguments)
        if num_workers != "auto" and (not isinstance(num_workers, int) or num_workers < 0):
            raise ValueError(f"num_workers must be 'auto' or a number from 0, not {num_workers!r}")
        self.data: Any = data
        self.num_neighbors = _check_num_neighbors(num_neighbors)
        self.input_nodes = input_nodes
        self.replace = replace
        self.transform = transform
        self._edges = _edges_of(data)
        graph = self._edges.graph
        self.device = _device_of(data, graph, device)
        self._masks = split_masks(data) if isinstance(data, Dataset) else {}
        seeds = _seeds_of(data, input_nodes, graph.num_nodes)
        self._input_ids = seeds.input_ids
        self._seeds = seeds.ids.to(graph.device)
        # Checks the values of the arguments.
        Sampled(
            fanouts=tuple(self.num_neighbors),
            batch_size=batch_size,
            replace=replace,
            drop_last=drop_last,
            workers=num_workers,
        )
        self._neighbor_sampler = NeighborSampler(graph, self.num_neighbors, replace=replace, repeats=True)
        super().__init__(
            seeds.ids.numel(),
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            num_workers=num_workers,
            look_ahead="auto",
            on_gpu=graph.device.type != "cpu",
            world=world,
            sampler=sampler,
            batch_sampler=batch_sampler,
        )
        if world is not None:
            check_same(world, settings_facts({"seed": seed}) | {"the seeds": ids_fact(seeds.ids)})
        num_remaining = len(self.dataset) % (batch_size * self.size)
        if 0 < num_remaining < self.size and not drop_last:
            # The mean loss of an empty batch is NaN, and DistributedDataParallel would give it to all ranks.
            raise ValueError(
                f"the last batch has {num_remaining} seeds for {self.size} ranks: give drop_last=True, or a batch_size "
                f"other than {batch_size}"
            )

    def __repr__(self) -> str:
        return f"NeighborLoader({len(self.dataset):,} seeds, {self.num_neighbors}, batch_size={self.batch_size})"

    def _batches(self, steps: Iterator[RankExamples]) -> Iterator[Data]:
        workers, look_ahead = self.threads
        builder = _BatchBuilder(self._columns(), self._edges, self.device)
        mover = Mover(self.device, look_ahead)
        stages = [Stage("sample", self._sample), Stage("gather", builder.gather), Stage("move", mover.move)]
        pipeline = Pipeline(stages, workers=workers, look_ahead=look_ahead)

        with closing(pipeline.run(steps)) as prepared:
            for moved in prepared:
                batch = builder.finish(mover.ready(moved))
                yield batch if self.transform is None else self.transform(batch)

    def _batch(self, step: RankExamples) -> Data:
        builder = _BatchBuilder(self._columns(), self._edges, self.device)
        batch = builder.finish(builder.gather(self._sample(step)).to(self.device))
        return batch if self.transform is None else self.transform(batch)

    def _sample(self, step: RankExamples) -> _Sample:
        """The sample around the seeds of a batch. The pipeline's first stage."""
        positions = step.numbers  # among the seeds of the loader
        input_id = positions if self._input_ids is None else self._input_ids[positions]
        seeds = self._seeds[positions.to(self._seeds.device)]
        return _Sample(input_id, self._neighbor_sampler.sample_subgraph(seeds, step.key))

    def _columns(self) -> Attributes:
        """The attributes that the data has now."""
        if isinstance(self.data, Dataset):
            return _dataset_columns(self.data, self._masks)
        return _data_columns(self.data)


class _Sample(NamedTuple):
    """The result of the stage "sample"."""

    input_id: Tensor
    """[n] int64: PyG's `input_id` of the seeds."""
    subgraph: Subgraph
    """Nodes and edges around the seeds."""


# ---- edges


@dataclass(frozen=True, eq=False)
class GroupedEdges:
    """A graph's in-edges, grouped by destination."""

    graph: Graph
    order: Tensor | None
    """[num_edges] int64: each grouped edge's position in `edge_index`. None: the order is the same."""
    edge_index: Tensor | None
    """The edges before grouping. Held so that no other tensor can get its id, which is a key of
    `_grouped`."""

    def original_ids(self, edge_ids: Tensor) -> Tensor:
        """[n] int64: positions in `edge_index` of edges that are given by their positions in the graph."""
        return edge_ids if self.order is None else ops.gather_rows(self.order, edge_ids)


_grouped: WeakValueDictionary[tuple[int, int, int], GroupedEdges] = WeakValueDictionary()
"""By (id of `edge_index`, its checksum, number of nodes): edges that some loader holds.

This module owns the cache, so that loaders over one `data` share the edges. An entry vanishes with its last
loader. A checksum, because torch counts no changes in place by NumPy, by `.data` or in `inference_mode`. It
takes a twentieth of the time of grouping. Two threads may group the same edges at the same time, and get
equal ones.
"""


def _edges_of(data: Data | Dataset) -> GroupedEdges:
    """The grouped edges of the data, from the cache if another loader holds them.

    Raises:
        ValueError: The data is neither a `Data` nor a `Dataset`, or a `Data` has no `edge_index`, or an `adj_t`.
    """
    if isinstance(data, Dataset):
        return GroupedEdges(data.graph, None, None)
    if not isinstance(data, Data):
        expect_dataset(data, "NeighborLoader", "a torch_geometric.data.Data or a hopline Dataset")
    if "adj_t" in data:
        raise ValueError("the Data has an adj_t, and batches have edge_index: make the Data without T.ToSparseTensor()")
    edge_index = data.edge_index
    num_nodes = data.num_nodes
    if edge_index is None or num_nodes is None:
        raise ValueError("the Data has no edge_index: give it one, [2, E] with sources first")
    key = (id(edge_index), checksum(edge_index.as_subclass(Tensor)), num_nodes)
    edges = _grouped.get(key)
    if edges is None:
        edges = _group(edge_index, num_nodes)
        _grouped[key] = edges
    return edges


def _group(edge_index: Tensor, num_nodes: int) -> GroupedEdges:
    """Group edges by destination. edge_index: [2, num_edges], sources first."""
    # PyG's EdgeIndex is a Tensor whose operations do more than needed here.
    plain = edge_index.as_subclass(Tensor)
    if plain.dim() != 2 or plain.size(0) != 2:
        raise ValueError(f"edge_index must be [2, E], sources first, not {list(plain.shape)}")
    check_ids(plain.reshape(-1), num_nodes)
    src, dst = plain
    indptr, order = ops.group_by_key(dst.contiguous(), num_nodes)
    is_sorted = bool((dst[1:] >= dst[:-1]).all())
    indices = src.to(torch.int32 if num_nodes < 2**31 else torch.int64).contiguous()
    if is_sorted:
        return GroupedEdges(Graph(indptr, indices), order=None, edge_index=edge_index)
    return GroupedEdges(Graph(indptr, ops.gather_rows(indices, order)), order=order, edge_index=edge_index)


# ---- attributes


@dataclass(frozen=True)
class Column:
    """An attribute with one row per node or edge."""

    table: Table
    dim: int
    """The dimension of the attribute along which its rows lie; the table has them along 0."""

    def read(self, ids: Tensor) -> Tensor:
        """The rows of some nodes or edges, along `dim`."""
        return self.table.read(ids).movedim(0, self.dim)


@dataclass(frozen=True)
class Attributes:
    """The attributes of which an epoch's batches get their rows."""

    template: Data
    """A Data that every batch starts as: attributes of the whole graph stay, those in `node` and `edge` are
    replaced."""
    node: Mapping[str, Column]
    """By name: attributes with a row per node."""
    edge: Mapping[str, Column]
    """By name: attributes with a row per edge."""


def _data_columns(data: Data) -> Attributes:
    """The attributes of a `Data`.

    Raises:
        ValueError: An attribute by node or edge is not a dense tensor.
    """
    node: dict[str, Column] = {}
    edge: dict[str, Column] = {}
    for key in data.keys():  # noqa: SIM118, a Data is not iterated by its keys
        if key in ("edge_index", "num_nodes"):
            continue
        if data.is_node_attr(key):
            columns = node
        elif data.is_edge_attr(key):
            columns = edge
        else:
            continue
        value = data[key]
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if not isinstance(value, Tensor):
            raise ValueError(
                f"data.{key} is a {type(value).__name__} with an entry per node or edge: make it a tensor, or delete it"
            )
        if value.layout != torch.strided:
            raise ValueError(
                f"data.{key} is sparse: give NeighborLoader the dataset hl.from_pyg(data), which keeps it so and whose "
                f"batches have dense rows, or set data.{key} = data.{key}.to_dense()"
            )
        dim = data.__cat_dim__(key, value)
        columns[key] = Column(TensorTable(value.movedim(dim, 0)), dim)
    return Attributes(copy.copy(data), node, edge)


def _dataset_columns(data: Dataset, masks: Mapping[str, Tensor]) -> Attributes:
    """The attributes that `data.to_pyg()` would have. masks: by name, the splits as node masks."""
    tables = dict(data.tables)
    if data.y is not None:
        tables["y"] = TensorTable(data.y)
    tables |= {name: TensorTable(mask) for name, mask in masks.items()}
    node = {name: Column(table, 0) for name, table in tables.items()}
    edge = {f"edge_{name}": Column(TensorTable(rows), 0) for name, rows in data.graph.edge.items()}
    return Attributes(Data(), node, edge)


@dataclass(frozen=True, eq=False)
class _PartialBatch:
    """A batch between two stages of the pipeline, without the rows that a GPU reads.

    A `Movable` of the mover.
    """

    data: Data
    """The batch with the rows that it has so far."""
    node_ids: Tensor
    """[num_nodes] int64: global node ids, on the device of the batch."""
    edge_ids: Tensor
    """[num_edges] int64: positions in `edge_index`, on the device of the batch."""

    @property
    def num_bytes(self) -> int:
        """The bytes that are still in host memory, and will be copied to the GPU."""
        values = [*self.data.to_dict().values(), self.node_ids, self.edge_ids]
        return sum(value.nbytes for value in values if isinstance(value, Tensor) and value.device.type == "cpu")

    def to(self, device: torch.device, non_blocking: bool = False) -> _PartialBatch:
        if device.type == "cpu":
            return self
        node_ids = self.node_ids.to(device, non_blocking=non_blocking)
        edge_ids = self.edge_ids.to(device, non_blocking=non_blocking)
        data = self.data.apply(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        return _PartialBatch(data, node_ids, edge_ids)


class _BatchBuilder:
    """Makes the batches of one epoch. Any thread may call it."""

    def __init__(self, columns: Attributes, edges: GroupedEdges, device: torch.device) -> None:
        self.columns = columns
        self.edges = edges
        self.device = device
        # Rows on a GPU are read late, after the batch has moved, by ids that have moved with it. Copying
        # ids for this alone would wait for the steps before.
        self.has_late_rows = edges.graph.device.type == "cpu" and device.type != "cpu"

    def gather(self, sample: _Sample) -> _PartialBatch:
        """The batch with all rows that can be read by ids on the device that sampled them.

        The second stage.
        """
        subgraph = sample.subgraph
        edge_ids = self.edges.original_ids(subgraph.edge_ids)
        data = copy.copy(self.columns.template)
        data.edge_index = subgraph.edge_index
        data.num_nodes = subgraph.node_ids.numel()
        data.batch_size = sample.input_id.numel()
        data.input_id = sample.input_id.to(subgraph.node_ids.device)
        data.num_sampled_nodes = subgraph.num_nodes
        data.num_sampled_edges = subgraph.num_edges
        batch = _PartialBatch(data, subgraph.node_ids, edge_ids)
        self._read(batch, late=False)
        return batch

    def finish(self, batch: _PartialBatch) -> Data:
        """The whole batch, after its move to the device."""
        if self.has_late_rows:
            self._read(batch, late=True)
        # If the data has attributes with these names, the batch has their rows instead.
        if "n_id" not in self.columns.template:
            batch.data.n_id = batch.node_ids
        if "e_id" not in self.columns.template:
            batch.data.e_id = batch.edge_ids
        return batch.data

    def _read(self, batch: _PartialBatch, late: bool) -> None:
        """Read the rows of those attributes that are read late, or of all others."""
        for columns, ids in ((self.columns.node, batch.node_ids), (self.columns.edge, batch.edge_ids)):
            for key, column in columns.items():
                tiers = column.table.tiers(self.device)
                is_on_gpu = tiers is not None and tiers.hot.device.type != "cpu"
                is_late = self.has_late_rows and is_on_gpu
                if late == is_late:
                    # If no kernel of the device can read the rows, the host reads them.
                    batch.data[key] = column.read(ids if tiers is not None else ids.cpu())


# ---- arguments


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that PyG's loader does not have, or that would change batches.

    Raises:
        TypeError: There is no such argument.
        ValueError: An argument of `REFUSED` has a value that changes batches.
    """
    for name, value in arguments.items():
        if name in IGNORED:
            continue
        if name not in REFUSED:
            close = nearest(name, [*inspect.signature(NeighborLoader).parameters, *REFUSED, *IGNORED])
            raise TypeError(f"NeighborLoader has no argument {name!r}.{close}")
        default, advice = REFUSED[name]
        value = getattr(value, "value", value)  # PyG has enums, whose values are strings
        # By type too, since 0 == False.
        if type(value) is not type(default) or value != default:
            raise ValueError(f"hopline's NeighborLoader has no {name}=: {advice}")


def _check_num_neighbors(num_neighbors: Any) -> list[int]:
    is_list = isinstance(num_neighbors, Iterable) and not isinstance(num_neighbors, Mapping | str)
    try:
        numbers = list(map(operator.index, num_neighbors)) if is_list else []
    except TypeError:
        numbers = []
    if not numbers:
        raise ValueError(
            f"num_neighbors must have one whole number per hop, for example [15, 10], not {num_neighbors!r}"
        )
    return numbers


class _Seeds(NamedTuple):
    """The seeds of a loader."""

    ids: Tensor
    """[n] int64 on the host: global node ids."""
    input_ids: Tensor | None
    """[n] int64: PyG's `input_id` of each seed, its position in `input_nodes`. For a mask these are the ids
    themselves. None stands for 0, 1, 2, ..."""


def _seeds_of(data: Data | Dataset, input_nodes: Any, num_nodes: int) -> _Seeds:
    """The seeds that `input_nodes` names.

    Raises:
        ValueError: There is no such split, a mask has the wrong length, or an id is no node or comes twice.
    """
    if input_nodes is None:
        return _Seeds(torch.arange(num_nodes), None)
    if isinstance(input_nodes, str):
        splits = data.splits if isinstance(data, Dataset) else {}
        if input_nodes not in splits:
            names = f"or one of {', '.join(splits)}" if splits else "since the data has no named splits"
            raise ValueError(f"there is no split {input_nodes!r}: give input_nodes= as ids or as a mask, {names}")
        input_nodes = splits[input_nodes]
    ids = as_node_ids(input_nodes, num_nodes).cpu()
    is_mask = torch.as_tensor(input_nodes).dtype == torch.bool
    is_seed = torch.zeros(num_nodes, dtype=torch.bool)
    is_seed[ids] = True
    if int(is_seed.sum()) != ids.numel():
        raise ValueError("input_nodes names a node more than once: give each id once, for example input_nodes.unique()")
    return _Seeds(ids, ids if is_mask else None)


def _device_of(data: Data | Dataset, graph: Graph, requested: torch.device | str | None) -> torch.device:
    """The device of the batches: the requested one, else a GPU that holds data, else the CPU.

    Raises:
        ValueError: The data has tensors on a GPU, and the CPU is requested.
    """
    if isinstance(data, Dataset):
        tensors = [table.storage() for table in data.tables.values()] + [data.y]
    else:
        tensors = list(data.to_dict().values())
    devices = [graph.device, *(tensor.device for tensor in tensors if isinstance(tensor, Tensor))]
    data_device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
    if requested is None:
        return data_device
    find_device(str(requested))
    device = with_index(requested)
    if device.type == "cpu" and data_device.type != "cpu":
        raise ValueError(
            f"the data has tensors on {data_device} and batches are asked for on the CPU: leave out device="
        )
    return device
