"""Two ways to make a sampled batch fit: split it into micro-batches, or cut edges out of it.

Splitting (`groups_to_fit`, `micro_batch_of`) divides the seeds into groups. A micro-batch is a group with
the edges of the batch that lead to it. The gradients of all micro-batches thus add up to those of the
batch:

    batch  ->  seed_costs  ->  balanced_groups  ->  sizes_of  ->  fits?  no: more groups
                                                                         yes: micro_batch_of(each group)

The price is time: nodes that several groups need are computed in each of them. Sizes of micro-batches are
counted without building them, so a search over numbers of groups is cheap.

Cutting (`cut_to_fit`) leaves edges out and so changes the sample. It happens only where the user chose it
(over_budget=cut and its variants).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from hopline import ops
from hopline.budget.plan import CutBy
from hopline.budget.predictor import Costs
from hopline.core.batch import Batch, Block, Part
from hopline.core.batch_sizes import Sizes
from hopline.core.row_handles import Readable, ReducedRows, Rows
from hopline.nn.whole_module import Whole
from hopline.ops.cpu import cut_batches as cpu_cut_batches
from hopline.util.config import CHANGES_TRAINING, format_size

P = TypeVar("P")
"""The type of what `find_fewest` splits into: groups of seeds here, ranges of nodes or a plan elsewhere."""
BytesOf = Callable[[Sizes], float]
"""A function from sizes to peak bytes. It must be monotonic: never less for more nodes or edges."""
SMALL_TENSOR_BYTES = 1024
"""Bytes reckoned per micro-batch for small tensors."""
MAX_GROWTH = 1.5
"""The largest factor from one number of groups that `groups_to_fit` tries to the next."""

# ---- filling the first group (`_fill_first_group`). All are rules of thumb.

MAX_FILLED_GROUPS = 4
"""The most groups of which the first is made as large as fits. With more groups all stay even."""
NUM_SHARES = 32
"""The number of even shares that the seeds are divided into. The first group takes some of these."""
FILLED_FRACTION = 0.97
"""The fraction of the limit up to which the first group is filled.

It is below 1 because predicted peaks change until the group runs, and a group that is then too large would
be split again.
"""


def can_split(model: nn.Module) -> bool:
    """Whether micro-batches of a batch give the gradients of the batch, in training."""
    try:
        check_split(model, training=True)
    except ValueError:
        return False
    return True


def check_split(
    model: nn.Module, instead: str = f"set over_budget=cut {CHANGES_TRAINING}", training: bool = False
) -> None:
    """Raise a ValueError if micro-batches would not give what the whole batch gives. It names the module.

    instead: the advice at the end of the message. training: check as in training mode, whatever the mode is
    now.
    """
    if isinstance(model, Whole):
        raise ValueError(
            f"{type(model.module).__name__} runs on all edges of a batch at once, which cannot be split: use hl.nn.GNN "
            f"or a PyG model such as GCN, or {instead}"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or training):
            raise ValueError(
                f"{name} is a {type(module).__name__}, which takes its statistics from a whole batch, so none can be "
                f"split: use norm='layer', or {instead}"
            )


# ---- micro-batches


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Some seeds of a batch and the edges of the batch that lead to them.

    It holds blocks and indices only. `batch()` copies the rows, and is called when the micro-batch runs.
    """

    whole: Batch
    seed_idx: Tensor
    """[num_seeds] int64: positions of the seeds among the batch's."""
    blocks: tuple[Block, ...]
    """The blocks of the micro-batch, in the order of computation."""
    input_idx: Tensor
    """[blocks[0].num_src] int64: positions of the input rows among the batch's input rows."""
    own_idx: Tensor
    """[blocks[0].num_dst] int64: positions of the first block's destinations in the batch's first block."""

    @property
    def sizes(self) -> Sizes:
        return Sizes.of_blocks(self.blocks)

    def batch(self) -> Batch:
        return _batch(self.whole, self.seed_idx, self.blocks, self.input_idx, self.own_idx)


def micro_batch_of(batch: Batch, seed_idx: Tensor) -> MicroBatch:
    """The micro-batch of some seeds, over the edges of the batch that lead to them.

    seed_idx: [n] int64, positions of the seeds among the batch's.
    """
    seed_idx = seed_idx.to(batch.seeds.device)
    dst = src = seed_idx
    blocks: list[Block] = []
    # From the seeds backwards: the sources of a block are the destinations of the block before it.
    for block in reversed(batch.blocks):
        dst = src
        part = _check_divisible(block).part
        has_edge_arrays = bool(part.edge) or part.edge_ids is not None
        indptr, src_idx, src, edge_idx = _edges_to(part, block.num_src, dst, with_positions=has_edge_arrays)
        blocks.append(_block(block, src, dst.numel(), _part(part, indptr, src_idx, edge_idx)))
    blocks.reverse()
    return MicroBatch(whole=batch, seed_idx=seed_idx, blocks=tuple(blocks), input_idx=src, own_idx=dst)


def batch_of_block(block: Block) -> Batch:
    """A block as a batch of one layer: all its destinations are seeds, without input rows or layer hooks."""
    return Batch(block.dst_ids, (replace(block, layer_hooks=None),), None, None)


def edges_of_run(block: Block, run: slice) -> tuple[Block, Tensor]:
    """(in-edges of consecutive destinations, [num_src] int64: which source of the whole block each source is)."""
    micro_batch = micro_batch_of(batch_of_block(block), torch.arange(run.start, run.stop))
    return micro_batch.blocks[0], micro_batch.input_idx


def _edges_to(
    part: Part, num_src: int, dst: Tensor, with_positions: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(indptr, src_idx, sources, edge_idx) of the edges of `part` that lead to the destinations `dst`.

    sources: positions among the part's num_src sources, `dst` first. edge_idx: positions among the part's
    edges; the CPU kernel leaves them out (None) unless `with_positions`.
    """
    if dst.device.type == "cpu":
        return cpu_cut_batches.take(part.indptr, part.src_idx, num_src, dst, with_positions)
    indptr, edge_idx = ops.row_entries(part.indptr, dst)
    sources, src_idx = ops.relabel(dst, ops.gather_rows(part.src_idx, edge_idx))
    return indptr, src_idx, sources, edge_idx


@dataclass(frozen=True)
class MicroBatchBytes:
    """The bytes of a micro-batch itself, apart from its step, where it runs: from its sizes, before it is built."""

    per_node: tuple[float, ...]
    """[num_blocks + 1]: bytes per node for ids, indptr, labels and copied rows, by the entries of
    `Sizes.nodes`."""
    per_edge: tuple[float, ...]
    """[num_blocks]: bytes per edge for indices and copied edge arrays, by the entries of `Sizes.edges`."""
    build_bytes_per_edge: float
    """Temporary bytes per edge of the largest block while the micro-batch is built; 0 if built on another
    device."""
    map_bytes: int
    """Temporary bytes of the map from the batch's nodes to their local ids while the micro-batch is built."""

    @classmethod
    def of(cls, batch: Batch, device: torch.device | None) -> MicroBatchBytes:
        """The bytes of micro-batches of a batch.

        device: where micro-batches are built and run; None if they are built on the host and then copied.
        """
        per_node = [8.0] * len(batch.blocks) + [0.0]  # each block's ids of sources
        for l in range(len(batch.blocks)):
            per_node[l + 1] += 8  # the block's indptr
        per_node[-1] += 8  # the seeds
        if batch.output_idx is not None:
            per_node[-1] += 8
        if batch.y is not None:
            per_node[-1] += _row_bytes(batch.y)
        for rows in (batch.x, *batch.tables.values()):
            if isinstance(rows, ReducedRows):
                per_node[1] += _row_bytes(rows.reduced_and_own)  # a row per destination of the first block
            elif isinstance(rows, Tensor):
                per_node[0] += _row_bytes(rows)

        per_edge = []
        for block in batch.blocks:
            part = _check_divisible(block).part
            edge_id_bytes = 0 if part.edge_ids is None else 8
            # 4: src_idx is int32.
            per_edge.append(4 + sum(map(_row_bytes, part.edge.values())) + edge_id_bytes)

        # Temporary bytes per edge of a block and per input node of the batch: those of the CPU kernel
        # `take`, or of `ops.relabel` on a GPU.
        if device is None:
            build_bytes_per_edge, map_bytes_per_node = 0, 0
        elif device.type == "cpu":
            build_bytes_per_edge, map_bytes_per_node = 24, 4
        else:
            build_bytes_per_edge, map_bytes_per_node = 96, 16
        return cls(
            per_node=tuple(per_node),
            per_edge=tuple(per_edge),
            build_bytes_per_edge=build_bytes_per_edge,
            map_bytes=map_bytes_per_node * batch.blocks[0].num_src,
        )

    def resident(self, sizes: Sizes) -> float:
        node_bytes = sum(b * n for b, n in zip(self.per_node, sizes.nodes, strict=True))
        edge_bytes = sum(b * n for b, n in zip(self.per_edge, sizes.edges, strict=True))
        return node_bytes + edge_bytes + SMALL_TENSOR_BYTES

    def while_built(self, sizes: Sizes) -> float:
        """The bytes of a micro-batch while it is built, with temporary arrays: 24 bytes per input node for
        ids, and those of its largest block."""
        is_built_elsewhere = not self.build_bytes_per_edge
        if is_built_elsewhere:
            return self.resident(sizes)
        id_bytes = 24 * sizes.nodes[0]
        return self.resident(sizes) + id_bytes + self.build_bytes_per_edge * max(sizes.edges) + self.map_bytes

    def peak_with_step(self, sizes: Sizes, step_bytes: float) -> float:
        """The peak bytes of building and running a micro-batch. step_bytes: the peak of its step alone."""
        return max(self.resident(sizes) + step_bytes, self.while_built(sizes))


def _row_bytes(rows: Tensor) -> int:
    return rows.element_size() * math.prod(rows.shape[1:])


def seed_costs(batch: Batch, costs: Costs) -> Tensor:
    """[num_seeds] float64 on the host: the bytes of each seed alone, by the bound, as if its sources formed
    a tree.

    Computed for all seeds at once, layer by layer from the inputs. With c_l the bytes per node and e_l per
    edge:

        total_0[v]      =  c_0
        total_(l+1)[v]  =  c_(l+1)  +  total_l[v]  +  sum over in-edges (u, v) of block l   (total_l[u] + e_l)

    A node that a seed reaches by two paths counts twice.
    """
    total = torch.full((batch.blocks[0].num_src, 1), costs.per_node[0], dtype=torch.float64)
    for block, node_bytes, edge_bytes in zip(batch.blocks, costs.per_node[1:], costs.per_edge, strict=True):
        indptr = block.part.indptr.cpu()
        src_idx = block.part.src_idx.cpu()
        from_sources = ops.reduce_edges(total, indptr, src_idx, "sum")
        num_in_edges = indptr.diff()[:, None]
        total = from_sources.add_(total[: block.num_dst]).add_(node_bytes).add_(num_in_edges, alpha=edge_bytes)
    return total[:, 0]


def sizes_of(batch: Batch, groups: Sequence[Tensor]) -> list[Sizes]:
    """The sizes of the micro-batches of groups of seeds [n] int64, counted on the host without building them."""
    num_nodes = Sizes.of_blocks(batch.blocks).nodes
    group_arrays = [group.cpu().numpy() for group in groups]
    counts = cpu_cut_batches.count(_edges_of(batch), num_nodes, group_arrays).tolist()
    # A row has the nodes of each layer, then the edges of each block.
    num_layers = len(num_nodes)
    sizes = [Sizes(nodes=tuple(row[:num_layers]), edges=tuple(row[num_layers:])) for row in counts]
    if batch.output_idx is None:
        return sizes
    # [num_seeds]: the examples of each seed.
    num_examples = torch.bincount(batch.output_idx.cpu(), minlength=batch.num_seeds)
    return [s.with_outputs(int(num_examples[group.cpu()].sum())) for s, group in zip(sizes, groups, strict=True)]


def examples_of(batch: Batch, seed_idx: Tensor) -> tuple[Tensor, Tensor | None]:
    """(which examples of a batch are of some seeds, the position of each one's seed among them).

    seed_idx: [n] int64, positions of seeds. Both are [m] int64. The second is None if the seeds are the examples.
    """
    if batch.output_idx is None:
        return seed_idx, None
    new_idx = torch.full_like(batch.seeds, -1)
    new_idx[seed_idx] = torch.arange(seed_idx.numel(), device=new_idx.device)
    output_idx = new_idx[batch.output_idx]
    examples = (output_idx >= 0).nonzero().view(-1)
    return examples, output_idx[examples]


def balanced_groups(seed_cost: Tensor, num_micro_batches: int) -> list[Tensor]:
    """Groups of seeds of about equal cost, each [n] int64: ascending positions in `seed_cost`.

    Seeds are dealt out, the most expensive first, to groups 0, 1, ..., k - 1, k - 1, ..., 1, 0, and so on,
    where k is `num_micro_batches`. Empty groups are left out.
    """
    order = torch.argsort(seed_cost, descending=True, stable=True)
    # One round deals a seed to every group on the way up and another on the way down.
    round_length = 2 * num_micro_batches
    step_in_round = torch.arange(order.numel(), device=order.device) % round_length
    group_of = torch.minimum(step_in_round, round_length - 1 - step_in_round)

    groups = [order[group_of == number].sort().values for number in range(num_micro_batches)]
    return [group for group in groups if group.numel()]


def find_fewest(
    split: Callable[[int], list[P]],
    bytes_of_largest: Callable[[list[P]], float],
    limit: float,
    *,
    first_number: int,
    max_number: int,
    max_growth: float,
) -> tuple[list[P], float]:
    """(micro-batches, bytes of the largest): as few as fit below `limit`, of the numbers that are tried.

    If none fits, the result is `max_number` micro-batches.

    split: makes that number of micro-batches. first_number: the number that is tried first. max_growth: the
    largest factor from one tried number to the next.
    """
    num_micro_batches = first_number
    while True:
        num_micro_batches = min(num_micro_batches, max_number)
        micro_batches = split(num_micro_batches)
        largest_bytes = bytes_of_largest(micro_batches)
        if largest_bytes <= limit or num_micro_batches == max_number:
            return micro_batches, largest_bytes
        factor = min(largest_bytes / limit, max_growth)
        num_micro_batches = max(num_micro_batches + 1, math.floor(num_micro_batches * factor))


def groups_to_fit(
    batch: Batch,
    bytes_of: BytesOf,
    limit: float,
    costs: Costs,
    *,
    among: Tensor | None = None,
    first: int | None = None,
    max_bytes: float | None = None,
    expected_bytes_of: BytesOf | None = None,
) -> list[Tensor]:
    """Groups of seeds, as few as fit, such that the micro-batch of each takes at most `limit` bytes.

    Each group is [n] int64 on the host: positions of seeds. If not even single seeds fit, every group is a
    single seed. Then a ValueError is raised if the largest is expected to take more than `max_bytes`.

    among: [n] int64, the positions of the seeds to divide; None for all. first: the number of groups tried
    first; by default by the bytes of all seeds together. max_bytes: None for `limit`. expected_bytes_of:
    expected bytes of sizes, which may be below `bytes_of`; None for `bytes_of`.
    """
    seed_cost = seed_costs(batch, costs)
    seeds = torch.arange(batch.num_seeds) if among is None else among.cpu()

    def split(num_groups: int) -> list[Tensor]:
        groups = [seeds[group] for group in balanced_groups(seed_cost[seeds], num_groups)]
        return sorted(groups, key=lambda group: -float(seed_cost[group].sum()))

    def bytes_of_largest(groups: list[Tensor]) -> float:
        return max(map(bytes_of, sizes_of(batch, groups)))

    num_groups = math.ceil(bytes_of_largest([seeds]) / limit) if first is None else max(1, first)
    groups, largest_bytes = find_fewest(
        split, bytes_of_largest, limit, first_number=num_groups, max_number=seeds.numel(), max_growth=MAX_GROWTH
    )
    if largest_bytes <= limit:
        return _fill_first_group(batch, bytes_of, limit, groups, seed_cost)

    # Every group is a single seed, and the largest is above the limit.
    seed_bytes = max(map(expected_bytes_of or bytes_of, sizes_of(batch, groups)))
    if max_bytes is None:
        max_bytes = limit
    if seed_bytes <= max_bytes:
        return groups
    raise ValueError(
        f"one seed takes {format_size(seed_bytes)} and {format_size(max_bytes)} are left for a step: give the budget "
        f"{format_size(seed_bytes - max_bytes)} more, or make the fan-outs smaller or set "
        f"over_budget=cut {CHANGES_TRAINING}"
    )


def _fill_first_group(
    batch: Batch, bytes_of: BytesOf, limit: float, groups: list[Tensor], seed_cost: Tensor
) -> list[Tensor]:
    """One group as large as fits and even groups of the remaining seeds; or `groups` if that gains nothing.

    Nodes that seeds share are computed in every group, so one large and some small groups cost less than
    even ones. A large group also teaches the predictor, which adds smaller margins for sizes up to those it
    has seen.

    groups: even groups that fit.
    """
    num_groups = len(groups)
    if not 1 < num_groups <= MAX_FILLED_GROUPS:
        return groups
    seeds = torch.cat(groups)
    shares = balanced_groups(seed_cost[seeds], NUM_SHARES)

    # Bisection: the largest count of shares that fits is at least `low` and below `high`.
    even_count = len(shares) // num_groups
    low = even_count
    high = len(shares)
    while high - low > 1:
        count = (low + high) // 2
        (sizes,) = sizes_of(batch, [seeds[torch.cat(shares[:count])]])
        if bytes_of(sizes) <= FILLED_FRACTION * limit:
            low = count
        else:
            high = count
    if low == even_count:
        return groups

    first_group = seeds[torch.cat(shares[:low])]
    remaining = seeds[torch.cat(shares[low:])]
    # The number of even groups that the remaining shares would fill.
    remaining_fraction = (len(shares) - low) / len(shares)
    num_remaining_groups = math.ceil(num_groups * remaining_fraction)
    remaining_groups = balanced_groups(seed_cost[remaining], num_remaining_groups)
    filled = [first_group, *(remaining[group] for group in remaining_groups)]
    all_fit = max(map(bytes_of, sizes_of(batch, filled))) <= limit
    return filled if all_fit else groups


# ---- cutting edges


def cut_to_fit(batch: Batch, bytes_of: BytesOf, limit: float, by: CutBy = "random", key: int = 0) -> Batch:
    """The batch with as many of its edges as fit below `limit` bytes.

    Nodes that no remaining edge needs go too.

    Every edge gets a number: random, drawn from `key`, or by importance (`edge_numbers`). Suppose that a batch
    starts with its seeds and takes edges in the order of their numbers. An edge or node *enters* at the number
    at which the batch first computes with it. The search finds the largest number up to which all that enters
    fits.

    by: "random", or "degree" or "pagerank", which leave out edges between hubs first.
    """
    block_edges = _edges_of(batch)
    numbers = edge_numbers(batch, by, key)
    node_entries = [np.full(batch.num_seeds, -1)]  # seeds enter before all edges
    edge_entries: list[np.ndarray] = []
    for l in reversed(range(len(batch.blocks))):
        num_src = batch.blocks[l].num_src
        src_entry, edge_entry = cpu_cut_batches.entries(block_edges[l], numbers[l], node_entries[0], num_src)
        node_entries.insert(0, src_entry)
        edge_entries.insert(0, edge_entry)

    def fits(counts: Sequence[int]) -> bool:
        """Whether a batch fits. counts: the nodes of each layer, then the edges of each block."""
        num_nodes = tuple(counts[: len(node_entries)])
        num_edges = tuple(counts[len(node_entries) :])
        return bytes_of(Sizes(num_nodes, num_edges).with_outputs(batch.num_examples)) <= limit

    seeds_alone = [*[batch.num_seeds] * len(node_entries), *[0] * len(edge_entries)]
    if not fits(seeds_alone):
        raise ValueError(
            f"the seeds alone take more than the {format_size(limit)} left for a step: give a larger budget, or make "
            f"batch_size smaller {CHANGES_TRAINING}"
        )
    last = cpu_cut_batches.last_that_fits([*node_entries, *edge_entries], lambda counts: fits(counts.tolist()))
    return _batch_up_to(batch, block_edges, node_entries, edge_entries, last)


def edge_numbers(batch: Batch, by: CutBy, key: int = 0) -> list[np.ndarray]:
    """[num_edges] int64 per block: a number for each edge, not negative. Edges with low numbers are kept first."""
    block_edges = _edges_of(batch)
    if by == "random":
        return cpu_cut_batches.draw_numbers([block.num_edges for block in batch.blocks], key)
    num_nodes = batch.blocks[0].num_src
    if by == "degree":
        importance = cpu_cut_batches.total_degrees(block_edges, num_nodes)
    else:
        importance = cpu_cut_batches.page_rank(block_edges, num_nodes)
    return cpu_cut_batches.hub_numbers(block_edges, importance, key)


def _edges_of(batch: Batch) -> list[cpu_cut_batches.Edges]:
    """(indptr, src_idx) of each block, on the host. Refuses blocks that cannot be divided."""
    for block in batch.blocks:
        _check_divisible(block)
    return [(block.part.indptr.cpu().numpy(), block.part.src_idx.cpu().numpy()) for block in batch.blocks]


def _batch_up_to(
    batch: Batch,
    block_edges: Sequence[cpu_cut_batches.Edges],
    node_entries: Sequence[np.ndarray],
    edge_entries: Sequence[np.ndarray],
    last: int,
) -> Batch:
    """The batch of the nodes and edges that enter at number `last` or before.

    node_entries, edge_entries: the number at which each node of a layer, and each edge of a block, enters.
    """

    def to_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(batch.seeds.device)

    nodes = [to_device(np.flatnonzero(entry <= last)) for entry in node_entries]
    blocks = []
    for l, block in enumerate(batch.blocks):
        arrays = cpu_cut_batches.cut_block(
            block_edges[l], edge_entries[l], dst_entry=node_entries[l + 1], src_entry=node_entries[l], last=last
        )
        indptr, src_idx, edge_idx = map(to_device, arrays)
        part = _part(block.part, indptr, src_idx, edge_idx)
        blocks.append(_block(block, src=nodes[l], num_dst=nodes[l + 1].numel(), part=part))
    return _batch(batch, seed_idx=nodes[-1], blocks=tuple(blocks), input_idx=nodes[0], own_idx=None)


def with_rows(batch: Batch, tables: Mapping[str, Readable]) -> Batch:
    """The batch with rows for its new edges.

    Rows that were handles remain handles. Rows that were tensors are read from `tables`.
    """
    ids = batch.input_ids

    def rows(name: str, before: Rows | Tensor) -> Rows | Tensor:
        if isinstance(before, Rows):
            return Rows(before.table, ids)
        return tables[name].read(ids.cpu()).to(before.device)

    x = None if batch.x is None else rows("x", batch.x)
    return replace(batch, x=x, tables={name: rows(name, before) for name, before in batch.tables.items()})


# ---- parts of blocks and batches


def _check_divisible(block: Block) -> Block:
    """The block itself; raises a ValueError if its edges cannot be divided."""
    if not block.is_divisible:
        raise ValueError(f"a {type(block).__name__} cannot be split or cut: set layout=block")
    return block


def _part(part: Part, indptr: Tensor, src_idx: Tensor, edge_idx: Tensor | None) -> Part:
    """A part with some edges of another one.

    edge_idx: their positions in `part`; None where the part has no edge arrays and no edge ids.
    """
    if edge_idx is None:
        return Part(indptr, src_idx)
    edge = {name: ops.gather_rows(rows, edge_idx) for name, rows in part.edge.items()}
    edge_ids = None if part.edge_ids is None else ops.gather_rows(part.edge_ids, edge_idx)
    return Part(indptr, src_idx, edge, edge_ids)


def _block(block: Block, src: Tensor, num_dst: int, part: Part) -> Block:
    """A block over some edges of another one. src: positions of its sources among the sources of `block`."""
    return replace(block, src_ids=ops.gather_rows(block.src_ids, src), num_dst=num_dst, parts=(part,))


def _batch(
    batch: Batch, seed_idx: Tensor, blocks: tuple[Block, ...], input_idx: Tensor, own_idx: Tensor | None
) -> Batch:
    """The batch of some seeds of `batch`, over other blocks.

    seed_idx, input_idx: positions of its seeds and input rows in the batch. own_idx: positions of the first
    block's destinations; None if the first block lost edges. Then `ReducedRows`, which are aggregated over
    these edges, are no longer right, and are replaced by `Rows`.
    """
    src_ids = blocks[0].src_ids
    examples, output_idx = examples_of(batch, seed_idx)

    def select(rows: Rows | Tensor | None) -> Any:
        if rows is None:
            return None
        if isinstance(rows, Tensor):
            return ops.gather_rows(rows, input_idx)
        if isinstance(rows, ReducedRows) and own_idx is not None:
            return replace(rows, ids=src_ids, reduced_and_own=ops.gather_rows(rows.reduced_and_own, own_idx))
        return Rows(rows.table, src_ids)

    return replace(
        batch,
        seeds=ops.gather_rows(batch.seeds, seed_idx),
        blocks=blocks,
        x=select(batch.x),
        y=None if batch.y is None else ops.gather_rows(batch.y, examples.to(batch.y.device)),
        tables={name: select(rows) for name, rows in batch.tables.items()},
        output_idx=output_idx,
        groups=(),
    )
