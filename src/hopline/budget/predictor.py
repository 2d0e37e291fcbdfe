"""The predicted peak of a step before it runs, from the numbers of nodes and edges in each layer.

Write s for the sizes of a step: nodes and edges per layer, and a 1 for the constant term. `Costs` holds the
bytes c_i per unit of each size, from the widths of the model alone, so that

    bound(s)     =  sum over i   c_i * s_i                an upper bound, usually far above the real peak
    expected(s)  =  sum over i   f_i * c_i * s_i          the factors f_i >= 0 are fitted to measured steps

`Predictor` returns the bound until `ENOUGH` steps were measured. Afterwards it returns the least of three
values:

    the bound
    expected(s), plus a margin from the residuals of the fit and from the distance of s to the measured steps
    the peak of a measured step, scaled up to sizes s (`_Fit.scale_up`), plus a margin

The second is never below what a measured step, scaled down to sizes s, has taken (`_Fit.scale_down`). CUDA's rounding
comes on top. A prediction costs a few operations on small arrays; an observation costs a fit.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from hopline.core.batch_sizes import Sizes
from hopline.core.row_handles import Readable, Rows
from hopline.nn.conv_facts import NORMALISED, is_fused
from hopline.nn.layered import Layered, inner_widths
from hopline.nn.whole_module import Whole
from hopline.ops.cpu.linear import ROWS

# ---- the bound

BYTES_PER_NODE = 64
"""Bytes of the bound per node for indices, degrees and weights, apart from rows."""
BYTES_PER_EDGE = 160
"""Bytes of the bound per edge for indices, degrees and weights, apart from rows."""
SMALL_TENSOR_BYTES = 1 << 16
"""Bytes of the bound per step for small tensors."""
CUDA_ROUNDING = 4 << 20
"""Bytes by which CUDA's allocator may exceed the requests of a step: it leaves up to 1 MiB of a block unused.
The number of such blocks is a rule of thumb."""
FORWARD = 0.5
"""Fraction of a training step's bound that bounds a forward pass without gradients."""

# ---- the fit

ENOUGH = 6
"""Steps that must have been measured before the predicted peak may be below the bound."""
MAX_OBSERVED = 128
"""Measured steps that the fit uses: the latest ones, of all sizes."""
RIDGE = 1e-4
"""Strength, per step, of the ridge penalty that pulls all factors of the fit towards one common factor.

With few steps the common factor decides; with many, each factor follows its own term. A rule of thumb.
"""
DEVIATIONS = 3.0
"""Standard deviations of the relative residuals that a predicted peak adds as its margin."""
MIN_MARGIN = 0.02
"""The least margin of a predicted peak, as a fraction of the expected bytes."""
BEYOND = 0.3
"""Fraction of the bound that is added for sizes beyond the largest measured.

A larger step may have its peak at another moment of the step, where other terms count.
"""
UNLIKE = 1.2
"""Margin for proportions of sizes outside those measured, as a fraction of the expected bytes.

A rule of thumb.

It is multiplied by the logarithm of how far outside they are. A step with other proportions may have its
peak at another moment, where other terms count.
"""


@dataclass(frozen=True, eq=False)
class Costs:
    """An upper bound of a step's bytes: a sum of bytes per node and per edge of each layer, and a
    constant."""

    per_node: tuple[float, ...]
    """[num_blocks + 1]: bytes per node, one entry for each of `Sizes.nodes`."""
    per_edge: tuple[float, ...]
    """[num_blocks]: bytes per edge, one entry for each of `Sizes.edges`."""
    fixed: float
    """Bytes per step whatever its sizes: gradients of the parameters, partial sums of them, small tensors."""
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
        per_node = tuple(FORWARD * num_bytes for num_bytes in self.per_node)
        per_edge = tuple(FORWARD * num_bytes for num_bytes in self.per_edge)
        return replace(self, per_node=per_node, per_edge=per_edge, fixed=FORWARD * self.fixed)


def costs_of(model: Layered | Whole, x: Rows | Readable | Tensor | None, num_blocks: int) -> Costs:
    """The bound for a model on batches whose input rows have the shape of `x`'s.

    Each term counts the numbers that are in memory at once in forward and backward, as multiples of the
    widths of rows. The multiples are rules of thumb, meant to lie above what steps take. x: None if there
    are no features.
    """
    width = 0 if x is None else math.prod(x.shape[1:])
    number_bytes = max((p.element_size() for p in model.parameters()), default=4)
    fixed = 3 * sum(p.numel() * p.element_size() for p in model.parameters()) + SMALL_TENSOR_BYTES
    rounding = CUDA_ROUNDING if any(p.is_cuda for p in model.parameters()) else 0.0
    if isinstance(model, Whole):
        # It runs all its layers on all nodes, so one term for nodes and one for edges cover everything.
        numbers = 6 * inner_widths([model]) + 2 * width
        return Costs(
            per_node=(numbers * number_bytes + BYTES_PER_NODE,) + (0.0,) * num_blocks,
            per_edge=(numbers * number_bytes + BYTES_PER_EDGE,) + (0.0,) * (num_blocks - 1),
            fixed=fixed,
            rounding=rounding,
        )

    model_sizes = model.sizes(width)
    node_numbers = [0.0] * (num_blocks + 1)
    per_edge = [0.0] * num_blocks
    node_numbers[0] += model_sizes.numbers_per_input
    for l, layer in enumerate(model_sizes.layers):
        for conv in layer.convs:
            numbers = _conv_numbers(conv.conv, conv.in_width, conv.width, layer.needs_input_gradient)
            node_numbers[l] += numbers.per_src
            node_numbers[l + 1] += numbers.per_dst
            per_edge[l] += numbers.per_edge * number_bytes + BYTES_PER_EDGE
        node_numbers[l + 1] += layer.numbers_per_dst
    node_numbers[-1] += model_sizes.numbers_per_output
    return Costs(
        per_node=tuple(numbers * number_bytes + BYTES_PER_NODE for numbers in node_numbers),
        per_edge=tuple(per_edge),
        fixed=fixed,
        rounding=rounding,
    )


class _ConvNumbers(NamedTuple):
    """The numbers (values, not bytes) that a conv holds at once in forward and backward."""

    per_src: float
    per_dst: float
    per_edge: float


def _conv_numbers(conv: Any, in_width: int, width: int, needs_input_gradient: bool) -> _ConvNumbers:
    """The numbers that a conv holds. in_width, width: of its input and output rows."""
    if not is_fused(conv):
        heads = getattr(conv, "heads", 1)
        channels = heads * getattr(conv, "out_channels", width)
        is_attention = heads > 1 or "GAT" in type(conv).__name__
        per_edge = 10 * channels if is_attention else 6 * (inner_widths([conv]) + in_width)
        per_node = 6 * (inner_widths([conv]) + channels)
        return _ConvNumbers(per_src=per_node, per_dst=per_node, per_edge=per_edge + 20 * heads)

    per_src = 3 * in_width if needs_input_gradient else 0
    if isinstance(conv, NORMALISED):  # multiplies by the weight before or after the reduction
        return _ConvNumbers(per_src=per_src + 4 * width, per_dst=3 * (in_width + width), per_edge=0)

    if getattr(conv, "project", False):
        per_src += 4 * in_width
    # Linear layers of the conv itself have rows of `in_width` and `width`, which other terms count. Other
    # modules, as the MLP of GINConv, have widths of their own.
    mlp_widths = inner_widths(child for name, child in conv.named_children() if not name.startswith("lin"))
    per_dst = 4 * in_width + 4 * mlp_widths
    if getattr(conv, "normalize", False):
        per_dst += 4 * width
    # The weight's gradient is summed from one gradient per range of ROWS rows.
    weight_gradients = 2 * in_width * width / ROWS
    return _ConvNumbers(per_src=per_src, per_dst=per_dst + weight_gradients, per_edge=0)


@dataclass(frozen=True, eq=False)
class _Fit:
    """The state of a predictor after some measured steps. Immutable, and replaced as a whole.

    A thread that predicts reads one reference and so sees a consistent state without a lock. Below,
    num_terms is the length of `Sizes.array`: all sizes and a 1.
    """

    factors: np.ndarray
    """[num_terms] float64: the fraction of each term of the bound that steps really take, 0 or more."""
    spread: np.ndarray
    """[num_terms, num_terms] float64: covariance of the factors, divided by the variance of the residuals."""
    deviation: float
    """The standard deviation of the relative residuals of the fit."""
    largest: np.ndarray
    """[num_terms] float64: the largest value of each size over the steps that the fit uses."""
    shapes: np.ndarray
    """[2, num_sizes] float64: the least and the largest value of each entry of `Sizes.shape` over these steps.

    `Sizes.shape` has the proportions of a step: the logarithms of its sizes, minus their mean.
    """
    sizes: np.ndarray
    """[num_kept, num_terms] float64: `Sizes.array` of the steps that the fit uses."""
    peaks: np.ndarray
    """[num_kept] float64: the measured peak bytes of the steps that the fit uses."""
    num_seen: int = 0
    over_bound: float = 1.0
    """The largest factor by which a step exceeded the bound; 1 if none did."""
    max_miss: float = 0.0
    """The most bytes by which a step missed the range that `scale_up` and `scale_down` gave for it before."""

    @cached_property
    def per_size(self) -> np.ndarray:
        """[num_kept, num_terms] float64: 1 / sizes. Stored because multiplying is faster than dividing."""
        return 1 / np.maximum(self.sizes, 1)

    def scale_up(self, sizes: Sizes) -> float:
        """An upper estimate of a step's peak from each measured step; returns the least of them.

        For a measured step with sizes m and peak p let t = max(1, max over i of s_i / m_i). The estimate is
        t * p. It rests on two assumptions: no larger size takes less memory, and t times all sizes take at
        most t times as much.
        """
        times = np.maximum.reduce(sizes.array * self.per_size, axis=1)
        return float(np.minimum.reduce(np.maximum(times, 1, out=times) * self.peaks))

    def scale_down(self, sizes: Sizes) -> float:
        """A lower estimate of a step's peak from each measured step; returns the largest of them.

        It rests on the assumptions of `scale_up`: a measured step with t times the sizes took at most t
        times as much.
        """
        times = (self.sizes / np.maximum(sizes.array, 1)).max(1)
        return float((self.peaks / np.maximum(times, 1)).max())

    def bytes_outside(self, sizes: Sizes, peak_bytes: float) -> float:
        """The bytes by which a step is outside the range that earlier steps give for it; negative or 0 if
        inside."""
        if self.num_seen < 2:  # the first step does not count (`Predictor.observe`)
            return 0.0
        return max(peak_bytes - self.scale_up(sizes), self.scale_down(sizes) - peak_bytes)


class Predictor:
    """Predicts the peak bytes of steps, and learns from measured ones.

    Call `observe` with every measured step and `predict_peak` before the next. Any thread may call either:
    observations take a lock, and predictions read one immutable `_Fit`.

    The fit scales the terms of the bound: with few steps all by one factor, with more each by its own.
    Errors are relative, so a small batch counts as much as a large one. No factor is negative: more nodes
    or edges never take less.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        # Before the first step: the bound itself, no sizes seen, and a measured step of infinite peak.
        ones = np.ones_like(costs.array)
        self._fit = _Fit(
            factors=ones,
            spread=np.zeros((ones.size, ones.size)),
            deviation=0.0,
            largest=ones,
            shapes=np.outer([np.inf, -np.inf], ones[1:]),
            sizes=ones[None],
            peaks=np.array([np.inf]),
        )
        self._observed: list[tuple[Sizes, float]] = []
        """Sizes and peak of the steps that the fit uses."""
        self._timed: list[tuple[float, float]] = []
        """Nodes and edges of all layers together, and seconds, of the steps that were timed."""
        self._lock = threading.Lock()

    @property
    def num_seen(self) -> int:
        return self._fit.num_seen

    @property
    def is_sure(self) -> bool:
        return self.num_seen >= ENOUGH

    def observe(self, sizes: Sizes, peak_bytes: int, seconds: float | None = None) -> None:
        """Learn from a step that took `peak_bytes`. seconds: its time. None: it was not timed."""
        with self._lock:
            if seconds is not None:
                self._timed.append((float(sizes.array.sum()), seconds))
            before = self._fit
            if before.num_seen == 1:
                # The second step replaces the first, which may have allocated memory that later steps find
                # in place.
                self._observed.clear()
            self._observed.append((sizes, float(max(peak_bytes, 1))))
            if len(self._observed) > MAX_OBSERVED:
                # Of the most common size, by powers of two, the oldest goes. If many small steps replaced the few
                # large ones, the fit would not know how large steps grow.
                octaves = [math.frexp(self.costs.bound(observed))[1] for observed, _ in self._observed]
                del self._observed[octaves.index(max(octaves, key=octaves.count))]

            factors, spread, deviation = self._fit_factors()
            all_sizes = np.array([observed.array for observed, _ in self._observed])
            # Of the steps that the fit uses: what it has forgotten, it must not count as seen.
            shapes = np.array([observed.shape for observed, _ in self._observed])
            self._fit = _Fit(
                factors=factors,
                spread=spread,
                deviation=deviation,
                largest=all_sizes.max(0),
                shapes=np.stack([shapes.min(0), shapes.max(0)]),
                sizes=all_sizes,
                peaks=np.array([peak for _, peak in self._observed]),
                num_seen=before.num_seen + 1,
                over_bound=max(before.over_bound, peak_bytes / self.costs.bound(sizes)),
                max_miss=max(before.max_miss, before.bytes_outside(sizes, peak_bytes)),
            )

    def expected_bytes(self, sizes: Sizes) -> float:
        """The expected bytes of a step of these sizes, without a margin. Before the first step, the bound."""
        return float((self.costs.array * sizes.array) @ self._fit.factors)

    def expected_s(self, sizes: Sizes) -> float:
        """The expected seconds of a step of these sizes. nan before the first timed step.

        A line from the fastest timed step through a large one. Of the three largest, the one with the flattest line
        counts: another process may have held up the others.
        """
        if not self._timed:
            return math.nan
        fixed_s = min(seconds for _, seconds in self._timed)
        per_size_s = min((seconds - fixed_s) / size for size, seconds in sorted(self._timed)[-3:])
        return fixed_s + per_size_s * float(sizes.array.sum())

    def predict_peak(self, sizes: Sizes) -> float:
        """The bytes that a step of these sizes will not exceed: the bound at first, then the fit and a
        margin.

        The formula is in the module's docstring.
        """
        fit = self._fit  # read once: another thread may replace it meanwhile
        bound = float(self.costs.array @ sizes.array) * fit.over_bound + self.costs.rounding
        if fit.num_seen < ENOUGH:
            return bound
        terms = self.costs.array * sizes.array
        expected = float(terms @ fit.factors)

        # Noise of one step, and on top the uncertainty of the factors for these sizes.
        noise = DEVIATIONS * fit.deviation
        margin = noise * math.sqrt(1 + float(terms @ fit.spread @ terms) / expected**2)
        # A step with sizes beyond the largest seen, or proportions outside those seen, may have its peak at
        # another moment.
        excess = sizes.array - fit.largest
        beyond_margin = BEYOND * float(self.costs.array @ np.maximum(excess, 0, out=excess)) / expected
        least_shape, largest_shape = fit.shapes
        outside = np.maximum.reduce(np.maximum(sizes.shape - largest_shape, least_shape - sizes.shape))
        unlike_margin = UNLIKE * max(0.0, float(outside))

        # Many small steps may draw the fit below the few large ones: steps at least half as large tell by how much.
        is_alike = fit.sizes @ self.costs.array >= bound / 2
        misses = fit.peaks[is_alike] / ((fit.sizes[is_alike] * self.costs.array) @ fit.factors)
        expected *= max(1.0, float(misses.max(initial=1.0)))

        fitted_bytes = expected * (1 + max(margin, MIN_MARGIN) + beyond_margin + unlike_margin)
        scaled_bytes = fit.scale_up(sizes) * (1 + max(noise, MIN_MARGIN)) + fit.max_miss
        least_bytes = fit.scale_down(sizes) * (1 + MIN_MARGIN)
        return min(bound, max(min(fitted_bytes, scaled_bytes), least_bytes) + self.costs.rounding)

    def _fit_factors(self) -> tuple[np.ndarray, np.ndarray, float]:
        """(factors, spread, deviation) of `_Fit`, by least squares of the relative errors with a ridge
        penalty.

        Row k of `shares` is c_i * s_i / peak of step k. With f0 the one factor that fits best for all
        terms, minimise

            sum over k   (1 - sum over i  shares[k, i] * f_i)^2   +   RIDGE * num_steps * sum over i  (f_i - f0)^2

        with every f_i >= 0. Terms whose factor comes out negative are set to 0, and the rest is fitted again.
        """
        peaks = np.array([peak for _, peak in self._observed])
        shares = self.costs.array * np.array([sizes.array for sizes, _ in self._observed]) / peaks[:, None]
        num_steps, num_terms = shares.shape
        total = shares.sum(1)
        common_factor = float(total.sum() / (total @ total))  # f0

        is_free = np.ones(num_terms, dtype=bool)
        factors = np.zeros(num_terms)
        penalty = RIDGE * num_steps * np.eye(num_terms)
        while True:
            free_shares = shares[:, is_free]
            inverse = np.linalg.inv(free_shares.T @ free_shares + penalty[np.ix_(is_free, is_free)])
            # f = f0 + d, where d is the ridge regression of the residuals that f0 leaves.
            factors[is_free] = common_factor + inverse @ free_shares.T @ (1 - common_factor * free_shares.sum(1))
            if (factors[is_free] >= 0).all():
                break
            is_free &= factors > 0
            factors[:] = 0
        spread = np.zeros((num_terms, num_terms))
        spread[np.ix_(is_free, is_free)] = inverse

        residuals = 1 - shares @ factors
        # Of a ridge regression: the trace of shares @ spread @ shares.T.
        degrees_of_freedom = float(np.einsum("ij,jk,ik->", shares, spread, shares))
        deviation = math.sqrt(float(residuals @ residuals) / max(1.0, num_steps - degrees_of_freedom))
        return factors, spread, deviation
