"""`as_dtype`: stored features get the dtype of the model; rows with a gradient and integers keep theirs."""

from __future__ import annotations

import torch

from hopline.core.row_handles import Rows, as_dtype
from hopline.tables import TensorTable


def test_stored_features_get_the_precision_of_the_model():
    table = TensorTable(torch.ones(4, 2, dtype=torch.float16))
    rows = as_dtype(Rows(table, torch.tensor([3, 1])), torch.float32)
    assert rows.dtype == torch.float32
    assert rows.shape == (2, 2)


def test_rows_with_a_gradient_and_integers_keep_their_dtype():
    hidden = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
    assert as_dtype(hidden, torch.float32) is hidden
    tokens = torch.ones(2, 2, dtype=torch.int64)
    assert as_dtype(tokens, torch.float32) is tokens
