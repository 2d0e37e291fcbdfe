"""The halo of a historical batch: pulled after each hidden layer, while rows of the batch are recorded for the push."""

from __future__ import annotations

import torch

from hopline.methods.historical.halo import Halo
from hopline.tables.history import Histories
from tests.support.helpers import randn


def test_after_layer_appends_the_halo_and_records_the_rows_of_the_batch():
    histories = Histories(8)
    histories.write(0, [slice(0, 8)], randn(8, 4))
    halo = Halo([slice(0, 3)], torch.tensor([6, 4]), histories, last=1)
    batch_rows = randn(3, 4, seed=1)
    assert torch.equal(halo.after_layer(0, batch_rows), torch.cat([batch_rows, histories.tables[0][[6, 4]]]))

    last = randn(3, 2, seed=2)
    assert halo.after_layer(1, last) is last
    assert [l for l, _ in halo.commits()] == [0]
    assert not histories.tables[0][0].equal(batch_rows[0])  # nothing is written before it is committed

    halo.reset()
    assert not halo.rows


def test_gradients_of_recorded_rows_survive_a_change_in_place():
    halo = Halo([slice(0, 3)], torch.empty(0, dtype=torch.int64), Histories(3), last=0, keeps_gradients=True)
    rows = randn(3, 4).requires_grad_() * 1
    halo.after_layer(0, rows).mul_(3).sum().backward()
    assert torch.equal(halo.rows[0].grad, torch.full_like(rows, 3))  # type: ignore[arg-type]
