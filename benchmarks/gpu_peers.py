"""A section of `gpu.py`: stock PyG convs on the same batches, in a loop as one would write it by hand."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from gpu_lab import (
    DROPOUT,
    FANOUTS,
    HIDDEN,
    SHAPES,
    Lab,
    batch_size,
    graphed,
    make_trainer,
    num_steps,
    sage,
    seconds_per_call,
    timed_epochs,
)
from gpu_train import DrawTrees
from torch import Tensor, nn
from torch_geometric import nn as pyg

import hopline as hl
from hopline import ops

NUM_HEADS, GAT_HIDDEN = 4, 128


def gat(data: hl.Dataset) -> list[nn.Module]:
    """As PyG's GAT with 128 hidden channels: 4 heads of 32, and in the last layer their mean."""
    each = GAT_HIDDEN // NUM_HEADS
    return [
        pyg.GATConv(data.num_features, each, heads=NUM_HEADS),
        pyg.GATConv(GAT_HIDDEN, each, heads=NUM_HEADS),
        pyg.GATConv(GAT_HIDDEN, data.num_classes, heads=NUM_HEADS, concat=False),
    ]


def gin(data: hl.Dataset) -> list[nn.Module]:
    widths = (data.num_features, HIDDEN, HIDDEN, data.num_classes)
    return [
        pyg.GINConv(nn.Sequential(nn.Linear(i, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, o)))
        for i, o in itertools.pairwise(widths)
    ]


CONVS: dict[str, Callable[[hl.Dataset], list[nn.Module]]] = {"SAGE": sage, "GAT": gat, "GIN": gin}
TARGETS = {"GAT": 3.0, "GIN": 3.0}
"""How many times faster than stock convs an epoch is to be."""


def peers(lab: Lab) -> None:
    """Epochs of the trainer beside those of a plain loop over stock convs."""
    for shape in list(SHAPES)[: 1 if lab.quick else None]:
        for name in CONVS:
            lab.attempt(f"{shape}: {name} beside stock", partial(_compare, lab, shape, name))
        lab.attempt(f"{shape}: stock SAGE on padded trees", partial(_stock_trees, lab, shape))


def _compare(lab: Lab, shape: str, name: str) -> None:
    data = lab.shaped(shape)
    stock = {kind: _stock_epoch(lab, data, CONVS[name](data), kind == "bf16") for kind in ("bf16", "float32")}
    kind = min(stock, key=stock.__getitem__)
    others = ", ".join(f"{s:.2f} s in {k}" for k, s in stock.items())
    lab.row(f"{shape}: {name}, stock convs on blocks: epoch", stock[kind], "s", note=f"the faster of {others}")
    lab.free()
    torch.manual_seed(0)
    ours = timed_epochs(lab, data, CONVS[name](data), "auto", 3, 150 if lab.quick else 300)
    lab.row(f"{shape}: {name}, hopline: epoch", ours.seconds, "s", note=ours.note)
    ratio = stock[kind] / ours.seconds
    lab.row(f"{shape}: {name}, times faster", ratio, "×", TARGETS.get(name), at_least=True)


def _stock_epoch(lab: Lab, data: hl.Dataset, convs: Sequence[nn.Module], bf16: bool) -> float:
    """Seconds of an epoch on blocks that our sampler makes on the device, scaled from some steps."""
    torch.manual_seed(0)
    module = nn.ModuleList(convs).to(lab.device).train()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.003, fused=lab.on_gpu)
    loader = hl.Sampled(fanouts=FANOUTS, batch_size=batch_size(data), layout="block").loader(data, device=lab.device)
    steps = num_steps(data)
    warm_up = min(8, steps // 4)
    timed = min(30 if lab.quick else 60, steps - warm_up - 1)
    started = 0.0
    with _float32_products_in_tf32():
        for number, batch in enumerate(itertools.islice(loader, warm_up + timed)):
            if number == warm_up:
                lab.wait()
                started = time.perf_counter()
            assert isinstance(batch.x, Tensor)
            edges = [(block.edge_index, block.num_dst) for block in batch.blocks]
            _stock_step(lab, convs, optimizer, batch.x, edges, batch.labels, bf16)
        lab.wait()
    return (time.perf_counter() - started) / timed * steps


def _stock_step(
    lab: Lab,
    convs: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    edges: Sequence[tuple[Tensor, int]],
    y: Tensor,
    bf16: bool,
    spare: int = 0,
) -> None:
    """spare: rows after the destinations to which edges lead that are not there."""
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(lab.device.type, dtype=torch.bfloat16, enabled=bf16, cache_enabled=False):
        h = x.bfloat16() if bf16 else x.float()
        for l, (conv, (edge_index, num_dst)) in enumerate(zip(convs, edges, strict=True)):
            h = conv((h, h[: num_dst + spare]), edge_index)[:num_dst]
            if l < len(convs) - 1:
                h = nn.functional.dropout(h.relu(), DROPOUT)
    nn.functional.cross_entropy(h.float(), y).backward()
    optimizer.step()


def _stock_trees(lab: Lab, shape: str) -> None:
    """Stock SAGEConv on the tree batch with all its slots, as one CUDA graph where it can be."""
    data = lab.shaped(shape)
    torch.manual_seed(0)
    draw = DrawTrees(make_trainer(lab, data, sage(data), "tree", batch_size(data), epochs=1))
    found: dict[str, float] = {}
    notes: list[str] = []
    for kind in ("bf16", "float32"):
        convs = nn.ModuleList(sage(data)).to(lab.device)
        options: dict[str, Any] = {"fused": True, "capturable": True} if lab.on_gpu else {}
        optimizer = torch.optim.Adam(convs.parameters(), lr=0.003, **options)
        bf16 = kind == "bf16"

        def step(convs: Any = convs, optimizer: Any = optimizer, bf16: bool = bf16) -> None:
            blocks = draw()
            edges = [(block.padded[0], block.num_dst) for block in blocks]
            y = ops.gather_rows(data.labels, blocks[-1].dst_ids)
            _stock_step(lab, convs, optimizer, data.x.read(blocks[0].src_ids), edges, y, bf16, spare=1)

        draw.reset()
        call: Callable[[], Any] = step
        with _float32_products_in_tf32():
            try:
                call = graphed(lab, step)
            except Exception as error:
                lab.wait()
                notes.append(f"{kind} is not captured: {' '.join(str(error).split())[:100]}")
            repeats = min(40 if lab.on_gpu else 3, num_steps(data) - 5)
            found[kind] = seconds_per_call(lab, call, repeats, draw.reset)
    kind = min(found, key=found.__getitem__)
    notes.append(", ".join(f"{1e3 * s:.2f} ms in {k}" for k, s in found.items()))
    note = f"the faster of {'; '.join(reversed(notes))}"
    lab.row(f"{shape}: stock SAGE on padded trees: a step", 1e3 * found[kind], "ms", note=note)
    lab.row(f"{shape}: stock SAGE on padded trees: epoch", found[kind] * num_steps(data), "s")


class _float32_products_in_tf32:
    """Within, float32 products run as fast as the stock loop can have them."""

    def __enter__(self) -> None:
        self.before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")

    def __exit__(self, *error: object) -> None:
        torch.set_float32_matmul_precision(self.before)
