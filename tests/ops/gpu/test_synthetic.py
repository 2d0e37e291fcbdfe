"""The Triton kernels of the synthetic graphs against those of Numba, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hopline.ops.cpu import synthetic as cpu_synthetic
from tests.support.grids import RUNS_ON_GPU, parametrize_kernel
from tests.support.helpers import KERNEL_DEVICE, randn

pytest.importorskip("triton")

from hopline.ops.gpu import synthetic as gpu_synthetic

pytestmark = RUNS_ON_GPU
DEVICE = torch.device(KERNEL_DEVICE)


def unsigned(key: int) -> np.uint64:
    return np.uint64(key % 2**64)


def cpu_ranks(first: int, count: int, key: int, half: int, num_nodes: int) -> np.ndarray:
    ranks = np.empty(count, dtype=np.int64)
    cpu_synthetic.fill_ranks(first, unsigned(key), np.uint64(half), num_nodes, ranks)
    return ranks


@parametrize_kernel(
    [((2, 1), -(2**62) - 7), ((1023, 5), 99), ((1025, 6), -(2**62) - 7)],
    nodes_and_half=[(2, 1), (5, 2), (100, 4), (1023, 5), (1025, 6), (70_000, 9)],
    key=[99, -(2**62) - 7],
)
def test_ranks_of_all_nodes_are_those_of_numba(nodes_and_half: tuple[int, int], key: int) -> None:
    num_nodes, half = nodes_and_half
    ours = gpu_synthetic.ranks(0, num_nodes, key, half, num_nodes, DEVICE)
    assert ours.tolist() == cpu_ranks(0, num_nodes, key, half, num_nodes).tolist()


def test_ranks_of_a_range_of_many_nodes() -> None:
    first = 3_000_000_000
    num_nodes = 3_000_000_300
    half = 16
    ours = gpu_synthetic.ranks(first, 300, -5, half, num_nodes, DEVICE)
    assert ours.tolist() == cpu_ranks(first, 300, -5, half, num_nodes).tolist()


@parametrize_kernel(
    [
        ((4, 1, 2), 0.3, torch.int64),
        ((1025, 6, 7), 0.3, torch.int32),
        ((1025, 6, 7), 1.0, torch.int64),
        ((3000, 6, 1), 0.0, torch.int32),
    ],
    sizes=[(4, 1, 2), (1025, 6, 7), (3000, 6, 1)],
    homophily=[0.0, 0.3, 1.0],
    dtype=[torch.int32, torch.int64],
)
def test_sources_are_those_of_numba(sizes: tuple[int, int, int], homophily: float, dtype: torch.dtype) -> None:
    num_nodes, half, num_classes = sizes
    rank_key = 2**61 + 3
    draw_key = -11
    ranks = cpu_ranks(0, num_nodes, rank_key, half, num_nodes)
    degrees = np.random.default_rng(0).integers(0, 9, num_nodes)
    degrees[[0, -1]] = 0  # empty rows at the ends and a hub between them
    degrees[1] = 5000
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    expected = np.empty(indptr[-1], dtype=np.int64)
    cpu_synthetic.fill_sources(
        0, ranks, indptr, unsigned(rank_key), unsigned(draw_key), np.uint64(half), num_nodes, num_classes,
        homophily, expected,
    )  # fmt: skip
    ours = gpu_synthetic.sources(
        torch.from_numpy(indptr).to(DEVICE), torch.from_numpy(ranks).to(DEVICE), rank_key, draw_key, half,
        num_classes, homophily, dtype,
    )  # fmt: skip
    assert ours.dtype == dtype
    assert torch.equal(ours.cpu().long(), torch.from_numpy(expected))


def test_no_edges_have_no_sources() -> None:
    ranks = torch.arange(4, device=DEVICE)
    indptr = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    assert gpu_synthetic.sources(indptr, ranks, 1, 2, 1, 2, 0.5, torch.int32).shape == (0,)


@parametrize_kernel(
    [((5, 1433), torch.float32), ((333, 100), torch.float16), ((1000, 8), torch.bfloat16)],
    shape=[(2, 1), (1000, 8), (333, 100), (5, 1433)],
    dtype=[torch.float32, torch.float16, torch.bfloat16],
)
def test_features_are_those_of_numba(shape: tuple[int, int], dtype: torch.dtype) -> None:
    num_nodes, num_features = shape
    means = randn(2, num_features, dtype=torch.float32)
    labels = torch.arange(num_nodes) % 2
    expected = np.empty((num_nodes, num_features), dtype=np.float32)
    cpu_synthetic.fill_features(0, labels.numpy(), means.numpy(), 1.0, unsigned(-3), expected)
    ours = gpu_synthetic.features(labels.to(DEVICE), means.to(DEVICE), -3, dtype)
    # The interpreter cuts bfloat16 off where GPUs round.
    one_bit_off = 2**-7 if dtype == torch.bfloat16 and KERNEL_DEVICE == "cpu" else 0
    torch.testing.assert_close(ours.cpu(), torch.from_numpy(expected).to(dtype), rtol=one_bit_off, atol=0)
