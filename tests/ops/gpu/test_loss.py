"""Cross entropy against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hopline.ops.gpu import loss_and_adam as gpu_loss_and_adam
from tests.support.grids import RUNS_ON_GPU, parametrize_kernel
from tests.support.helpers import KERNEL_DEVICE, randint, randn

pytestmark = RUNS_ON_GPU


@parametrize_kernel(
    [((7, 3), torch.float32), ((130, 172), torch.float32), ((130, 172), torch.bfloat16)],
    shape=[(1, 1), (7, 3), (130, 172), (5, 1000)],
    dtype=[torch.float32, torch.bfloat16],
)
def test_loss_and_gradient_are_torchs(shape: tuple[int, int], dtype: torch.dtype):
    num, classes = shape
    values = (5 * randn(num, classes)).to(dtype).to(KERNEL_DEVICE)
    labels = randint(0, classes, num).to(KERNEL_DEVICE)
    our_scores = values.clone().requires_grad_()
    torch_scores = values.float().requires_grad_()
    our_loss = gpu_loss_and_adam.cross_entropy(our_scores, labels)
    torch_loss = torch.nn.functional.cross_entropy(torch_scores, labels)
    torch.testing.assert_close(our_loss, torch_loss, rtol=1e-5, atol=1e-6)
    (3 * our_loss).backward()
    (3 * torch_loss).backward()
    assert our_scores.grad is not None
    assert torch_scores.grad is not None
    assert our_scores.grad.dtype == dtype
    tolerance: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-4}
    torch.testing.assert_close(our_scores.grad.float(), torch_scores.grad, **tolerance)


@pytest.mark.parametrize("label", [-100, -1, 3])
def test_a_label_that_is_no_class_makes_the_loss_and_its_rows_gradient_nan(label: int):
    scores = randn(5, 3).to(KERNEL_DEVICE).requires_grad_()
    labels = torch.tensor([0, 1, label, 2, 1]).to(KERNEL_DEVICE)
    loss = gpu_loss_and_adam.cross_entropy(scores, labels)
    assert loss.isnan()
    loss.backward()
    assert scores.grad is not None
    assert scores.grad.isnan().all(dim=1).tolist() == [False, False, True, False, False]
