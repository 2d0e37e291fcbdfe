"""One library in one process: reads the name of a task from standard input, runs it once, answers with a line of JSON.

Started by `loader_cpu.py` and `train_cpu.py` with the Python of an environment that has the library
(see `make bench-peers`). A worker that waits for its turn uses no core, so runs of all libraries are interleaved.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

BATCH, FANOUTS, HIDDEN, CLASSES = 1024, (15, 10, 5), 64, 47

Tasks = dict[str, Callable[[], int]]
"""Task -> what runs one epoch of it; it returns the number of sampled edges, or 0 where that is not counted."""


class Files:
    """The graph that every library gets: in-edges by destination, features, labels, seeds."""

    def __init__(self, folder: Path) -> None:
        self.indptr, self.indices, self.x, self.y, self.seeds = (
            torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("indptr", "indices", "x", "y", "seeds")
        )
        self.num_nodes = self.indptr.numel() - 1
        self.widths = [self.x.size(1), HIDDEN, HIDDEN, CLASSES]


def hopline(files: Files, threads: int) -> Tasks:
    from torch_geometric.nn import SAGEConv

    import hopline as hl
    from hopline.pipeline.stages import Pipeline, Stage
    from hopline.util.host import keep_freed_memory

    keep_freed_memory()
    graph = hl.Graph(files.indptr, files.indices)
    train = {"train": files.seeds.sort().values}
    tables: dict[str, hl.extend.Table] = {"x": hl.extend.TensorTable(files.x)}
    data = hl.Dataset(name="rmat", graph=graph, tables=tables, y=files.y, splits=train, num_classes=CLASSES)
    sampler = hl.extend.NeighborSampler(graph, FANOUTS)
    workers = threads if threads > 1 else 0
    stage = Stage("sample", lambda request: sampler.sample(request[1], request[0]))
    pipeline = Pipeline([stage], workers=workers, look_ahead=2 * threads)
    loader = hl.Sampled(fanouts=FANOUTS, batch_size=BATCH, workers=workers).loader(data)
    model = hl.nn.GNN([SAGEConv(i, o) for i, o in itertools.pairwise(files.widths)])
    trainer = hl.Trainer(model, data, hl.Sampled(fanouts=FANOUTS, batch_size=BATCH), epochs=1, show=False)

    def sample() -> int:
        return sum(b.num_edges for blocks in pipeline.run(enumerate(files.seeds.split(BATCH))) for b in blocks)

    def gather() -> int:
        return sum(block.num_edges for batch in loader for block in batch.blocks)

    return {"sample": sample, "gather": gather, "train": lambda: 0 * trainer.fit().epochs}


def dgl(files: Files, threads: int) -> Tasks:
    import dgl  # type: ignore[import-not-found]
    import dgl.nn  # type: ignore[import-not-found]

    none = torch.empty(0, dtype=torch.int64)
    graph = dgl.graph(("csc", (files.indptr, files.indices.long(), none)), num_nodes=files.num_nodes)
    graph.ndata["x"], graph.ndata["y"] = files.x, files.y

    def loader(**options: Any) -> Any:
        sampler = dgl.dataloading.NeighborSampler(list(reversed(FANOUTS)), **options)
        return dgl.dataloading.DataLoader(graph, files.seeds, sampler, batch_size=BATCH, num_workers=0, device="cpu")

    plain, full = loader(), loader(prefetch_node_feats=["x"], prefetch_labels=["y"])
    convs = torch.nn.ModuleList(dgl.nn.SAGEConv(i, o, "mean") for i, o in itertools.pairwise(files.widths))

    def forward(batch: Any) -> torch.Tensor:
        h = batch[2][0].srcdata["x"]
        for conv, block in zip(convs[:-1], batch[2][:-1], strict=True):
            h = conv(block, h).relu()
        return convs[-1](batch[2][-1], h)

    def gather() -> int:
        read = ((blocks[0].srcdata["x"].size(0), blocks) for _, _, blocks in full)
        return sum(block.num_edges() for _, blocks in read for block in blocks)

    return {
        "sample": lambda: sum(block.num_edges() for _, _, blocks in plain for block in blocks),
        "gather": gather,
        "train": lambda: _train(convs, full, forward, lambda batch: batch[2][-1].dstdata["y"]),
    }


def graphbolt(files: Files, threads: int) -> Tasks:
    import dgl.graphbolt as gb  # type: ignore[import-not-found]
    import dgl.nn  # type: ignore[import-not-found]

    make = getattr(gb, "fused_csc_sampling_graph", None) or gb.from_fused_csc
    graph = make(files.indptr, files.indices.long())
    store = gb.BasicFeatureStore({("node", None, "x"): gb.TorchBasedFeature(files.x)})
    items = gb.ItemSet((files.seeds, files.y[files.seeds]), names=("seed_nodes", "labels"))

    def loader(features: bool) -> Any:
        pipe = gb.ItemSampler(items, batch_size=BATCH).sample_neighbor(graph, [torch.tensor([f]) for f in FANOUTS])
        pipe = pipe.fetch_feature(store, node_feature_keys=["x"]) if features else pipe
        return gb.DataLoader(pipe, num_workers=0)

    plain, full = loader(features=False), loader(features=True)
    convs = torch.nn.ModuleList(dgl.nn.SAGEConv(i, o, "mean") for i, o in itertools.pairwise(files.widths))

    def edges(batches: Iterable[Any]) -> int:
        return sum(g.sampled_csc.indices.numel() for batch in batches for g in batch.sampled_subgraphs)

    def forward(batch: Any) -> torch.Tensor:
        h, blocks = batch.node_features["x"], batch.blocks
        for conv, block in zip(convs[:-1], blocks[:-1], strict=True):
            h = conv(block, h).relu()
        return convs[-1](blocks[-1], h)

    return {
        "sample": lambda: edges(plain),
        "gather": lambda: edges(full),
        "train": lambda: _train(convs, full, forward, lambda batch: batch.labels),
    }


def pyg(files: Files, threads: int) -> Tasks:
    """PyG's NeighborLoader, by pyg-lib where it is importable, else by torch-sparse; layers trimmed as PyG advises."""
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader
    from torch_geometric.nn import SAGEConv
    from torch_geometric.utils import trim_to_layer

    dst = torch.repeat_interleave(torch.arange(files.num_nodes), files.indptr.diff())
    edge_index = torch.stack([files.indices.long(), dst])
    options: dict[str, Any] = {"num_neighbors": list(FANOUTS), "batch_size": BATCH, "is_sorted": True}
    plain = NeighborLoader(Data(edge_index=edge_index, num_nodes=files.num_nodes), input_nodes=files.seeds, **options)
    full = NeighborLoader(Data(x=files.x, y=files.y, edge_index=edge_index), input_nodes=files.seeds, **options)
    convs = torch.nn.ModuleList(SAGEConv(i, o) for i, o in itertools.pairwise(files.widths))

    def forward(batch: Any) -> torch.Tensor:
        h, edges = batch.x, batch.edge_index
        # torch-sparse does not tell how many nodes and edges each hop has: without that nothing can be trimmed.
        trims = getattr(batch, "num_sampled_nodes", None) is not None
        for layer, conv in enumerate(convs):
            if trims:
                h, edges, _ = trim_to_layer(layer, batch.num_sampled_nodes, batch.num_sampled_edges, h, edges)
            h = conv(h, edges)
            h = h.relu() if layer < len(convs) - 1 else h
        return h[: batch.batch_size]

    return {
        "sample": lambda: sum(batch.edge_index.size(1) for batch in plain),
        "gather": lambda: sum(batch.edge_index.size(1) for batch in full),
        "train": lambda: _train(convs, full, forward, lambda batch: batch.y[: batch.batch_size]),
    }


def _train(
    model: torch.nn.Module, batches: Iterable[Any], forward: Callable[[Any], Any], labels: Callable[[Any], Any]
) -> int:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for batch in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(forward(batch), labels(batch)).backward()
        optimizer.step()
    return 0


LIBRARIES = {"hopline": hopline, "dgl": dgl, "graphbolt": graphbolt, "pyg": pyg}


def main() -> None:
    library, folder, threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    tasks = LIBRARIES[library](Files(folder), threads)
    print(json.dumps({"ready": library, "torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        edges = tasks[line.strip()]()
        print(json.dumps({"seconds": time.perf_counter() - started, "edges": edges}), flush=True)


if __name__ == "__main__":
    main()
