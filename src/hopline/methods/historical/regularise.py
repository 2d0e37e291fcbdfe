"""What keeps a model from leaning on rows that may be stale: edges dropped at random, and layers held smooth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from hopline import ops
from hopline.core.batch import Block, edges_where
from hopline.core.row_handles import as_tensor
from hopline.nn.conv_adapter import convolve
from hopline.nn.gnn import GNN, State
from hopline.ops.random import draw

NOISE = 0.1
"""Standard deviation of the noise on a layer's input, as in GNNAutoScale."""
EDGES, ROWS = 1 << 20, 1 << 21
"""Places of these draws among the keys of a step, apart from those of the layers' dropout."""


def drop_edges(block: Block, p: float, key: int) -> Block:
    """A block without a share `p` of its edges, drawn by (key, edge id); its nodes stay.

    Sums are not scaled up, but convs that normalise by degree weigh the edges that are left by degree / left, as they
    do with sampled ones.
    """
    edge_ids = block.part.edge_ids
    assert edge_ids is not None, "the block was made without edge ids"
    kept = _uniform(draw(ops.derive_key(key, EDGES), edge_ids, 0), 53) >= p
    return replace(block, parts=(edges_where(block.part, kept),))


@contextmanager
def spreads(model: GNN, wanted: bool = True, noise: float = NOISE) -> Iterator[list[Tensor]]:
    """While this lasts, how far noise on a layer's input moves its conv's output: a mean distance per layer.

    All layers but the first count: they read rows that may be stale. Their mean is GNNAutoScale's penalty on layers
    that are not Lipschitz continuous.
    """
    found: list[Tensor] = []
    if not wanted:
        yield found
        return

    def layer(l: int, state: State, block: Block) -> State:
        if l > 0 and model.training and torch.is_grad_enabled():  # rows of the halo are constants
            found.append(_spread(model, l, state, block, noise))
        return GNN.layer(model, l, state, block)

    vars(model)["layer"] = layer
    try:
        yield found
    finally:
        del vars(model)["layer"]


def _spread(model: GNN, l: int, state: State, block: Block, noise: float) -> Tensor:
    """Mean over the destinations of |f(h) - f(h + noise)|, f being the conv in evaluation: only the noise differs."""
    conv, h = model.convs[l], as_tensor(state.h)
    x0 = None if state.x0 is None else state.x0[: block.num_dst]
    modes = [(module, module.training) for module in conv.modules()]
    conv.eval()
    try:
        moved = h + noise * _normal(h, block, l)
        change = convolve(conv, h, block, x0, l) - convolve(conv, moved, block, x0, l)
    finally:
        for module, was_training in modes:
            module.training = was_training
    return change.flatten(1).norm(dim=1).mean()


def _normal(h: Tensor, block: Block, l: int) -> Tensor:
    """Standard normal numbers like `h`, by (key, layer, node, column)."""
    if not isinstance(block.key, int):
        return torch.randn_like(h)
    columns = torch.arange(h.size(1), device=h.device)
    raw = draw(ops.derive_key(block.key, ROWS + l), block.src_keys[: h.size(0), None], columns)
    angle, size = _uniform(raw, 26), 1 - _uniform(raw >> 26, 26)  # two numbers of one draw; the second above 0
    return ((-2 * size.log()).sqrt() * (2 * math.pi * angle).cos()).to(h.dtype)


def _uniform(raw: Tensor, bits: int) -> Tensor:
    """Numbers from 0 up to 1, of the lowest bits of some draws: float64."""
    return (raw & ((1 << bits) - 1)).double() / (1 << bits)
