"""How far noise on a layer's input moves its output: the penalty of GNNAutoScale on layers that are not smooth."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hopline import ops
from hopline.core.batch import Block
from hopline.core.row_handles import as_tensor
from hopline.nn.conv_adapter import convolve
from hopline.nn.gnn import GNN, State
from hopline.ops.random import draw, uniform

NOISE = 0.1
"""Standard deviation of the noise on a layer's input, as in GNNAutoScale."""
ROWS = 1 << 21
"""Place of these draws among the keys of a step, apart from those of the layers' dropout."""


def spread_of(model: GNN, l: int, state: State, block: Block) -> Tensor | None:
    """How far noise on the input of layer `l` moves its conv's output: a mean distance over the destinations.

    None for the first layer, which reads no row that may be stale, and where no gradient is wanted.
    """
    if l == 0 or not model.training or not torch.is_grad_enabled():
        return None
    return _spread(model, l, state, block, NOISE)


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
    angle, size = uniform(raw, 26), 1 - uniform(raw >> 26, 26)  # two numbers of one draw; the second above 0
    return ((-2 * size.log()).sqrt() * (2 * math.pi * angle).cos()).to(h.dtype)
