"""examples/pyg_script.py as it is, and with PyG's own NeighborLoader, in one environment: seconds of an epoch.

    make .venv-pyg/.installed && .venv-pyg/bin/python benchmarks/pyg_script.py [FOLDER FOR THE GRAPH]

The script trains a 2-layer GraphSAGE, hidden 64, on an RMAT graph of 500k nodes and 12M edges with 100 features: 50k
seeds, batch 1024, fan-outs (15, 10). Each variant runs in a process of its own, in turn; an epoch to warm up does not
count.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from peers import ROOT, rmat_folder

import hopline as hl

ROUNDS, EPOCHS = 3, 2
"""Processes of each variant, and epochs that count in each."""
VARIANTS = {
    "hopline": ("hopline", 2),
    "PyG, num_workers=0": ("pyg", 0),
    "PyG, num_workers=2": ("pyg", 2),
}
"""Name -> (loader, its num_workers)."""


def dataset_folder(folder: Path) -> Path:
    """The RMAT graph as a dataset, made once: 50k nodes to train on, and the next 10k to test."""
    target = folder / "dataset"
    if not target.exists():
        arrays = rmat_folder(folder)
        indptr, indices, x, y = (
            torch.from_numpy(np.load(arrays / f"{name}.npy")) for name in ("indptr", "indices", "x", "y")
        )
        train = torch.from_numpy(np.load(arrays / "seeds.npy")).sort().values
        is_train = torch.zeros(y.numel(), dtype=torch.bool).index_fill_(0, train, True)
        hl.Dataset(
            name="rmat",
            graph=hl.Graph(indptr, indices),
            tables={"x": hl.extend.TensorTable(x)},
            y=y,
            splits={"train": train, "test": (~is_train).nonzero().view(-1)[:10_000]},
            num_classes=int(y.max()) + 1,
        ).save(target)
    return target


def write_scripts(folder: Path) -> None:
    """The example as script_hopline.py, and with the import that its comment names as script_pyg.py."""
    text = (ROOT / "examples" / "pyg_script.py").read_text()
    pygs, num_changed = re.subn(r"^.*  # PyG: (.*)$", r"\1", text, flags=re.MULTILINE)
    assert num_changed == 1
    (folder / "script_hopline.py").write_text(text)
    (folder / "script_pyg.py").write_text(pygs)


def epoch_seconds(scripts: Path, loader: str, num_workers: int, data: Path) -> list[float]:
    """Run a variant in a process of its own; the seconds of its epochs, without the first."""
    call = f"import script_{loader} as s; s.main({str(data)!r}, epochs={EPOCHS + 1}, num_workers={num_workers})"
    paths = os.pathsep.join([str(scripts), str(ROOT / "src")])
    print_messages = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", call],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    return [float(seconds) for seconds in re.findall(r"^epoch .*, ([\d.]+) s$", print_messages, flags=re.MULTILINE)][1:]


def installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


def main() -> None:
    data = dataset_folder(Path(sys.argv[1] if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "hopline-rmat"))
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        write_scripts(Path(folder))
        for _ in range(ROUNDS):
            for name, (loader, num_workers) in VARIANTS.items():
                seconds[name] += epoch_seconds(Path(folder), loader, num_workers, data)
    packages = ("torch", "torch-geometric", "pyg-lib", "torch-sparse")
    print(f"{os.cpu_count()} cores, {', '.join(installed(package) for package in packages)}")
    print(f"{'loader':<24} {'seconds':>8} {'least':>8} {'most':>8} {'ratio':>8}")
    ours = statistics.median(seconds["hopline"])
    for name, found in seconds.items():
        median = statistics.median(found)
        print(f"{name:<24} {median:8.2f} {min(found):8.2f} {max(found):8.2f} {median / ours:8.2f}")


if __name__ == "__main__":
    main()
