"""After an allocation failed the step is undone: gradients, buffers and random states are as before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hopline.device import out_of_memory as rescue

CPU = torch.device("cpu")


class Model(nn.Module):
    """Rows with sparse gradients, a dense layer, statistics in buffers, and draws of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 4, sparse=True, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.lin = nn.Linear(4, 2, dtype=torch.float64)
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lin(nn.functional.dropout(self.norm(self.rows(ids)))).square().sum()


def dense(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        n: None if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad.clone()
        for n, p in model.named_parameters()
    }


def test_out_of_memory_errors_are_recognised_by_type_and_text():
    for error in (
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ):
        assert rescue.is_out_of_memory(error)
    for error in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory"), OSError()):
        assert not rescue.is_out_of_memory(error)
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert rescue.is_out_of_memory(caught.value)


@pytest.mark.parametrize("begun", [False, True])
def test_restoring_a_snapshot_undoes_the_step(begun: bool):
    torch.manual_seed(1)
    model = Model()
    if begun:
        model(torch.arange(6)).backward()
    expected = dense(model)
    gradients = [p.grad for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    draws = torch.get_rng_state()
    snapshot = rescue.StepSnapshot(model, CPU)
    assert (snapshot.gradient_bytes > 0) == begun
    model(torch.arange(2, 8)).backward()
    snapshot.restore()
    ours = dense(model)
    for name, grad in expected.items():
        assert (grad is None) == (ours[name] is None)
        assert grad is None or torch.equal(grad, ours[name])  # type: ignore[arg-type]
    assert all(
        gradient_before is gradient_after
        for gradient_before, gradient_after in zip(gradients, [p.grad for p in model.parameters()], strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert torch.equal(draws, torch.get_rng_state())


def test_accepting_a_snapshot_adds_gradients_as_autograd_does():
    gradients = []
    for guarded in (False, True):
        torch.manual_seed(2)
        model = Model()
        for first in (0, 2, 1):
            snapshot = rescue.StepSnapshot(model, CPU) if guarded else None
            model(torch.arange(first, first + 6)).backward()
            if snapshot is not None:
                snapshot.accept()
        gradients.append(dense(model))
    assert gradients[0]["unused"] is None
    assert gradients[1]["unused"] is None
    for name in ("rows.weight", "lin.weight", "norm.weight"):
        assert torch.equal(gradients[0][name], gradients[1][name])  # type: ignore[arg-type]


def test_sparse_and_dense_gradients_add_up_in_either_order():
    model = nn.Embedding(4, 2, dtype=torch.float64)
    ids = torch.tensor([1, 1, 3])
    for order in ((True, False), (False, True)):
        model.zero_grad(set_to_none=True)
        for sparse in order:
            before = rescue.StepSnapshot(model, CPU)
            nn.functional.embedding(ids, model.weight, sparse=sparse).sum().backward()
            before.accept()
        assert model.weight.grad is not None
        assert model.weight.grad.to_dense().tolist() == [[0, 0], [4, 4], [0, 0], [2, 2]]


def test_state_bytes_counts_gradients_and_buffers():
    gradients, buffers = rescue.state_bytes(Model())
    assert gradients == 8 * (8 * 4 + 4 + 4 + 8 + 2 + 3)
    assert buffers == 8 * (4 + 4 + 1)
    model = nn.LazyBatchNorm1d()
    assert rescue.state_bytes(model) == (0, 8)
    rescue.StepSnapshot(model, CPU).restore()
