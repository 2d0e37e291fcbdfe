"""Linear layers over our own threads: torch's results and gradients, for any number of threads."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hopline import ops
from hopline.ops.cpu import linear as cpu_linear
from hopline.ops.cpu.runtime import own_threads
from tests.support.helpers import assert_close, randn

SIZES = [1, cpu_linear.ROWS, cpu_linear.ROWS + 1, 3 * cpu_linear.ROWS + 17]


def results(function, x: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor | None]:
    """Output and gradients of all inputs."""
    leaves = [t if t is None else t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    out = function(*leaves)
    (out * randn(*out.shape, seed=9, dtype=out.dtype)).sum().backward()
    return [out.detach(), *[leaf if leaf is None else leaf.grad for leaf in leaves]]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_equals_torch_in_float64(size: int, with_bias: bool) -> None:
    tensors = randn(size, 7), randn(5, 7, seed=1), randn(5, seed=2) if with_bias else None
    with own_threads(3):
        our_results = results(cpu_linear.linear, *tensors)
    for ours, theirs in zip(our_results, results(nn.functional.linear, *tensors), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert_close(ours, theirs, 1e-12)


def test_the_number_of_threads_changes_no_bit() -> None:
    tensors = (randn(SIZES[-1], 33, dtype=torch.float32), randn(16, 33, dtype=torch.float32), None)
    by_threads = []
    for threads in (1, 2, 5):
        with own_threads(threads):
            by_threads.append(results(cpu_linear.linear, *tensors))
    for other in by_threads[1:]:
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(other, by_threads[0], strict=True))


def test_strided_columns_and_inputs_without_gradient_equal_torch() -> None:
    wide = randn(SIZES[-1], 9)
    weight = randn(4, 3).requires_grad_()
    out = cpu_linear.linear(wide[:, 2:5], weight)
    out.sum().backward()
    assert_close(out, wide[:, 2:5] @ weight.t(), 1e-12)
    assert weight.grad is not None
    assert_close(weight.grad, wide[:, 2:5].sum(0).expand(4, 3), 1e-9)


def test_an_expanded_upstream_gradient_equals_torch() -> None:
    x = randn(SIZES[-1], 3).requires_grad_()
    weight = randn(2, 3)
    cpu_linear.linear(x, weight).sum().backward()  # the gradient of sum has strides of 0
    assert x.grad is not None
    assert_close(x.grad, weight.sum(0).expand_as(x), 1e-12)


@pytest.mark.parametrize("shape", [(7,), (2, 3000, 7)])
def test_other_shapes_are_left_to_torch(shape: tuple[int, ...]) -> None:
    x = randn(*shape)
    weight = randn(5, 7)
    assert torch.equal(cpu_linear.linear(x, weight), nn.functional.linear(x, weight))


def test_autocast_is_left_to_torch() -> None:
    x = randn(SIZES[-1], 4, dtype=torch.float32)
    weight = randn(3, 4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cpu_linear.linear(x, weight).dtype == torch.bfloat16


@pytest.mark.parametrize("module", [nn.Linear(6, 3), pyg.Linear(6, 3), nn.Sequential(nn.ReLU(), nn.Linear(6, 3))])
def test_every_linear_layer_within_is_spread(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(cpu_linear, "linear", lambda *args: calls.append(args) or torch.zeros(1))
    x = torch.randn(4, 6)
    with ops.own_threads(2):
        module(x)
    assert len(calls) == 1
    module(x)
    assert len(calls) == 1


def test_an_error_in_a_range_reaches_the_caller() -> None:
    with own_threads(2), pytest.raises(RuntimeError, match="shape"):
        cpu_linear.linear(randn(SIZES[-1], 4), randn(3, 5))
