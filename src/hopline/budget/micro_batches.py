"""A sampled batch that takes too much: in pieces that together are the same batch, or with fewer edges.

Pieces are micro-batches of the seeds over the edges that were drawn for the whole batch, so their gradients add up to
the whole batch's. Leaving edges out changes the sample; it is done only where somebody chose it.
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
from hopline.budget.predictor import Costs
from hopline.contract import CutBy
from hopline.core.batch import Batch, Block, Part
from hopline.core.row_handles import Readable, ReducedRows, Rows
from hopline.core.sizes import Sizes
from hopline.nn.whole_module import Whole
from hopline.ops.cpu import cut_batches as cpu_cut_batches
from hopline.util.config import format_size

P = TypeVar("P")
BytesOf = Callable[[Sizes], float]
"""What a batch of some sizes takes; never less for more nodes or edges."""
SMALL_TENSOR_BYTES = 1024
"""Bytes of what is small in every piece."""
MAX_FILLED_GROUPS, FILLED_BY, FILLED_TO = 4, 32, 0.97
"""Up to so many groups the first is filled, by so many parts of the seeds, to so much of the limit: promises move until
its turn comes, and one that would then be too large is split again."""


def can_split(model: nn.Module) -> bool:
    """Whether, in training, the pieces of a batch are the batch."""
    try:
        check_split(model, training=True)
    except ValueError:
        return False
    return True


def check_split(model: nn.Module, instead: str = "set over_budget=cut", training: bool = False) -> None:
    """Refuse, by name, a model for which the pieces of a batch are not the batch.

    instead: what else to do; training: whether it will be in training, if it is not now.
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


# ---- pieces


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Some seeds of a batch and the edges that lead to them; rows are copied only by `batch()`, when its turn comes."""

    whole: Batch
    seed_idx: Tensor
    blocks: tuple[Block, ...]
    input_idx: Tensor
    """Where its input rows are among the whole batch's,"""
    own_idx: Tensor
    """and its first block's destinations."""

    @property
    def sizes(self) -> Sizes:
        return Sizes.of_blocks(self.blocks)

    def batch(self) -> Batch:
        return _batch(self.whole, self.seed_idx, self.blocks, self.input_idx, self.own_idx)


def micro_batch_of(batch: Batch, seed_idx: Tensor) -> MicroBatch:
    """The part of a batch that leads to some of its seeds (by position), over the same edges."""
    chosen = own = seed_idx = seed_idx.to(batch.seeds.device)
    blocks: list[Block] = []
    for block in reversed(batch.blocks):
        part, own = _splittable(block).part, chosen
        wants = bool(part.edge) or part.edge_ids is not None
        indptr, src_idx, chosen, edges = _edges_to(part, block.num_src, own, wants)
        blocks.append(_block(block, chosen, own.numel(), _part(part, indptr, src_idx, edges)))
    return MicroBatch(batch, seed_idx, tuple(reversed(blocks)), chosen, own)


def _edges_to(part: Part, num_src: int, own: Tensor, wants: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    if own.device.type == "cpu":
        return cpu_cut_batches.take(part.indptr, part.src_idx, num_src, own, wants)
    indptr, edges = ops.row_positions(part.indptr, own)
    chosen, src_idx = ops.relabel(own, ops.gather_rows(part.src_idx, edges))
    return indptr, src_idx, chosen, edges


@dataclass(frozen=True)
class MicroBatchBytes:
    """What a piece takes besides its step, by its sizes alone, on the device where it runs."""

    per_node: tuple[float, ...]
    """Bytes that it keeps, by the entries of `Sizes.nodes`,"""
    per_edge: tuple[float, ...]
    """and of `Sizes.edges`: ids, indices, and rows that are copied."""
    to_make: float
    """Bytes per edge of its largest block, while that is made,"""
    maps: int
    """and for the places of all nodes of the batch."""

    @classmethod
    def of(cls, batch: Batch, device: torch.device | None) -> MicroBatchBytes:
        """device: where pieces are made; None: elsewhere, and what runs is copied."""
        nodes = [8.0] * len(batch.blocks) + [0.0]
        for l in range(len(batch.blocks)):
            nodes[l + 1] += 8  # the block's indptr
        nodes[-1] += 8 + (0 if batch.y is None else _row_bytes(batch.y))
        for rows in (batch.x, *batch.tables.values()):
            if isinstance(rows, ReducedRows):
                nodes[1] += _row_bytes(rows.reduced_and_own)
            elif isinstance(rows, Tensor):
                nodes[0] += _row_bytes(rows)
        edges = []
        for block in batch.blocks:
            part = _splittable(block).part
            edges.append(4 + sum(map(_row_bytes, part.edge.values())) + 8 * (part.edge_ids is not None))
        if device is None:
            return cls(tuple(nodes), tuple(edges), 0, 0)
        on_cpu = device.type == "cpu"
        return cls(tuple(nodes), tuple(edges), 24 if on_cpu else 96, (4 if on_cpu else 16) * batch.blocks[0].num_src)

    def resident(self, sizes: Sizes) -> float:
        """While its step runs."""
        of_nodes = sum(b * n for b, n in zip(self.per_node, sizes.nodes, strict=True))
        return of_nodes + sum(b * n for b, n in zip(self.per_edge, sizes.edges, strict=True)) + SMALL_TENSOR_BYTES

    def while_made(self, sizes: Sizes) -> float:
        """While it is made: nodes' places come on top, and the positions of edges."""
        if not self.to_make:
            return self.resident(sizes)
        return self.resident(sizes) + 24 * sizes.nodes[0] + self.to_make * max(sizes.edges) + self.maps

    def peak_with_step(self, sizes: Sizes, step_bytes: float) -> float:
        """All of a piece whose step takes so much beside it."""
        return max(self.resident(sizes) + step_bytes, self.while_made(sizes))


def _row_bytes(rows: Tensor) -> int:
    return rows.element_size() * math.prod(rows.shape[1:])


def seed_costs(batch: Batch, costs: Costs) -> Tensor:
    """[num_seeds] float64 on the host: what each seed would take alone, by the bound, were nothing shared within."""
    total = torch.full((batch.blocks[0].num_src, 1), costs.per_node[0], dtype=torch.float64)
    for block, node, edge in zip(batch.blocks, costs.per_node[1:], costs.per_edge, strict=True):
        indptr, src_idx = block.part.indptr.cpu(), block.part.src_idx.cpu()
        below = ops.reduce_edges(total, indptr, src_idx, "sum")
        total = below.add_(total[: block.num_dst]).add_(node).add_(indptr.diff()[:, None], alpha=edge)
    return total[:, 0]


def sizes_of(batch: Batch, groups: Sequence[Tensor]) -> list[Sizes]:
    """How large the pieces of some groups of seeds (positions) are, without making them. Counted on the host."""
    num_nodes, num_blocks = Sizes.of(batch).nodes, len(batch.blocks)
    counts = cpu_cut_batches.count(_edges_of(batch), num_nodes, [group.cpu().numpy() for group in groups]).tolist()
    return [Sizes(tuple(row[: num_blocks + 1]), tuple(row[num_blocks + 1 :])) for row in counts]


def balanced_groups(seed_cost: Tensor, num_micro_batches: int) -> list[Tensor]:
    """Groups of seeds (positions) of about equal cost: dealt out from the dearest on, there and back."""
    order = torch.argsort(seed_cost, descending=True, stable=True)
    turn = torch.arange(order.numel(), device=order.device)
    place = turn % (2 * num_micro_batches)
    owner = torch.minimum(place, 2 * num_micro_batches - 1 - place)
    return [
        order[owner == number].sort().values for number in range(num_micro_batches) if bool((owner == number).any())
    ]


def find_fewest(
    cut: Callable[[int], list[P]],
    worst: Callable[[list[P]], float],
    limit: float,
    *,
    first: int,
    most: int,
    grow: float,
) -> tuple[list[P], float]:
    """(as few pieces as fit below `limit` bytes, what the worst of them takes); or `most` pieces, which may not fit.

    cut: makes a number of pieces; worst: what the largest of some takes; first: how many are tried first; grow: how
    many times as many are tried next, at most.
    """
    num_micro_batches = first
    while True:
        num_micro_batches = min(num_micro_batches, most)
        pieces = cut(num_micro_batches)
        taken = worst(pieces)
        if taken <= limit or num_micro_batches == most:
            return pieces, taken
        num_micro_batches = max(num_micro_batches + 1, math.floor(num_micro_batches * min(taken / limit, grow)))


def split_to_fit(batch: Batch, bytes_of: BytesOf, limit: float, costs: Costs) -> list[MicroBatch]:
    """A batch in as few pieces as fit, each below `limit` bytes."""
    return [micro_batch_of(batch, group) for group in groups_to_fit(batch, bytes_of, limit, costs)]


def groups_to_fit(
    batch: Batch,
    bytes_of: BytesOf,
    limit: float,
    costs: Costs,
    *,
    among: Tensor | None = None,
    first: int | None = None,
    max_bytes: float | None = None,
    min_bytes_of: BytesOf | None = None,
) -> list[Tensor]:
    """Seeds (positions, on the host) in as few groups as fit, those of each together below `limit` bytes.

    among: only these seeds; first: how many groups are tried first; max_bytes: what a seed alone may take,
    if not `limit`; min_bytes_of: by which it is refused, if not `bytes_of`.
    """
    seed_cost = seed_costs(batch, costs)
    seeds = torch.arange(batch.num_seeds) if among is None else among.cpu()

    def cut(num_groups: int) -> list[Tensor]:
        groups = [seeds[group] for group in balanced_groups(seed_cost[seeds], num_groups)]
        return sorted(groups, key=lambda group: -float(seed_cost[group].sum()))

    def worst(groups: list[Tensor], bytes_of: BytesOf = bytes_of) -> float:
        return max(map(bytes_of, sizes_of(batch, groups)))

    num_groups = math.ceil(worst([seeds]) / limit) if first is None else max(1, first)
    groups, taken = find_fewest(cut, worst, limit, first=num_groups, most=seeds.numel(), grow=1.5)
    if taken <= limit:
        return _first_filled(batch, bytes_of, limit, groups, seed_cost)
    least, most = worst(groups, min_bytes_of or bytes_of), limit if max_bytes is None else max_bytes
    if least <= most:
        return groups
    raise ValueError(
        f"one seed takes {format_size(least)} and {format_size(most)} are left for a step: give the budget "
        f"{format_size(least - most)} more, make the fan-outs smaller, or set over_budget=cut"
    )


def _first_filled(
    batch: Batch, bytes_of: BytesOf, limit: float, groups: list[Tensor], seed_cost: Tensor
) -> list[Tensor]:
    """Even groups that fit, or instead one as large as fits and even ones of the rest.

    What seeds have in common is computed once more in every group, so a large one and small ones cost less than even
    ones; and the larger the groups that were seen are, the less is added to the promise for still larger ones.
    """
    num_groups, seeds = len(groups), torch.cat(groups)
    if not 1 < num_groups <= MAX_FILLED_GROUPS:
        return groups
    shares = balanced_groups(seed_cost[seeds], FILLED_BY)

    even = len(shares) // num_groups
    low, high = even, len(shares)  # the largest count that fits is from low on and below high
    while high - low > 1:
        count = (low + high) // 2
        if bytes_of(sizes_of(batch, [seeds[torch.cat(shares[:count])]])[0]) <= FILLED_TO * limit:
            low = count
        else:
            high = count
    if low == even:
        return groups
    first, rest = (seeds[torch.cat(some)] for some in (shares[:low], shares[low:]))
    others = balanced_groups(seed_cost[rest], -(-num_groups * (len(shares) - low) // len(shares)))
    found = [first, *(rest[group] for group in others)]
    return found if max(map(bytes_of, sizes_of(batch, found))) <= limit else groups


# ---- fewer edges


def cut_to_fit(batch: Batch, bytes_of: BytesOf, limit: float, by: CutBy = "random", key: int = 0) -> Batch:
    """The batch with the most edges that fit below `limit` bytes, kept in an order drawn from `key` or by importance.

    Nodes that no kept edge needs go too. `degree` and `pagerank` leave out edges between hubs first.
    """
    blocks, numbers = _edges_of(batch), edge_numbers(batch, by, key)
    nodes, edges = [np.full(batch.num_seeds, -1)], []
    for block, edge, number in zip(reversed(batch.blocks), reversed(blocks), reversed(numbers), strict=True):
        src_entry, edge_entry = cpu_cut_batches.entries(edge, number, nodes[0], block.num_src)
        nodes.insert(0, src_entry)
        edges.insert(0, edge_entry)

    def fits(counts: Sequence[int]) -> bool:
        return bytes_of(Sizes(tuple(counts[: len(nodes)]), tuple(counts[len(nodes) :]))) <= limit

    if not fits([*[batch.num_seeds] * len(nodes), *[0] * len(edges)]):
        raise ValueError(
            f"the seeds alone take more than the {format_size(limit)} left for a step: give a larger budget, or make "
            "batch_size smaller"
        )
    last = cpu_cut_batches.last_that_fits([*nodes, *edges], lambda counts: fits(counts.tolist()))
    return _kept(batch, blocks, nodes, edges, last)


def edge_numbers(batch: Batch, by: CutBy, key: int = 0) -> list[np.ndarray]:
    """For the edges of each block a number of their own, int64 from 0 on: those with lower ones are kept first."""
    blocks, num_nodes = _edges_of(batch), batch.blocks[0].num_src
    if by == "random":
        return cpu_cut_batches.drawn_numbers([block.num_edges for block in batch.blocks], key)
    hub = (
        cpu_cut_batches.num_ends(blocks, num_nodes) if by == "degree" else cpu_cut_batches.page_rank(blocks, num_nodes)
    )
    return cpu_cut_batches.hub_numbers(blocks, hub, key)


def _edges_of(batch: Batch) -> list[cpu_cut_batches.Edges]:
    for block in batch.blocks:
        _splittable(block)
    return [(block.part.indptr.cpu().numpy(), block.part.src_idx.cpu().numpy()) for block in batch.blocks]


def _kept(
    batch: Batch,
    edges: Sequence[cpu_cut_batches.Edges],
    nodes: Sequence[np.ndarray],
    entry: Sequence[np.ndarray],
    last: int,
) -> Batch:
    """The batch of the nodes and edges whose entry is not after `last`."""

    def here(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(batch.seeds.device)

    chosen, blocks = [here(np.flatnonzero(n <= last)) for n in nodes], []
    for l, block in enumerate(batch.blocks):
        found = cpu_cut_batches.kept_edges(edges[l], entry[l], nodes[l + 1], nodes[l], last)
        indptr, src_idx, kept = map(here, found)
        blocks.append(_block(block, chosen[l], chosen[l + 1].numel(), _part(block.part, indptr, src_idx, kept)))
    return _batch(batch, chosen[-1], tuple(blocks), chosen[0], None)


def with_rows(batch: Batch, tables: Mapping[str, Readable]) -> Batch:
    """A batch whose edges are others than its rows are for, with the rows that they need, read if they were read."""
    ids = batch.input_ids

    def rows(name: str, before: Rows | Tensor) -> Rows | Tensor:
        if isinstance(before, Rows):
            return Rows(before.table, ids)
        return tables[name].read(ids.cpu()).to(before.device)

    others = {name: rows(name, before) for name, before in batch.tables.items()}
    return replace(batch, x=None if batch.x is None else rows("x", batch.x), tables=others)


# ---- parts of blocks and batches


def _splittable(block: Block) -> Block:
    if not block.is_divisible:
        raise ValueError(
            f"a {type(block).__name__} cannot be split or cut: set layout=block, or make batch_size smaller"
        )
    return block


def _part(part: Part, indptr: Tensor, src_idx: Tensor, edges: Tensor | None) -> Part:
    """edges: where they were; not asked for where a part has nothing to say about its edges."""
    if edges is None:
        return Part(indptr, src_idx)
    edge = {name: ops.gather_rows(rows, edges) for name, rows in part.edge.items()}
    return Part(indptr, src_idx, edge, None if part.edge_ids is None else ops.gather_rows(part.edge_ids, edges))


def _block(block: Block, chosen: Tensor, num_dst: int, part: Part) -> Block:
    return replace(block, src_ids=ops.gather_rows(block.src_ids, chosen), num_dst=num_dst, parts=(part,))


def _batch(batch: Batch, seed_idx: Tensor, blocks: tuple[Block, ...], chosen: Tensor, own: Tensor | None) -> Batch:
    """own: the first block's destinations; None where its edges are others, so that nothing was reduced yet."""

    def rows(of: Rows | Tensor | None) -> Any:
        if isinstance(of, Tensor):
            return ops.gather_rows(of, chosen)
        if isinstance(of, ReducedRows) and own is not None:
            return replace(of, ids=blocks[0].src_ids, reduced_and_own=ops.gather_rows(of.reduced_and_own, own))
        return None if of is None else Rows(of.table, blocks[0].src_ids)

    return replace(
        batch,
        seeds=ops.gather_rows(batch.seeds, seed_idx),
        blocks=blocks,
        x=rows(batch.x),
        y=None if batch.y is None else ops.gather_rows(batch.y, seed_idx.to(batch.y.device)),
        tables={name: rows(of) for name, of in batch.tables.items()},
        groups=(),
    )
