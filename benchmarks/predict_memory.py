"""Peak bytes of training steps: predicted, promised and measured.

    python benchmarks/predict_memory.py [--models SAGE,GCN,GAT,GIN] [--probes 8] [--steps 40] [--device cuda]
    python benchmarks/predict_memory.py --split SAGE
    python benchmarks/predict_memory.py --resident sage

Three layers of width 128 on a power-law graph, fan-outs (10, 10, 5). Each predictor sees `--probes` steps of 64 to
1024 seeds, and is then asked about `--steps` steps of 64 to 2048 seeds that it never saw. `mape` is the mean error of
what it expects, `over` how many steps took more than promised, `promised` the mean of promised over measured, `bound`
that of the bound before anything was measured. On a GPU the measure is that of its allocator. With `--resident`, one
step of more than 100 MB in a process of its own: bytes by the meter, and growth of the process's resident memory. With
`--split`, a batch of 2048 seeds split to shares of what it takes: pieces, input rows of all pieces over the batch's,
largest step measured over the limit, and time of splitting and of all steps over that of the batch in one piece,
without the meter.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv

from hopline import ops
from hopline.budget.micro_batches import MicroBatch, groups_to_fit, micro_batch_of
from hopline.budget.predictor import Predictor, costs_of
from hopline.core.batch import Batch
from hopline.core.batch_sizes import Sizes
from hopline.core.row_handles import as_tensor
from hopline.data.dataset import Dataset
from hopline.data.synthetic import planted_partition
from hopline.device.meter import meter_of
from hopline.methods.sampled.settings import Sampled
from hopline.nn import GNN

WIDTH, FANOUTS, SEEDS = 128, (10, 10, 5), 6144


def mlp(a: int, b: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.ReLU(), torch.nn.Linear(b, b))


CONVS: dict[str, Callable[[int, int], torch.nn.Module]] = {
    "SAGE": SAGEConv,
    "GCN": GCNConv,
    "GAT": lambda a, b: GATConv(a, b // 4, heads=4),
    "GIN": lambda a, b: GINConv(mlp(a, b)),
}


def model_of(name: str, data: Dataset, device: str = "cpu") -> GNN:
    torch.manual_seed(0)
    conv = CONVS[name]
    convs = [conv(data.num_features, WIDTH), conv(WIDTH, WIDTH), conv(WIDTH, WIDTH)]
    return GNN(convs, dropout=0.5, head=torch.nn.Linear(WIDTH, data.num_classes)).to(device).train()


def batch_at(data: Dataset, model: GNN, num_seeds: int, key: int) -> Batch:
    """A batch as the trainer gets it."""
    ids = data.splits["train"]
    seeds = ids[ops.permutation(key, ids.numel())[:num_seeds]]
    loader = Sampled(fanouts=FANOUTS, batch_size=num_seeds, workers=0, shuffle=False).loader(
        data, seeds, seed=key, model=model, device=next(model.parameters()).device
    )
    batch, device = next(iter(loader)), next(model.parameters()).device
    if device.type == "cpu" or batch.x is None:
        return batch
    return replace(batch, x=as_tensor(batch.x)).to(device)  # as a GPU that does not read the table gets it


def step(model: GNN, batch: Batch) -> None:
    model.zero_grad(set_to_none=True)
    with ops.own_threads(torch.get_num_threads()):
        ops.cross_entropy(model(batch), batch.labels).backward()


def measured(model: GNN, batch: Batch) -> int:
    model.zero_grad(set_to_none=True)
    with meter_of(next(model.parameters()).device) as meter:
        step(model, batch)
    return meter.peak_bytes


def compare(name: str, data: Dataset, probes: int, steps: int, device: str = "cpu") -> dict[str, Any]:
    model = model_of(name, data, device)
    predictor = None
    step(model, batch_at(data, model, 16, 1))  # libraries take what they keep
    for number in range(probes):
        batch = batch_at(data, model, [64, 128, 256, 512, 768, 1024][number % 6], 100 + number)
        predictor = predictor or Predictor(costs_of(model, batch.x, len(batch.blocks)))
        predictor.observe(Sizes.of(batch), measured(model, batch))
    assert predictor is not None
    errors, promised, bounds, over, largest = [], [], [], 0, 0
    for number in range(steps):
        batch = batch_at(data, model, 64 + ops.derive_key(7, number) % 1985, 1000 + number)
        sizes, taken = Sizes.of(batch), measured(model, batch)
        errors.append(abs(predictor.expected_bytes(sizes) - taken) / taken)
        promised.append(predictor.predict_peak(sizes) / taken)
        bounds.append(predictor.costs.bound(sizes) / taken)
        over, largest = over + (promised[-1] < 1), max(largest, taken)
    start = time.perf_counter()
    for _ in range(1000):
        predictor.predict_peak(Sizes.of(batch))  # type: ignore[possibly-undefined]
    return {
        "model": name,
        "mape": 100 * statistics.mean(errors),
        "worst": 100 * max(errors),
        "over": over,
        "promised": statistics.mean(promised),
        "bound": statistics.mean(bounds),
        "lowest_bound": min(bounds),
        "us": (time.perf_counter() - start) * 1e3,
        "largest_mb": largest / 1e6,
    }


def learnt(name: str, data: Dataset) -> tuple[GNN, Predictor]:
    """A model, and a predictor that saw steps of it up to 2048 seeds."""
    model = model_of(name, data)
    batches = [batch_at(data, model, 64 * 2 ** (number % 6), 200 + number) for number in range(12)]
    predictor = Predictor(costs_of(model, batches[0].x, len(batches[0].blocks)))
    for batch in batches:
        predictor.observe(Sizes.of(batch), measured(model, batch))
    return model, predictor


def timed(run: Callable[[], Any]) -> float:
    """The best of three, in seconds."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def redundancy(pieces: list[MicroBatch], batch: Batch) -> float:
    """Input rows of all pieces over those of the batch: what they have in common is computed again in each."""
    return sum(piece.input_idx.numel() for piece in pieces) / batch.input_ids.numel()


def show_splits(name: str, data: Dataset) -> None:
    model, predictor = learnt(name, data)
    batch = batch_at(data, model, 2048, 1)
    peak, alone = measured(model, batch), timed(lambda: step(model, batch))

    def metered() -> None:
        with meter_of("cpu"):
            step(model, batch)

    print(f"{name}: {peak / 1e6:.0f} MB, {alone:.3f} s a step, {timed(metered) / alone:.2f} times that under the meter")
    columns = ("share", "pieces", "rows", "peak", "split", "steps")
    print(*[f"{column:>8}" for column in columns])
    for share in (0.8, 0.6, 0.4, 0.2):

        def split(limit: float = share * peak) -> list[MicroBatch]:
            groups = groups_to_fit(batch, predictor.predict_peak, limit, predictor.costs)
            return [micro_batch_of(batch, group) for group in groups]

        pieces = split()
        batches = [piece.batch() for piece in pieces]
        worst = max(measured(model, b) for b in batches) / (share * peak)
        times = [timed(split), timed(lambda: [step(model, b) for b in batches])]  # noqa: B023
        numbers = (redundancy(pieces, batch), worst, *[t / alone for t in times])
        print(f"{share:8} {len(pieces):8}", *[f"{number:8.2f}" for number in numbers])


def resident(name: str) -> tuple[int, int]:
    """(bytes by the meter, growth of resident memory) of one step, after a small one that compiles the kernels."""
    data = planted_partition(num_nodes=100_000, num_edges=2_000_000, num_features=128)
    model = model_of({n.lower(): n for n in CONVS}[name], data)
    large = batch_at(data, model, SEEDS, 1)
    step(model, batch_at(data, model, 16, 2))
    model.zero_grad(set_to_none=True)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    step(model, large)
    after = _status("VmHWM")
    del large  # a batch keeps what a step found out about its edges
    return measured(model, batch_at(data, model, SEEDS, 1)), after - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CONVS))
    parser.add_argument("--probes", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--resident", choices=[name.lower() for name in CONVS])
    parser.add_argument("--split", choices=list(CONVS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.resident:
        print(*resident(args.resident))
        return
    data = planted_partition(num_nodes=100_000, num_edges=2_000_000)
    if args.split:
        show_splits(args.split, data)
        return
    columns = ("mape %", "worst %", "over", "promised", "bound", "us", "largest MB")
    print(f"{'model':>6}", *[f"{column:>10}" for column in columns])
    rows = [compare(name, data, args.probes, args.steps, args.device) for name in args.models.split(",")]
    for row in rows:
        numbers = (row["mape"], row["worst"], row["over"], row["promised"], row["bound"], row["us"], row["largest_mb"])
        print(f"{row['model']:>6}", *[f"{number:10.2f}" for number in numbers])
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
