"""The GPU path in one table: stages of a step, epochs, stock PyG convs, gathers, cached features, accuracy.

    PYTHONPATH=src python benchmarks/gpu.py --json results.json          # all of it: some 8 minutes on one H200
    PYTHONPATH=src python benchmarks/gpu.py --only stages,epochs         # sections; --quick does about half of each
    PYTHONPATH=src python benchmarks/gpu.py --device cpu --scale 0.0005  # whether it runs at all, without a GPU
    PYTHONPATH=src python benchmarks/gpu.py --markdown results.json      # stored results as a table for a page

Graphs are the built-in ones of papers100M's and products' sizes, made on the device; fan-outs (15, 10, 5), batch 1024,
GraphSAGE of three layers, hidden 256, dropout 0.5, Adam; float32 parameters, bf16 compute. Stock convs train on batches
that our sampler makes, in a plain loop, in bf16 and in float32 with TF32 products: the faster one counts. A file given
by --json keeps the rows of sections that are not run again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_features import cache, gather
from gpu_lab import Lab, markdown_table, read_json, text_table, write_json
from gpu_peers import peers
from gpu_train import accuracy, epochs, stages

SECTIONS: dict[str, Callable[[Lab], None]] = {
    "stages": stages,
    "epochs": epochs,
    "peers": peers,
    "gather": gather,
    "cache": cache,
    "accuracy": accuracy,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="all", help=f"sections, by commas: {', '.join(SECTIONS)}")
    parser.add_argument("--json", type=Path, help="a file for the rows, written after every section")
    parser.add_argument(
        "--markdown", nargs="*", type=Path, help="print the table in Markdown; with files, that of their rows alone"
    )
    parser.add_argument("--quick", action="store_true", help="about half of it")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the graphs, as a share")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to see whether it runs")
    return parser.parse_args()


def chosen(only: str) -> list[str]:
    names = list(SECTIONS) if only == "all" else only.split(",")
    for name in names:
        if name not in SECTIONS:
            raise SystemExit(f"there is no section {name!r}: choose from {', '.join(SECTIONS)}")
    return names


def main() -> None:
    args = arguments()
    if args.markdown:
        print(markdown_table([row for file in args.markdown for row in read_json(file)]))
        return
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here: give --device cpu --scale 0.0005 to see whether it runs")
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    lab = Lab(device=device, scale=args.scale, quick=args.quick)
    has_triton = importlib.util.find_spec("triton") is not None
    triton = f", Triton {importlib.metadata.version('triton')}" if has_triton else ""
    pyg = importlib.metadata.version("torch-geometric")
    lab.say(f"{lab.device_name}, torch {torch.__version__}{triton}, PyG {pyg}, commit {lab.commit}")
    taken: dict[str, float] = {}
    for name in chosen(args.only):
        started = time.perf_counter()
        lab.say(f"{name} ...")
        lab.attempt(name, lambda name=name: SECTIONS[name](lab))
        taken[name] = time.perf_counter() - started
        lab.say(f"{name}: {taken[name]:.1f} s")
        if args.json is not None:
            write_json(args.json, lab.rows)
    print("\n" + (text_table(lab.rows) if args.markdown is None else markdown_table(lab.rows)))
    print("\nseconds: " + ", ".join(f"{name} {seconds:.0f}" for name, seconds in taken.items()))


if __name__ == "__main__":
    main()
