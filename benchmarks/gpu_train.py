"""Sections of `gpu.py`: the stages of a training step, epochs, and accuracy by layout."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu_lab import (
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

import hopline as hl
from hopline import ops
from hopline.core.tree_layout import TreeBlock, TreeRows, TreeSampler
from hopline.data.synthetic import planted_partition
from hopline.methods.sampled.captured_step import CapturedWork
from hopline.nn.fused import defer_layer

NUM_TREES = 8
"""Batches whose rows are gathered in turn, so that none finds its rows in a cache."""


class DrawTrees:
    """The trees of one step after the other, drawn as training draws them."""

    def __init__(self, trainer: hl.Trainer) -> None:
        self.work: Any = trainer.work
        self.loader = self.work.loader
        self.size = self.loader.method.batch_size
        self.reset()

    def reset(self) -> None:
        self.step = 0
        if isinstance(self.work, CapturedWork):
            self.work.batches.start(1, 0, 0)

    def __call__(self) -> tuple[TreeBlock, ...]:
        sampler = self.loader.neighbor_sampler
        assert isinstance(sampler, TreeSampler)
        if isinstance(self.work, CapturedWork):
            batches = self.work.batches
            return sampler.sample(
                *ops.gpu_kernels("tree").next_step(batches.state, batches.order, self.size, 0, self.size)
            )
        first, self.step = self.step * self.size, self.step + 1
        return sampler.sample(self.loader.ids[first : first + self.size], self.step)


def stages(lab: Lab) -> None:
    """Each stage of a step alone."""
    for shape in SHAPES:
        lab.attempt(f"{shape}: stages", partial(_stages, lab, shape))


def _stages(lab: Lab, shape: str) -> None:
    data = lab.shaped(shape)
    size = batch_size(data)
    torch.manual_seed(0)
    trainer = make_trainer(lab, data, sage(data), "tree", size, epochs=1)
    trainer.job.model.train()
    draw = DrawTrees(trainer)
    full_steps = data.splits["train"].numel() // size
    repeats = min(150 if lab.on_gpu else 5, full_steps - 4)  # a graph is captured after some steps of the epoch

    edges = torch.zeros((), dtype=torch.int64, device=lab.device)
    for _ in range(repeats):
        edges += draw()[0].tree.counts.sum()
    edges_per_step = int(edges) / repeats
    sampling = seconds_per_call(lab, graphed(lab, draw), repeats, draw.reset)
    lab.row(f"{shape}: sampling", 1e3 * sampling, "ms")
    target = 8.0 if shape == "papers100m" else None
    note = f"{edges_per_step:,.0f} edges a step"
    lab.row(f"{shape}: sampled edges", edges_per_step / sampling / 1e9, "G/s", target, at_least=True, note=note)

    draw.reset()
    gather = graphed(lab, _gather(lab, trainer, [draw()[0] for _ in range(min(NUM_TREES, full_steps))]))
    gathering = seconds_per_call(lab, gather, 20 if lab.on_gpu else 1) / min(NUM_TREES, full_steps)
    lab.row(f"{shape}: gather and leaf mean", 1e3 * gathering, "ms")

    step, note = _step(trainer, draw)
    training = seconds_per_call(lab, step, repeats, draw.reset)
    lab.row(f"{shape}: sampling to gradients", 1e3 * training, "ms", note=note)
    lab.row(f"{shape}: layers, loss, backward", 1e3 * (training - sampling - gathering), "ms", note="the difference")

    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = trainer.make_optimizer()
    updating = seconds_per_call(lab, graphed(lab, optimizer.step), 100 if lab.on_gpu else 5)
    lab.row(f"{shape}: optimizer", 1e3 * updating, "ms")
    lab.row(f"{shape}: whole step", 1e3 * (training + updating), "ms", note="sampling to gradients, and the optimizer")


def _gather(lab: Lab, trainer: hl.Trainer, blocks: list[TreeBlock]) -> Callable[[], None]:
    """What the first layer does before its product: its rows read and reduced."""
    conv, table = trainer.model.convs[0], trainer.data.x  # type: ignore[index]

    def gather() -> None:
        with torch.no_grad(), torch.autocast(lab.device.type, dtype=torch.bfloat16, cache_enabled=False):
            for block in blocks:
                rows = TreeRows(table, block)
                if not lab.on_gpu:
                    table.read(rows.ids)
                elif defer_layer(conv, rows, block, 0.0, None) is None:
                    raise RuntimeError("the first layer is not fused with the gather")

    return gather


def _step(trainer: hl.Trainer, draw: DrawTrees) -> tuple[Callable[[], Any], str]:
    """A step from sampling to gradients, and how it runs."""
    draw.reset()
    next(iter(trainer.work.units(1)))  # captures
    steps = trainer.work.steps if isinstance(trainer.work, CapturedWork) else {}
    step = next(iter(steps.values()), None)
    if step is not None:
        return step.captured.replay, "captured"

    def again() -> Any:
        trainer.model.zero_grad()
        unit = next(state["units"])
        return unit.forward_backward(unit.total_size)

    def reset() -> None:
        state["units"] = trainer.work.units(1)

    state: dict[str, Any] = {}
    reset()
    draw.reset = reset  # type: ignore[method-assign]
    return again, "not captured"


def epochs(lab: Lab) -> None:
    """Whole epochs by the trainer."""
    for shape, target in (("papers100m", 0.75), ("products", 0.15)):
        lab.attempt(f"{shape}: epoch, tree", partial(_epoch, lab, shape, "tree", target=target))
        most = 300 if lab.quick else None
        lab.attempt(f"{shape}: epoch, block", partial(_epoch, lab, shape, "block", most_steps=most))
    if not lab.quick:
        lab.attempt("products: epoch, tree, bf16 features", partial(_epoch, lab, "products", "tree", dtype="bfloat16"))


def _epoch(
    lab: Lab,
    shape: str,
    layout: str,
    target: float | None = None,
    most_steps: int | None = None,
    dtype: str | None = None,
) -> None:
    data = lab.shaped(shape, dtype)
    torch.manual_seed(0)
    name = f"{shape}: epoch, {layout}" + (", bf16 features" if dtype else "")
    found = timed_epochs(lab, data, sage(data), layout, 4, most_steps)
    stages = " ".join(
        f"{stage} {1e3 * s / found.share / num_steps(data):.3f}" for stage, s in found.last.stages.items()
    )
    lab.say(f"  ms a step by the trainer's timers: {stages}")
    aim = "; the aim is 0.6" if target == 0.75 else ""
    lab.row(name, found.seconds, "s", target, note=found.note + aim)
    lab.row(f"{name}: a step", 1e3 * found.seconds / num_steps(data), "ms")
    lab.memory_row(name, found.peak_bytes, "with graph and features")


def accuracy(lab: Lab) -> None:
    """The test accuracy of both layouts, and of training on whole neighbourhoods."""
    lab.attempt("accuracy", partial(_accuracy, lab))


def _accuracy(lab: Lab) -> None:
    nodes = max(4_000, round(200_000 * lab.scale))
    data = planted_partition(
        num_nodes=nodes,
        num_edges=20 * nodes,
        num_train=nodes // 5,
        num_valid=0,
        num_test=nodes // 4,
        signal=1.5,
        homophily=0.6,
        dtype="bfloat16",
        device=str(lab.device),
    )
    data = replace(data, splits={name: data.splits[name] for name in ("train", "test")})
    seeds, epochs = (2, 4) if lab.quick else (3, 8)
    found: dict[str, list[float]] = {}
    for name, layout, fanouts in (
        ("tree", "tree", (15, 10, 5)),
        ("block", "block", (15, 10, 5)),
        ("whole neighbourhoods", "block", (-1, -1, -1)),
    ):
        for seed in range(seeds):
            torch.manual_seed(seed)
            convs = sage(data, 128)
            size = min(512, batch_size(data))
            options: dict[str, Any] = {"epochs": epochs, "seed": seed, "fanouts": fanouts}
            run = make_trainer(lab, data, convs, layout, size, **options).fit()
            found.setdefault(name, []).append(100 * run.test)
        spread = statistics.stdev(found[name])
        values = " ".join(f"{value:.2f}" for value in found[name])
        lab.row(f"accuracy, {name}", statistics.fmean(found[name]), "%", note=f"± {spread:.2f}: {values}")
    apart = abs(statistics.fmean(found["tree"]) - statistics.fmean(found["block"]))
    both = statistics.stdev(found["tree"]) + statistics.stdev(found["block"])
    note = "target: both deviations together, or 0.3"
    lab.row("accuracy, tree and block apart", apart, "points", max(0.3, both), note=note)
