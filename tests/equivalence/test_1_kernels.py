"""Identity 1: reference = Numba = Triton for the same key, bit for bit, over random graphs, keys and shapes.

Each kernel of the CPU is compared with the reference in plain torch, and each kernel of the GPU with that of the CPU.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from hopline import ops
from hopline.core.batch import Batch
from hopline.core.graph import Graph
from hopline.core.sampler import NeighborSampler, in_neighborhood
from hopline.ops import reference
from hopline.ops.cpu import reduce as cpu_reduce
from hopline.ops.cpu import sampling as cpu_sampling
from hopline.ops.gpu import reduce as gpu_reduce
from hopline.ops.gpu import sampling as gpu_sampling
from tests.support.grids import RUNS_ON_GPU, parametrize_kernel, parametrize_pairwise
from tests.support.helpers import KERNEL_DEVICE, assert_same_batches, randint, randn, random_graph

pytestmark = RUNS_ON_GPU
ROUNDS = range(60)
"""Random graphs, keys and shapes for the kernels of a GPU; in Triton's interpreter a round takes up to seconds."""
NUM_NODES = [1, 2, 17, 300]
HUB_EDGES = [0, 3000]
INDEX_DTYPES = [torch.int32, torch.int64]
KEYS = [0, 1, -1, 0x1234_5678_9ABC_DEF0, 2**63 - 1, -(2**63)]


def csr_of(num_nodes: int, hub_edges: int, dtype: torch.dtype, draw: random.Random) -> tuple[Tensor, Tensor]:
    """(indptr, indices) with empty rows, short rows, and one with `hub_edges` more: far longer than any fan-out."""
    degrees = [draw.choice([0, 1, 2, 3, draw.randrange(30), draw.randrange(200)]) for _ in range(num_nodes)]
    degrees[draw.randrange(num_nodes)] += hub_edges
    indptr = torch.tensor([0, *degrees]).cumsum(0)
    indices = randint(0, num_nodes, int(indptr[-1]), seed=draw.randrange(10**6))
    return indptr, indices.to(dtype)


def random_csr(draw: random.Random) -> tuple[Tensor, Tensor]:
    """(indptr, indices) of random size, hub and dtype."""
    return csr_of(draw.choice(NUM_NODES), draw.choice(HUB_EDGES), draw.choice(INDEX_DTYPES), draw)


def random_key(draw: random.Random) -> int:
    """A key, extreme ones among them."""
    return draw.choice(KEYS)


def assert_same(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Tensors of equal dtype are equal to the bit."""
    for our_tensor, expected_tensor in zip(ours, expected, strict=True):
        assert our_tensor.dtype == expected_tensor.dtype
        assert torch.equal(our_tensor, expected_tensor)


@parametrize_pairwise(
    num_nodes=NUM_NODES, hub_edges=HUB_EDGES, dtype=INDEX_DTYPES, num_sampled=[0, 1, 5, 400], key=KEYS
)
def test_sampled_neighbours_and_row_positions(
    num_nodes: int, hub_edges: int, dtype: torch.dtype, num_sampled: int, key: int
) -> None:
    draw = random.Random(key + num_nodes)
    indptr, indices = csr_of(num_nodes, hub_edges, dtype, draw)
    nodes = randint(0, num_nodes, num_sampled, seed=num_nodes)
    for fanout in (-1, 1, 2, draw.randrange(3, 20), draw.choice([40, 100])):
        for replace in (False, True) if fanout > 0 else (False,):
            for draw_ids in (None, ops.draw_ids(nodes, nodes % 3 == 0)):
                arguments = (indptr, indices, nodes, fanout, key, replace, draw_ids)
                assert_same(cpu_sampling.sample_neighbors(*arguments), reference.sample_neighbors(*arguments))
    assert_same(cpu_sampling.row_entries(indptr, nodes), reference.row_entries(indptr, nodes))


@parametrize_pairwise(top=[3, 100, 10**6, 2**40], num_seeds=[0, 1, 50], num_neighbors=[0, 1, 700], dtype=INDEX_DTYPES)
def test_relabelled_ids(top: int, num_seeds: int, num_neighbors: int, dtype: torch.dtype) -> None:
    seeds = randint(0, top, num_seeds).unique()
    neighbors = randint(0, top, num_neighbors, seed=1).to(dtype if top < 2**31 else torch.int64)
    assert_same(cpu_sampling.relabel(seeds, neighbors), reference.relabel(seeds, neighbors))


@parametrize_pairwise(
    dtype=[torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8],
    width=[1, 2, 7, 16, 19],
    count=[0, 1, 99],
)
def test_gathered_rows(dtype: torch.dtype, width: int, count: int) -> None:
    rows = (50 * randn(30, width)).to(dtype)
    ids = randint(0, 30, count)
    assert_same((cpu_sampling.gather_rows(rows, ids),), (reference.gather_rows(rows, ids),))


@parametrize_pairwise(num_nodes=NUM_NODES, hub_edges=HUB_EDGES, dtype=INDEX_DTYPES, num_keys=[0, 1, 300])
def test_grouped_edges_and_self_loops(num_nodes: int, hub_edges: int, dtype: torch.dtype, num_keys: int) -> None:
    keys = randint(0, 9, num_keys, seed=num_nodes)
    for num_groups in (9, 11):
        assert_same(cpu_sampling.group_by_key(keys, num_groups), reference.group_by_key(keys, num_groups))
    indptr, indices = csr_of(num_nodes, hub_edges, dtype, random.Random(num_nodes))
    assert_same((cpu_sampling.self_loops(indptr, indices),), (reference.self_loops(indptr, indices),))


@parametrize_pairwise(
    num_nodes=NUM_NODES,
    hub_edges=HUB_EDGES,
    index_dtype=INDEX_DTYPES,
    dtype=[torch.float32, torch.float64],
    shape=[(), (1,), (5,), (33,), (2, 3)],
    weighted=[False, True],
    how=["sum", "mean", "max"],
)
def test_reduced_edges(
    num_nodes: int,
    hub_edges: int,
    index_dtype: torch.dtype,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    weighted: bool,
    how: str,
) -> None:
    indptr, indices = csr_of(num_nodes, hub_edges, index_dtype, random.Random(num_nodes))
    rows = randn(num_nodes, *shape, dtype=dtype)
    weight = randn(indices.numel(), seed=1, dtype=dtype) if weighted else None
    arguments = (rows, indptr, indices, how, weight)
    assert_same((cpu_reduce.reduce_edges(*arguments),), (reference.reduce_edges(*arguments),))


@parametrize_pairwise(
    dtype=[torch.float32, torch.float64, torch.float16, torch.bfloat16],
    num_rows=[0, 1, 60],
    shape=[(), (1,), (6,), (64,), (3, 5)],
    top=[5, 2**50],
    p=[0.0, 1.0, 0.37],
    key=KEYS,
)
def test_keyed_dropout(dtype: torch.dtype, num_rows: int, shape: tuple[int, ...], top: int, p: float, key: int) -> None:
    arguments = (randn(num_rows, *shape, dtype=dtype), p, key, randint(0, top, num_rows))
    assert_same((cpu_reduce.keyed_dropout(*arguments),), (reference.keyed_dropout(*arguments),))


def on_gpu(*values: object) -> list:
    """The arguments with tensors moved to the device of the kernels."""
    return [v.to(KERNEL_DEVICE) if isinstance(v, Tensor) else v for v in values]


def assert_same_from_gpu(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Results of the GPU equal expected ones to the bit."""
    assert all(tensor.device.type == KERNEL_DEVICE for tensor in ours)
    assert_same(tuple(tensor.cpu() for tensor in ours), expected)


@parametrize_kernel([(18,), (25,)], seed=ROUNDS)
def test_sampled_neighbours_and_row_positions_on_the_gpu(seed: int) -> None:
    draw = random.Random(seed)
    indptr, indices = random_csr(draw)
    nodes = randint(0, indptr.numel() - 1, draw.choice([0, 1, 5, 400]), seed=seed)
    for fanout in (-1, 1, draw.randrange(3, 20), draw.choice([40, 100])):
        for replace in (False, True) if fanout > 0 else (False,):
            arguments = (indptr, indices, nodes, fanout, random_key(draw), replace, ops.draw_ids(nodes, nodes % 3 == 0))
            assert_same_from_gpu(
                gpu_sampling.sample_neighbors(*on_gpu(*arguments)), cpu_sampling.sample_neighbors(*arguments)
            )
    assert_same_from_gpu(gpu_sampling.row_entries(*on_gpu(indptr, nodes)), cpu_sampling.row_entries(indptr, nodes))


@parametrize_kernel([(0,), (1,), (2,), (3,), (4,)], seed=ROUNDS)
def test_relabelled_ids_gathered_rows_and_grouped_edges_on_the_gpu(seed: int) -> None:
    draw = random.Random(seed)
    top = draw.choice([3, 100, 10**6, 2**40])
    seeds = randint(0, top, draw.choice([0, 1, 50]), seed=seed).unique()
    neighbors = randint(0, top, draw.choice([0, 1, 700]), seed=seed + 1)
    assert_same_from_gpu(gpu_sampling.relabel(*on_gpu(seeds, neighbors)), cpu_sampling.relabel(seeds, neighbors))

    dtype = draw.choice([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8])
    rows = (50 * randn(30, draw.randrange(1, 20), seed=seed)).to(dtype)
    ids = randint(0, 30, draw.choice([0, 1, 99]), seed=seed)
    assert_same_from_gpu((gpu_sampling.gather_rows(*on_gpu(rows, ids)),), (cpu_sampling.gather_rows(rows, ids),))

    keys = randint(0, 9, draw.choice([0, 1, 300]), seed=seed)
    groups = 9 + draw.randrange(3)
    assert_same_from_gpu(gpu_sampling.group_by_key(*on_gpu(keys, groups)), cpu_sampling.group_by_key(keys, groups))

    indptr, indices = random_csr(draw)
    assert_same_from_gpu(
        (gpu_sampling.self_loops(*on_gpu(indptr, indices)),), (cpu_sampling.self_loops(indptr, indices),)
    )


@parametrize_kernel([(7,), (25,)], seed=ROUNDS)
def test_reduced_edges_and_keyed_dropout_on_the_gpu(seed: int) -> None:
    draw = random.Random(seed)
    indptr, indices = random_csr(draw)
    shape = draw.choice([(), (1,), (5,), (33,), (2, 3)])
    # Whole numbers below 2**53: sums are exact in any order, and the order of a GPU's is another.
    rows = randint(-99, 99, (indptr.numel() - 1) * torch.Size(shape).numel(), seed=seed).double().view(-1, *shape)
    weight = draw.choice([None, randint(-9, 9, indices.numel(), seed=seed + 1).double()])
    for how in ("sum", "mean", "max"):
        arguments = (rows, indptr, indices, how, weight)
        assert_same_from_gpu((gpu_reduce.reduce_edges(*on_gpu(*arguments)),), (cpu_reduce.reduce_edges(*arguments),))
    x = randn(draw.choice([0, 1, 60]), *shape, seed=seed, dtype=draw.choice([torch.float32, torch.float64]))
    ids = randint(0, draw.choice([5, 2**50]), x.size(0), seed=seed)
    arguments = (x, draw.choice([0.0, 1.0, draw.random()]), random_key(draw), ids)

    assert_same_from_gpu((gpu_reduce.keyed_dropout(*on_gpu(*arguments)),), (cpu_reduce.keyed_dropout(*arguments),))


@pytest.fixture
def kernels_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, have the ops choose its kernels for tensors on the CPU."""
    if KERNEL_DEVICE == "cpu":
        monkeypatch.setattr(ops, "_twin", lambda ids, on_cpu, on_gpu: ops.gpu_kernels(on_gpu))
        monkeypatch.setattr(ops, "new_id_map", gpu_sampling.DeviceIdMap)


def move_graph(graph: Graph) -> Graph:
    """The graph on the device of the kernels."""
    edge = {name: array.to(KERNEL_DEVICE) for name, array in graph.edge.items()}
    return Graph(graph.indptr.to(KERNEL_DEVICE), graph.indices.to(KERNEL_DEVICE), edge)


@parametrize_kernel([((3, 2), True), ((-1, 2), False)], fanouts=[(4,), (3, 2), (-1, 2)], replace=[False, True])
def test_blocks_from_the_gpu_are_those_of_the_cpu(
    fanouts: tuple[int, ...], replace: bool, request: pytest.FixtureRequest
) -> None:
    fanouts = tuple(abs(f) for f in fanouts) if replace else fanouts
    graph = random_graph(weight=True, attr=3, loops=True, dtype=torch.int32)
    requests = [(torch.tensor([0, 49, 11, 30]), 3), (torch.arange(20, 25), 3), (torch.empty(0).long(), 3)]

    def batches(sampler: NeighborSampler) -> list[Batch]:
        return [Batch(seeds, sampler.sample(seeds, key), None, None, key=key) for seeds, key in requests]

    expected = batches(NeighborSampler(graph, fanouts, replace=replace))
    request.getfixturevalue("kernels_of_the_gpu")
    for ours, theirs in zip(
        batches(NeighborSampler(move_graph(graph), fanouts, replace=replace)), expected, strict=True
    ):
        blocks = tuple(block.to(torch.device("cpu")) for block in ours.blocks)
        assert_same_batches(Batch(ours.seeds, blocks, None, None, key=ours.key), theirs)


@pytest.mark.usefixtures("kernels_of_the_gpu")
def test_a_sampler_on_the_gpu_refuses_what_one_on_the_cpu_refuses() -> None:
    sampler = NeighborSampler(move_graph(random_graph()), (2,))
    for bad, message in (([3, 50], "from 0 to 49"), ([3, -1], "from 0 to 49"), ([3, 4, 3], "distinct")):
        with pytest.raises(ValueError, match=message):
            sampler.sample(torch.tensor(bad, device=KERNEL_DEVICE), 1)
    assert sampler.sample(torch.tensor([4, 3], device=KERNEL_DEVICE), 1)[0].dst_ids.tolist() == [4, 3]
    broken = move_graph(Graph(torch.tensor([0, 2, 2]), torch.tensor([1, 9])))
    with pytest.raises(ValueError, match="out of range"):
        NeighborSampler(broken, (-1, -1)).sample(torch.tensor([0], device=KERNEL_DEVICE), 1)


@pytest.mark.usefixtures("kernels_of_the_gpu")
def test_in_neighborhood_on_the_gpu_is_that_of_the_cpu() -> None:
    graph = random_graph()
    nodes = torch.tensor([0, 3, 3])
    assert torch.equal(in_neighborhood(move_graph(graph), nodes.to(KERNEL_DEVICE)).cpu(), in_neighborhood(graph, nodes))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_in_pinned_memory_is_sampled_from_the_gpu() -> None:
    graph = random_graph(weight=True, dtype=torch.int32)
    pinned = Graph(graph.indptr.pin_memory(), graph.indices.pin_memory(), graph.edge)
    seeds = torch.tensor([0, 49, 11])
    expected = NeighborSampler(graph, (4, -1)).sample(seeds, 3)
    ours = NeighborSampler(pinned, (4, -1)).sample(seeds.cuda(), 3)
    assert all(block.src_ids.is_cuda for block in ours)

    on_cpu = tuple(block.to(torch.device("cpu")) for block in ours)
    assert_same_batches(Batch(seeds, on_cpu, None, None, key=3), Batch(seeds, expected, None, None, key=3))
