"""Sampling, and sampling with gathered features, beside DGL and PyG on one graph file.

    make bench-peers && .venv/bin/python benchmarks/loader_cpu.py [FOLDER FOR THE GRAPH]

An epoch of 50k seeds, batch 1024, fan-outs (15, 10, 5); median of 5, interleaved. The last column is the
other library's time over hopline's.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from peers import compare, rmat_folder, show


def main() -> None:
    folder = rmat_folder(Path(sys.argv[1] if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "hopline-rmat"))
    print(f"{'task':<24} {'library':<10} {'seconds':>8} {'M edges/s':>8} {'ratio':>8}")
    for task, threads in (("sample", 1), ("sample", 2), ("gather", 2)):
        show(f"{task}, {threads} threads", compare(task, threads, folder))


if __name__ == "__main__":
    main()
