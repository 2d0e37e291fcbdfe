"""GATConv and GATv2Conv on a GPU, in both layouts, without a matrix with a row per edge.

For a destination i and its sources j, with x_j the projected row of a source and own_i that of the
destination, each head computes

    GATConv      score_ij = leaky_relu(att_src . x_j + att_dst . own_i)
    GATv2Conv    score_ij = att . leaky_relu(x_j + own_i)
    both         out_i = sum over j of  dropout(softmax over j of score_ij)  x_j

The conv's own modules compute the projection, the residual and the bias. Everything between projection and
bias is one kernel (`ops.gpu.attention`).

`conv_facts.is_fused_attention` decides whether a conv is fused. PyG's own code runs all others: convs with edge
features (`edge_dim`), with an aggregation other than a sum, with heads wider than `MAX_CHANNELS`, with
hooks or in explain mode, and subclasses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv

from hopline import ops
from hopline.core.batch import Block
from hopline.core.row_handles import Handle, as_dtype
from hopline.nn.tree_layers import compute_dtype, edges_to_attend
from hopline.ops.random import NUM_PURPOSES


def attention(
    conv: Any, h: Handle | Tensor, block: Block, h_dst: Handle | Tensor | None = None, layer: int = 0
) -> Tensor:
    """[num_dst, ...]: the output of a conv with `is_fused_attention` on a block.

    The kernel draws the dropout of the attention weights from the step's key, or from a random key if there
    is none.

    h: rows of the sources, or a handle to them.
    h_dst: rows of the destinations, if they are not the first of h. The conv must not add self-loops then.
    layer: the number of the layer in the model, so that every layer draws other weights.
    """
    parameter = conv.att_src if isinstance(conv, GATConv) else conv.att
    dtype = compute_dtype(parameter.dtype)  # autocast's precision, if it lowers float32
    rows = as_dtype(h, dtype)
    num_dst = block.num_dst
    dst_rows = rows[:num_dst] if h_dst is None else as_dtype(h_dst, dtype)
    p = conv.dropout if conv.training else 0.0
    x, own, att, att_own = _project(conv, rows, dst_rows, is_pair=h_dst is not None)
    if x.size(0) < num_dst:
        # Only between two tables. The kernel's backward writes a row of x's gradient per destination.
        x = torch.cat([x, x.new_zeros(num_dst - x.size(0), x.size(1))])
    key = _key(block, layer, rows.device) if p else None
    # PyG's attention vectors are [1, heads, out_channels].
    out = ops.gpu_kernels("attention").attend(
        x, own, att[0], None if att_own is None else att_own[0], edges_to_attend(block, x.size(0)),
        slope=conv.negative_slope, loops=conv.add_self_loops, p=p, key=key,
    )  # fmt: skip
    if not conv.concat:
        out = out.view(num_dst, conv.heads, conv.out_channels).mean(dim=1)
    if conv.res is not None:
        out = out + conv.res(dst_rows)
    # A float32 bias would turn half-precision rows into float32. Under autocast hidden rows stay in half
    # precision.
    return out if conv.bias is None else out + conv.bias.to(out.dtype)


def _project(
    conv: Any, rows: Tensor, dst_rows: Tensor, is_pair: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """(x, own, att, att_own): projected rows and attention vectors of sources and of destinations.

    own: None where the destinations' rows are the first of `x`. att_own: None for GATv2Conv, which has one
    vector.
    is_pair: whether the destinations are in a table of their own.
    """
    if isinstance(conv, GATv2Conv):
        own = None if conv.share_weights and not is_pair else conv.lin_r(dst_rows)
        return conv.lin_l(rows), own, conv.att, None
    if conv.lin is not None:
        return conv.lin(rows), conv.lin(dst_rows) if is_pair else None, conv.att_src, conv.att_dst
    return conv.lin_src(rows), conv.lin_dst(dst_rows), conv.att_src, conv.att_dst


def _key(block: Block, layer: int, device: torch.device) -> int | Tensor:
    """The key of a layer's attention dropout.

    A step has `NUM_PURPOSES` keys, numbered from -1 to NUM_PURPOSES - 2. Dropout on the layers' outputs takes
    them from the first on, attention from the last one down. So the two do not meet unless a model has very
    many layers.
    """
    if block.key is None:
        return torch.randint(-(2**63), 2**63 - 1, (1,), device=device)
    return ops.purpose_key(block.key, NUM_PURPOSES - 2 - layer)
