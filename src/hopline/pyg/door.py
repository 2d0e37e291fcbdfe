"""The door: pyg-lib's operators are defined where no pyg-lib defined them, and PyG is told that they are there.

    import torch_geometric         first: it imports an installed pyg-lib, which defines operators of its own
    torch.ops.pyg.NAME             defined for each name that is missing; a second definition would raise
    torch_geometric.typing.WITH_*  set to what is there, and so are the copies that PyG's modules took

PyG reads its flags when it is imported, and several of its modules hold copies. So both are written, and `reset` puts
back what was there. Nothing of an installed pyg-lib is replaced unless `use` is called.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch_geometric
import torch_geometric.typing
from torch import Tensor
from torch_geometric.sampler import NeighborSampler

from hopline.pyg.matrices import grouped_matmul, index_sort, segment_matmul
from hopline.pyg.operators import compile_kernels, hetero_neighbor_sample, neighbor_sample
from hopline.pyg.walks import metis, random_walk

_OPERATORS: dict[str, tuple[Callable[..., Any], str]] = {
    "neighbor_sample": (
        neighbor_sample,
        "(Tensor rowptr, Tensor col, Tensor seed, int[] num_neighbors, Tensor? node_time = None, "
        "Tensor? edge_time = None, Tensor? seed_time = None, Tensor? edge_weight = None, bool csc = False, "
        "bool replace = False, bool directed = True, bool disjoint = False, str temporal_strategy = 'uniform', "
        "bool return_edge_id = True) -> (Tensor, Tensor, Tensor, Tensor?, int[], int[])",
    ),
    "hetero_neighbor_sample": (
        hetero_neighbor_sample,
        "(str[] node_types, (str, str, str)[] edge_types, Dict(str, Tensor) rowptr_dict, "
        "Dict(str, Tensor) col_dict, Dict(str, Tensor) seed_dict, Dict(str, int[]) num_neighbors_dict, "
        "Dict(str, Tensor)? node_time_dict = None, Dict(str, Tensor)? edge_time_dict = None, "
        "Dict(str, Tensor)? seed_time_dict = None, Dict(str, Tensor)? edge_weight_dict = None, bool csc = False, "
        "bool replace = False, bool directed = True, bool disjoint = False, str temporal_strategy = 'uniform', "
        "bool return_edge_id = True) -> (Dict(str, Tensor), Dict(str, Tensor), Dict(str, Tensor), "
        "Dict(str, Tensor)?, Dict(str, int[]), Dict(str, int[]))",
    ),
    "random_walk": (
        random_walk,
        "(Tensor rowptr, Tensor col, Tensor seed, int walk_length, float p, float q) -> Tensor",
    ),
    "metis": (
        metis,
        "(Tensor rowptr, Tensor col, int num_partitions, Tensor? node_weight = None, Tensor? edge_weight = None, "
        "bool recursive = False) -> Tensor",
    ),
    "index_sort": (index_sort, "(Tensor indices, int? max = None) -> (Tensor, Tensor)"),
    "segment_matmul": (segment_matmul, "(Tensor input, Tensor ptr, Tensor other) -> Tensor"),
    "grouped_matmul": (grouped_matmul, "(Tensor[] input, Tensor[] other) -> Tensor[]"),
}
"""The function and pyg-lib's schema of each operator, by its name."""

_DIFFERENTIABLE = ("segment_matmul", "grouped_matmul")
"""Operators made of torch's own, which autograd follows. The others have no gradient. Those that take dicts reach no
kernel that is registered for the CPU alone, so all are registered for every device."""

_FLAGS = {
    "WITH_PYG_LIB": True,
    "WITH_EDGE_TIME_NEIGHBOR_SAMPLE": True,
    "WITH_WEIGHTED_NEIGHBOR_SAMPLE": True,
    "WITH_METIS": importlib.util.find_spec("pymetis") is not None,
    "WITH_INDEX_SORT": True,
}
"""PyG's flags for what is here. Those of other operators of pyg-lib stay as they are."""
_MATMUL_FLAGS = ("WITH_SEGMM", "WITH_GMM")


def _segment_matmul(inputs: Tensor, ptr: Tensor, other: Tensor, bias: Tensor | None = None) -> Tensor:
    """`pyg_lib.ops.segment_matmul`. bias: [B, M], one row per segment."""
    out = torch.ops.pyg.segment_matmul(inputs, ptr, other)
    return out if bias is None else out + bias.repeat_interleave(ptr.diff().to(bias.device), dim=0)


def _grouped_matmul(inputs: list[Tensor], others: list[Tensor], biases: list[Tensor] | None = None) -> list[Tensor]:
    """`pyg_lib.ops.grouped_matmul`. biases: one for each product."""
    outs = torch.ops.pyg.grouped_matmul(list(inputs), list(others))
    return outs if biases is None else [out + bias for out, bias in zip(outs, biases, strict=True)]


def _index_sort(inputs: Tensor, max_value: int | None = None) -> tuple[Tensor, Tensor]:
    """`pyg_lib.ops.index_sort`."""
    return torch.ops.pyg.index_sort(inputs, max_value)


def _metis(
    rowptr: Tensor,
    col: Tensor,
    num_partitions: int,
    node_weight: Tensor | None = None,
    edge_weight: Tensor | None = None,
    recursive: bool = False,
) -> Tensor:
    """`pyg_lib.partition.metis`."""
    return torch.ops.pyg.metis(rowptr, col, num_partitions, node_weight, edge_weight, recursive)


def _module(name: str, **members: Any) -> ModuleType:
    """A module, since `torch.jit.script` looks up names in modules alone."""
    module = ModuleType(name)
    for member, value in members.items():
        setattr(module, member, value)
    return module


_PACKAGE = _module(
    "hopline.pyg.pyg_lib",
    ops=_module(
        "hopline.pyg.pyg_lib.ops",
        segment_matmul=_segment_matmul,
        grouped_matmul=_grouped_matmul,
        index_sort=_index_sort,
    ),
    partition=_module("hopline.pyg.pyg_lib.partition", metis=_metis),
)
"""What PyG's modules call `pyg_lib`."""


def _reduce(sampler: NeighborSampler, protocol: Any) -> tuple[Any, ...]:
    """How PyG's sampler is pickled: to a worker that is spawned, not forked, its pickle brings this module along."""
    rebuild, arguments, *rest = object.__reduce_ex__(sampler, protocol)
    return _rebuild, (rebuild, arguments), *rest


def _rebuild(rebuild: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return rebuild(*arguments)


class _Door:
    """What this module has changed in torch and in PyG, and how to undo it. There is one in a process."""

    def __init__(self) -> None:
        self._library = torch.library.Library("pyg", "FRAGMENT")
        """Operators are defined for as long as it lives."""
        self._has_pyg_lib = bool(torch_geometric.typing.WITH_PYG_LIB)
        """Whether PyG has imported a pyg-lib that is installed."""
        self._defined: list[str] = []
        self._preferred: list[str] = []
        """Operators of pyg-lib whose attributes of `torch.ops.pyg` are ours."""
        self._before: dict[str, Any] = {}
        """PyG's names as they were, by name."""

    def define(self) -> None:
        """Define the operators that are missing."""
        for name, (function, schema) in _OPERATORS.items():
            if not hasattr(torch.ops.pyg, name):
                self._library.define(name + schema)
                is_differentiable = name in _DIFFERENTIABLE
                key = "CompositeImplicitAutograd" if is_differentiable else "CompositeExplicitAutograd"
                self._library.impl(name, function, key)
                self._defined.append(name)

    def enter(self, preferred: bool, matmul: bool) -> None:
        """Tell PyG what is there. preferred: Use our operators in place of an installed pyg-lib's too."""
        if preferred:
            self._preferred = [name for name in _OPERATORS if name not in self._defined]
            for name in self._preferred:
                setattr(torch.ops.pyg, name, _OPERATORS[name][0])
        if not self._has_pyg_lib:
            setattr(NeighborSampler, "__reduce_ex__", _reduce)  # noqa: B010
            self._write({**_FLAGS, "pyg_lib": _PACKAGE, **dict.fromkeys(_MATMUL_FLAGS, matmul)})

    def leave(self) -> None:
        """Put back what `enter` changed. Defined operators stay, where nobody but PyG looks for them."""
        for name in self._preferred:
            delattr(torch.ops.pyg, name)
        self._preferred = []
        if "__reduce_ex__" in vars(NeighborSampler):
            delattr(NeighborSampler, "__reduce_ex__")
        self._write(self._before)
        self._before = {}

    def _write(self, values: dict[str, Any]) -> None:
        """Set names in `torch_geometric.typing`, and wherever a module of PyG has a copy."""
        for name, value in values.items():
            self._before.setdefault(name, getattr(torch_geometric.typing, name))
            for path, module in list(sys.modules.items()):
                if path.split(".")[0] == "torch_geometric" and name in getattr(module, "__dict__", {}):
                    setattr(module, name, value)

    def owners(self) -> dict[str, str]:
        """Whose each operator is: "hopline" or "pyg-lib"."""
        ours = {*self._defined, *self._preferred}
        return {name: "hopline" if name in ours else "pyg-lib" for name in _OPERATORS}


def use(matmul: bool = False) -> None:
    """Let PyG sample by hopline's operators, also where pyg-lib is installed. `import hopline.pyg` does so without.

    Args:
        matmul: Also give PyG `segment_matmul` and `grouped_matmul`. They make layers with many relations faster.
            But with them PyG's `RGCNConv(aggr="mean")` takes one mean over all relations, not one per relation.

    Example:
        >>> import hopline.pyg
        >>> hopline.pyg.use()
        >>> hopline.pyg.info()["neighbor_sample"]
        'hopline'
    """
    _door.leave()
    _door.enter(preferred=True, matmul=matmul)


def reset() -> None:
    """Undo `use` and what `import hopline.pyg` told PyG: its loaders are as without hopline. `use` brings it back.

    Example:
        >>> import hopline.pyg
        >>> hopline.pyg.reset()
        >>> hopline.pyg.use()
    """
    _door.leave()


def info() -> dict[str, str]:
    """Whose each operator of `torch.ops.pyg` is: "hopline" or "pyg-lib".

    Returns:
        A dict from the operator's name to its owner.

    Example:
        >>> import hopline.pyg
        >>> sorted(hopline.pyg.info())[:2]
        ['grouped_matmul', 'hetero_neighbor_sample']
    """
    return _door.owners()


_door = _Door()
_door.define()
_door.enter(preferred=False, matmul=False)
compile_kernels()  # here, before a DataLoader forks its workers
with torch.random.fork_rng(devices=[]):
    random_walk(torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([0]), 1, 1.0, 1.0)
