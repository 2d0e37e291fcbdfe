"""A tiny graph on which convs and whole models are tried before they are trusted.

It has what goes wrong elsewhere: uneven degrees and a hub, nodes without in-edges and one without any edge, loops,
several of one node, and double edges. What is tried on it is a copy in float64, beside plain PyG on the whole graph.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    (8,),  # nothing but a loop
    (0, 4, 10, 2),
    (9, 2, 1, 3),
    (),  # isolated, and the last one: what goes up to the largest id in an edge leaves it out
)
"""The sources of each node's in-edges; an odd number, so that nothing works by fours."""
BATCHES = ((3, 0, 5), (1, 2), (8, 4, 11), (4, 11), tuple(reversed(range(len(SOURCES)))))
"""Nodes that are computed together. The batches differ in what else is in them: the hub or only nodes of low degree;
last nodes beyond all edges; no edges at all; every node, in another order."""


class Findings:
    """What trials have found out about modules, by module and question. `findings` is the one object of the process.

    This module owns it. It is no field of a model, since convs are called without the model that they are in, and a
    user's convs get no attributes from us. A module's entries go with the module. Threads need no lock: two that ask at
    the same time both try, and store equal answers.
    """

    def __init__(self) -> None:
        self._answers: WeakKeyDictionary[nn.Module, dict[Hashable, tuple[object, Any]]] = WeakKeyDictionary()

    def get(self, module: nn.Module, question: Hashable, settings: object) -> Any:
        """The answer that was found at these settings; None if there is none, or if the settings have changed."""
        known, answer = self._answers.get(module, {}).get(question, (None, None))
        return answer if known == settings else None

    def put(self, module: nn.Module, question: Hashable, settings: object, answer: Any) -> None:
        """Keep an answer, in the place of one for other settings. settings: all that it depends on and may change."""
        self._answers.setdefault(module, {})[question] = (settings, answer)


findings = Findings()


def probe_graph(edge: Mapping[str, Tensor]) -> Graph:
    """The graph, with the same kinds of edge arrays as another; whole numbers, such as types, are some of its own."""
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
    """The same ones for the same shape."""
    return _drawn(shape).clone()


@functools.lru_cache(maxsize=16)
def _drawn(shape: tuple[int, ...]) -> Tensor:
    """Kept, since a model's layers and their copies ask for the same shapes again and again."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def block_of(graph: Graph, nodes: Sequence[int]) -> Block:
    """All in-edges of some nodes, which are its first sources."""
    indptr, positions = ops.row_positions(graph.indptr, torch.tensor(nodes))
    sources = graph.indices[positions].tolist()
    src_ids = list(dict.fromkeys([*nodes, *sources]))
    src_idx = torch.tensor([src_ids.index(source) for source in sources], dtype=torch.int32)
    part = Part(indptr, src_idx, {name: rows[positions] for name, rows in graph.edge.items()})
    return Block(torch.tensor(src_ids), len(nodes), (part,), graph)


def reverse_edges_of_nodes(graph: Graph) -> Graph:
    """The same graph, the in-edges of each node in the reverse of their order."""
    stops = torch.repeat_interleave(graph.indptr[1:] + graph.indptr[:-1] - 1, graph.in_degrees())
    order = stops - torch.arange(graph.num_edges)
    return Graph(graph.indptr, graph.indices[order], {name: rows[order] for name, rows in graph.edge.items()})


def tree_of(graph: Graph, nodes: Sequence[int]) -> TreeBlock:
    """All in-edges of some nodes in the tree layout, in which every edge has a source of its own."""
    fanout = int(graph.in_degrees().max())
    slots = torch.full((len(nodes), fanout), -1)
    edge_ids = torch.zeros_like(slots)
    counts = torch.zeros(len(nodes), dtype=torch.int32)
    for i, node in enumerate(nodes):
        first, stop = int(graph.indptr[node]), int(graph.indptr[node + 1])
        counts[i] = stop - first
        slots[i, : stop - first] = graph.indices[first:stop]
        edge_ids[i, : stop - first] = torch.arange(first, stop)
    tree = Tree(
        Slots(len(nodes), (fanout,)), torch.cat([torch.tensor(nodes), slots.view(-1)]), counts, edge_ids.view(-1)
    )
    return TreeBlock(tree=tree, hop=0, graph=graph)


def trial_of(module: Module) -> Module:
    """A copy to try: in float64, on the host, in evaluation mode.

    Its weights are others: some are zero before training, and not finite in a run that diverges, which would hide what
    the module does.
    """
    trial = fresh_copy(module).cpu().double().eval()
    with torch.no_grad():
        for weight in trial.parameters():
            if not is_lazy(weight):
                weight.copy_(weight.nan_to_num(0, 0, 0) + 0.1 * random_rows(*weight.shape))
    return trial


def fresh_copy(module: Module) -> Module:
    """A copy that remembers no graph it was run on."""
    try:
        with _detach_caches(module):
            trial = copy.deepcopy(module)
    except RuntimeError as error:  # torch does not copy what is in the middle of a computation
        raise ValueError(
            f"{type(module).__name__} keeps tensors of an earlier call: build it anew ({error})"
        ) from error
    for m in trial.modules():
        vars(m).update(_empty_caches(m))
    return trial


@contextmanager
def _detach_caches(module: nn.Module) -> Iterator[None]:
    """Within, tensors that a module computed and kept, such as the weight of `weight_norm`, can be copied."""
    kept = [(m, k, v) for m in module.modules() for k, v in vars(m).items() if isinstance(v, Tensor) and not v.is_leaf]
    for m, name, value in kept:
        vars(m)[name] = value.detach()
    try:
        yield
    finally:
        for m, name, value in kept:
            vars(m)[name] = value


def options_of(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The plain settings of a module, on which what was found out about it may depend."""
    plain = (bool, int, float, str, type(None))
    return tuple((k, v) for k, v in vars(module).items() if type(v) in plain and k != "training")


def has_cache(module: nn.Module) -> bool:
    """Whether a conv keeps what it computes of the first graph that it sees, as PyG's do with cached=True."""
    return any(vars(m).get("cached") is True for m in module.modules())


@contextmanager
def without_caches(module: nn.Module) -> Iterator[None]:
    """Within, convs with cached=True compute everything anew: every block has other edges.

    What they had kept is there again afterwards.
    """
    # A conv reads what it keeps also where `cached` is off.
    before = [(m, {**_caches(m), "cached": vars(m)["cached"]}) for m in module.modules() if "cached" in vars(m)]
    for m, _ in before:
        vars(m).update(_empty_caches(m), cached=False)
    try:
        yield
    finally:
        for m, values in before:
            vars(m).update(values)


def _caches(module: nn.Module) -> dict[str, Any]:
    """What PyG's convs keep, by the name of the attribute."""
    return {name: value for name, value in vars(module).items() if name.startswith("_cached")}


def _empty_caches(module: nn.Module) -> dict[str, Any]:
    return dict.fromkeys(_caches(module))
