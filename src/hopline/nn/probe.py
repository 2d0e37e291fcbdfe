"""A tiny graph on which convs and models are tried before they run on blocks, and helpers for such trials.

PyG modules do not declare what they read of a graph. So `conv_adapter` and `row_wise` run a copy of a
module twice: as plain PyG on the whole tiny graph, and on blocks of it. Only if both give the same outputs
is the module used on blocks.

The graph has the cases in which convs tend to go wrong: uneven degrees and a hub, nodes without in-edges and
one without any edge, self-loops, two self-loops of one node, and duplicate edges. Copies run in float64, so
that outputs that should be equal differ by little. Findings are stored in `findings`, by module.

Two problems of copying a module are solved here too: convs with cached=True must not reuse the edges of an
earlier graph (`without_caches`), and torch does not copy tensors that have a gradient history
(`fresh_copy`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hopline import ops
from hopline.core.batch import Block, Part
from hopline.core.graph import Graph
from hopline.core.tree_layout import Tree, TreeBlock
from hopline.ops.tree_slots import Slots

Module = TypeVar("Module", bound=nn.Module)

SOURCES = (
    (0, 7, 7),  # a loop and a double edge
    (5,),
    (2, 6),
    (3, 1, 3, 9, 7, 0, 2, 5, 5, 6, 8),  # the hub, with two loops
    (),
    (1, 6, 0),
    (3, 8),
    (6, 5, 9, 0),
    (8,),  # nothing but a self-loop
    (0, 4, 10, 2),
    (9, 2, 1, 3),
    (),  # isolated, and the last one: code that counts nodes by the largest id in an edge misses it
)
"""SOURCES[i]: the sources of node i's in-edges. 12 nodes and 35 edges: an odd number, so that code that
takes edges by twos or fours fails."""
BATCH_WITH_HUB = (3, 0, 5)
"""Destinations of a block, the hub among them."""
BATCHES_OF_FEW_EDGES = ((8, 4, 11), (4, 11))
"""Destinations of a block whose last nodes have no in-edges, and of a block without edges."""
BATCHES = (BATCH_WITH_HUB, (1, 2), *BATCHES_OF_FEW_EDGES, tuple(reversed(range(len(SOURCES)))))
"""Destinations of all blocks of a trial. Those not named above: only nodes of low degree; every node, in reverse
order. A node's output must not depend on the others in its block."""

PLAIN_TYPES = frozenset((bool, int, float, str, type(None)))
"""Types of the attributes of a module that are settings, on which findings about it may depend."""


class Findings:
    """Answers that trials have found, by module and question. `findings` is the only object of this class.

    It is global to the process. It cannot be a field of a model, since convs are also called without their
    model, and hopline sets no attributes on a user's convs. A module's answers are dropped with the module
    (weak keys).

    Any thread may call, without a lock: two threads that ask at the same time both try, and store equal
    answers.
    """

    def __init__(self) -> None:
        self._answers: WeakKeyDictionary[nn.Module, dict[Hashable, tuple[object, Any]]] = WeakKeyDictionary()

    def get(self, module: nn.Module, question: Hashable, settings: object) -> Any:
        """The stored answer to a question about a module; None if there is none for these settings."""
        stored_settings, answer = self._answers.get(module, {}).get(question, (None, None))
        return answer if stored_settings == settings else None

    def put(self, module: nn.Module, question: Hashable, settings: object, answer: Any) -> None:
        """Store an answer. It replaces an earlier one, for other settings.

        settings: everything that the answer depends on and that may change while the module lives.
        """
        self._answers.setdefault(module, {})[question] = (settings, answer)


findings = Findings()
"""The findings of this process."""


def probe_graph(edge: Mapping[str, Tensor]) -> Graph:
    """The tiny graph, with edge arrays of the same names and kinds as those of the dataset's graph.

    Real numbers are random in float64, some of them negative if some in the dataset are. Integer weights
    are random. Other whole numbers, such as edge types, are values of the dataset, since only these are
    sure to be valid.

    edge: the dataset's edge arrays, [num_edges, ...] each.
    """
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor([len(sources) for sources in SOURCES])
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    indices = torch.tensor([source for sources in SOURCES for source in sources])
    arrays = {}
    for name, rows in edge.items():
        shape = (indices.numel(), *rows.shape[1:])
        if rows.is_floating_point():
            arrays[name] = 0.1 + 0.8 * torch.rand(shape, generator=generator, dtype=torch.float64)
            if bool((rows < 0).any()):
                arrays[name][::3] *= -1
        elif name == "weight":
            arrays[name] = torch.randint(1, 4, shape, generator=generator).to(rows.dtype)
        elif rows.size(0):
            arrays[name] = rows[torch.linspace(0, rows.size(0) - 1, shape[0], device=rows.device).long()].cpu()
        else:
            arrays[name] = torch.zeros(shape, dtype=rows.dtype)
    return Graph(indptr, indices, arrays)


def random_rows(*shape: int) -> Tensor:
    """Normally distributed float64 rows on the host. Calls with the same shape return the same numbers."""
    return _draw_rows(shape).clone()


@functools.lru_cache(maxsize=16)
def _draw_rows(shape: tuple[int, ...]) -> Tensor:
    """The numbers of `random_rows`.

    Cached, because a model's layers and their copies ask for the same shapes.
    """
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def is_close(outputs: Tensor, expected: Tensor) -> bool:
    """Whether two float64 outputs of a trial are equal up to rounding."""
    return torch.allclose(outputs, expected, rtol=1e-8, atol=1e-10, equal_nan=True)


def block_of(graph: Graph, nodes: Sequence[int]) -> Block:
    """A block with all in-edges of some nodes. The nodes are its destinations, and so its first sources."""
    indptr, positions = ops.row_entries(graph.indptr, torch.tensor(nodes))
    sources = graph.indices[positions].tolist()
    src_ids = list(dict.fromkeys([*nodes, *sources]))
    src_idx = torch.tensor([src_ids.index(source) for source in sources], dtype=torch.int32)
    part = Part(indptr, src_idx, {name: rows[positions] for name, rows in graph.edge.items()})
    return Block(torch.tensor(src_ids), len(nodes), (part,), graph)


def sources_of(block: Block) -> tuple[Tensor, Part]:
    """(ids of the nodes that edges lead from, the edges): a block's edges as between two tables of rows.

    Without edges there is no source at all, and there may be fewer sources than destinations.
    """
    positions, src_idx = block.part.src_idx.unique(return_inverse=True)
    return block.src_ids[positions], replace(block.part, src_idx=src_idx.int())


def reverse_edges_of_nodes(graph: Graph) -> Graph:
    """A copy of a graph in which the in-edges of each node are in reverse order."""
    # Edge e of a node with the range [start, stop) goes to start + stop - 1 - e.
    start_plus_last = torch.repeat_interleave(graph.indptr[1:] + graph.indptr[:-1] - 1, graph.in_degrees())
    order = start_plus_last - torch.arange(graph.num_edges)
    edge = {name: rows[order] for name, rows in graph.edge.items()}
    return graph.with_arrays(graph.indptr, graph.indices[order], edge)


def tree_of(graph: Graph, nodes: Sequence[int]) -> TreeBlock:
    """A block with all in-edges of some nodes in the tree layout: every edge has a source slot of its own.

    Every node has as many child slots as the largest in-degree of the graph. Slots without an edge are empty
    (-1).
    """
    fanout = int(graph.in_degrees().max())
    slots = torch.full((len(nodes), fanout), -1)
    edge_ids = torch.zeros_like(slots)
    counts = torch.zeros(len(nodes), dtype=torch.int32)
    for i, node in enumerate(nodes):
        start = int(graph.indptr[node])
        stop = int(graph.indptr[node + 1])
        degree = stop - start
        counts[i] = degree
        slots[i, :degree] = graph.indices[start:stop]
        edge_ids[i, :degree] = torch.arange(start, stop)
    tree_nodes = torch.cat([torch.tensor(nodes), slots.view(-1)])
    tree = Tree(Slots(len(nodes), (fanout,)), tree_nodes, counts, edge_ids.view(-1))
    return TreeBlock(tree=tree, hop=0, graph=graph)


def trial_of(module: Module) -> Module:
    """A copy of a module for a trial: in float64, on the host, in evaluation mode, with noisy weights.

    Some weights are zero before training, and some are not finite in a run that diverges. Both would hide
    what the module computes, so noise is added, and weights that are not finite become noise.
    """
    trial = fresh_copy(module).cpu().double().eval()
    with torch.no_grad():
        for weight in trial.parameters():
            if not is_lazy(weight):
                weight.copy_(weight.nan_to_num(0, 0, 0) + 0.1 * random_rows(*weight.shape))
    return trial


def fresh_copy(module: Module) -> Module:
    """A copy of a module without the caches of a graph that it has run on (cached=True).

    Raises:
        ValueError: The module holds tensors of an earlier call that torch cannot copy.
    """
    try:
        trial = copy_module(module)
    except RuntimeError as error:  # torch copies no tensor that is the result of a computation with gradients
        raise ValueError(
            f"{type(module).__name__} keeps tensors of an earlier call: build it anew ({error})"
        ) from error
    for m in trial.modules():
        vars(m).update(dict.fromkeys(_caches(m)))
    return trial


def copy_module(module: Module) -> Module:
    """A deep copy of a module, also if it stores tensors that it has computed with gradients.

    The weight that `weight_norm` computes is such a tensor. Torch refuses to copy it, so the copy gets its value
    without the gradient.
    """
    computed = {
        id(value): value.detach().clone()
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    return copy.deepcopy(module, computed)  # takes what is listed by its id as copied already


def options_of(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Attributes of a module that are numbers, strings, booleans or None, as (name, value).

    Findings about the module may depend on them, so a change of one asks for a new trial. `training` is
    left out: trials choose the mode themselves.
    """
    return tuple((k, v) for k, v in vars(module).items() if type(v) in PLAIN_TYPES and k != "training")


def has_cache(module: nn.Module) -> bool:
    """Whether a module contains a conv with cached=True, which stores results for its first graph."""
    return any(vars(m).get("cached") is True for m in module.modules())


@contextmanager
def without_caches(module: nn.Module) -> Iterator[None]:
    """Make convs with cached=True compute everything again while the context lasts.

    Every block has other edges, so a cache of one is wrong for the next. Afterwards the convs have their caches
    back.
    """
    # Setting `cached` to False is not enough, since a conv reads a cache that it has. So caches are emptied too.
    old_values: list[tuple[nn.Module, dict[str, Any]]] = []
    for m in module.modules():
        if "cached" in vars(m):
            old_values.append((m, {**_caches(m), "cached": vars(m)["cached"]}))
            vars(m).update(dict.fromkeys(_caches(m)), cached=False)
    try:
        yield
    finally:
        for m, values in old_values:
            vars(m).update(values)


def _caches(module: nn.Module) -> dict[str, Any]:
    """The caches of a PyG conv, by the name of the attribute: PyG's names all begin with `_cached`."""
    return {name: value for name, value in vars(module).items() if name.startswith("_cached")}
