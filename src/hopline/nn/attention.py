"""GATConv and GATv2Conv on a GPU, on trees and on blocks, without a matrix with a row per edge.

The conv's own modules and parameters are used; only what lies between its projection and its bias is one kernel. Not
fused, and left to PyG's own code: convs with edge features (`edge_dim`), another aggregation than a sum, heads wider
than a kernel holds, subclasses, and convs that something listens to by a hook.
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
"""The widest head that is fused: a program of the kernel holds all columns of one."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_fused_attention(conv: Any) -> bool:
    """Exact types only: a subclass may have changed the message."""
    if type(conv) not in (GATConv, GATv2Conv) or conv.edge_dim is not None or conv.out_channels > MAX_CHANNELS:
        return False
    heard = conv.explain or any(hooks for name, hooks in vars(conv).items() if name.endswith(HOOKS))
    return not heard and type(conv.aggr_module) is SumAggregation and conv.flow == "source_to_target"


def attention(conv: Any, h: Handle | Tensor, block: Block, layer: int = 0) -> Tensor:
    """A conv with `is_fused_attention` on a block: [num_dst, ...]. layer: which of the model's the draws are for.

    Dropout of the attention weights is drawn in the kernel, from the step's key where there is one.
    """
    rows = as_dtype(h, compute_dtype(conv.att_src.dtype if isinstance(conv, GATConv) else conv.att.dtype))
    num_dst, heads, p = block.num_dst, conv.heads, conv.dropout if conv.training else 0.0
    x, own, att, att_own = _projected(conv, rows, num_dst)
    out = ops.gpu_kernels("attention").attend(
        x, own, att[0], None if att_own is None else att_own[0], edges_to_attend(block),
        slope=conv.negative_slope, loops=conv.add_self_loops, p=p, key=_key(block, layer, rows.device) if p else None,
    )  # fmt: skip
    if not conv.concat:
        out = out.view(num_dst, heads, conv.out_channels).mean(dim=1)
    if conv.res is not None:
        out = out + conv.res(rows[:num_dst])
    # Hidden rows stay in half precision under autocast, as those of other convs do.
    return out if conv.bias is None else out + conv.bias.to(out.dtype)


def _projected(conv: Any, rows: Tensor, num_dst: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """(sources' rows, destinations' where they are not the first of these, attention vectors of both)."""
    if isinstance(conv, GATv2Conv):
        return conv.lin_l(rows), None if conv.share_weights else conv.lin_r(rows[:num_dst]), conv.att, None
    if conv.lin is not None:
        return conv.lin(rows), None, conv.att_src, conv.att_dst
    return conv.lin_src(rows), conv.lin_dst(rows[:num_dst]), conv.att_src, conv.att_dst


def _key(block: Block, layer: int, device: torch.device) -> int | Tensor:
    """Of this layer's draws: places from the last one down, since those from the first on are the layers' outputs'."""
    if block.key is None:
        return torch.randint(-(2**63), 2**63 - 1, (1,), device=device)
    return ops.purpose_key(block.key, NUM_PURPOSES - 2 - layer)
