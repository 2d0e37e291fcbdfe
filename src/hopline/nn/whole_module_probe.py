"""What a module reads of a graph, found by running a copy of it on a tiny one.

A module with `forward(x, edge_index)` does not tell how far from a node it looks. On a subgraph around some seeds, its
output at the seeds is that of the whole graph if it depends on

    the in-edges within k hops (SAGE, GAT, GIN)                   on the k-hop neighbourhood of the seeds
    and on in-degrees of nodes k hops away (GCN's norm)           on that of k + 1 hops, where these have all in-edges
    on anything else: more hops, all nodes present (pooling,      on no neighbourhood of k + 1 hops
    norms over nodes), out-degrees, the largest degree

The tiny graph has a node further away than any of these, and is ugly: loops, duplicate edges, isolated nodes and nodes
without in-edges, a hub, edges in one direction. Features and edge arrays are rows of the dataset with noise, so that
they have its kinds and ranges. Weights are drawn anew, since some are zero before training. Copies run in float64
where they can, in evaluation mode, on the CPU.
"""

from __future__ import annotations

import copy
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
from hopline.nn.probe import findings
from hopline.nn.whole_module import Whole

WIDTH = 4
"""Nodes at each distance from the seeds of the tiny graph."""
FURTHER = 4
"""How many hops more than asked for are tried, to name a number that would do."""
MAX_BYTES = 256 << 20
"""Parameters, or features of the tiny graph, that are not copied for a trial. A rule of thumb: half a second."""
TOLERANCE = 1e-8
"""Relative to the largest output, in float64."""
TOLERANCE_SINGLE = 1e-4
"""Relative to the largest output, in any other precision."""


@dataclass(frozen=True)
class Reach:
    """What was found about a module and a number of hops."""

    in_batch: bool = False
    """Whether the neighbourhood of that many hops gives the whole graph's outputs: a batch with all neighbours does."""
    part_hops: int | None = None
    """Hops of the neighbourhood that does: that many, or one more, so that nodes at the border have all their in-edges;
    None where neither does."""
    reason: str = ""
    """Why neither does: a clause with the module as "it"."""
    refusal: str = ""
    """Why its outputs mean nothing in batches: a clause with the module as "it"; empty where they do."""
    error: Exception | None = None
    """What it raised on the tiny graph."""


def find_reach(walk: Whole, hops: int, x: Readable, edge: Mapping[str, Tensor]) -> Reach:
    """Whether outputs at a node are those of the whole graph if only `hops` hops around it are there.

    x, edge: the dataset's features and edge arrays. Found once for a module, whatever its weights are later.
    """
    kinds = tuple((name, array.dtype, array.shape[1:]) for name, array in edge.items())
    question = ("reach", hops, x.shape[1:], x.dtype, kinds)
    reach: Reach | None = findings.get(walk.module, question, None)
    if reach is None:
        # What a module draws in evaluation mode must not be what training draws.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            reach = _find(walk.module, hops, x, edge)
        findings.put(walk.module, question, None, reach)
    return reach


def find_hops(walk: Whole, x: Readable, edge: Mapping[str, Tensor]) -> int | None:
    """A number of hops around a node that is enough for a module, if there is one: that of its convs, if it will do."""
    num_convs = sum(isinstance(part, MessagePassing) for part in walk.module.modules())
    tried = (num_convs, *range(FURTHER + 1))
    return next((hops for hops in tried if find_reach(walk, hops, x, edge).part_hops is not None), None)


def initialise(walk: Whole, x: Readable, edge: Mapping[str, Tensor]) -> None:
    """Give convs built with in_channels=-1 their parameters, by a forward pass on the tiny graph."""
    parameters = list(walk.module.parameters())
    if any(map(is_lazy, parameters)):
        tiny, device = _TinyGraph(1, x, edge), parameters[0].device
        with torch.no_grad():
            walk.on_block(tiny.x.to(device), tiny.block.to(device))


def check_batches(walk: Whole, fanouts: Sequence[int], graph: Graph, x: Readable, seeds: Tensor) -> None:
    """Refuse a module whose outputs mean nothing, or cannot be computed, in sampled batches."""
    name = type(walk.module).__name__
    reach = find_reach(walk, len(fanouts), x, graph.edge)
    if reach.refusal:
        raise ValueError(
            f"{name} cannot be trained in batches: {reach.refusal}. Use convs such as SAGEConv, GCNConv or GATConv, "
            "which take any graph"
        )
    if reach.error is None:
        return
    # The tiny graph may lack what the module expects of this one, so a real batch decides.
    blocks = NeighborSampler(graph, tuple(fanouts)).sample(seeds[:WIDTH], 0)
    union = Batch(seeds[:WIDTH], blocks, None, None).union()
    try:
        trial = Whole(copy.deepcopy(walk.module).eval())
        device = next((p.device for p in trial.parameters()), torch.device("cpu"))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            trial.on_block(_read(x, union.src_ids).to(device), union.to(device))
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith(f"{name}.forward"):
            raise
        text = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{name} cannot run on a batch, here of {union.num_src} nodes and {union.num_edges} edges "
            f"({type(error).__name__}{': ' * bool(text)}{text}). Use convs such as SAGEConv, GCNConv or GATConv, which "
            "take any graph"
        ) from error


# ---- the trial


def _find(module: nn.Module, hops: int, x: Readable, edge: Mapping[str, Tensor]) -> Reach:
    num_bytes = sum(p.numel() * p.element_size() for p in module.parameters() if not is_lazy(p))
    if max(num_bytes, _TinyGraph.num_nodes(hops + FURTHER) * 8 * torch.Size(x.shape[1:]).numel()) > MAX_BYTES:
        return Reach(reason="it is too large to be tried out on a small graph")
    error: Exception | None = None
    tiny = _TinyGraph(hops, x, edge)
    for dtype in (torch.float64, None):  # some modules are written for one precision
        try:
            trials = [_Trial(module, dtype, seed, tiny) for seed in (0, 1)]
            return _compare(trials, hops, x, edge, tiny)
        except Exception as raised:
            error = raised
    return Reach(reason=f"it fails on a small graph ({_text(error)})", error=error)


def _compare(trials: list[_Trial], hops: int, x: Readable, edge: Mapping[str, Tensor], tiny: _TinyGraph) -> Reach:
    first, outputs = trials[0], [trial.outputs for trial in trials]
    if not all(map(_tells, outputs)):
        return Reach(reason="its outputs on a small graph are all alike or not finite, which shows nothing")
    if not _are_equal(first.run(tiny.x, tiny.block), outputs[0]):
        return Reach(reason="it draws at random in evaluation mode")
    if first.remembers(tiny):
        return Reach(refusal="it keeps something of the first graph that it is run on")
    x_renumbered, renumbered, numbers = tiny.renumbered()
    if not _are_equal(first.run(x_renumbered, renumbered)[numbers], outputs[0]):
        return Reach(refusal="its output depends on how nodes are numbered, and every batch numbers them anew")
    # The last seed alone has no edges: a batch that is nothing else is rare, and a chunk of inference may be.
    in_batch = _difference(trials, outputs, tiny, tiny.seeds[:-1], hops) is None
    if in_batch and _difference(trials, outputs, tiny, tiny.seeds[-1:], hops) is None:
        return Reach(True, hops)
    difference = _difference(trials, outputs, tiny, tiny.seeds, hops + 1)
    if difference is None:
        return Reach(in_batch, hops + 1)
    if difference:
        return Reach(in_batch, None, difference)
    for more in range(hops + 1, hops + 1 + FURTHER):
        larger = _TinyGraph(more, x, edge)
        wanted = [trial.run(larger.x, larger.block) for trial in trials]
        if _difference(trials, wanted, larger, larger.seeds, more + 1) is None:
            return Reach(in_batch, None, f"its output at a node depends on nodes up to {more} hops away")
    return Reach(
        in_batch,
        None,
        f"its output at a node depends on more than {hops} hop{'s' * (hops != 1)} around it: on nodes further away, or "
        "on all that are there (pooling, a norm over nodes, out-degrees, the largest degree)",
    )


def _difference(
    trials: list[_Trial], outputs: list[Tensor], tiny: _TinyGraph, all_seeds: list[Tensor], num_hops: int
) -> str | None:
    """None where neighbourhoods give the outputs of the whole graph; else why they do not, empty for other numbers."""
    for seeds in all_seeds:
        part = neighborhood(tiny.graph, seeds, num_hops)
        assert part is not None
        for trial, expected in zip(trials, outputs, strict=True):
            try:
                found = trial.run(tiny.x[part.src_ids], part)
            except Exception as error:
                return f"it fails on a part of a graph with {part.num_edges} edges ({_text(error)})"
            if not _are_equal(found[: seeds.numel()], expected[seeds]):
                return ""
    return None


class _Trial:
    """A copy of a module with weights of its own, which was run on the whole tiny graph first."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None, seed: int, tiny: _TinyGraph) -> None:
        self._module, self._dtype, self._seed = module, dtype, seed
        self._draws = True
        self._walk = self._copied(tiny)
        self.outputs = self.run(tiny.x, tiny.block)
        if not bool(self.outputs.isfinite().all()):  # with the module's own weights, then
            self._draws = False
            self._walk = self._copied(tiny)
            self.outputs = self.run(tiny.x, tiny.block)

    def run(self, x: Tensor, block: Block) -> Tensor:
        return self._walk.on_block(x, block)

    def remembers(self, tiny: _TinyGraph) -> bool:
        """Whether a copy that has seen no graph before gives something else."""
        part = neighborhood(tiny.graph, tiny.seeds[0], 2)
        assert part is not None
        x = tiny.x[part.src_ids]
        expected = self._copied(tiny).on_block(x, part)
        try:
            return not _are_equal(self.run(x, part), expected)
        except Exception:
            return True

    def _copied(self, tiny: _TinyGraph) -> Whole:
        module = copy.deepcopy(self._module).cpu().eval()
        walk = Whole(module if self._dtype is None else module.to(self._dtype))
        if any(map(is_lazy, walk.parameters())):
            torch.manual_seed(0)
            walk.on_block(tiny.x, tiny.block)
        generator = torch.Generator().manual_seed(self._seed)
        for p in walk.parameters():
            if self._draws and p.is_floating_point():
                noise = torch.randn(p.shape, generator=generator).to(p.dtype)
                # Matrices are drawn anew; a number such as a temperature or a power stays near its own.
                p.copy_(noise / p.size(-1) ** 0.5) if p.dim() > 1 else p.add_(0.1 * noise)
        return walk


def _tells(out: Tensor) -> bool:
    """Whether rows differ, so that a wrong one could be told from a right one."""
    return bool(out.isfinite().all()) and bool((out != out[:1]).any())


def _are_equal(found: Tensor, expected: Tensor) -> bool:
    tolerance = TOLERANCE if expected.dtype == torch.float64 else TOLERANCE_SINGLE
    if found.shape != expected.shape:
        return False
    found, expected = found.double(), expected.double()
    return bool(((found - expected).abs() <= tolerance * expected.abs().max()).all())


def _text(error: Exception | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# ---- the tiny graph


class _TinyGraph:
    """Nodes at distances 0 .. hops + 3 from the seeds, and some that no seed can be reached from.

    Node (l, i) is the i-th at distance l. Edges lead from l + 1 to l, within l, and back from l to l + 1.
    """

    def __init__(self, hops: int, x: Readable, edge: Mapping[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        num_levels = hops + 4
        num_nodes = self.num_nodes(hops)
        # The last node is one without edges: convs that count nodes by the largest id in an edge miss it.
        order = [*torch.randperm(num_nodes - 1, generator=generator).tolist(), num_nodes - 1]

        def node(level: int, i: int) -> int:
            return order[level * WIDTH + i % WIDTH]

        first_observer, second_observer, alone, last = (order[num_levels * WIDTH + i] for i in range(4))
        edges: list[tuple[int, int]] = []
        for level in range(num_levels - 1):
            for i in range(WIDTH - 1):  # the last node of a level has no in-edges
                edges += [(node(level + 1, (i + j) % (WIDTH - 1)), node(level, i)) for j in range(1 + (level + i) % 3)]
            edges.append((node(level + 1, WIDTH - 1), node(level, 0)))
            edges.append((node(level, 1), node(level, 1)))
            edges.append((node(level, 0), node(level, 2)))
            edges.append(edges[-1])
            edges.append((node(level, 0), node(level + 1, 0)))
            edges.append((node(level, level), first_observer))
        edges += [(node(0, 0), second_observer), (node(0, 1), second_observer), (first_observer, second_observer)]
        hub = node(num_levels - 1, 1)
        edges += [(other, hub) for other in range(num_nodes - 1) if other != alone]
        src, dst = torch.tensor(edges).T
        by_dst = dst.argsort(stable=True)
        indptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
        indptr[1:] = torch.bincount(dst, minlength=num_nodes).cumsum(0)
        arrays = {name: _rows_like(array, len(edges), generator) for name, array in edge.items()}
        self.graph = Graph(indptr, src[by_dst].int(), arrays)
        self.block = _whole(self.graph)
        self.x = _rows_like(x, num_nodes, generator)
        self.seeds = [
            torch.tensor([node(0, 0), node(0, WIDTH - 1), alone, node(0, 1)]),
            torch.tensor([node(1, 0), node(0, 2), last]),
            torch.tensor([node(0, 1)]),
            torch.tensor([node(0, WIDTH - 1)]),
        ]

    @staticmethod
    def num_nodes(hops: int) -> int:
        return (hops + 4) * WIDTH + 4

    def renumbered(self) -> tuple[Tensor, Block, Tensor]:
        """(features, graph, the new number of each node): the same graph, its last node staying the last."""
        num_nodes = self.graph.num_nodes
        numbers = torch.cat([torch.arange(num_nodes - 1).roll(num_nodes // 2), torch.tensor([num_nodes - 1])])
        src, dst = numbers[self.block.edge_index]
        by_dst = dst.argsort(stable=True)
        indptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
        indptr[1:] = torch.bincount(dst, minlength=num_nodes).cumsum(0)
        edge = {name: rows[by_dst] for name, rows in self.graph.edge.items()}
        x = torch.empty_like(self.x)
        x[numbers] = self.x
        return x, _whole(Graph(indptr, src[by_dst].int(), edge)), numbers


def _whole(graph: Graph) -> Block:
    part = Part(graph.indptr, graph.indices, graph.edge)
    return Block(torch.arange(graph.num_nodes), graph.num_nodes, (part,), graph)


def _rows_like(rows: Readable | Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Rows from all over a table or an edge array, with noise where they are not whole numbers: float64 or whole."""
    total = rows.shape[0]
    if not total:
        return torch.zeros((count, *rows.shape[1:]), dtype=rows.dtype)
    found = _read(rows, torch.arange(count) * total // count)
    found = found[torch.randperm(count, generator=generator)]
    if not found.is_floating_point():
        return found
    found = found.double()
    spread = found.std() if found.numel() > 1 and float(found.std()) > 0 else found.abs().mean().clamp(min=1.0)
    if isinstance(rows, Tensor):  # weights may not be negative: they are scaled
        return found * (0.5 + torch.rand(found.shape, generator=generator, dtype=torch.float64))
    return found + spread * torch.randn(found.shape, generator=generator, dtype=torch.float64)


def _read(rows: Readable | Tensor, ids: Tensor) -> Tensor:
    """Rows on the CPU, wherever they are stored."""
    if isinstance(rows, Tensor):
        return rows[ids.to(rows.device)].cpu()
    storage = rows.storage()
    return rows.read(ids if storage is None else ids.to(storage.device)).cpu()
