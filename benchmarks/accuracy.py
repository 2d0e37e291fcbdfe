"""Sampled training beside plain full-batch PyG on cora: test accuracy of the same two-layer GCN, seed by seed.

    python benchmarks/accuracy.py                       # ten seeds that no setting was chosen by: some minutes
    python benchmarks/accuracy.py --data path/cora.npz  # a local copy; else hl.open("cora"), which downloads it

Models and settings are those of tests/training/test_results.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hopline as hl
from hopline.util.progress import progress
from tests.training.test_results import full_batch_accuracy, sampled_accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cora")
    parser.add_argument("--first-seed", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=10)
    given = parser.parse_args()
    data = hl.open(given.data).normalized()
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    found = []
    with progress("training twice", len(seeds), "seeds") as shown:
        for seed in seeds:
            found.append((sampled_accuracy(data, seed), full_batch_accuracy(data, seed)))
            shown.advance()
    for name, accuracies in zip(("hopline, sampled", "plain PyG, full batch"), zip(*found, strict=True), strict=True):
        spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        print(f"{name:<22} {100 * statistics.fmean(accuracies):.1f}% ± {100 * spread:.1f}")


if __name__ == "__main__":
    main()
