"""A training epoch of a 3-layer GraphSAGE, hidden 64, beside DGL and PyG on one graph file.

    make bench-peers && .venv/bin/python benchmarks/train_cpu.py [FOLDER FOR THE GRAPH]

An epoch of 50k seeds, batch 1024, fan-outs (15, 10, 5), both cores; median of 5, interleaved. The last column is
the other library's time over hopline's.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from peers import compare, rmat_folder, show


def main() -> None:
    folder = rmat_folder(Path(sys.argv[1] if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "hopline-rmat"))
    cores = os.cpu_count() or 1
    print(f"{'task':<24} {'library':<10} {'seconds':>8} {'M edges/s':>8} {'ratio':>8}")
    show(f"train, {cores} cores", compare("train", cores, folder))


if __name__ == "__main__":
    main()
