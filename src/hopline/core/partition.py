"""Partitions of a graph: how they are made, cached on disk, and described.

    make_partition(graph, num_parts, how)   ->   Partition
        divide: part_of [N], by METIS, streaming, labels, at random or by node id
        with `cache`: read from or written to a folder, under a hash of the edges and the settings

A `Partition` also defines an order of the nodes, part after part, in which every part is one row range. Tables and
shards store rows in that order. `cut_fraction`, `halo_sizes`, `edge_counts` and `describe` tell how good a partition
is. All of it runs on the host. Only METIS and streaming read the edges, but the cache hashes them in any case.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from hopline import ops
from hopline.core.graph import Graph
from hopline.ops.cpu import partition as cpu_partition
from hopline.ops.cpu.runtime import in_threads
from hopline.util.config import format_size
from hopline.util.files import replacing
from hopline.util.host import host_memory
from hopline.util.log import logger
from hopline.util.progress import progress

HOW = ("metis", "streaming", "random", "range")
"""The values of `how` in `make_partition`. Labels are given by an argument of their own."""
METIS_BYTES = 110
"""Bytes of memory that METIS needs per edge of the undirected copy of the graph, which has every edge in both
directions. Measured (docs/shards.md)."""
SNAP = 0.05
"""The most by which `by_labels` moves the end of a part to the end of a label, as a share of the mean part size.
Ends are about one mean size apart, so two of them never meet."""
VERSION = 1
"""Version of the cached files. It is part of their key, so partitions of another version are not found."""
HASH_BYTES = 1 << 24
"""Bytes that one task hashes. Another value changes the hash of larger arrays, so that partitions cached under it are
no longer found."""
LARGEST_SHOWN = 16
"""The most parts for which `describe` shows the matrix of edge counts."""


def check_edges(graph: Graph) -> None:
    """Raise ValueError if an edge leads out of the graph or `indptr` decreases. Kernels follow edges unchecked."""
    low, high = (int(v) for v in torch.aminmax(graph.indices)) if graph.num_edges else (0, 0)
    if low < 0 or high >= graph.num_nodes or bool((graph.indptr[1:] < graph.indptr[:-1]).any()):
        raise ValueError("an edge index is out of range: check the dataset by `hopline verify FOLDER`")


def divide(
    graph: Graph, num_parts: int, how: str, labels: Tensor | None, seed: int, slack: float, passes: int, show: bool
) -> Tensor:
    """[N] int32: the part of each node. No part is empty.

    graph: on the host. The other arguments are those of `make_partition`. `how` is not read if there are labels.
    """
    num_nodes = graph.num_nodes
    if labels is not None:
        return by_labels(labels.cpu(), num_parts)
    equal_ranges = (torch.arange(num_nodes) * num_parts // num_nodes).int()
    if how == "range" or num_parts == 1:
        return equal_ranges
    if how == "random":
        return equal_ranges[ops.permutation(ops.derive_key(seed), num_nodes)]
    check_edges(graph)
    if how == "metis":
        return by_metis(graph, num_parts, seed, show)
    if num_nodes >= 2**31:
        raise ValueError(f"streaming numbers nodes by int32 and there are {num_nodes}: use how='range' or labels")
    with progress("Partitioning", None, "nodes", enabled=show) as shown:
        part_of = cpu_partition.stream_parts(
            graph.indptr.numpy(), graph.indices.numpy(), num_parts, slack, ops.derive_key(seed), passes, shown.advance
        )
    return torch.from_numpy(part_of)


def by_metis(
    graph: Graph,
    num_parts: int,
    seed: int,
    show: bool,
    node_weight: Tensor | None = None,
    recursive: bool = False,
) -> Tensor:
    """[N] int32: the part of each node by METIS, on the graph with every edge in both directions.

    node_weight: [N] integers above 0, of which parts get equal sums. recursive: by bisection, not k ways at once.
    """
    try:
        import pymetis
    except ImportError as error:
        raise ValueError("METIS is not installed: type `pip install pymetis`, or use how='streaming'") from error
    dtype = pymetis.zero_copy_dtype()
    if 2 * graph.num_edges > np.iinfo(dtype).max:
        raise ValueError(f"this METIS counts edges by {dtype} and there are too many: use how='streaming'")
    # Checked twice: for the undirected copy before it is made, then for METIS itself by the exact number of edges.
    _check_memory(2 * graph.num_edges * dtype.itemsize)
    with progress("Partitioning by METIS", None, "nodes", enabled=show) as shown:
        starts, neighbors = cpu_partition.undirected(graph.indptr.numpy(), graph.indices.numpy(), dtype)
        _check_memory(METIS_BYTES * neighbors.shape[0])
        options = pymetis.Options()
        options.seed = seed % 2**31  # METIS may be built with int32
        adjacency = pymetis.CSRAdjacency(cast(Any, starts), cast(Any, neighbors))
        weights = None if node_weight is None else cast(Any, node_weight.numpy().astype(dtype, copy=False))
        result = pymetis.part_graph(num_parts, adjacency, vweights=weights, options=options, recursive=recursive)
        shown.advance(graph.num_nodes)
    part_of = torch.from_numpy(np.array(result.vertex_part, dtype=np.int32))
    return without_empty(part_of, num_parts)


def _check_memory(num_bytes: int) -> None:
    """Raise ValueError if fewer bytes are free on the host. Otherwise the system would kill the process silently."""
    free = host_memory().available
    if num_bytes > free:
        raise ValueError(
            f"METIS would take about {format_size(num_bytes)} and {format_size(free)} are free: use how='streaming'"
        )


def by_labels(labels: Tensor, num_parts: int) -> Tensor:
    """[N] int32: the part of each node by its label.

    If there are `num_parts` labels, each label is a part. Otherwise the nodes, sorted by label, are divided into
    ranges of equal size. The end of a range moves to the nearest end of a label, if that is within `SNAP`.
    """
    distinct_labels, label_number = torch.unique(labels, return_inverse=True)
    if distinct_labels.numel() == num_parts:
        return label_number.int()
    # Part p ends before position part_ends[p] of the nodes sorted by label. The last part ends with the nodes.
    num_nodes = labels.numel()
    part_ends = torch.arange(1, num_parts) * num_nodes // num_parts
    label_ends = torch.bincount(label_number).cumsum(0)
    next_label = torch.searchsorted(label_ends, part_ends)
    end_after = label_ends[next_label]
    # No label ends before the first one. Its own end stands in, so that both ends are the same.
    end_before = label_ends[(next_label - 1).clamp(min=0)]
    is_before_nearer = part_ends - end_before < end_after - part_ends
    nearest_end = torch.where(is_before_nearer, end_before, end_after)
    is_near = (nearest_end - part_ends).abs() <= int(SNAP * num_nodes / num_parts)
    part_ends = torch.where(is_near, nearest_end, part_ends)

    part_of = torch.empty(num_nodes, dtype=torch.int32)
    part_at_position = torch.bucketize(torch.arange(num_nodes), part_ends, right=True).int()
    part_of[torch.argsort(label_number, stable=True)] = part_at_position
    return part_of


def without_empty(part_of: Tensor, num_parts: int) -> Tensor:
    """Fill empty parts in place: each gets a node of the part that is the largest at that moment.

    METIS may leave parts of small graphs empty.
    """
    sizes = torch.bincount(part_of, minlength=num_parts)
    for part in (sizes == 0).nonzero().view(-1).tolist():
        largest = int(sizes.argmax())
        part_of[(part_of == largest).nonzero()[-1]] = part
        sizes[largest] -= 1
        sizes[part] += 1
    return part_of


@dataclass(frozen=True, eq=False, repr=False)
class Partition:
    """A division of all nodes into `num_parts` parts, none of them empty.

    It also orders the nodes part after part. A node's index in that order is its *position*.
    """

    part_of: Tensor
    """[N] int32 on the host: the part of each node."""
    num_parts: int
    """Number of parts."""
    how: str = "given"
    """The way in which the parts were made: one of `HOW`, "labels", or "given"."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings that decided the result, by name: seed, slack, passes, or a hash of the labels."""

    def __post_init__(self) -> None:
        if self.part_of.dtype != torch.int32 or self.part_of.dim() != 1 or self.part_of.device.type != "cpu":
            raise ValueError("Partition.part_of must be a 1-D int32 tensor on the CPU with the part of each node")
        check_num_parts(self.num_parts, self.num_nodes)
        low, high = (int(v) for v in torch.aminmax(self.part_of))
        if low < 0 or high >= self.num_parts:
            raise ValueError(f"a node is in part {low if low < 0 else high}: parts go from 0 to {self.num_parts - 1}")
        empty = (self.sizes == 0).nonzero().view(-1)
        if empty.numel():
            raise ValueError(f"part {int(empty[0])} has no nodes: every part needs one")

    @property
    def num_nodes(self) -> int:
        return self.part_of.numel()

    @cached_property
    def sizes(self) -> Tensor:
        """[P] int64: the number of nodes of each part."""
        return torch.bincount(self.part_of, minlength=self.num_parts)

    @cached_property
    def ptr(self) -> Tensor:
        """[P + 1] int64: part p has the positions ptr[p] .. ptr[p + 1] - 1."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.sizes.cumsum(0)])

    @cached_property
    def order(self) -> Tensor:
        """[N] int64: the node at each position; part after part, nodes ascending in each."""
        _, order = ops.group_by_key(self.part_of, self.num_parts)
        return order

    @cached_property
    def position(self) -> Tensor:
        """[N] int64: the position of each node, the inverse of `order`."""
        position = torch.empty_like(self.order)
        position[self.order] = torch.arange(self.num_nodes)
        return position

    def split(self, num_runs: Tensor, weight: Tensor) -> Partition:
        """The partition with part p divided into up to num_runs[p] runs of consecutive nodes, of about equal weight.

        A part of several nodes, of which at least two runs are wanted, becomes at least two parts.

        num_runs: [P] int64, 1 for a part that stays as it is. weight: [N], above 0, the weight of each node.
        """
        part_at = self.part_of[self.order].long()
        weight_at = weight[self.order].double()
        ends = weight_at.cumsum(0)
        part_weight = torch.zeros(self.num_parts, dtype=torch.float64).index_add_(0, part_at, weight_at)
        middle = ends - weight_at / 2 - (part_weight.cumsum(0) - part_weight)[part_at]
        run = (middle * num_runs[part_at] / part_weight[part_at]).long().minimum(num_runs[part_at] - 1)
        _, numbers = torch.unique(part_at * (int(num_runs.max()) + 1) + run, return_inverse=True)
        part_of = torch.empty_like(self.part_of)
        part_of[self.order] = numbers.int()
        return Partition(part_of, int(numbers.max()) + 1, self.how, self.settings)

    def __repr__(self) -> str:
        settings = "".join(f", {name}={value}" for name, value in self.settings.items())
        return f"Partition({self.num_nodes:,} nodes in {self.num_parts} parts, how={self.how}{settings})"


def check_num_parts(num_parts: int, num_nodes: int) -> None:
    """Raise ValueError unless every part can have a node."""
    if not isinstance(num_parts, int) or not 1 <= num_parts <= num_nodes:
        raise ValueError(f"num_parts is {num_parts}: {num_nodes} nodes make from 1 to {num_nodes} parts")


def make_partition(
    graph: Graph,
    num_parts: int,
    how: str = "metis",
    labels: Tensor | None = None,
    seed: int = 0,
    cache: Path | None = None,
    show: bool = False,
    *,
    slack: float = 0.1,
    passes: int = 20,
) -> Partition:
    """Divide a graph into parts.

    how: "metis" leaves fewest edges between parts. It needs about 110 bytes of memory per edge if the graph has every
        edge in both directions, else up to twice as many. "streaming" needs 32 bytes per node and no copy of the
        edges. It reads them until few nodes move, often some ten times (see `passes`). "random" and "range" (by node
        id) do not read the edges.
    labels: [N] integers, a community per node, used in place of `how`. If there are num_parts labels, each is a part.
        Otherwise the nodes, sorted by label, are divided into parts of nearly equal size, which end where a label
        ends if possible.
    seed: of the random draws of "metis", "streaming" and "random".
    cache: a folder for the result. A later call with the same edges and settings reads it from there.
    show: whether to show progress on standard error.
    slack: for "streaming", the most by which the size of a part may differ from the mean, as a share of the mean.
    passes: for "streaming", the most passes over the edges that find clusters. At most max(2, passes // 2) more passes
        then move nodes between the parts. Both stages end early if few nodes move.
    """
    check_num_parts(num_parts, graph.num_nodes)
    if labels is None and how not in HOW:
        raise ValueError(f"how={how!r}: choose one of {', '.join(HOW)}, or give labels")
    if labels is not None and (labels.dim() != 1 or labels.numel() != graph.num_nodes or labels.is_floating_point()):
        raise ValueError(f"labels must be whole numbers, one for each of the {graph.num_nodes} nodes")
    if not 0 <= slack < 1 or passes < 1:
        raise ValueError(f"slack={slack}, passes={passes}: give a share below 1, and at least one pass")
    # Only the settings that the result depends on. They are part of the cache key, where a setting without effect would
    # hide a valid entry.
    if labels is not None:
        how = "labels"
        settings = {"labels": _hash([labels.cpu().numpy()])}
    elif how == "streaming":
        settings = {"seed": seed, "slack": slack, "passes": passes}
    elif how in ("metis", "random"):
        settings = {"seed": seed}
    else:
        settings = {}
    graph = _on_host(graph)

    def make() -> Partition:
        part_of = divide(graph, num_parts, how, labels, seed, slack, passes, show)
        return Partition(part_of, num_parts, how, settings)

    if cache is None:
        return make()
    key = json.dumps([VERSION, graph_hash(graph), num_parts, how, settings])
    digest = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    return _read_or_write(Path(cache), digest, graph.num_nodes, make)


def _on_host(graph: Graph) -> Graph:
    return graph.with_arrays(graph.indptr.cpu().contiguous(), graph.indices.cpu().contiguous(), {})


def graph_hash(graph: Graph) -> str:
    """A hash of all edges. The edge arrays are not part of it."""
    return _hash([a.cpu().contiguous().numpy() for a in (graph.indptr, graph.indices)])


def _hash(arrays: Sequence[np.ndarray]) -> str:
    """A hash of dtypes, shapes and all bytes.

    Threads hash runs of HASH_BYTES each. The result is the hash of their hashes.
    """
    total = hashlib.blake2b(digest_size=16)
    for array in arrays:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        num_runs = -(-len(data) // HASH_BYTES)  # rounded up
        digests = [b""] * num_runs

        def hash_run(i: int, data: memoryview = data, digests: list[bytes] = digests) -> None:
            digests[i] = hashlib.blake2b(data[i * HASH_BYTES : (i + 1) * HASH_BYTES], digest_size=32).digest()

        in_threads(hash_run, num_runs)
        total.update(f"{array.dtype.str}{array.shape}".encode() + b"".join(digests))
    return total.hexdigest()


def _read_or_write(folder: Path, key: str, num_nodes: int, make: Callable[[], Partition]) -> Partition:
    """The cached partition of that key. If its files are missing or damaged, it is made by `make` and written.

    A folder that cannot be written to is a warning and no error.
    """
    header_path = folder / f"partition-{key}.json"
    array_path = folder / f"partition-{key}.npy"
    if header_path.exists():
        try:
            header = json.loads(header_path.read_text())
            part_of = np.array(np.lib.format.open_memmap(array_path, mode="r"))
            if part_of.shape != (num_nodes,) or _hash([part_of]) != header["checksum"]:
                raise ValueError("its checksum differs")
            return Partition(torch.from_numpy(part_of), header["num_parts"], header["how"], header["settings"])
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            logger.warning(f"{array_path} is damaged ({' '.join(str(error).split())}): the partition is made again")
    partition = make()
    header = {
        "how": partition.how,
        "settings": dict(partition.settings),
        "num_parts": partition.num_parts,
        "checksum": _hash([partition.part_of.numpy()]),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(array_path) as file:
            np.lib.format.write_array(file, partition.part_of.numpy(), allow_pickle=False)
        with replacing(header_path) as file:  # last, because a reader opens the array only if this file exists
            file.write(json.dumps(header, indent=1).encode())
    except OSError as error:
        logger.warning(f"the partition could not be kept in {folder} ({error.strerror}): it will be made again")
    return partition


def edge_counts(graph: Graph, partition: Partition) -> Tensor:
    """[P, P] int64: entry (p, q) is the number of edges into part p from part q."""
    return torch.from_numpy(cpu_partition.edge_counts(*_arrays(graph, partition)))


def cut_fraction(graph: Graph, partition: Partition) -> float:
    """The share of the edges that lead from one part to another, from 0 to 1."""
    indptr, indices, part_of, _, _ = _arrays(graph, partition)
    return cpu_partition.cut_edges(indptr, indices, part_of) / max(1, graph.num_edges)


def halo_sizes(graph: Graph, partition: Partition) -> Tensor:
    """[P] int64: the size of each part's halo, the nodes outside the part that have an edge into it."""
    return torch.from_numpy(cpu_partition.halo_sizes(*_arrays(graph, partition)))


def _arrays(graph: Graph, partition: Partition) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(indptr, indices, part_of, order, ptr) for the kernels. Raises ValueError if partition and graph do not fit."""
    if partition.num_nodes != graph.num_nodes:
        raise ValueError(f"the partition is of {partition.num_nodes} nodes, the graph has {graph.num_nodes}")
    graph = _on_host(graph)
    check_edges(graph)
    parts = (partition.part_of.numpy(), partition.order.numpy(), partition.ptr.numpy())
    return graph.indptr.numpy(), graph.indices.numpy(), *parts


def describe(graph: Graph, partition: Partition) -> str:
    """A text of a few lines: part sizes, share of edges between parts, halos, and for few parts the edge counts."""
    sizes = partition.sizes
    halos = halo_sizes(graph, partition)
    per_node = halos / sizes
    lines = [
        f"{partition!r}",
        f"  sizes: {int(sizes.min()):,} to {int(sizes.max()):,}, mean {partition.num_nodes / partition.num_parts:,.0f}",
        f"  cut: {cut_fraction(graph, partition):.1%} of {graph.num_edges:,} edges",
        f"  halo nodes per node of a part: {per_node.min():.2f} to {per_node.max():.2f}, "
        f"mean {int(halos.sum()) / partition.num_nodes:.2f}",
    ]
    if partition.num_parts <= LARGEST_SHOWN:
        lines.append("  edges into a part (row) from a part (column):")
        table = [["", *map(str, range(partition.num_parts))]]
        for part, counts in enumerate(edge_counts(graph, partition).tolist()):
            table.append([str(part), *map(_short, counts)])
        lines += ["  " + "".join(f"{cell:>7}" for cell in row) for row in table]
    return "\n".join(lines)


def _short(count: int) -> str:
    """A count in at most five characters: 1234, 56.8k, 1.23M."""
    if count < 10_000:
        return str(count)
    for unit, name in ((1e3, "k"), (1e6, "M"), (1e9, "G")):
        if count / unit < 999.5:  # `.3g` rounds 999.5 to 1e+03
            return f"{count / unit:.3g}{name}"
    return f"{count / 1e12:.3g}T"
