"""Where a training batch's time goes on the CPU: kernel by kernel on one thread, and stage by stage in a real run.

    .venv/bin/python benchmarks/profile_cpu.py [FOLDER FOR THE GRAPH] [--instructions]

Graph, model and batches are those of `train_cpu.py`. A kernel's rate stands beside what the machine reaches in the same
run: a plain copy of memory (bytes read and written) or a square matrix product. What is in cache already can be faster
than a copy. `--instructions` also counts the instructions of the Numba kernels, under Valgrind: about a minute.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import timeit
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from peer_worker import BATCH, CLASSES, FANOUTS, Files
from peers import rmat_folder
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline import ops
from hopline.ops.cpu import linear as cpu_linear
from hopline.ops.cpu import sampling as cpu_sampling
from hopline.util.host import keep_freed_memory, num_cores
from hopline.util.progress import progress

NUM_BATCHES, WARM_UP = 10, 2
LINE = 64  # bytes of a cache line
TORCH = ("linear", "relu", "cross entropy", "Adam")  # kernels that are not ours
Kernel = tuple[str, str]  # stage and name
AtRandom = Callable[[], tuple[int, int]]
"""Bytes asked for at random, and bytes of the cache lines they are in. A function, called at the end of the batch:
counting the lines between two kernels would empty the caches."""


class Totals(NamedTuple):
    """A kernel's calls in one batch, and what they have to do however they are written."""

    seconds: float = 0
    moved: float = 0
    """Bytes in order, and bytes asked for at random as often as they are asked for."""
    lines: float = 0
    """The same with every cache line that is touched at random once: what an endless cache would have to fetch."""
    items: float = 0  # edges or rows
    flops: float = 0


class Stopwatch:
    """Times every kernel, batch by batch."""

    def __init__(self) -> None:
        self.calls: list[tuple[Kernel, float]] = []
        self.costs: list[tuple[int, int, AtRandom, int]] = []
        self.batches: list[dict[Kernel, Totals]] = []

    def __call__(self, stage: str, name: str, run: Callable[..., Any], *args: Any) -> Any:
        started = time.perf_counter()
        result = run(*args)
        self.calls.append(((stage, name), time.perf_counter() - started))
        return result

    def cost(self, in_order: int, items: int, at_random: AtRandom = lambda: (0, 0), flops: int = 0) -> None:
        """What the last call had to do; `in_order`: bytes that are read or written one after the other."""
        self.costs.append((in_order, items, at_random, flops))

    def next_batch(self) -> None:
        batch: defaultdict[Kernel, Totals] = defaultdict(Totals)
        for (kernel, seconds), (in_order, items, at_random, flops) in zip(self.calls, self.costs, strict=True):
            asked, lines = at_random()
            more = (seconds, in_order + asked, in_order + lines, items, flops)
            batch[kernel] = Totals(*map(sum, zip(batch[kernel], more, strict=True)))
        self.batches.append(batch)
        self.calls, self.costs = [], []

    def medians(self) -> dict[Kernel, Totals]:
        """Each kernel's middle batch, by its seconds."""
        used = self.batches[WARM_UP:]
        return {k: sorted((b[k] for b in used), key=lambda t: t.seconds)[len(used) // 2] for k in used[0]}


def pieces(positions: Tensor, stride: int, size: int) -> tuple[int, int]:
    """`size` bytes at each of some positions that are `stride` bytes apart: their sum, and their distinct lines."""
    begin = positions.long().numpy() * stride
    first, last = begin // LINE, (begin + size - 1) // LINE
    touched = np.zeros(int(last.max()) + 1, dtype=bool)
    for line in range(size // LINE + 2):
        touched[np.minimum(first + line, last)] = True
    return size * begin.size, LINE * int(touched.sum())


class Walk:
    """A batch's kernels one by one, in the order of training, so that each finds in cache what it would find there."""

    def __init__(self, files: Files, meter: Stopwatch) -> None:
        self.files, self.meter = files, meter
        self.id_map, self.model = ops.IdMap(files.num_nodes), sage(files)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.003)
        self.tape: list[tuple[str, Tensor, list[Tensor], tuple]] = []

    def batch(self, seeds: Tensor, key: int) -> None:
        blocks = self._sample(seeds, key)
        h = self._read(blocks[0])
        for l, block in enumerate(blocks):
            h = self._mean(l, h, block) if l else h
            h = self._linear(l, h)
            if l < len(blocks) - 1:  # in and out; back: result and gradient in, gradient out
                size, n = 4 * h.numel(), len(h)
                h = self._forward(f"relu {l + 1}", torch.relu, h, [], (2 * size, n), (3 * size, n))
        y, size, n = self.files.y[seeds], 4 * h.numel(), len(h)
        # Scores and labels in; back: the same, and the gradient of the scores out.
        there, back = (size + 8 * n, n), (2 * size + 8 * n, n)
        self._forward("cross entropy", partial(nn.functional.cross_entropy, target=y), h, [], there, back)
        self._backward()
        x, ids = self.files.x, blocks[0].src_ids
        n, row = len(ids), 4 * x.size(1)
        # What a model needs that does not read the table itself.
        self.meter("no part of this model", "gather_rows, all inputs", ops.gather_rows, x, ids)
        self.meter.cost((8 + row) * n, n, lambda: pieces(ids, row, row))  # ids in, rows in, rows out
        self.meter.next_batch()

    def _sample(self, seeds: Tensor, key: int) -> tuple[hl.extend.Block, ...]:
        self._add("hop 1", seeds)
        hops = [self._hop(f"hop {i + 1}", fanout, key) for i, fanout in enumerate(FANOUTS)]
        ids = hops[-1].src_ids
        self.meter("sample", "IdMap.clear", self.id_map.clear)
        self.meter.cost(8 * len(ids), len(ids), lambda: pieces(ids, 4, 4))  # ids in, their int32 in the map out
        return tuple(reversed(hops))

    def _hop(self, hop: str, fanout: int, key: int) -> hl.extend.Block:
        indptr, indices, dst = self.files.indptr, self.files.indices, self._ids(hop)
        n, ends = len(dst), partial(pieces, dst, 8, 16)  # start and stop of a row are neighbours in indptr
        starts = self.meter(
            "sample", f"{hop} count", cpu_sampling._row_starts, indptr, dst, len(indices), fanout, False
        )
        self.meter.cost(16 * n, n, ends)  # ids in, ends in, starts of the new rows out
        edges = np.empty(starts[-1], dtype=np.int64)
        size, draw = edges.size, (indptr.numpy(), dst.numpy(), fanout, np.int64(key), starts, edges)
        self.meter("sample", f"{hop} draw", cpu_sampling._draw_without_replacement, *draw)
        self.meter.cost(16 * n + 8 * size, size, ends)  # ids and starts in, ends in, int64 edge positions out
        found = np.empty(size, dtype=np.int32)
        self.meter("sample", f"{hop} take", cpu_sampling._take, indices.numpy(), edges, found)
        # Positions in, int32 in, int32 out.
        self.meter.cost(12 * size, size, lambda: pieces(torch.from_numpy(edges), 4, 4))
        src_idx = self._add(hop, torch.from_numpy(found))
        return hl.extend.Block(self._ids(hop), n, (hl.extend.Part(torch.from_numpy(starts), src_idx),))

    def _add(self, hop: str, nodes: Tensor) -> Tensor:
        before = self.id_map.size
        idx = self.meter("sample", f"{hop} IdMap.add", self.id_map.add, nodes)
        new = self.id_map.ids()[before:]
        # Nodes in, their int32 in the map in, and that out; of new ones also the int32 in the map and the int64 id out.
        in_order = (nodes.element_size() + 4) * len(nodes) + 8 * len(new)
        self.meter.cost(in_order, len(nodes), lambda: pieces(torch.cat([nodes, new]), 4, 4))
        return idx

    def _ids(self, hop: str) -> Tensor:
        ids = self.meter("sample", f"{hop} IdMap.ids", self.id_map.ids)
        self.meter.cost(16 * len(ids), len(ids))  # ids in and out
        return ids

    def _read(self, block: hl.extend.Block) -> Tensor:
        """What the first layer needs of the table, as the loader reads it ahead."""
        ids, part = block.src_ids, block.part
        sources = self.meter("gather", "leaf ids", ops.gather_rows, ids, part.src_idx)
        size = part.num_edges
        self.meter.cost(12 * size, size, lambda: pieces(part.src_idx, 8, 8))  # int32 in, int64 in, int64 out
        edges = (part.indptr, sources, "mean", None, block.dst_ids)
        out = self.meter("gather", "leaf mean, own rows", ops.reduce_edges, self.files.x, *edges)
        self.meter.cost(*mean_cost(part.indptr, sources, block.dst_ids, 4 * self.files.x.size(1)))
        return out

    def _forward(self, name: str, run: Callable, x: Tensor, params: list[Tensor], there: tuple, back: tuple) -> Tensor:
        """`run(x, *params)`, cut off from what came before, so that its gradient can be measured alone."""
        given = x.detach().requires_grad_(x.requires_grad)
        out = self.meter("forward", name, run, given, *params)
        self.meter.cost(*there)
        self.tape.append((name, out, [given] * given.requires_grad + params, back))
        return out

    def _mean(self, l: int, h: Tensor, block: hl.extend.Block) -> Tensor:
        part, own, row = block.part, torch.arange(block.num_dst), 4 * h.size(1)
        run = partial(ops.reduce_edges, indptr=part.indptr, src_idx=part.src_idx, reduce="mean", own=own)
        # Back: edges in, gradients of own rows in and of h out, and at random the mean's gradient for every edge.
        in_order = 8 * len(part.indptr) + 4 * part.num_edges + row * (block.num_dst + block.num_src)
        back = (in_order, part.num_edges, lambda: pieces(part.edge_index[1], row, row))
        return self._forward(f"mean {l + 1}", run, h, [], mean_cost(part.indptr, part.src_idx, own, row), back)

    def _linear(self, l: int, x: Tensor) -> Tensor:
        conv: Any = self.model.convs[l]
        weight = torch.cat([conv.lin_l.weight, conv.lin_r.weight], dim=1).detach().requires_grad_()
        params = [weight, conv.lin_l.bias.detach().requires_grad_()]
        n, (columns, width), products = len(x), weight.shape, 1 + x.requires_grad
        flops, small, none = 2 * n * width * columns, 4 * columns * (width + 1), lambda: (0, 0)
        there = (4 * n * (width + columns) + small, n, none, flops)  # x and parameters in, result out
        # The gradient, x and the parameters in; a gradient for each input that wants one out.
        back = (4 * n * (products * width + columns) + 2 * small, n, none, flops * products)
        return self._forward(f"linear {l + 1}", cpu_linear.linear, x, params, there, back)

    def _backward(self) -> None:
        grad = torch.ones(())
        while self.tape:
            name, out, inputs, back = self.tape.pop()
            grad = self.meter("backward", f"{name}, back", torch.autograd.grad, out, inputs, grad)[0]
            self.meter.cost(*back)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        size = sum(p.numel() for p in self.model.parameters())
        self.meter("optimizer", "Adam", self.optimizer.step)
        self.meter.cost(28 * size, size)  # value, gradient and two moments in; all but the gradient out


def mean_cost(indptr: Tensor, sources: Tensor, own: Tensor, row: int) -> tuple[int, int, AtRandom]:
    """Edges and own ids in, a row per edge and own id in, and a row of both out per destination."""
    in_order = sum(t.numel() * t.element_size() for t in (indptr, sources, own)) + 2 * row * len(own)
    return in_order, len(sources), lambda: pieces(torch.cat([sources, own]), row, row)


def sage(files: Files) -> hl.nn.GNN:
    return hl.nn.GNN([SAGEConv(i, o) for i, o in itertools.pairwise(files.widths)])


def yardsticks(x: Tensor) -> tuple[float, float]:
    """Bytes per second of a copy and flops per second of a product on one thread; shown for all cores too."""
    # NumPy's arrays are on huge pages where the system has them: of all plain copies this is the fastest.
    source, target, square = np.ones(1 << 25), np.ones(1 << 25), torch.ones(2048, 2048)
    ids, row = torch.randperm(len(x))[: len(x) // 2], 4 * x.size(1)
    rates: dict[int, tuple[float, float]] = {}
    for threads in sorted({num_cores(), 1}):
        torch.set_num_threads(threads)
        parts = [np.array_split(array, threads) for array in (target, source)]
        with ThreadPoolExecutor(threads) as pool:
            copy = 2 * source.nbytes / best(lambda p=pool, t=parts: list(p.map(np.copyto, *t)))
        rows = (8 + 2 * row) * len(ids) / best(lambda: x.index_select(0, ids))
        product = 2 * len(square) ** 3 / best(lambda: square @ square)
        rates[threads] = copy, product
        print(f"threads: {threads}, copy {copy / 1e9:.1f} GB/s, random rows of {row} bytes (index_select) ", end="")
        print(f"{rows / 1e9:.1f} GB/s, square product {product / 1e9:.0f} GFLOP/s", flush=True)
    return rates[1]


def best(run: Callable[[], object]) -> float:
    return min(timeit.repeat(run, number=1, repeat=10))  # a yardstick is to be the limit


def show_kernels(medians: dict[Kernel, Totals], copy: float, product: float) -> None:
    columns = ("ms", "MB", "GB/s", "% copy", "lines MB", "% copy", "ns/item", "GFLOP/s", "% product")
    print(f"\n{'kernel, one thread':<26}" + "".join(f"{column:>10}" for column in columns))
    for stage, group in itertools.groupby(medians.items(), key=lambda kernel: kernel[0][0]):
        kernels = list(group)
        for (_, name), t in kernels:
            rate, lines, flops = t.moved / t.seconds, t.lines / t.seconds, t.flops / t.seconds
            line = f"{name:<26}{t.seconds * 1e3:10.2f}{t.moved / 1e6:10.2f}{rate / 1e9:10.1f}{100 * rate / copy:10.0f}"
            line += " " * 20 if t.lines == t.moved else f"{t.lines / 1e6:10.2f}{100 * lines / copy:10.0f}"
            line += f"{t.seconds / t.items * 1e9:10.1f}"
            print(line + (f"{flops / 1e9:10.1f}{100 * flops / product:10.0f}" if t.flops else ""))
        print(f"  {stage:<24}{sum(t.seconds for _, t in kernels) * 1e3:10.2f}", flush=True)


def show_stages(files: Files) -> None:
    """One epoch as users run it: `sample` and `gather` run ahead in threads that give way to training."""
    graph, train = hl.Graph(files.indptr, files.indices), {"train": files.seeds.sort().values}
    tables: dict[str, hl.extend.Table] = {"x": hl.extend.TensorTable(files.x)}
    data = hl.Dataset(name="rmat", graph=graph, tables=tables, y=files.y, splits=train, num_classes=CLASSES)
    method = hl.Sampled(fanouts=FANOUTS, batch_size=BATCH)
    torch.set_num_threads(num_cores())
    trainer = hl.Trainer(sage(files), data, method, epochs=1, show=False)
    wall, used = time.perf_counter(), time.process_time()
    run = trainer.fit()
    wall, used = time.perf_counter() - wall, time.process_time() - used
    print(f"\n{'stage, one epoch':<26}{'s':>10}{'ms/batch':>10}")
    for stage in run.stages:
        print(f"{stage.name:<26}{stage.first_epoch_s:10.2f}{stage.first_epoch_s / stage.calls * 1e3:10.2f}")
    print(f"wall {wall:.2f} s, processor {used:.2f} s: {used / wall:.2f} cores of {num_cores()} in use", flush=True)


ZERO, DUMP, START = 0x43540001, 0x43540003, 0x43540004
"""Requests of callgrind.h: forget what was counted, write it to a file with a label, begin to count."""
ASK_VALGRIND = bytes.fromhex("4889f8 31d2 48c1c703 48c1c70d 48c1c73d 48c1c733 4887db c3")
"""valgrind.h's sequence as an x86-64 function: address of the request to rax, 0 to rdx, rdi rotated by 128 bits in all,
xchg rbx, rbx. Valgrind takes it for a request; to a processor it is nothing."""
NO_AVX512 = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+bmi,+bmi2,+fma,+lzcnt,+popcnt,+sse4.2"}
"""Valgrind knows no AVX-512, so kernels are compiled without."""


class InstructionMeter(Stopwatch):
    """Has Callgrind write a file for every call of a kernel of ours: it has no names for compiled code, but totals."""

    def __init__(self) -> None:
        super().__init__()
        self.code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self.code.write(ASK_VALGRIND)
        self.ask = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.addressof(ctypes.c_char.from_buffer(self.code)))

    def request(self, what: int, text: str = "") -> None:
        label = ctypes.create_string_buffer(text.encode())
        words = (ctypes.c_uint64 * 6)(what, ctypes.addressof(label))
        self.ask(ctypes.addressof(words))

    def __call__(self, stage: str, name: str, run: Callable[..., Any], *args: Any) -> Any:
        if not self.batches or name.startswith(TORCH):  # the first batch loads what is compiled
            return super().__call__(stage, name, run, *args)
        self.request(ZERO)
        result = super().__call__(stage, name, run, *args)
        self.request(DUMP, name)
        return result

    def next_batch(self) -> None:
        self.batches.append({})  # costs are known from the other run, and slow to work out in this one


def count_under_valgrind(files: Files) -> None:
    meter = InstructionMeter()
    walk = Walk(files, meter)
    with ops.own_threads(1):
        walk.batch(files.seeds[:BATCH], 0)
        meter.request(START)
        for name in ("warm-up", "nothing"):  # the second is what measuring itself takes
            meter("", name, bool)
        walk.batch(files.seeds[:BATCH], 0)


def count_instructions(folder: Path) -> dict[str, int]:
    """Instructions of each Numba kernel in the first batch."""
    counts: defaultdict[str, int] = defaultdict(int)
    with tempfile.TemporaryDirectory() as place, progress("instructions", 2, "runs", brief=True) as bar:
        # Without fused multiply-add, which Valgrind takes very long for, in torch's products: these are not counted.
        environment = os.environ | NO_AVX512 | {"NUMBA_CACHE_DIR": place, "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
        command = [sys.executable, "-W", "ignore", __file__, str(folder), "--under-valgrind"]
        callgrind = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={place}/out"]
        for before in ([], callgrind):  # the first run compiles, which would take very long in the second
            subprocess.run([*before, *command], env=environment, check=True)
            bar.advance()
        for text in (path.read_text() for path in Path(place).glob("out.*")):
            label, total = re.search(r"Client Request: (.+)", text), re.search(r"^totals: (\d+)", text, re.M)
            if label and total:
                counts[label[1]] += int(total[1])
    nothing = counts.pop("nothing")
    return {name: total - nothing for name, total in counts.items()}


def show_instructions(folder: Path, watch: Stopwatch) -> None:
    if shutil.which("valgrind") is None or os.uname().machine != "x86_64":
        print("\n--instructions needs Valgrind on an x86-64 processor: apt-get install valgrind, or your system's way")
        return
    counts, medians = count_instructions(folder), watch.medians()
    print(f"\n{'Numba kernel, AVX2 code':<26}{'M instr':>10}{'per item':>10}{'per ns':>10}")
    for kernel, first in watch.batches[0].items():
        if count := counts.get(kernel[1]):
            # Another batch was timed, with other edges: per item they are alike.
            each, ns = count / first.items, medians[kernel].seconds / medians[kernel].items * 1e9
            print(f"{kernel[1]:<26}{count / 1e6:10.2f}{each:10.1f}{each / ns:10.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(tempfile.gettempdir()) / "hopline-rmat")
    parser.add_argument("--instructions", action="store_true", help="count instructions too, under Valgrind")
    parser.add_argument("--under-valgrind", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    files = Files(rmat_folder(options.folder))
    keep_freed_memory()  # as `hopline train` does
    if options.under_valgrind:
        count_under_valgrind(files)
        return
    limits, watch = yardsticks(files.x), Stopwatch()
    walk, count = Walk(files, watch), WARM_UP + NUM_BATCHES
    with ops.own_threads(1), progress("kernels", count, "batches", brief=True) as bar:
        for key, seeds in enumerate(files.seeds.split(BATCH)[:count]):
            walk.batch(seeds, key)
            bar.advance()
    show_kernels(watch.medians(), *limits)
    show_stages(files)
    if options.instructions:
        show_instructions(options.folder, watch)


if __name__ == "__main__":
    main()
