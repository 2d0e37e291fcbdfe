"""The predicted peak of a step before it runs, from the numbers of nodes and edges in each layer.

Write s for the sizes of a step: nodes and edges per layer, and a 1 for the constant term. `Costs` holds the bytes c_i
per unit of each size, from the widths of the model alone, so that

    bound(s)     =  sum over i   c_i * s_i                an upper bound, usually far above the real peak
    expected(s)  =  sum over i   f_i * c_i * s_i          the factors f_i >= 0 are fitted to measured steps

`Predictor` returns the bound until `ENOUGH` steps were measured. Afterwards it returns the least of three values:

    the bound
    expected(s), plus a margin from the residuals of the fit and from how unlike the measured steps s is
    the peak of a measured step, scaled up to sizes s (`_Fit.scaled`), plus a margin

CUDA's rounding comes on top. A prediction costs a few operations on small arrays; an observation costs a fit.
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
"""Bytes of the bound besides rows. Rules of thumb.

PER_NODE, PER_EDGE: bytes per node and per edge for indices, degrees and weights. SMALL: bytes per step for small
tensors.
"""
CUDA_ROUNDING = 4 << 20
"""Bytes by which CUDA's allocator may exceed the requests of a step: it leaves up to 1 MiB of a block unused.
The number of such blocks is a rule of thumb."""
FORWARD = 0.5
"""Fraction of a training step's bound that bounds a forward pass without gradients. A rule of thumb."""
ENOUGH = 6
"""Steps that must have been measured before the predicted peak may be below the bound. A rule of thumb."""
MAX_OBSERVED = 128
"""Measured steps that the fit uses: the latest ones. A rule of thumb."""
RIDGE = 1e-4
"""Strength, per step, of the ridge penalty that pulls all factors of the fit towards one common factor.

With few steps the common factor decides; with many, each factor follows its own term. A rule of thumb.
"""
DEVIATIONS = 3.0
"""Standard deviations of the relative residuals that a predicted peak adds as its margin. A rule of thumb."""
MIN_MARGIN = 0.02
"""The least margin of a predicted peak, as a fraction of the expected bytes. A rule of thumb."""
BEYOND = 0.3
"""Fraction of the bound that is added for sizes beyond the largest measured. A rule of thumb.

A larger step may have its peak at another moment of the step, where other terms count.
"""
UNLIKE = 1.2
"""Margin for proportions of sizes outside those measured, as a fraction of the expected bytes. A rule of thumb.

It is multiplied by the logarithm of how far outside they are. A step with other proportions may have its peak at
another moment, where other terms count.
"""


@dataclass(frozen=True, eq=False)
class Costs:
    """An upper bound of a step's bytes: a sum of bytes per node and per edge of each layer, and a constant."""

    per_node: tuple[float, ...]
    """[num_blocks + 1]: bytes per node, one entry for each of `Sizes.nodes`."""
    per_edge: tuple[float, ...]
    """[num_blocks]: bytes per edge, one entry for each of `Sizes.edges`."""
    fixed: float
    """Bytes per step whatever its sizes: gradients of the parameters, and the terms that these are summed from."""
    rounding: float = 0.0
    """Bytes that the allocator may add. They depend on its free blocks, so no fit learns them."""

    @cached_property
    def array(self) -> np.ndarray:
        """[num_sizes + 1] float64: all costs, in the order of `Sizes.array`."""
        return np.array((*self.per_node, *self.per_edge, self.fixed), dtype=np.float64)

    def bound(self, sizes: Sizes) -> float:
        """The most bytes that a step of these sizes takes, apart from `rounding`."""
        return float(self.array @ sizes.array)

    def forward_only(self) -> Costs:
        """The bound for a forward pass without gradients, which keeps no layer for a backward pass."""
        per_node, per_edge = (tuple(FORWARD * each for each in terms) for terms in (self.per_node, self.per_edge))
        return Costs(per_node, per_edge, FORWARD * self.fixed, self.rounding)


def costs_of(model: GNN | Whole, x: Rows | Readable | Tensor | None, num_blocks: int) -> Costs:
    """The bound for a model on batches whose input rows have the shape of `x`'s.

    Each term counts the numbers that are in memory at once in forward and backward, as multiples of the widths of
    rows. The multiples are rules of thumb, meant to lie above what steps take. x: None if there are no features.
    """
    width = 0 if x is None else math.prod(x.shape[1:])
    unit = max((p.element_size() for p in model.parameters()), default=4)
    fixed = 3 * sum(p.numel() * p.element_size() for p in model.parameters()) + SMALL
    rounding = CUDA_ROUNDING if any(p.is_cuda for p in model.parameters()) else 0.0
    if isinstance(model, Whole):  # runs all its layers on all nodes: one node term and one edge term cover everything
        numbers = 6 * _widths(model) + 2 * width
        edges = (numbers * unit + PER_EDGE, *[0.0] * (num_blocks - 1))
        return Costs((numbers * unit + PER_NODE, *[0.0] * num_blocks), edges, fixed, rounding)
    nodes, edges = [0.0] * (num_blocks + 1), [0.0] * num_blocks
    if model.encoder is not None:
        nodes[0] += 2 * width + 4 * _widths(model.encoder)
        width = out_width(model.encoder)
    nodes[0] += 0 if model.reads_rows else 3 * width
    widths = [width]
    for conv in model.convs:  # a conv without weights leaves the width as it is
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
    """Numbers that a conv holds at once in forward and backward: (per source, per destination, per edge).

    learns: whether the conv's input rows need a gradient.
    """
    heads = getattr(conv, "heads", 1)
    if not is_fused(conv):
        channels = heads * getattr(conv, "out_channels", after)
        by_edge = 10 * channels if heads > 1 or "GAT" in type(conv).__name__ else 6 * (_widths(conv) + before)
        by_node = 6 * (_widths(conv) + channels)
        return by_node, by_node, by_edge + 20 * heads
    src = 3 * before * learns
    if isinstance(conv, NORMALISED):  # multiplies by the weight before or after the reduction
        return src + 4 * after, 3 * (before + after), 0
    inside = sum(_widths(m) for name, m in conv.named_children() if not name.startswith("lin"))
    sums = 2 * before * after / ROWS  # the weight's gradient is summed from one per range of ROWS rows
    projected = 4 * before * bool(getattr(conv, "project", False))
    return src + projected, 4 * before + 4 * inside + 4 * after * bool(getattr(conv, "normalize", False)) + sums, 0


def _widths(module: nn.Module) -> int:
    """The sum of the input and output widths of all weight matrices in a module."""
    return sum(sum(p.shape) for p in module.parameters() if p.dim() >= 2)


@dataclass(frozen=True, eq=False)
class _Fit:
    """The state of a predictor after some measured steps. Immutable, and replaced as a whole.

    A thread that predicts reads one reference and so sees a consistent state without a lock. Below, num_terms is the
    length of `Sizes.array`: all sizes and a 1.
    """

    factors: np.ndarray
    """[num_terms] float64: the fraction of each term of the bound that steps really take, from 0 on."""
    spread: np.ndarray
    """[num_terms, num_terms] float64: covariance of the factors, up to the variance of the residuals."""
    deviation: float
    """The standard deviation of the relative residuals of the fit."""
    largest: np.ndarray
    """[num_terms] float64: the largest value of each size over all steps."""
    shapes: np.ndarray
    """[2, num_sizes] float64: the least and the largest value of each entry of `Sizes.shape` over all steps."""
    sizes: np.ndarray
    """[num_kept, num_terms] float64: `Sizes.array` of the steps that the fit uses."""
    taken: np.ndarray
    """[num_kept] float64: the measured peak bytes of the steps that the fit uses."""
    num_seen: int = 0
    """The number of steps measured so far."""
    over_bound: float = 1.0
    """The largest factor by which a step exceeded the bound; 1 if none did."""
    unsteady: float = 0.0
    """The most bytes by which a step missed the range that `scaled` and `scaled_down` gave for it before."""

    @cached_property
    def per_size(self) -> np.ndarray:
        """[num_kept, num_terms] float64: 1 / sizes. Stored because multiplying is faster than dividing."""
        return 1 / np.maximum(self.sizes, 1)

    def scaled(self, sizes: Sizes) -> float:
        """An upper estimate of a step's peak from each measured step; returns the least of them.

        For a measured step with sizes m and peak p let t = max(1, max over i of s_i / m_i). The estimate is t * p.
        It rests on two assumptions: no larger size takes less memory, and t times all sizes take at most t times as
        much.
        """
        times = np.maximum.reduce(sizes.array * self.per_size, axis=1)
        return float(np.minimum.reduce(np.maximum(times, 1, out=times) * self.taken))

    def scaled_down(self, sizes: Sizes) -> float:
        """A lower estimate of a step's peak from each measured step; returns the largest of them.

        It rests on the assumptions of `scaled`: a measured step with t times the sizes took at most t times as much.
        """
        times = (self.sizes / np.maximum(sizes.array, 1)).max(1)
        return float((self.taken / np.maximum(times, 1)).max())


class Predictor:
    """Predicts the peak bytes of steps, and learns from measured ones.

    Call `observe` with every measured step and `predict_peak` before the next. Any thread may call either:
    observations take a lock, and predictions read one immutable `_Fit`.

    The fit scales the terms of the bound: with few steps all by one factor, with more each by its own. Errors are
    relative, so a small batch counts as much as a large one. No factor is negative: more nodes or edges never take
    less.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        # Before the first step: the bound itself, no sizes seen, and a measured step of infinite peak.
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
        """Whether enough steps were measured to predict less than the bound."""
        return self.num_seen >= ENOUGH

    def observe(self, sizes: Sizes, peak_bytes: int) -> None:
        """Learn from a step that took `peak_bytes`."""
        with self._lock:
            before = self._learnt
            if before.num_seen == 1:
                # The second step replaces the first, which may have allocated memory that later steps find in place.
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
        """The bytes by which a step is outside the range that earlier steps give for it; negative or 0 if inside."""
        if learnt.num_seen < 2:
            return 0.0
        return max(peak_bytes - learnt.scaled(sizes), learnt.scaled_down(sizes) - peak_bytes)

    def expected_bytes(self, sizes: Sizes) -> float:
        """The expected bytes of a step of these sizes, without a margin. Before the first step, the bound."""
        return float((self.costs.array * sizes.array) @ self._learnt.factors)

    def predict_peak(self, sizes: Sizes) -> float:
        """The bytes that a step of these sizes will not exceed: the bound at first, then the fit and a margin.

        The formula is in the module's docstring.
        """
        learnt = self._learnt
        terms = self.costs.array * sizes.array
        bound = float(self.costs.array @ sizes.array) * learnt.over_bound + self.costs.rounding
        if learnt.num_seen < ENOUGH:
            return bound
        expected, noise, shape = float(terms @ learnt.factors), DEVIATIONS * learnt.deviation, sizes.shape
        # Noise of one step, and on top the uncertainty of the factors for these sizes.
        margin = noise * math.sqrt(1 + float(terms @ learnt.spread @ terms) / expected**2)
        # Sizes beyond the largest seen, and proportions outside those seen: the peak may be at another moment.
        more = sizes.array - learnt.largest
        beyond = BEYOND * float(self.costs.array @ np.maximum(more, 0, out=more)) / expected
        apart = np.maximum.reduce(np.maximum(shape - learnt.shapes[1], learnt.shapes[0] - shape))
        other = UNLIKE * max(0.0, float(apart))
        learnt_bytes = expected * (1 + max(margin, MIN_MARGIN) + beyond + other)
        scaled_bytes = learnt.scaled(sizes) * (1 + max(noise, MIN_MARGIN)) + learnt.unsteady
        return min(bound, min(learnt_bytes, scaled_bytes) + self.costs.rounding)

    def _fit(self) -> tuple[np.ndarray, np.ndarray, float]:
        """(factors, spread, deviation) of `_Fit`, by least squares of the relative errors with a ridge penalty.

        Row k of `shares` is c_i * s_i / peak of step k. With f0 the one factor that fits best for all terms, minimise

            sum over k   (1 - sum over i  shares[k, i] * f_i)^2   +   RIDGE * num_steps * sum over i  (f_i - f0)^2

        with every f_i >= 0. Terms whose factor comes out negative are set to 0, and the rest is fitted again.
        """
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
        used = float(np.einsum("ij,jk,ik->", shares, spread, shares))  # degrees of freedom of the fit
        return factors, spread, math.sqrt(float(errors @ errors) / max(1.0, len(taken) - used))
