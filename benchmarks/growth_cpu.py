"""How cost grows with the seeds and with the graph, what memory training takes, and how soon it starts.

    .venv/bin/python benchmarks/growth_cpu.py [FOLDER FOR THE GRAPHS]

GraphSAGE of `train_cpu.py`. Seeds: 5k, 50k and 500k of one graph, as time per seed. Graph: 500k nodes and ten times
that, as time to sample and gather per unique row read. Memory: bytes in use by malloc, which is where every tensor and
array lives, above those after the import, over what must be there. Start: in processes of their own, after one that
compiles the kernels.
"""

from __future__ import annotations

import ctypes
import itertools
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from peer_worker import BATCH, CLASSES, FANOUTS, Files
from peers import rmat_folder
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.util.progress import progress

ROUNDS = 3


def dataset(files: Files, num_seeds: int) -> hl.Dataset:
    every = torch.cat([files.seeds, torch.arange(files.num_nodes)]).unique()
    seeds = files.seeds[:num_seeds] if num_seeds <= files.seeds.numel() else every[:num_seeds]
    return hl.Dataset(
        name="rmat",
        graph=hl.Graph(files.indptr, files.indices),
        tables={"x": hl.extend.TensorTable(files.x)},
        y=files.y,
        splits={"train": seeds.sort().values},
        num_classes=CLASSES,
    )


def trainer(data: hl.Dataset) -> hl.Trainer:
    convs = [SAGEConv(i, o) for i, o in itertools.pairwise([data.num_features, 64, 64, CLASSES])]
    return hl.Trainer(hl.nn.GNN(convs), data, hl.Sampled(fanouts=FANOUTS, batch_size=BATCH), epochs=1, show=False)


def seeds_grow(files: Files) -> None:
    per_seed = {}
    trainer(dataset(files, 5_000)).fit()  # compiles and warms up
    with progress("seeds", 3, "sizes", brief=True) as bar:
        for count in (5_000, 50_000, 500_000):
            job = trainer(dataset(files, count))
            per_seed[count] = (
                statistics.median(_seconds(job.fit) for _ in range(ROUNDS if count < 500_000 else 1)) / count
            )
            bar.advance()
    for count, seconds in per_seed.items():
        ratio = seconds / per_seed[50_000]
        print(
            f"train {count:>7} seeds {seconds * count:8.2f} s {seconds * 1e6:8.1f} us a seed {ratio:6.2f}", flush=True
        )


def graph_grows(small: Files, large: Files) -> None:
    found: dict[str, list[float]] = {"small": [], "large": []}
    loaders = {
        name: hl.Sampled(fanouts=FANOUTS, batch_size=BATCH).loader(dataset(files, 50_000))
        for name, files in (("small", small), ("large", large))
    }
    for number, (name, loader) in itertools.product(range(ROUNDS + 1), loaders.items()):
        started, rows = time.perf_counter(), 0
        for batch in loader:
            rows += batch.input_ids.numel()
        if number:
            found[name].append((time.perf_counter() - started) / rows)
    per_row = {name: statistics.median(times) for name, times in found.items()}
    for name, seconds in per_row.items():
        ratio = seconds / per_row["small"]
        print(f"sample and gather, {name} graph {seconds * 1e9:8.1f} ns a unique row {ratio:6.2f}", flush=True)


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def in_use() -> int:
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return found.uordblks + found.hblkhd


@contextmanager
def peak_of_malloc():
    peak, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            peak[0] = max(peak[0], in_use())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def memory_of_training(folder: Path) -> None:
    before = in_use()
    data = dataset(Files(folder), 50_000)
    job = trainer(data)
    with peak_of_malloc() as peak:
        job.fit()
    batch = next(iter(job.work.loader.epoch(1)))  # type: ignore[attr-defined]
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        job.job.model(batch)
    model = 4 * sum(p.numel() * p.element_size() for p in job.model.parameters())  # weights, gradients, two moments
    known = {t.untyped_storage().data_ptr() for t in (batch.x.reduced_and_own, *job.model.parameters())}  # type: ignore[union-attr]
    activations = sum(size for place, size in kept.items() if place not in known)
    from hopline.pipeline.stages import resolve_threads

    ahead = resolve_threads(job.method.workers, job.method.look_ahead, job.world.num_cores)[1] + 1
    due = data.num_bytes + ahead * batch.num_bytes + activations + model
    print(
        f"memory: peak {(peak[0] - before) / 2**20:.0f} MiB, of {due / 2**20:.0f} due (dataset "
        f"{data.num_bytes / 2**20:.0f}, {ahead} batches of {batch.num_bytes / 2**20:.0f}, activations "
        f"{activations / 2**20:.0f}, model {model / 2**20:.1f}): {(peak[0] - before) / due:.2f}",
        flush=True,
    )


FIRST_BATCH = """
import time; started = time.perf_counter()
import hopline as hl
imported = time.perf_counter()
data = hl.open("{folder}")
opened = time.perf_counter()
from torch_geometric.nn import SAGEConv
batch = next(iter(hl.Sampled(fanouts=(15, 10, 5)).loader(data)))
from numba.core.dispatcher import Dispatcher
import gc
compiled = sum(sum(d.stats.cache_misses.values()) for d in gc.get_objects() if isinstance(d, Dispatcher))
print(imported - started, opened - imported, time.perf_counter() - opened, compiled)
"""


IMPORT_PYG = """
import time; started = time.perf_counter()
import torch_geometric.nn, torch_geometric.loader
print(time.perf_counter() - started)
"""


def start(folder: Path) -> None:
    saved = folder / "saved"
    if not saved.exists():
        dataset(Files(folder), 50_000).save(saved)
    runs: dict[str, list[list[float]]] = {"hopline": [], "pyg": []}
    scripts = {
        "hopline": FIRST_BATCH.format(folder=saved),
        "pyg": IMPORT_PYG,
    }
    for _, (name, script) in itertools.product(range(ROUNDS + 1), scripts.items()):
        answer = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True
        )
        runs[name].append([float(word) for word in answer.stdout.split()])
    ours, theirs = ([statistics.median(column) for column in zip(*rows[1:], strict=True)] for rows in runs.values())
    print(f"import hopline {ours[0]:.2f} s, torch_geometric {theirs[0]:.2f} s: {ours[0] / theirs[0]:.2f}")
    print(
        f"open {files_edges(folder) / 1e6:.0f}M edges {ours[1] * 1e3:.1f} ms, first batch {ours[2]:.2f} s after, "
        f"kernels compiled in a second run: {ours[3]:.0f}",
        flush=True,
    )


def files_edges(folder: Path) -> int:
    return Files(folder).indices.numel()


def _seconds(work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    home = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir())
    folder, ten_times = home / "hopline-rmat", home / "hopline-rmat-10"
    rmat_folder(folder)
    memory_of_training(folder)
    seeds_grow(Files(folder))
    print("making ten times the graph", flush=True)
    graph_grows(Files(folder), Files(rmat_folder(ten_times, 5_000_000, 120_000_000)))
    start(ten_times)


if __name__ == "__main__":
    main()
