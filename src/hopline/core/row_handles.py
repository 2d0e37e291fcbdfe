"""Rows as a model can compute with them."""

from __future__ import annotations

import torch
from torch import Tensor

from hopline.core.batch import Handle, as_tensor


def typed(rows: Handle | Tensor, dtype: torch.dtype) -> Tensor:
    """The rows themselves; stored features are brought to the model's precision, whole numbers are left alone.

    Under autocast hidden rows come in half precision on purpose: what has a gradient is left as it is.
    """
    rows = as_tensor(rows)
    same = rows.requires_grad or rows.dtype == dtype or not rows.is_floating_point()
    return rows if same else rows.to(dtype)
