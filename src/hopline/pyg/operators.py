"""PyG's two sampling operators, with pyg-lib's arguments and results, on hopline's kernels.

    neighbor_sample           one node type      \\
                                                   -> ops.sample_hops -> tuples or dicts as PyG expects them
    hetero_neighbor_sample    dicts by type      /

A call takes one number from torch's generator as its key. So `torch.manual_seed` reproduces it, and the workers of a
DataLoader, which torch seeds one by one, draw differently. No tensor of the graph is copied. PyG's words are used for
errors that pyg-lib raises too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hopline import ops
from hopline.core.schema import relation_key
from hopline.ops import Relation, Rows

OptionalDict = Mapping[str, Tensor] | None
EdgeType = tuple[str, str, str]


def neighbor_sample(
    rowptr: Tensor,
    col: Tensor,
    seed: Tensor,
    num_neighbors: Sequence[int],
    node_time: Tensor | None = None,
    edge_time: Tensor | None = None,
    seed_time: Tensor | None = None,
    edge_weight: Tensor | None = None,
    csc: bool = False,
    replace: bool = False,
    directed: bool = True,
    disjoint: bool = False,
    temporal_strategy: str = "uniform",
    return_edge_id: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, list[int], list[int]]:
    """(row, col, node, edge_id, nodes per hop, edges per hop) sampled around seeds, as PyG's NeighborLoader asks.

    rowptr: [num_nodes + 1]; col: [num_edges]; both int32 or int64. seed: [n], whose dtype the results have.
    num_neighbors: Draws per node, one number for each hop; -1 takes all edges.
    node_time: [num_nodes], edge_time: [num_edges], seed_time: [n]; int64. Edges later than the seed are left out.
    node: [num_rows], or with `disjoint` [num_rows, 2], the seed's number and the node.
    """
    _check_options(directed, temporal_strategy)
    _check_times(node_time, edge_time, seed_time, disjoint, "Temporal")
    check_arrays({"rowptr": rowptr, "col": col, "seed": seed}, seed)
    relation = _relation("col", 0, 0, rowptr, col, num_neighbors, new_key(), node_time, edge_time, edge_weight)
    bounds = None
    if relation.times is not None:
        bounds = _bounds("seed", seed, node_time, seed_time)
    (rows,), (edges,) = ops.sample_hops(
        [relation], [(0, seed.long())], 1, replace, disjoint, bounds, temporal_strategy == "last"
    )
    dtype = seed.dtype
    ends = (edges.sources, edges.destinations) if csc else (edges.destinations, edges.sources)
    edge_id = edges.edge_ids.to(dtype) if return_edge_id else None
    row_of, col_of = (end.to(dtype) for end in ends)
    return row_of, col_of, _nodes(rows, disjoint, dtype), edge_id, rows.per_hop, edges.per_hop


def hetero_neighbor_sample(
    node_types: Sequence[str],
    edge_types: Sequence[EdgeType],
    rowptr_dict: Mapping[str, Tensor],
    col_dict: Mapping[str, Tensor],
    seed_dict: Mapping[str, Tensor],
    num_neighbors_dict: Mapping[str, Sequence[int]],
    node_time_dict: OptionalDict = None,
    edge_time_dict: OptionalDict = None,
    seed_time_dict: OptionalDict = None,
    edge_weight_dict: OptionalDict = None,
    csc: bool = False,
    replace: bool = False,
    directed: bool = True,
    disjoint: bool = False,
    temporal_strategy: str = "uniform",
    return_edge_id: bool = True,
) -> tuple[
    dict[str, Tensor],
    dict[str, Tensor],
    dict[str, Tensor],
    dict[str, Tensor] | None,
    dict[str, list[int]],
    dict[str, list[int]],
]:
    """As `neighbor_sample`, in dicts: by node type, or by relation, "source__name__destination".

    With `csc`, the CSC of a relation has its destinations as rows, and sources are reached; without, the other way
    round. Relations that are not in `edge_time_dict`, and node types that are not in `node_time_dict`, have no times.
    """
    _check_options(directed, temporal_strategy)
    _check_times(node_time_dict, edge_time_dict, seed_time_dict, disjoint, "Node temporal", "Edge temporal")
    if not seed_dict:
        raise ValueError("seed_dict is empty: give the seeds of at least one node type")
    first_seeds = next(iter(seed_dict.values()))
    number_of = {name: number for number, name in enumerate(node_types)}
    unknown = sorted({*seed_dict} - {*number_of})
    if unknown:
        raise ValueError(f"seed_dict has {unknown}, and the node types are {list(node_types)}")

    key = new_key()
    names = ["__".join(edge_type) for edge_type in edge_types]
    relations = []
    for name, edge_type in zip(names, edge_types, strict=True):
        for label, given in {"rowptr": rowptr_dict, "col": col_dict, "num_neighbors": num_neighbors_dict}.items():
            if name not in given:
                raise ValueError(f"{label}_dict has no relation {name}, and edge_types names it")
        reached, expanded = (edge_type[0], edge_type[2]) if csc else (edge_type[2], edge_type[0])
        unknown = sorted({reached, expanded} - {*number_of})
        if unknown:
            raise ValueError(f"relation {edge_type} has {unknown}, and the node types are {list(node_types)}")
        arrays = {f"rowptr of {name}": rowptr_dict[name], f"col of {name}": col_dict[name]}
        check_arrays(arrays, first_seeds)
        relations.append(
            _relation(
                name,
                number_of[reached],
                number_of[expanded],
                rowptr_dict[name],
                col_dict[name],
                num_neighbors_dict[name],
                relation_key(key, edge_type),
                (node_time_dict or {}).get(reached),
                (edge_time_dict or {}).get(name),
                (edge_weight_dict or {}).get(name),
            )
        )
    hops = {len(relation.fanouts) for relation in relations}
    if len(hops) > 1:
        raise ValueError(f"num_neighbors_dict has lists of {sorted(hops)} hops: give every relation the same number")

    check_arrays({f"seeds of {name}": seeds for name, seeds in seed_dict.items()}, first_seeds)
    seeds = [(number_of[name], ids.long()) for name, ids in seed_dict.items()]
    bounds = None
    if any(relation.times is not None for relation in relations):
        of_types = []
        for name, ids in seed_dict.items():
            own = (seed_time_dict or {}).get(name)
            of_types.append(
                _bounds(name, ids, (node_time_dict or {}).get(name) if seed_time_dict is None else None, own)
            )
        bounds = torch.cat(of_types)
    rows, edges = ops.sample_hops(
        relations, seeds, len(node_types), replace, disjoint, bounds, temporal_strategy == "last"
    )

    dtype = first_seeds.dtype
    sources = {name: edge.sources.to(dtype) for name, edge in zip(names, edges, strict=True)}
    destinations = {name: edge.destinations.to(dtype) for name, edge in zip(names, edges, strict=True)}
    edge_ids = {name: edge.edge_ids.to(dtype) for name, edge in zip(names, edges, strict=True)}
    return (
        sources if csc else destinations,
        destinations if csc else sources,
        {name: _nodes(of_type, disjoint, dtype) for name, of_type in zip(node_types, rows, strict=True)},
        edge_ids if return_edge_id else None,
        {name: of_type.per_hop for name, of_type in zip(node_types, rows, strict=True)},
        {name: edge.per_hop for name, edge in zip(names, edges, strict=True)},
    )


def new_key() -> int:
    """A key for one call, from torch's generator."""
    limits = torch.iinfo(torch.int64)
    return int(torch.randint(limits.min, limits.max, ()))


def _nodes(rows: Rows, disjoint: bool, dtype: torch.dtype) -> Tensor:
    """[num_rows], or [num_rows, 2] with the example before the node."""
    return (torch.stack([rows.examples, rows.nodes], dim=1) if disjoint else rows.nodes).to(dtype)


def _relation(
    name: str,
    source: int,
    destination: int,
    rowptr: Tensor,
    col: Tensor,
    num_neighbors: Sequence[int],
    key: int,
    node_time: Tensor | None,
    edge_time: Tensor | None,
    edge_weight: Tensor | None,
) -> Relation:
    """A relation whose times and weights have been checked. Times are int64 and have one entry per node or edge."""
    times = node_time if edge_time is None else edge_time
    if times is not None:
        check_arrays({f"time of {name}": times}, col, dtypes=(torch.int64,))
    for label, of_edges in {"edge_time": edge_time, "edge_weight": edge_weight}.items():
        if of_edges is not None and of_edges.numel() != col.numel():
            raise ValueError(f"{label} of {name} has {of_edges.numel()} numbers for {col.numel()} edges")
    if edge_weight is not None:
        check_arrays({f"edge_weight of {name}": edge_weight}, col, dtypes=(torch.float32, torch.float64))
    fanouts = tuple(num_neighbors)
    return Relation(source, destination, rowptr, col, fanouts, key, times, edge_time is None, edge_weight)


def _bounds(name: str, seeds: Tensor, node_time: Tensor | None, seed_time: Tensor | None) -> Tensor:
    """[n] int64: the time of each seed, its own or that of its node."""
    if seed_time is not None:
        check_arrays({f"seed_time of {name}": seed_time}, seeds, dtypes=(torch.int64,))
        if seed_time.numel() != seeds.numel():
            raise ValueError(f"seed_time of {name} has {seed_time.numel()} times for {seeds.numel()} seeds")
        return seed_time
    if node_time is None:
        raise ValueError(f"Seed time needs to be specified: the seeds of {name} have no time")
    return ops.gather_rows(node_time, seeds)


def _check_options(directed: bool, temporal_strategy: str) -> None:
    if not directed:
        raise RuntimeError("Undirected subgraphs not yet supported")
    if temporal_strategy not in ("uniform", "last"):
        raise RuntimeError(f"No valid temporal strategy found: 'uniform' or 'last', not {temporal_strategy!r}")


def _check_times(
    node_time: object, edge_time: object, seed_time: object, disjoint: bool, by_node: str, by_edge: str | None = None
) -> None:
    """Refuse what pyg-lib refuses, in its words."""
    for given, words in ((node_time, by_node), (edge_time, by_edge or by_node)):
        if given is not None and not disjoint:
            raise RuntimeError(f"{words} sampling needs to create disjoint subgraphs")
    if node_time is not None and edge_time is not None:
        raise RuntimeError("Only one of node-level or edge-level sampling is supported ")
    if edge_time is not None and seed_time is None:
        raise RuntimeError("Seed time needs to be specified")


def check_arrays(
    arrays: Mapping[str, Tensor], like: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.int32, torch.int64)
) -> None:
    """Raise ValueError unless tensors are contiguous vectors of such a dtype, on the device of `like`."""
    for name, array in arrays.items():
        if array.dim() != 1 or array.dtype not in dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(f"{name} must be a 1-D tensor of {names}, not {list(array.shape)} {array.dtype}")
        if not array.is_contiguous():
            raise ValueError(f"Non-contiguous '{name}'")
        if array.device != like.device:
            raise ValueError(f"{name} is on {array.device} and others are on {like.device}: move them to one device")


def compile_kernels() -> None:
    """Call both operators once in each way, so that a process that is forked afterwards compiles nothing.

    For int64 ids, which PyG makes, and float32 weights. Kernels that an earlier process has compiled are on disk.
    The caller's generator is left as it was.
    """
    rowptr = torch.tensor([0, 2, 2])
    col = torch.tensor([0, 1])
    seed = torch.tensor([0])
    graph = (["a"], [("a", "to", "a")], {"a__to__a": rowptr}, {"a__to__a": col}, {"a": seed}, {"a__to__a": [1, -1]})
    with torch.random.fork_rng(devices=[]):
        hetero_neighbor_sample(*graph)
        for replace in (False, True):
            neighbor_sample(rowptr, col, seed, [1], replace=replace)
            neighbor_sample(rowptr, col, seed, [1], edge_weight=torch.ones(2), replace=replace)
        neighbor_sample(rowptr, col, seed, [-1], node_time=col, disjoint=True)
