"""`make convs`: judge every cell, record it, and write docs/convs.md. Fails if a cell is wrong."""

from __future__ import annotations

import argparse

import torch

from tests.conv_table import page, record


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conv_table", description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", default="", help="a class such as GCNConv: print its verdicts, write nothing")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here: leave out --device cuda")
    found = record.run(given.device, given.jobs, given.only)
    if given.only:
        for rows in found.sections.values():
            for name, row in rows.items():
                for mode, verdict in row.items():
                    print(f"{name}, {mode}: {verdict.word}{': ' * bool(verdict.why)}{verdict.why}")
    else:
        record.write(found, given.device)
        cpu = record.read("cpu")
        if cpu is not None:
            page.PAGE.write_text(page.render(cpu, record.read("cuda")))
    faults = found.faults()
    print(f"{len(faults)} cells are wrong", *faults, sep="\n  ")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
