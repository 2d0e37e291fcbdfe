"""Peak bytes of a step before it runs, from the numbers of nodes and edges of its layers.

`Costs` is an upper bound by the widths of the model alone. `Predictor` begins with it, learns from what steps really
took how much of each of its terms there is, and bounds its own error by the residuals.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor, nn

from hopline.core.row_handles import Readable, Rows
from hopline.core.sizes import Sizes
from hopline.nn.fused import NORMALISED, is_fused
from hopline.nn.gnn import GNN, out_width
from hopline.nn.whole_module import Whole
from hopline.ops.cpu.linear import ROWS

PER_NODE, PER_EDGE, SMALL = 64, 160, 1 << 16
"""Bytes for indices, degrees and weights at a node and at an edge, and for what is small in every step."""
CUDA_ROUNDING = 4 << 20
"""Bytes by which CUDA's allocator may give more than was asked: it leaves up to a MiB of a block unused."""
FORWARD = 0.5
"""How much of a training step's bound bounds a forward pass."""
ENOUGH = 6
"""Steps that must have been measured before anything but the bound is promised."""
MAX_OBSERVED = 128
"""Steps that are remembered: the latest."""
RIDGE = 1e-4
"""How much the terms are held together: few steps tell how large all are, many how large each is."""
DEVIATIONS = 3.0
"""Standard deviations of the residuals that are added to a promise,"""
MIN_MARGIN = 0.02
"""and the least share of it that is."""
BEYOND = 0.3
"""Share of the bound added for what goes beyond the largest step seen: another moment may then be the step's peak."""
UNLIKE = 1.2
"""Share added for proportions outside those seen, by the logarithm of how far outside: for the same reason."""


@dataclass(frozen=True, eq=False)
class Costs:
    """Bytes that a step takes at most: so many per node and per edge of each layer, and so many besides."""

    per_node: tuple[float, ...]
    """By the entries of `Sizes.nodes`."""
    per_edge: tuple[float, ...]
    """By the entries of `Sizes.edges`."""
    fixed: float
    """Gradients of the parameters, and what they are summed from."""
    rounding: float = 0.0
    """What an allocator adds, by whichever blocks it has at hand: never learnt, always promised."""

    @cached_property
    def array(self) -> np.ndarray:
        return np.array((*self.per_node, *self.per_edge, self.fixed), dtype=np.float64)

    def bound(self, sizes: Sizes) -> float:
        return float(self.array @ sizes.array)

    def forward_only(self) -> Costs:
        """The bound for a forward pass without gradients, which keeps no layer for later."""
        per_node, per_edge = (tuple(FORWARD * each for each in terms) for terms in (self.per_node, self.per_edge))
        return Costs(per_node, per_edge, FORWARD * self.fixed, self.rounding)


def costs_of(model: GNN | Whole, x: Rows | Readable | Tensor | None, num_blocks: int) -> Costs:
    """The bound for a model on batches whose input rows are like `x`."""
    width = 0 if x is None else math.prod(x.shape[1:])
    unit = max((p.element_size() for p in model.parameters()), default=4)
    fixed = 3 * sum(p.numel() * p.element_size() for p in model.parameters()) + SMALL
    rounding = CUDA_ROUNDING if any(p.is_cuda for p in model.parameters()) else 0.0
    if isinstance(model, Whole):  # all layers on all nodes, however many layers there are
        numbers = 6 * _widths(model) + 2 * width
        edges = (numbers * unit + PER_EDGE, *[0.0] * (num_blocks - 1))
        return Costs((numbers * unit + PER_NODE, *[0.0] * num_blocks), edges, fixed, rounding)
    nodes, edges = [0.0] * (num_blocks + 1), [0.0] * num_blocks
    if model.encoder is not None:
        nodes[0] += 2 * width + 4 * _widths(model.encoder)
        width = out_width(model.encoder)
    nodes[0] += 0 if model.reads_rows else 3 * width
    widths = [width]
    for conv in model.convs:  # one without weights leaves the width as it is
        widths.append(out_width(conv) if any(True for _ in conv.parameters()) else widths[-1])
    after_conv = 6 + 6 * (model.residual or model.encodes or any(type(n) is not nn.Identity for n in model.norms))
    for l, (before, after) in enumerate(pairwise(widths)):
        src, dst, edge = _conv_numbers(model.convs[l], before, after, learns=l > 0 or model.encodes)
        nodes[l] += src
        nodes[l + 1] += dst + after_conv * after + 2 * sum(widths) * model.keeps_jk
        edges[l] = edge * unit + PER_EDGE
    head = [module for module in (getattr(model, "jk", None), getattr(model, "lin", None)) if module is not None]
    nodes[-1] += 6 * (sum(map(_widths, head)) + widths[-1])
    return Costs(tuple(n * unit + PER_NODE for n in nodes), tuple(edges), fixed, rounding)


def _conv_numbers(conv: Any, before: int, after: int, learns: bool) -> tuple[float, float, float]:
    """Numbers that a conv has at once in forward and backward, per source, per destination and per edge.

    learns: whether its input rows have a gradient.
    """
    heads = getattr(conv, "heads", 1)
    if not is_fused(conv):
        channels = heads * getattr(conv, "out_channels", after)
        by_edge = 10 * channels if heads > 1 or "GAT" in type(conv).__name__ else 6 * (_widths(conv) + before)
        by_node = 6 * (_widths(conv) + channels)
        return by_node, by_node, by_edge + 20 * heads
    src = 3 * before * learns
    if isinstance(conv, NORMALISED):  # the product comes first, or after the reduction
        return src + 4 * after, 3 * (before + after), 0
    inside = sum(_widths(m) for name, m in conv.named_children() if not name.startswith("lin"))
    sums = 2 * before * after / ROWS  # a product's gradient is the sum of one per range of rows
    projected = 4 * before * bool(getattr(conv, "project", False))
    return src + projected, 4 * before + 4 * inside + 4 * after * bool(getattr(conv, "normalize", False)) + sums, 0


def _widths(module: nn.Module) -> int:
    """What goes into and comes out of the weights in a module, side by side."""
    return sum(sum(p.shape) for p in module.parameters() if p.dim() >= 2)


@dataclass(frozen=True, eq=False)
class _Fit:
    """What a predictor makes of the steps it saw; replaced as a whole, so that any thread may ask at any time."""

    factors: np.ndarray
    """How much of each term of the bound there is,"""
    spread: np.ndarray
    """how sure that is,"""
    deviation: float
    """and the standard deviation of the relative errors."""
    largest: np.ndarray
    """The most of each size that was seen."""
    shapes: np.ndarray
    """[2, num_sizes] the least and the most of each `Sizes.shape` that was seen."""
    sizes: np.ndarray
    """[num_kept, num_sizes] of the steps that are remembered,"""
    taken: np.ndarray
    """[num_kept] and what they took."""
    num_seen: int = 0
    over_bound: float = 1.0
    """By what factor the bound was exceeded, if it ever was,"""
    unsteady: float = 0.0
    """and by how many bytes a step was off what all others say of it by `scaled`."""

    @cached_property
    def per_size(self) -> np.ndarray:
        """What `sizes` are divided by, or multiplied with their inverse, which takes less long."""
        return 1 / np.maximum(self.sizes, 1)

    def scaled(self, sizes: Sizes) -> float:
        """What a step that was seen took, times by how much the largest of the sizes exceeds its own, at the least.

        At every moment of a step no size takes less the more there is of it, and twice of all takes no more than twice.
        """
        times = np.maximum.reduce(sizes.array * self.per_size, axis=1)
        return float(np.minimum.reduce(np.maximum(times, 1, out=times) * self.taken))

    def scaled_down(self, sizes: Sizes) -> float:
        """The least that it takes for the same reason, if what is larger takes no less."""
        times = (self.sizes / np.maximum(sizes.array, 1)).max(1)
        return float((self.taken / np.maximum(times, 1)).max())


class Predictor:
    """Learns what steps take. Give it every measured step; ask it before the next, in any thread.

    The terms of the bound are kept and scaled: with few steps all by one factor, with more each by its own. Errors are
    relative, so a small batch counts as much as a large one. No factor is negative: more rows or edges never take less.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        ones = np.ones_like(costs.array)
        shapes = np.outer([np.inf, -np.inf], ones[1:])
        self._learnt = _Fit(ones, np.zeros((ones.size, ones.size)), 0.0, ones, shapes, ones[None], np.array([np.inf]))
        self._sizes: deque[np.ndarray] = deque(maxlen=MAX_OBSERVED)
        self._taken: deque[float] = deque(maxlen=MAX_OBSERVED)
        self._lock = threading.Lock()

    @property
    def num_seen(self) -> int:
        return self._learnt.num_seen

    @property
    def is_sure(self) -> bool:
        """Whether enough steps were measured to promise less than the bound."""
        return self.num_seen >= ENOUGH

    def observe(self, sizes: Sizes, peak_bytes: int) -> None:
        """Learn from a step that took `peak_bytes`."""
        with self._lock:
            before = self._learnt
            if before.num_seen == 1:  # the first may have set up what all others find
                self._sizes.clear()
                self._taken.clear()
            self._sizes.append(sizes.array)
            self._taken.append(float(max(peak_bytes, 1)))
            factors, spread, deviation = self._fit()
            self._learnt = _Fit(
                factors,
                spread,
                deviation,
                largest=np.maximum(before.largest, sizes.array),
                shapes=np.stack([np.minimum(before.shapes[0], sizes.shape), np.maximum(before.shapes[1], sizes.shape)]),
                sizes=np.array(self._sizes),
                taken=np.array(self._taken),
                num_seen=before.num_seen + 1,
                over_bound=max(before.over_bound, peak_bytes / self.costs.bound(sizes)),
                unsteady=max(before.unsteady, self._apart(before, sizes, peak_bytes)),
            )

    @staticmethod
    def _apart(learnt: _Fit, sizes: Sizes, peak_bytes: float) -> float:
        """By how many bytes a step took more or less than all before it say."""
        if learnt.num_seen < 2:
            return 0.0
        return max(peak_bytes - learnt.scaled(sizes), learnt.scaled_down(sizes) - peak_bytes)

    def expected_bytes(self, sizes: Sizes) -> float:
        """Bytes that a step of these sizes is expected to take; the bound as long as nothing was measured."""
        return float((self.costs.array * sizes.array) @ self._learnt.factors)

    def predict_peak(self, sizes: Sizes) -> float:
        """Bytes that a step of these sizes will not exceed: the bound at first, then what was learnt and a margin."""
        learnt = self._learnt
        terms = self.costs.array * sizes.array
        bound = float(self.costs.array @ sizes.array) * learnt.over_bound + self.costs.rounding
        if learnt.num_seen < ENOUGH:
            return bound
        expected, noise, shape = float(terms @ learnt.factors), DEVIATIONS * learnt.deviation, sizes.shape
        margin = noise * math.sqrt(1 + float(terms @ learnt.spread @ terms) / expected**2)
        more = sizes.array - learnt.largest
        beyond = BEYOND * float(self.costs.array @ np.maximum(more, 0, out=more)) / expected
        apart = np.maximum.reduce(np.maximum(shape - learnt.shapes[1], learnt.shapes[0] - shape))
        other = UNLIKE * max(0.0, float(apart))
        learnt_bytes = expected * (1 + max(margin, MIN_MARGIN) + beyond + other)
        scaled_bytes = learnt.scaled(sizes) * (1 + max(noise, MIN_MARGIN)) + learnt.unsteady
        return min(bound, min(learnt_bytes, scaled_bytes) + self.costs.rounding)

    def _fit(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Least squares of the relative errors, with every factor held to the one that fits best for all."""
        taken = np.array(self._taken)
        shares = self.costs.array * np.array(self._sizes) / taken[:, None]
        total = shares.sum(1)
        common = float(total.sum() / (total @ total))
        free = np.ones(shares.shape[1], dtype=bool)
        factors = np.zeros(shares.shape[1])
        held = RIDGE * len(taken) * np.eye(len(free))
        while True:
            use = shares[:, free]
            inverse = np.linalg.inv(use.T @ use + held[np.ix_(free, free)])
            factors[free] = common + inverse @ use.T @ (1 - common * use.sum(1))
            if (factors[free] >= 0).all():
                break
            free &= factors > 0
            factors[:] = 0
        spread = np.zeros((len(free), len(free)))
        spread[np.ix_(free, free)] = inverse
        errors = 1 - shares @ factors
        used = float(np.einsum("ij,jk,ik->", shares, spread, shares))  # how many steps the factors took to find
        return factors, spread, math.sqrt(float(errors @ errors) / max(1.0, len(taken) - used))
