"""`OwnSampler`: a sampler of the user's, as a `Loader` calls it.

    own_sampler   settings become a sampler for the graph, and a few seeds are sampled twice. Both once per graph
    sample        in the threads that prepare batches, or in one at a time. The blocks of every batch are checked

Kernels do not look whether a local id is one: an edge from a source that does not exist would read other memory. So
no batch goes unchecked. The check reads the ids and edges of a batch a few times (docs/own_sampler.md has its time).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hopline import ops
from hopline.contract import BlockSampler, SamplerSettings
from hopline.core.batch import Block, Part
from hopline.core.graph import Graph
from hopline.core.sampler import repeat_seeds
from hopline.device.snapshots import preserve_all_rng

NUM_TRIED_SEEDS = 32
"""Most seeds that are sampled before a run. A rule of thumb: enough for nodes of several degrees."""
TRIED_KEY = -0x5DEECE66D1234567
"""The key of that sample. Half of all keys are negative, which some generators refuse."""

_one_at_a_time = threading.Lock()
"""Held by whoever calls a sampler that has `thread_safe = False`.

One lock for all of them: loaders of training and of evaluation may share a sampler.
"""


def own_sampler(sampler: SamplerSettings | BlockSampler, graph: Graph, seeds: Tensor) -> OwnSampler:
    """The sampler for a graph, tried out. Made once per graph and cached there.

    seeds: [n] int64, some of which are sampled, on the device of the batches' seeds.
    """
    # The cached object refers to `sampler`, so that no other can get its id meanwhile.
    return graph.get_cached(("sampler", id(sampler)), lambda: OwnSampler(sampler, graph, seeds))


class OwnSampler:
    """A sampler of the user's for one graph. Any number of threads may call it.

    Raises:
        ValueError: `bind` returns no sampler, or the sampler does not give the same blocks for the same arguments,
            or blocks that do not fit the seeds.
    """

    def __init__(self, given: SamplerSettings | BlockSampler, graph: Graph, seeds: Tensor) -> None:
        self.given = given
        self.name = type(given).__name__
        self.graph = graph
        self._sampler = self._bind()
        self._lock: Any = nullcontext() if getattr(self._sampler, "thread_safe", True) else _one_at_a_time
        self._tried: tuple[Block, ...] = ()
        self._tried = self._try_out(seeds.unique()[:NUM_TRIED_SEEDS])

    @property
    def num_blocks(self) -> int:
        return len(self._tried)

    @property
    def edge(self) -> dict[str, Tensor]:
        """Edge arrays of the blocks, of which no row is meant."""
        return dict(self._tried[-1].edge)

    def sample(self, seeds: Tensor, key: int | Tensor, draw_key: int | Tensor | None = None) -> tuple[Block, ...]:
        """The blocks of some seeds. A seed that comes several times has a row each time, with the same in-edges.

        draw_key: of hopline's laws, which a sampler of the user's does without.
        """
        if not seeds.numel():  # this rank has no share of the step
            return tuple(replace(_without_nodes(block), key=key) for block in self._tried)
        distinct, seed_idx = ops.relabel(seeds[:0], seeds)
        if distinct.numel() == seeds.numel():
            return self._sample(seeds, key)
        return tuple(repeat_seeds(block, seed_idx, distinct.numel()) for block in self._sample(distinct, key))

    def _sample(self, seeds: Tensor, key: int | Tensor) -> tuple[Block, ...]:
        with self._lock:
            blocks: Any = self._sampler.sample(seeds, int(key))
        if not isinstance(blocks, list | tuple) or not blocks or not all(type(block) is Block for block in blocks):
            raise self._refusal(
                f"returned {_describe(blocks)}",
                "return a list of hl.extend.Block, one per layer, in the order of computation",
            )
        if self._tried and len(blocks) != self.num_blocks:
            raise self._refusal(
                f"returned {len(blocks)} blocks, and {self.num_blocks} before", "return one per layer of the model"
            )
        dst_ids = seeds
        checked: list[Block] = []
        for l in reversed(range(len(blocks))):
            mistake, advice = self._mistake(blocks[l], dst_ids, is_last=l == len(blocks) - 1)
            if mistake:
                raise self._refusal(f"gave a block {l} of {len(blocks)} in which {mistake}", advice)
            dst_ids = blocks[l].src_ids
            checked.append(_as_sampled(blocks[l], key))
        return tuple(reversed(checked))

    def _bind(self) -> BlockSampler:
        if not isinstance(self.given, SamplerSettings):
            return self.given
        sampler = self.given.bind(self.graph)
        if not isinstance(sampler, BlockSampler) or isinstance(sampler, type):
            raise ValueError(
                f"{self.name}.bind returned {_describe(sampler)}: return an object that has sample(seeds, key)"
            )
        return sampler

    def _try_out(self, seeds: Tensor) -> tuple[Block, ...]:
        """The blocks of some seeds, which are sampled twice."""
        with preserve_all_rng(seeds.device):
            before = torch.get_rng_state()
            blocks = self._sample(seeds, TRIED_KEY)
            if not torch.equal(before, torch.get_rng_state()):
                raise self._refusal(
                    "draws from torch's default generator, which training threads share",
                    "draw from torch.Generator().manual_seed(key), or take hl.extend.random_numbers(key, ids, n)",
                )
            again = self._sample(seeds, TRIED_KEY)
        if len(again) != len(blocks) or not all(map(_are_equal, blocks, again)):
            raise self._refusal(
                "gave other blocks when it was called again with the same seeds and key",
                "let it depend on its arguments alone, and draw by torch.Generator().manual_seed(key)",
            )
        return blocks

    def _refusal(self, mistake: str, advice: str) -> ValueError:
        return ValueError(f"{self.name}.sample(seeds, key) {mistake}: {advice}")

    def _mistake(self, block: Block, dst_ids: Tensor, is_last: bool) -> tuple[str, str]:
        """(what is wrong with a block, what to write). Two empty texts if it fits.

        dst_ids: [n] int64, what its destinations must be.
        """
        part = block.parts[0] if len(block.parts) == 1 else None
        if part is None or block.convs is not None or block.layer_hooks is not None:
            return "there is not one Part of edges", "give Block(src_ids, num_dst, (part,))"
        arrays = {"src_ids": block.src_ids, "indptr": part.indptr, "src_idx": part.src_idx, **part.edge}
        if part.edge_ids is not None:
            arrays["edge_ids"] = part.edge_ids
        for name, array in arrays.items():
            if not isinstance(array, Tensor) or array.device != dst_ids.device:
                return f"{name} is no tensor on {dst_ids.device}", "make it on seeds.device"
        for name, dtype in (("src_ids", torch.int64), ("indptr", torch.int64), ("src_idx", torch.int32)):
            array = arrays[name]
            if array.dim() != 1 or array.dtype != dtype:
                advice = "make blocks by hl.extend.block_of_edges, or give [n] " + str(dtype).removeprefix("torch.")
                return f"{name} is {list(array.shape)} {array.dtype}", advice
        if block.num_dst != dst_ids.numel() or not torch.equal(block.dst_ids, dst_ids):
            which = "the seeds" if is_last else "the sources of the next block"
            return f"the destinations are not {which}, in their order", f"begin src_ids with {which}, each once"
        if not _all_below(block.src_ids, self.graph.num_nodes):
            return "an id of src_ids is no node", f"give ids from 0 to {self.graph.num_nodes - 1}"
        indptr = part.indptr
        fits = indptr.numel() == block.num_dst + 1 and int(indptr[0]) == 0 and int(indptr[-1]) == part.num_edges
        if not fits or bool((indptr.diff() < 0).any()):
            return (
                f"indptr does not rise from 0 to the {part.num_edges} edges in {block.num_dst} steps",
                "make blocks by hl.extend.block_of_edges",
            )
        if not _all_below(part.src_idx, block.num_src):
            advice = "give positions in src_ids, or make blocks by hl.extend.block_of_edges"
            return f"src_idx is not from 0 to {block.num_src - 1}", advice
        for name in [*part.edge, *(() if part.edge_ids is None else ("edge_ids",))]:
            if arrays[name].shape[:1] != part.src_idx.shape or (name == "weight" and arrays[name].dim() != 1):
                return (
                    f"{name} is {list(arrays[name].shape)} for {part.num_edges} edges",
                    "give one row per edge, and weights as [num_edges]",
                )
        if self._tried and part.edge.keys() != self._tried[-1].edge.keys():
            return (
                f"edges have the arrays {_names(part)}, and {_names(self._tried[-1].part)} before",
                "give all the same",
            )
        return self._mistake_of_graph(block, part)

    def _mistake_of_graph(self, block: Block, part: Part) -> tuple[str, str]:
        """`_mistake` about the graph that a block names."""
        graph = block.graph
        if graph is None:
            advice = "give Block(graph=graph), if all in-edges of a node are equally likely"
            return ("scale_sums is set without a graph", advice) if block.scale_sums else ("", "")
        if (graph.num_nodes, graph.num_edges) != (self.graph.num_nodes, self.graph.num_edges):
            return f"the graph is {graph!r} and not {self.graph!r}", "make the sampler for the graph of the dataset"
        if part.edge.keys() != graph.edge.keys():
            advice = "give those of the graph, or leave graph= out"
            return f"edges have the arrays {_names(part)}, and the graph has {', '.join(graph.edge) or 'none'}", advice
        return "", ""


def _as_sampled(block: Block, key: int | Tensor) -> Block:
    """The block with the step's key. Its edges count as in the graph's order only if they are."""
    in_order = block.in_graph_order and _has_all_in_order(block)
    if block.key is key and block.in_graph_order == in_order:
        return block
    return replace(block, key=key, in_graph_order=in_order)


def _has_all_in_order(block: Block) -> bool:
    """Whether a block has all in-edges of its destinations, in the order of its graph."""
    graph = block.graph
    if graph is None or not torch.equal(block.counts, graph.in_degrees(block.dst_ids)):
        return False
    _, edges = ops.row_entries(graph.indptr, block.dst_ids)
    return torch.equal(ops.gather_rows(graph.indices, edges).long(), block.src_ids[block.part.src_idx.long()])


def _without_nodes(block: Block) -> Block:
    part = block.part
    edge = {name: rows[:0] for name, rows in part.edge.items()}
    edge_ids = None if part.edge_ids is None else part.edge_ids[:0]
    return replace(
        block, src_ids=block.src_ids[:0], num_dst=0, parts=(Part(part.indptr[:1], part.src_idx[:0], edge, edge_ids),)
    )


def _are_equal(ours: Block, others: Block) -> bool:
    if ours.edge.keys() != others.edge.keys():
        return False
    pairs = zip(ours.tensors(), others.tensors(), strict=True)
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def _all_below(ids: Tensor, limit: int) -> bool:
    if not ids.numel():
        return True
    lowest, highest = torch.stack(torch.aminmax(ids)).tolist()
    return lowest >= 0 and highest < limit


def _names(part: Part) -> str:
    return ", ".join(part.edge) or "none"


def _describe(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a {type(value).__name__} of {', '.join(sorted({type(item).__name__ for item in value})) or 'nothing'}"
    return "None" if value is None else f"a {type(value).__name__}"
