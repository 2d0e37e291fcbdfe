"""GATConv and GATv2Conv on a GPU, in both layouts, without a matrix with a row per edge.

For a destination i and its sources j, with x_j the projected row of a source and own_i that of the
destination, each head computes

    GATConv      score_ij = leaky_relu(att_src . x_j + att_dst . own_i)
    GATv2Conv    score_ij = att . leaky_relu(x_j + own_i)
    both         out_i = sum over j of  dropout(softmax over j of score_ij)  x_j

The conv's own modules compute the projection, the residual and the bias. Everything between projection and
bias is one kernel (`ops.gpu.attention`).

`is_fused_attention` decides whether a conv is fused. PyG's own code runs all others: convs with edge
features (`edge_dim`), with an aggregation other than a sum, with heads wider than `MAX_CHANNELS`, with
hooks or in explain mode, and subclasses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv
from torch_geometric.nn.aggr import SumAggregation

from hopline import ops
from hopline.core.batch import Block
from hopline.core.row_handles import Handle, as_dtype
from hopline.nn.tree_layers import compute_dtype, edges_to_attend
from hopline.ops.random import NUM_PURPOSES

MAX_CHANNELS = 512
"""Most columns of a head that is fused. A program of the kernel holds all columns of one head."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Endings of the attributes that hold a conv's hooks, those of PyG included (such as
`_message_forward_hooks`)."""


def is_fused_attention(conv: Any) -> bool:
    """Whether `attention` may run the conv. Exact types only: a subclass may have changed the message."""
    if type(conv) not in (GATConv, GATv2Conv):
        return False
    if conv.edge_dim is not None or conv.out_channels > MAX_CHANNELS or conv.flow != "source_to_target":
        return False
    is_observed = conv.explain or any(hooks for name, hooks in vars(conv).items() if name.endswith(HOOKS))
    return not is_observed and type(conv.aggr_module) is SumAggregation


def attention(conv: Any, h: Handle | Tensor, block: Block, layer: int = 0) -> Tensor:
    """[num_dst, ...]: the output of a conv with `is_fused_attention` on a block.

    The kernel draws the dropout of the attention weights from the step's key, or from a random key if there
    is none.

    h: rows of the block's sources, or a handle to them.
    layer: the number of the layer in the model, so that every layer draws other weights.
    """
    parameter = conv.att_src if isinstance(conv, GATConv) else conv.att
    rows = as_dtype(h, compute_dtype(parameter.dtype))  # autocast's precision, if it lowers float32
    num_dst = block.num_dst
    p = conv.dropout if conv.training else 0.0
    x, own, att, att_own = _project(conv, rows, num_dst)
    key = _key(block, layer, rows.device) if p else None
    # PyG's attention vectors are [1, heads, out_channels].
    out = ops.gpu_kernels("attention").attend(
        x, own, att[0], None if att_own is None else att_own[0], edges_to_attend(block),
        slope=conv.negative_slope, loops=conv.add_self_loops, p=p, key=key,
    )  # fmt: skip
    if not conv.concat:
        out = out.view(num_dst, conv.heads, conv.out_channels).mean(dim=1)
    if conv.res is not None:
        out = out + conv.res(rows[:num_dst])
    # A float32 bias would turn half-precision rows into float32. Under autocast hidden rows stay in half
    # precision.
    return out if conv.bias is None else out + conv.bias.to(out.dtype)


def _project(conv: Any, rows: Tensor, num_dst: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """(x, own, att, att_own): projected rows and attention vectors of sources and of destinations.

    own: None where the destinations' rows are the first of `x`. att_own: None for GATv2Conv, which has one
    vector.
    """
    if isinstance(conv, GATv2Conv):
        x = conv.lin_l(rows)
        own = None if conv.share_weights else conv.lin_r(rows[:num_dst])
        return x, own, conv.att, None
    if conv.lin is not None:
        return conv.lin(rows), None, conv.att_src, conv.att_dst
    return conv.lin_src(rows), conv.lin_dst(rows[:num_dst]), conv.att_src, conv.att_dst


def _key(block: Block, layer: int, device: torch.device) -> int | Tensor:
    """The key of a layer's attention dropout.

    A step has `NUM_PURPOSES` keys, numbered from -1 to NUM_PURPOSES - 2. Dropout on the layers' outputs takes
    them from the first on, attention from the last one down. So the two do not meet unless a model has very
    many layers.
    """
    if block.key is None:
        return torch.randint(-(2**63), 2**63 - 1, (1,), device=device)
    return ops.purpose_key(block.key, NUM_PURPOSES - 2 - layer)
