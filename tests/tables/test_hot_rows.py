"""Orders of hot rows: predicted access probabilities against the frequencies of sampled batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopline.core.graph import Graph
from hopline.core.sampler import NeighborSampler
from hopline.core.seed_order import seed_batches
from hopline.tables import hot_rows as order
from hopline.tables import table
from tests.support.helpers import generator, graph_of, randint, random_graph


def skewed_graph(num_nodes: int = 2000, num_edges: int = 20_000) -> Graph:
    """A graph in which few nodes, at scattered ids, are the source of most edges."""
    src = (num_nodes * torch.rand(num_edges, generator=generator(1)) ** 4).long()
    names = torch.randperm(num_nodes, generator=generator(2))
    return graph_of(names[src], randint(0, num_nodes, num_edges, 3), num_nodes)


def measure_access_probability(
    graph: Graph, fanouts: tuple[int, ...], train: Tensor, batch_size: int, epochs: int
) -> Tensor:
    """[num_nodes] the share of sampled batches that read each node's row."""
    sampler = NeighborSampler(graph, fanouts)
    count = torch.zeros(graph.num_nodes)
    total = 0
    for epoch in range(epochs):
        for step, seeds in enumerate(seed_batches(train, batch_size, epoch, drop_last=True)):
            count[sampler.sample(seeds, 1000 * epoch + step)[0].src_ids] += 1
            total += 1
    return count / total


@pytest.mark.parametrize("fanouts", [(3,), (4, 2), (2, 4), (3, 2, 2)], ids=str)
def test_predicted_probabilities_are_the_simulated_frequencies(fanouts: tuple[int, ...]) -> None:
    graph = skewed_graph(400, 2400)
    train = torch.arange(0, 400, 4)
    expected = measure_access_probability(graph, fanouts, train, 5, 60)  # 1200 batches
    ours = order.access_probability(graph, fanouts, train, 5)
    assert float((ours - expected).abs().mean()) < 0.01
    assert float((ours - expected).abs().max()) < 0.07  # draws of one batch are not quite independent


def test_with_all_neighbours_and_all_seeds_every_reachable_node_is_certain() -> None:
    graph = random_graph()
    train = torch.tensor([0, 7])
    ours = order.access_probability(graph, (-1, -1), train, batch_size=99)
    reached = NeighborSampler(graph, (-1, -1)).sample(train, 0)[0].src_ids
    expected = torch.zeros(graph.num_nodes)
    expected[reached] = 1
    assert torch.allclose(ours, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_torch_and_numba_agree(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(dtype=dtype)
    values = randint(0, 1 << 40, graph.num_nodes)
    monkeypatch.setattr(order, "CHUNK_EDGES", 77)
    assert torch.equal(order.add_in_chunks(graph.indptr, graph.indices, values), order.add_to_sources(graph, values))


def test_degree_is_that_of_sources() -> None:
    graph = graph_of(torch.tensor([2, 2, 1, 2]), torch.tensor([0, 1, 0, 0]), 4)
    assert order.out_degrees(graph).tolist() == [0, 1, 3, 0]
    assert order.hottest(order.out_degrees(graph), 4).tolist() == [2, 1, 0, 3]


@pytest.mark.parametrize("count", [0, 1, 7, 99, 100])
def test_the_hottest_are_those_of_a_stable_sort(count: int) -> None:
    score = randint(0, 12, 100)  # with many ties
    expected = score.argsort(descending=True, stable=True)[:count]
    assert torch.equal(order.hottest(score, count), expected)
    assert torch.equal(order.hottest(score.float(), count), expected)


def test_orders_that_know_more_of_the_sampling_have_more_hits() -> None:
    graph = skewed_graph()
    train = torch.arange(0, 2000, 10)[:60]
    rows = torch.zeros(2000, 1)
    rates = []
    for chosen in ("access", "degree", torch.randperm(2000, generator=generator(5))):
        cached = table(
            rows,
            device_cache="10%",
            order=chosen,
            device="cpu",
            graph=graph,
            fanouts=(5, 5),
            train_ids=train,
            batch_size=8,
        )
        sampler = NeighborSampler(graph, (5, 5))
        for step, seeds in enumerate(seed_batches(train, 8, 1)):
            cached.read(sampler.sample(seeds, step)[0].src_ids)
        counts = cached.counters()
        rates.append(counts["hits"] / (counts["hits"] + counts["misses"]))
    access, degree, random = rates
    assert access > degree > random + 0.1
