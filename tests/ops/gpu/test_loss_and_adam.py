"""Cross entropy, and Adam in one kernel, against torch's own."""

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


@pytest.mark.parametrize(("kind", "decay"), [("Adam", 0.0), ("Adam", 0.01), ("AdamW", 0.1)])
def test_steps_are_torchs_and_so_is_the_state(kind: str, decay: float):
    start = [randn(40, 30).float(), randn(7, seed=1).float(), randn(1, seed=2).float()]
    ours = [torch.nn.Parameter(t.clone().to(KERNEL_DEVICE)) for t in start]
    theirs = [torch.nn.Parameter(t.clone().to(KERNEL_DEVICE)) for t in start]
    rate = torch.tensor(0.01, device=KERNEL_DEVICE)
    options: dict[str, Any] = {"lr": rate, "weight_decay": decay, "capturable": KERNEL_DEVICE == "cuda"}
    our_optimizer = getattr(gpu_loss_and_adam, kind)(ours, **options)
    torch_optimizer = getattr(torch.optim, kind)(theirs, lr=0.01, weight_decay=decay)
    for step in range(6):
        for a, b in zip(ours, theirs, strict=True):
            b.grad = randn(*b.shape, seed=step).float().to(KERNEL_DEVICE)
            a.grad = b.grad.clone()  # at another place each time
        our_optimizer.step()
        torch_optimizer.step()
        if step == 3:
            rate.fill_(0.002)
            for group in torch_optimizer.param_groups:
                group["lr"] = 0.002
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            our_optimizer.state[a]["exp_avg_sq"], torch_optimizer.state[b]["exp_avg_sq"], rtol=1e-5, atol=1e-8
        )
        assert float(our_optimizer.state[a]["step"]) == 6
    copy = getattr(torch.optim, kind)(theirs, lr=0.01)
    copy.load_state_dict(our_optimizer.state_dict())
    torch.testing.assert_close(copy.state[theirs[0]]["exp_avg"], our_optimizer.state[ours[0]]["exp_avg"])


def test_what_the_kernel_cannot_do_is_left_to_torch():
    p = torch.nn.Parameter(randn(5).to(KERNEL_DEVICE))  # float64
    optimizer = gpu_loss_and_adam.Adam(
        [p], lr=torch.tensor(0.1, device=KERNEL_DEVICE), capturable=KERNEL_DEVICE == "cuda"
    )
    before = p.detach().clone()
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
    torch.testing.assert_close(p.detach(), before - 0.2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_options_that_the_kernel_does_not_know_are_taken_by_torch(option: str):
    ours, theirs = (torch.nn.Parameter(randn(5).float().to(KERNEL_DEVICE)) for _ in range(2))
    on_gpu = KERNEL_DEVICE == "cuda"
    options: dict[str, Any] = {option: True}
    rate = torch.tensor(0.1, device=KERNEL_DEVICE)
    our_optimizer = gpu_loss_and_adam.Adam([ours], lr=rate, capturable=on_gpu, **options)
    torch_optimizer = torch.optim.Adam([theirs], lr=0.1, **options)
    for step in range(4):
        theirs.grad = (randn(5, seed=step) / (1 + step)).float().to(KERNEL_DEVICE)
        ours.grad = theirs.grad.clone()
        our_optimizer.step()
        torch_optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_graph_finds_the_table_of_gradients_that_were_there_long_ago(monkeypatch: pytest.MonkeyPatch):
    p = torch.nn.Parameter(randn(5).float().to(KERNEL_DEVICE))
    optimizer = gpu_loss_and_adam.Adam(
        [p], lr=torch.tensor(0.1, device=KERNEL_DEVICE), capturable=KERNEL_DEVICE == "cuda"
    )
    places = [torch.ones_like(p) for _ in range(gpu_loss_and_adam.MAX_TABLES + 2)]
    for p.grad in places:
        optimizer.step()
    p.grad = places[1]
    optimizer.prepare()
    monkeypatch.setattr(gpu_loss_and_adam, "_is_capturing", lambda tensor: True)
    assert optimizer._group_steps() is not None
    p.grad = places[2]
    assert optimizer._group_steps() is None, "what is not there a graph would copy every time"
