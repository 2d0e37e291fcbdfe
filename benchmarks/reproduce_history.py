"""Published accuracies of historical training, run again: writes the table of docs/measurements/history.md.

    make reproduce-history                                       # all of it: about an hour on 2 cores
    PYTHONPATH=src python benchmarks/reproduce_history.py --data ../shared/data --only gas-gcn-cora --seeds 3

Each row is one named run over some seeds, as published; beside it the same with random parts, and in full batch (one
part, which has no neighbours outside). Rows that are not run again keep their figures. With `--folders DIR` the
datasets are kept there with their parts; `--prepare` makes these alone, so that another machine (`--device cuda`) needs
no METIS.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hopline as hl
from hopline.core.partition import make_partition
from hopline.recipes import RunConfig, find_recipe
from hopline.run.models import make_model
from hopline.training.settings import TrainSettings

PAGE = Path(__file__).parents[1] / "docs" / "measurements" / "history.md"
MARK = "<!-- made by make reproduce-history -->"


@dataclass(frozen=True)
class Row:
    """One run to reproduce."""

    recipe: str
    file: str
    seeds: int
    published: float | None
    """Mean test accuracy, in percent; None where only full batch is there to compare with."""
    within: float
    ways: tuple[str, ...] = ("as published", "random parts", "full batch")
    splits: bool = False
    """Each seed has a split of its own: 20 training and 30 validation nodes of every class."""


ROWS = (
    Row("gas-gcn-cora", "cora.npz", 10, 82.3, 0.8),
    Row("gas-gat-cora", "cora.npz", 5, 83.3, 1.0, ("as published", "full batch")),
    Row("gas-appnp-cora", "cora.npz", 5, 83.2, 1.0, ("as published", "full batch")),
    Row("gas-gcnii-cora", "cora.npz", 3, 85.5, 2.0, ("as published",)),
    Row("gas-gcn-amazon-photo", "amazon_photo.npz", 5, None, 0.5, ("as published", "full batch"), splits=True),
    Row("gas-gcn-coauthor-physics", "coauthor_physics.npz", 5, None, 0.5, ("as published", "full batch"), splits=True),
)


def method_of(config: RunConfig, way: str) -> Any:
    assert isinstance(config.method, hl.Historical)
    if way == "random parts":
        return dataclasses.replace(config.method, partition="random")
    if way == "full batch":
        return dataclasses.replace(config.method, num_parts=1, parts_per_batch=1, partition="range", groups="fixed")
    return config.method


def with_split(data: hl.Dataset, seed: int) -> hl.Dataset:
    """20 training and 30 validation nodes of each class, the rest to test."""
    generator = torch.Generator().manual_seed(seed)
    train, valid = [], []
    for label in range(data.num_classes):
        nodes = (data.labels == label).nonzero().view(-1)
        nodes = nodes[torch.randperm(nodes.numel(), generator=generator)]
        train.append(nodes[:20])
        valid.append(nodes[20:50])
    chosen = {"train": torch.cat(train).sort().values, "valid": torch.cat(valid).sort().values}
    rest = torch.ones(data.num_nodes, dtype=torch.bool)
    rest[torch.cat([*train, *valid])] = False
    return dataclasses.replace(data, splits={**chosen, "test": rest.nonzero().view(-1)}, alternatives=())


def opened(row: Row, source: Path, folders: Path | None) -> hl.Dataset:
    data = hl.from_npz(source / row.file)
    data = data.normalized() if row.file == "cora.npz" else data
    if folders is None:
        return data
    kept = folders / Path(row.file).stem
    if not kept.exists():
        data.save(kept)
    return hl.open(str(kept))


def accuracy(config: RunConfig, data: hl.Dataset, way: str, seed: int, device: str) -> float:
    torch.manual_seed(seed)
    model = make_model(config.model, data)
    settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(TrainSettings)}
    settings |= {"seed": seed, "show": False, "device": device}
    return 100 * hl.Trainer(model, data, method_of(config, way), **settings).fit().test


def results(row: Row, data: hl.Dataset, seeds: int | None, device: str) -> Iterator[str]:
    config = find_recipe(row.recipe)()
    means: dict[str, float] = {}
    for way in row.ways:
        started, found = time.perf_counter(), []
        for seed in range(seeds or row.seeds):
            found.append(accuracy(config, with_split(data, seed) if row.splits else data, way, seed, device))
            print(f"{row.recipe}, {way}, seed {seed}: {found[-1]:.2f}", flush=True)
        means[way] = statistics.fmean(found)
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        per_run = (time.perf_counter() - started) / len(found)
        target = row.published if way == "as published" else None
        if way == "full batch" and row.published is None:
            target = means["as published"]
        apart = "" if target is None else f"{means[way] - target:+.2f} (within {row.within})"
        yield (
            f"| {row.recipe} | {way} | {means[way]:.2f} ± {spread:.2f} | {len(found)} | "
            f"{'' if row.published is None or target is None else row.published} | {apart} | {per_run:.0f} |"
        )


def write_page(lines: list[str]) -> None:
    """The table of the page, with rows of these runs in place of those it had."""
    head = ["| run | way | test accuracy, % | seeds | published | apart | s a run |", "|---|---|---|---|---|---|---|"]
    page = PAGE.read_text()
    start = page.index(MARK) + len(MARK)
    end = page.index("<!-- end -->", start)
    kept = [line for line in page[start:end].splitlines() if line.startswith("| gas")]

    def key(line: str) -> tuple[str, ...]:
        return tuple(re.split(r"\s*\|\s*", line)[1:3])

    fresh = {key(line): line for line in lines}
    merged = [fresh.pop(key(line), line) for line in kept] + list(fresh.values())
    PAGE.write_text(page[:start] + "\n\n" + "\n".join([*head, *merged]) + "\n\n" + page[end:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with the .npz files")
    parser.add_argument("--only", help="one run")
    parser.add_argument("--seeds", type=int, help="instead of the row's own number")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folders", type=Path, help="where datasets and their parts are kept")
    parser.add_argument("--prepare", action="store_true", help="make the parts alone")
    args = parser.parse_args()
    for row in ROWS:
        if args.only not in (None, row.recipe):
            continue
        data = opened(row, args.data, args.folders)
        if not args.prepare:
            write_page(list(results(row, data, args.seeds, args.device)))
            continue
        method = find_recipe(row.recipe)().method
        assert isinstance(method, hl.Historical)
        assert data.folder is not None, "--prepare needs --folders"
        for seed in range(args.seeds or row.seeds):
            make_partition(data.graph, method.num_parts, method.partition, None, seed, data.folder / "partitions")


if __name__ == "__main__":
    main()
