"""Exact gradients of all nodes at the layer boundaries, against autograd over the whole graph."""

from __future__ import annotations

import torch

from hopline.core.batch import Batch
from hopline.methods.partitioned.sweep import Sweep
from tests.equivalence.test_5_historical import MODELS, full_batch, mean_loss, work_of


def test_gradients_at_layer_boundaries_equal_those_of_autograd():
    torch.manual_seed(0)
    model = MODELS["gcn"](6, 3).double()
    work = work_of(model)
    sweep = Sweep(work.partitioned, keeps_gradients=True)
    sweep.forward()
    sweep.backward()

    batch: Batch = full_batch(model)
    state = model.encode(batch.input_rows, batch.input_keys, None)
    rows = []
    for l, block in enumerate(batch.blocks):
        state = model.layer(l, state, block)
        assert isinstance(state.h, torch.Tensor)
        state.h.retain_grad()
        rows.append(state.h)

    class ModelFromState(torch.nn.Module):
        def forward(self, batch: Batch) -> torch.Tensor:
            return model.decode(state)[batch.seeds]

    (mean_loss(ModelFromState(), batch) * batch.num_seeds).backward()
    for l, h in enumerate(rows):
        ours = work.partitioned.gradients.tables[l][work.partitioned.partition.position]
        torch.testing.assert_close(ours, h.grad, rtol=1e-9, atol=1e-12)
