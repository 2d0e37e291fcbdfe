"""The penalty of GNNAutoScale on layers that are not smooth: noise on a layer's input moves its output far.

For a conv f in evaluation mode and its input rows h, with z standard normal, the penalty of a layer is

    mean over the destinations of   | f(h) - f(h + NOISE z) |

Historical training adds it to the loss, with the weight `Historical.lipschitz`, since historical embeddings
are not exact: a smooth layer carries less of their error on. Each conv except the first runs two more times
per step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hopline import ops
from hopline.core.batch import Block
from hopline.nn.conv_adapter import convolve
from hopline.nn.layered import ConvCall, Layered, State
from hopline.ops.random import draw, uniform

NOISE = 0.1
"""Standard deviation of the noise on a layer's input, as in GNNAutoScale."""
NOISE_PURPOSE = 1 << 21
"""Layer l draws its noise from key number NOISE_PURPOSE + l of a step. Dropout's numbers are far below, so that
no two draws share a key."""


def smoothness_penalty(model: Layered, l: int, state: State, block: Block) -> Tensor | None:
    """The penalty of layer `l` on a block: a scalar with a gradient.

    None for the first layer, whose input rows are features and never stale. None in evaluation or without
    gradients.
    """
    if l == 0 or not model.training or not torch.is_grad_enabled():
        return None
    spreads = [_spread(call, NOISE) for call in model.conv_calls(l, state, block)]
    return torch.stack(spreads).sum()


def _spread(call: ConvCall, noise: float) -> Tensor:
    """The mean over the destinations of |f(h) - f(h + noise z)|, with f the conv of a call."""
    conv, h, x0, block, number = call
    # In evaluation mode the conv draws no dropout, so that only the noise differs between the two calls.
    # Modes are restored module by module, since a user may have set some of them to evaluation.
    modes = [(module, module.training) for module in conv.modules()]
    conv.eval()
    try:
        moved = h + noise * _normal(h, block, number)
        change = convolve(conv, h, block, x0, number) - convolve(conv, moved, block, x0, number)
    finally:
        for module, was_training in modes:
            module.training = was_training
    return change.flatten(1).norm(dim=1).mean()


def _normal(h: Tensor, block: Block, l: int) -> Tensor:
    """Standard normal numbers in the shape of `h`, which depend only on (key, layer, node, column).

    If the step has no key, or has it on a device, torch's generator draws them.
    """
    if not isinstance(block.key, int):
        return torch.randn_like(h)
    columns = torch.arange(h.size(1), device=h.device)
    raw = draw(ops.derive_key(block.key, NOISE_PURPOSE + l), block.src_keys[: h.size(0), None], columns)
    # Box-Muller: sqrt(-2 ln u) cos(2 pi v) is standard normal for uniform u and v. Both come from one
    # 64-bit draw, 26 bits each. 1 - uniform is above 0, so that its logarithm is finite.
    v = uniform(raw, 26)
    u = 1 - uniform(raw >> 26, 26)
    return ((-2 * u.log()).sqrt() * (2 * math.pi * v).cos()).to(h.dtype)
