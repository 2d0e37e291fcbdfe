"""Writes `dgl_2_1_0.zip`: partitions of one small graph, which DGL 2.1.0 wrote, and the graph itself.

DGL does not import beside the torch of this project, so it has an environment of its own:

    make .venv-dgl/.installed
    .venv-dgl/bin/python tests/data/formats/write_dgl.py tests/data/formats/dgl_2_1_0.zip

`original.npz` has the graph before the partition. Each folder has what `partition_graph` wrote. `nodes.npy` in it is
the first of the two arrays that `return_mapping=True` returns: the original id of each of DGL's node ids.
"""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import dgl  # type: ignore[import-not-found]
import numpy as np
import torch

NUM_NODES, NUM_EDGES = 30, 120
SETTINGS: dict[str, dict[str, Any]] = {
    "metis": {"num_parts": 2},
    "random": {"num_parts": 3, "part_method": "random", "graph_formats": ["csc"], "num_hops": 2},
    "csr": {"num_parts": 2, "part_method": "random", "graph_formats": ["csr"]},
    "all_formats": {"num_parts": 2, "graph_formats": ["coo", "csr", "csc"], "num_trainers_per_machine": 2},
    "one_part": {"num_parts": 1},
    "typed": {"num_parts": 2, "part_method": "random"},
    "original_ids": {"num_parts": 2},
}


def make_graph() -> tuple[dict[str, np.ndarray], Any]:
    """(the arrays of `original.npz`, the DGL graph): loops, double edges and a node without edges."""
    draw = torch.Generator().manual_seed(0)
    src, dst = torch.randint(0, NUM_NODES - 1, (2, NUM_EDGES), generator=draw)
    graph = dgl.graph((src, dst), num_nodes=NUM_NODES)
    split = torch.arange(NUM_NODES) % 3
    graph.ndata["feat"] = torch.randn(NUM_NODES, 4, generator=draw)
    graph.ndata["label"] = torch.randint(0, 5, (NUM_NODES,), generator=draw)
    graph.ndata["year"] = torch.randint(1990, 2020, (NUM_NODES,), generator=draw, dtype=torch.int16)
    graph.ndata["half"] = torch.randn(NUM_NODES, 2, generator=draw).half()
    graph.ndata["brain"] = torch.randn(NUM_NODES, 2, generator=draw).bfloat16()
    for number, name in enumerate(("train", "val", "test")):
        graph.ndata[f"{name}_mask"] = split == number
    graph.edata["w"] = torch.rand(NUM_EDGES, generator=draw)
    graph.edata["feat"] = torch.randn(NUM_EDGES, 3, generator=draw).double()
    arrays = {"edge_index": torch.stack([src, dst])}
    arrays |= {f"node_{name}": values.float() if name == "brain" else values for name, values in graph.ndata.items()}
    arrays |= {f"edge_{name}": values for name, values in graph.edata.items()}
    return {name: values.numpy() for name, values in arrays.items()}, graph


def write_parts(name: str, settings: dict[str, Any], graph: Any, folder: Path) -> None:
    """One folder of the archive."""
    dgl.seed(0)
    torch.manual_seed(0)
    if name == "typed":
        ring, buys = ([0, 1, 2, 3], [1, 2, 3, 0]), ([0, 1, 2, 3], [0, 1, 2, 3])
        graph = dgl.heterograph({("user", "knows", "user"): ring, ("user", "buys", "item"): buys})
    nodes, edges = dgl.distributed.partition_graph(
        graph, "graph", out_path=str(folder), return_mapping=True, **settings
    )
    if name != "typed":
        np.save(folder / "nodes.npy", nodes.numpy())
    if name == "original_ids":  # earlier versions left them in the graph of a part, whose ids may be int32
        for path in sorted(folder.glob("part*/graph.dgl")):
            (part,), _ = dgl.load_graphs(str(path))
            part.ndata["orig_id"] = nodes[part.ndata[dgl.NID]]
            part.edata["orig_id"] = edges[part.edata[dgl.EID]]
            dgl.save_graphs(str(path), [part.int()])


if __name__ == "__main__":
    arrays, graph = make_graph()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        np.savez(folder / "original.npz", **arrays)  # type: ignore[arg-type]
        for name, settings in SETTINGS.items():
            write_parts(name, settings, graph.clone(), folder / name)
        with zipfile.ZipFile(sys.argv[1], "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    archive.write(path, os.path.relpath(path, folder))
