"""Finds out how far from a node a module looks, by running copies of the module on a tiny graph.

A module with `forward(x, edge_index)` does not declare how many hops it reads. Whoever runs it on the
neighbourhood of some seeds must know whether its outputs at the seeds are then those of the whole graph.
For k hops there are three answers:

    its output at a node depends on                              the outputs are right on
    in-edges within k hops (SAGE, GAT, GIN)                      the k-hop neighbourhood of the seeds
    also in-degrees of nodes k hops away (GCN's norm)            the neighbourhood of k + 1 hops, in which the nodes
                                                                 k hops away have all their in-edges
    anything else: more hops, all nodes present (pooling,        neither of the two
    norms over nodes), out-degrees, the largest degree

A trial (`_find`) runs a copy of the module on the whole tiny graph, and on neighbourhoods of several seeds.
It compares the outputs at the seeds, for two draws of the weights. It also looks for outputs that depend on
random numbers, on earlier calls or on the numbers of the nodes.

The tiny graph reaches further than k + 1 hops. It has the cases in which modules tend to go wrong: loops,
duplicate edges, isolated nodes, nodes without in-edges, a hub, and edges in one direction. Its features and edge
arrays are rows of the dataset with noise, so that they have the dataset's dtypes and ranges. Weights are drawn
again, since some are zero before training. Copies run on the CPU in evaluation mode, in float64 where they can.

A finding is stored in `probe.findings`, so a module is tried once for each number of hops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.nn import MessagePassing

from hopline.core.batch import Batch, Block, Part
from hopline.core.graph import Graph
from hopline.core.neighborhood import neighborhood
from hopline.core.row_handles import Readable
from hopline.core.sampler import NeighborSampler
from hopline.nn.probe import copy_module, findings
from hopline.nn.whole_module import Whole

WIDTH = 4
"""Nodes of the tiny graph at each distance from the seeds.

Also the most seeds of a batch in `check_batches`.
"""
FURTHER = 4
"""Hops that are tried beyond the number asked for, so that a message can name a number that is enough."""
MAX_BYTES = 256 << 20
"""Most bytes of a module's parameters, or of the tiny graph's features, for a trial. A larger module is not
tried. A rule of thumb: a trial takes up to half a second."""
TOLERANCE = 1e-8
"""Largest difference of equal outputs in float64, relative to the largest output."""
TOLERANCE_SINGLE = 1e-4
"""Largest difference of equal outputs in any other precision, relative to the largest output."""


@dataclass(frozen=True)
class Reach:
    """The finding of a trial of one module with one number of hops."""

    in_batch: bool = False
    """Whether a batch with all neighbours of these hops gives the whole graph's outputs."""
    part_hops: int | None = None
    """Hops of a neighbourhood that gives the whole graph's outputs: the number tried, or one more. None if
    neither is enough."""
    reason: str = ""
    """The reason why `part_hops` is None: a clause with the module as "it"."""
    refusal: str = ""
    """The reason why outputs in batches mean nothing: a clause with the module as "it". Empty if they mean
    something."""
    error: Exception | None = None
    """The exception that the module raised on the tiny graph."""


def find_reach(batch_model: Whole, hops: int, x: Readable, edge: Mapping[str, Tensor]) -> Reach:
    """Find out whether `hops` hops around a node are enough for the module's output at the node.

    The finding is cached for the module. It does not depend on the weights, which the trial draws itself.

    x, edge: the dataset's features and edge arrays.
    """
    kinds = tuple((name, array.dtype, array.shape[1:]) for name, array in edge.items())
    question = ("reach", hops, x.shape[1:], x.dtype, kinds)
    reach: Reach | None = findings.get(batch_model.module, question, settings=None)
    if reach is None:
        # The generator is restored afterwards: a trial must not change what training draws.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            reach = _find(batch_model.module, hops, x, edge)
        findings.put(batch_model.module, question, settings=None, answer=reach)
    return reach


def find_hops(batch_model: Whole, x: Readable, edge: Mapping[str, Tensor]) -> int | None:
    """A number of hops around a node that is enough for the module's output.

    The number of the module's PyG convs is tried first, then 0, 1, ... `FURTHER`. None if none of them is enough.
    """
    num_convs = sum(isinstance(part, MessagePassing) for part in batch_model.module.modules())
    for hops in (num_convs, *range(FURTHER + 1)):
        if find_reach(batch_model, hops, x, edge).part_hops is not None:
            return hops
    return None


def initialise(batch_model: Whole, x: Readable, edge: Mapping[str, Tensor]) -> None:
    """Give convs built with in_channels=-1 their parameters, by a forward pass on the tiny graph."""
    parameters = list(batch_model.module.parameters())
    if any(map(is_lazy, parameters)):
        tiny = _TinyGraph(hops=1, x=x, edge=edge)  # any number of hops would do
        device = parameters[0].device
        with torch.no_grad():
            batch_model.on_block(tiny.x.to(device), tiny.block.to(device))


def check_batches(batch_model: Whole, fanouts: Sequence[int], graph: Graph, x: Readable, seeds: Tensor) -> None:
    """Raise ValueError if the module's outputs mean nothing in sampled batches, or cannot be computed.

    fanouts, graph, x, seeds: settings and data of the run. If the module fails on the tiny graph, a copy of
    it runs on a batch of the first few seeds.
    """
    name = type(batch_model.module).__name__
    reach = find_reach(batch_model, len(fanouts), x, graph.edge)
    if reach.refusal:
        raise ValueError(
            f"{name} cannot be trained in batches: {reach.refusal}. Use convs such as SAGEConv, GCNConv or GATConv, "
            "which take any graph"
        )
    if reach.error is None:
        return
    # The tiny graph may lack something that the module expects of the dataset's graph, so a real batch
    # decides.
    blocks = NeighborSampler(graph, tuple(fanouts), one_list=True).sample(seeds[:WIDTH], 0)
    union = Batch(seeds[:WIDTH], blocks, None, None).union()
    try:
        trial = Whole(copy_module(batch_model.module).eval())
        device = next((p.device for p in trial.parameters()), torch.device("cpu"))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            trial.on_block(_read(x, union.src_ids).to(device), union.to(device))
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith(f"{name}.forward"):
            raise  # by `Whole.on_block`, with advice of its own
        text = " ".join(str(error).split())[:200]
        reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
        raise ValueError(
            f"{name} cannot run on a batch, here of {union.num_src} nodes and {union.num_edges} edges ({reason}). Use "
            "convs such as SAGEConv, GCNConv or GATConv, which take any graph"
        ) from error


# ---- the trial


def _find(module: nn.Module, hops: int, x: Readable, edge: Mapping[str, Tensor]) -> Reach:
    """Try a module with a number of hops, without the cache of `find_reach`."""
    module_bytes = sum(p.numel() * p.element_size() for p in module.parameters() if not is_lazy(p))
    max_nodes = _TinyGraph.num_nodes(hops + FURTHER)  # of the largest tiny graph that `_compare` builds
    feature_bytes = max_nodes * torch.Size(x.shape[1:]).numel() * torch.float64.itemsize
    if max(module_bytes, feature_bytes) > MAX_BYTES:
        return Reach(reason="it is too large to be tried out on a small graph")
    error: Exception | None = None
    tiny = _TinyGraph(hops, x, edge)
    # In float64 first, where equal outputs differ least. Some modules run only in the precision they were
    # built in.
    for dtype in (torch.float64, None):
        try:
            trials = [_Trial(module, dtype, seed, tiny) for seed in (0, 1)]
            return _compare(trials, hops, x, edge, tiny)
        except Exception as raised:
            error = raised
    return Reach(reason=f"it fails on a small graph ({_text(error)})", error=error)


def _compare(trials: list[_Trial], hops: int, x: Readable, edge: Mapping[str, Tensor], tiny: _TinyGraph) -> Reach:
    """Rule out modules about which a comparison would show nothing, then compare neighbourhoods by hops."""
    first = trials[0]
    outputs = [trial.outputs for trial in trials]
    if not all(map(_is_informative, outputs)):
        return Reach(reason="its outputs on a small graph are all alike or not finite, which shows nothing")
    if not _are_equal(first.run(tiny.x, tiny.block), outputs[0]):
        return Reach(reason="it draws at random in evaluation mode")
    if first.remembers(tiny):
        return Reach(refusal="it keeps something of the first graph that it is run on")
    renumbered_x, renumbered_block, numbers = tiny.renumber()
    if not _are_equal(first.run(renumbered_x, renumbered_block)[numbers], outputs[0]):
        return Reach(refusal="its output depends on how nodes are numbered, and every batch numbers them anew")

    # The last of `tiny.seeds` is one node without in-edges. Its neighbourhood has no edges, on which some
    # modules fail. A batch of only such nodes is rare, so `in_batch` does without this case. A chunk of
    # inference may have only such nodes, so `part_hops` needs it.
    in_batch = _difference(trials, outputs, tiny, tiny.seeds[:-1], hops) is None
    if in_batch and _difference(trials, outputs, tiny, tiny.seeds[-1:], hops) is None:
        return Reach(in_batch=True, part_hops=hops)
    difference = _difference(trials, outputs, tiny, tiny.seeds, hops + 1)
    if difference is None:
        return Reach(in_batch, part_hops=hops + 1)
    if difference:  # the module failed: more hops would not help
        return Reach(in_batch, reason=difference)

    # The message is better if it says how many hops would be enough. Each number is tried with one hop more,
    # which is right also for modules that read in-degrees.
    for more_hops in range(hops + 1, hops + 1 + FURTHER):
        larger = _TinyGraph(more_hops, x, edge)
        larger_outputs = [trial.run(larger.x, larger.block) for trial in trials]
        if _difference(trials, larger_outputs, larger, larger.seeds, more_hops + 1) is None:
            return Reach(in_batch, reason=f"its output at a node depends on nodes up to {more_hops} hops away")
    plural = "" if hops == 1 else "s"
    return Reach(
        in_batch,
        reason=f"its output at a node depends on more than {hops} hop{plural} around it: on nodes further away, or "
        "on all that are there (pooling, a norm over nodes, out-degrees, the largest degree)",
    )


def _difference(
    trials: list[_Trial], outputs: list[Tensor], tiny: _TinyGraph, all_seeds: list[Tensor], num_hops: int
) -> str | None:
    """Compare the outputs at seeds on their neighbourhoods with `outputs`, those on the whole tiny graph.

    None if they are equal. "" if the numbers differ. A clause that says why if the module fails on a
    neighbourhood.
    """
    for seeds in all_seeds:
        part = neighborhood(tiny.graph, seeds, num_hops)
        assert part is not None
        for trial, expected in zip(trials, outputs, strict=True):
            try:
                part_outputs = trial.run(tiny.x[part.src_ids], part)
            except Exception as error:
                return f"it fails on a part of a graph with {part.num_edges} edges ({_text(error)})"
            if not _are_equal(part_outputs[: seeds.numel()], expected[seeds]):
                return ""
    return None


class _Trial:
    """A copy of a module with weights drawn from a seed, and its outputs on the whole tiny graph."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None, seed: int, tiny: _TinyGraph) -> None:
        self._module = module
        self._dtype = dtype
        self._seed = seed
        self._draws = True
        self.batch_model = self.copy_module(tiny)
        self.outputs = self.run(tiny.x, tiny.block)
        if not bool(self.outputs.isfinite().all()):
            # The drawn weights lead to inf or nan. Try the module's own.
            self._draws = False
            self.batch_model = self.copy_module(tiny)
            self.outputs = self.run(tiny.x, tiny.block)

    def run(self, x: Tensor, block: Block) -> Tensor:
        """Outputs at all nodes of a square block."""
        return self.batch_model.on_block(x, block)

    def remembers(self, tiny: _TinyGraph) -> bool:
        """Whether the output on a neighbourhood differs from that of a new copy, which has seen no graph."""
        part = neighborhood(tiny.graph, tiny.seeds[0], 2)  # any graph but the whole tiny one would do
        assert part is not None
        x = tiny.x[part.src_ids]
        expected = self.copy_module(tiny).on_block(x, part)
        try:
            return not _are_equal(self.run(x, part), expected)
        except Exception:
            return True

    def copy_module(self, tiny: _TinyGraph) -> Whole:
        """A new copy of the module.

        Copies of one trial have the same weights: the generator is seeded for each.
        """
        module = copy_module(self._module).cpu().eval()
        batch_model = Whole(module if self._dtype is None else module.to(self._dtype))
        if any(map(is_lazy, batch_model.parameters())):
            torch.manual_seed(0)
            batch_model.on_block(tiny.x, tiny.block)
        generator = torch.Generator().manual_seed(self._seed)
        for p in batch_model.parameters():
            if self._draws and p.is_floating_point():
                noise = torch.randn(p.shape, generator=generator).to(p.dtype)
                # Matrices are drawn again. Vectors and numbers, such as a temperature or a power, stay near
                # their values.
                if p.dim() > 1:
                    p.copy_(noise / p.size(-1) ** 0.5)
                else:
                    p.add_(0.1 * noise)
        return batch_model


def _is_informative(out: Tensor) -> bool:
    """Whether outputs are finite and rows differ.

    Otherwise a wrong output could not be told from a right one.
    """
    return bool(out.isfinite().all()) and bool((out != out[:1]).any())


def _are_equal(outputs: Tensor, expected: Tensor) -> bool:
    """Whether two outputs have the same shape and are equal up to the tolerance of their precision."""
    tolerance = TOLERANCE if expected.dtype == torch.float64 else TOLERANCE_SINGLE
    if outputs.shape != expected.shape:
        return False
    expected = expected.double()
    difference = (outputs.double() - expected).abs()
    return bool((difference <= tolerance * expected.abs().max()).all())


def _text(error: Exception | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# ---- the tiny graph


class _TinyGraph:
    """The graph of a trial: levels of `WIDTH` nodes at distances 0 .. hops + 3 from the seeds, and four others.

        level hops + 3  -->  ...  -->  level 1  -->  level 0, with most of the seeds

    Node (level, i) is the i-th of its level. Edges lead from level + 1 to level, within a level, and from
    level back to level + 1. Two observers receive edges from the levels. Both lead into the hub, and the
    first leads into the second. The hub is in the last level, and every node but two leads into it. These
    two, `alone` and `last`, have no edges.
    """

    def __init__(self, hops: int, x: Readable, edge: Mapping[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        num_levels = hops + 4
        num_nodes = self.num_nodes(hops)
        # Nodes are numbered at random. Only the last stays last: code that counts nodes by the largest id
        # in an edge misses it.
        order = [*torch.randperm(num_nodes - 1, generator=generator).tolist(), num_nodes - 1]

        def node(level: int, i: int) -> int:
            return order[level * WIDTH + i % WIDTH]

        first_observer, second_observer, alone, last = (order[num_levels * WIDTH + i] for i in range(4))
        edges: list[tuple[int, int]] = []  # (source, destination)
        for level in range(num_levels - 1):
            # One to three sources in the next level, so that degrees differ. The last node of a level has none.
            for i in range(WIDTH - 1):
                num_sources = 1 + (level + i) % 3
                for j in range(num_sources):
                    edges.append((node(level + 1, (i + j) % (WIDTH - 1)), node(level, i)))
            edges.append((node(level + 1, WIDTH - 1), node(level, 0)))
            edges.append((node(level, 1), node(level, 1)))  # a loop
            edges.append((node(level, 0), node(level, 2)))
            edges.append(edges[-1])  # a duplicate
            edges.append((node(level, 0), node(level + 1, 0)))  # back to the next level
            edges.append((node(level, level), first_observer))  # i varies with the level
        edges += [(node(0, 0), second_observer), (node(0, 1), second_observer), (first_observer, second_observer)]
        hub = node(num_levels - 1, 1)
        edges += [(other, hub) for other in range(num_nodes - 1) if other != alone]
        src, dst = torch.tensor(edges).T
        arrays = {name: _rows_like(array, len(edges), generator) for name, array in edge.items()}
        self.graph = _graph_of(src, dst, num_nodes, arrays)
        self.block = _whole(self.graph)
        self.x = _rows_like(x, num_nodes, generator)
        self.seeds = [
            torch.tensor([node(0, 0), node(0, WIDTH - 1), alone, node(0, 1)]),
            torch.tensor([node(1, 0), node(0, 2), last]),  # of two levels
            torch.tensor([node(0, 1)]),
            torch.tensor([node(0, WIDTH - 1)]),  # without in-edges
        ]
        """Node ids of each batch of seeds."""

    @staticmethod
    def num_nodes(hops: int) -> int:
        """Nodes of the graph for a number of hops, known without building it."""
        return (hops + 4) * WIDTH + 4

    def renumber(self) -> tuple[Tensor, Block, Tensor]:
        """(features, block, the new number of each node) of this graph with other node numbers.

        The last node keeps its number, so that only the order of the nodes differs.
        """
        num_nodes = self.graph.num_nodes
        numbers = torch.cat([torch.arange(num_nodes - 1).roll(num_nodes // 2), torch.tensor([num_nodes - 1])])
        src, dst = numbers[self.block.edge_index]
        edge = {name: rows[dst.argsort(stable=True)] for name, rows in self.graph.edge.items()}
        x = torch.empty_like(self.x)
        x[numbers] = self.x
        return x, _whole(_graph_of(src, dst, num_nodes, edge)), numbers


def _graph_of(src: Tensor, dst: Tensor, num_nodes: int, edge: dict[str, Tensor]) -> Graph:
    """The graph of some edges. edge: arrays by name, whose rows are in the order of the destinations already."""
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(dst, minlength=num_nodes).cumsum(0)
    return Graph(indptr, src[dst.argsort(stable=True)].int(), edge)


def _whole(graph: Graph) -> Block:
    part = Part(graph.indptr, graph.indices, graph.edge)
    return Block(torch.arange(graph.num_nodes), graph.num_nodes, (part,), graph)


def _rows_like(rows: Readable | Tensor, count: int, generator: torch.Generator) -> Tensor:
    """[count, ...]: rows from all over a table or an edge array. Real numbers become float64 and get noise.

    Whole numbers, such as types or ids, are left as they are.
    """
    total = rows.shape[0]
    if not total:
        return torch.zeros((count, *rows.shape[1:]), dtype=rows.dtype)
    values = _read(rows, torch.arange(count) * total // count)
    values = values[torch.randperm(count, generator=generator)]
    if not values.is_floating_point():
        return values
    values = values.double()
    if isinstance(rows, Tensor):
        # An edge array. Weights may have to be positive, so they are scaled: a factor keeps the sign.
        return values * (0.5 + torch.rand(values.shape, generator=generator, dtype=torch.float64))
    differ = values.numel() > 1 and float(values.std()) > 0
    spread = values.std() if differ else values.abs().mean().clamp(min=1.0)
    return values + spread * torch.randn(values.shape, generator=generator, dtype=torch.float64)


def _read(rows: Readable | Tensor, ids: Tensor) -> Tensor:
    """Rows of a table or a tensor, copied to the CPU."""
    if isinstance(rows, Tensor):
        return rows[ids.to(rows.device)].cpu()
    storage = rows.storage()
    return rows.read(ids if storage is None else ids.to(storage.device)).cpu()
