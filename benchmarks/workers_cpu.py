"""What `workers="auto"` and `look_ahead="auto"` cost against the best fixed setting, on so many cores.

    .venv/bin/python benchmarks/workers_cpu.py [FOLDER FOR THE GRAPH] [CORES ...]

For each number of cores (1, 2, and all by default) a process that may use no more: epochs of 10k seeds, batch 1024,
fan-outs (15, 10, 5), of GraphSAGE (whose long ops are ours) and of GAT (whose are torch's), for every fixed setting
and for auto, interleaved, median of 5. The last column is the best fixed setting's time over auto's: 1 is as good.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SEEDS, ROUNDS = 10_240, 5


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "hopline-rmat")
    everything = len(os.sched_getaffinity(0))
    wanted = [int(n) for n in sys.argv[2:]] or sorted({1, min(2, everything), everything})
    from peers import rmat_folder

    rmat_folder(folder)
    print(f"{'cores':>5} {'model':<6} {'auto s':>8} {'best s':>8} {'best fixed setting':<28} {'ratio':>6}", flush=True)
    for cores in wanted:
        subprocess.run([sys.executable, __file__, str(folder), str(cores), "--here"], check=True)


def measure(folder: Path, cores: int) -> None:
    """In a process that runs on the first `cores` cores only: set before torch counts them."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    from peer_worker import Files

    import hopline as hl

    files = Files(folder)
    data = hl.Dataset(
        name="rmat",
        graph=hl.Graph(files.indptr, files.indices),
        tables={"x": hl.extend.TensorTable(files.x)},
        y=files.y,
        splits={"train": files.seeds[:SEEDS].sort().values},
        num_classes=files.widths[-1],
    )
    counts = sorted({0, 1, 2, min(4, cores), min(8, cores), cores})
    fixed = [(w, a) for w in counts for a in ({2 * w, 4 * w} if w else {1})]
    for name in ("SAGE", "GAT"):
        trainers = {setting: _trainer(name, files.widths, data, *setting) for setting in [*fixed, ("auto", "auto")]}
        seconds: dict[object, list[float]] = {setting: [] for setting in trainers}
        for number, (setting, trainer) in itertools.product(range(ROUNDS + 1), trainers.items()):
            started = time.perf_counter()
            trainer.fit()
            if number:
                seconds[setting].append(time.perf_counter() - started)
        median = {setting: statistics.median(times) for setting, times in seconds.items()}
        auto = median.pop(("auto", "auto"))
        best = min(median, key=lambda setting: median[setting])
        words = "workers={}, look_ahead={}".format(*best)  # type: ignore[misc]
        print(
            f"{cores:5} {name:<6} {auto:8.2f} {median[best]:8.2f} {words:<28} {median[best] / auto:6.2f}"
            f"   all: {' '.join(f'{w}/{a}:{s:.2f}' for (w, a), s in median.items())}",  # type: ignore[misc]
            flush=True,
        )


def _trainer(name: str, widths: list[int], data: object, workers: object, look_ahead: object):
    import torch
    from torch_geometric.nn import GATConv, SAGEConv

    import hopline as hl

    torch.manual_seed(0)
    conv = {"SAGE": SAGEConv, "GAT": GATConv}[name]
    model = hl.nn.GNN([conv(i, o) for i, o in itertools.pairwise(widths)])
    method = hl.Sampled(fanouts=(15, 10, 5), batch_size=1024, workers=workers, look_ahead=look_ahead)  # type: ignore[arg-type]
    return hl.Trainer(model, data, method, epochs=1, show=False)  # type: ignore[arg-type]


if __name__ == "__main__":
    if sys.argv[-1] == "--here":
        measure(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
