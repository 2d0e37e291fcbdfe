"""Transports of rows and gradients between shards: contents, bytes counted, and rounds under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hopline.core.graph import Graph
from hopline.core.partition import Partition, make_partition
from hopline.distributed.world import RankSpec, World, serve
from hopline.shards.layout import shard_layouts, virtual_layout
from hopline.shards.transports import LocalTransport, P2PTransport, Transport
from hopline.util import trace
from tests.support.helpers import randn, random_graph


def graph_and_parts(num_shards: int) -> tuple[Graph, Partition]:
    graph = random_graph()
    return graph, make_partition(graph, num_shards, "random", seed=1)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_virtual_shards_are_slices_of_the_rows() -> None:
    layout = virtual_layout(*graph_and_parts(3))
    transport = LocalTransport(layout)
    rows = randn(50, 2)
    parts = [part[0] for part in transport.fetch([rows], "forward", 1)]
    assert torch.equal(torch.cat(parts), rows)
    assert parts[1].data_ptr() == rows[int(layout.ptr[1])].data_ptr()
    assert transport.traffic == {"forward": rows.nbytes}


def test_gradients_are_added_to_the_rows_they_are_of() -> None:
    layout = virtual_layout(*graph_and_parts(3))
    returns = LocalTransport(layout).start_return([randn(50, 2)], 1)
    for k in range(3):
        returns.buffers(k)[0].add_(k + 1.0)
        returns.buffers(k)[0].add_(k + 1.0)
        returns.push(k)
    (total,) = returns.finish()
    owner = torch.repeat_interleave(torch.arange(3), layout.ptr.diff())
    assert torch.equal(total, 2.0 * (owner[:, None] + 1.0).expand(50, 2).double())


def test_bytes_are_counted_for_whoever_listens() -> None:
    transport = LocalTransport(virtual_layout(*graph_and_parts(2)))
    counters = trace.Counters()
    with trace.listen(counters):
        transport.return_all(transport.fetch_all(randn(50, 2), "forward"))
    assert counters.totals() == {"bytes.forward": 800, "bytes.gradient": 800}


def test_one_shard_of_several_is_not_all() -> None:
    layout = shard_layouts(*graph_and_parts(3))[0]
    with pytest.raises(ValueError, match="shard 0 of 3 needs rows"):
        LocalTransport(layout)


def test_ranks_and_shards_must_be_as_many(group: None) -> None:
    with pytest.raises(ValueError, match=r"2 of 3 .*0 of 1"):
        P2PTransport(shard_layouts(*graph_and_parts(3))[2])


def test_a_single_rank_sends_nothing(group: None) -> None:
    layout = shard_layouts(*graph_and_parts(1))[0]
    transport = P2PTransport(layout)
    rows = randn(50, 2)
    assert [torch.equal(part[0], rows) for part in transport.fetch([rows], "forward", 2)] == [True]
    assert torch.equal(transport.fetch_all(rows, "forward"), rows)
    assert torch.equal(transport.return_all(rows), rows)
    returns = transport.start_return([rows], 2)
    returns.buffers(0)[0].add_(rows)
    returns.push(0)
    assert torch.equal(returns.finish()[0], rows)
    assert transport.traffic.total() == 0


class Wires(P2PTransport):
    """A stand-in for the messages of one rank, which records them instead of sending."""

    def __init__(self, layout: Any) -> None:
        Transport.__init__(self, layout)
        self.on_host = True
        self.events = list[tuple[str, int]]()
        self.received: WeakSet[Tensor] = WeakSet()
        self.most_alive = 0
        self.under_way: Counter[str] = Counter()
        self.beside: set[tuple[str, str]] = set()
        """(kind of a message, kind of another that was under way when it was posted)."""

    def post(
        self, sent: list[Tensor], to: int, shapes: list[tuple[int, ...]], source: int, kind: str
    ) -> tuple[list[Tensor], list[Any]]:
        transport = self

        class Wait:
            def wait(self) -> None:
                transport.events.append(("wait", source))
                transport.under_way[kind] -= 1

        self.beside |= {(kind, other) for other, count in self.under_way.items() if count}
        self.under_way[kind] += 1
        self.events.append(("post", to))
        received = [t.new_ones(shape) for t, shape in zip(sent, shapes, strict=True)]
        self.received.update(received)
        self.most_alive = max(self.most_alive, len(self.received))
        return received, [Wait()]


@pytest.mark.parametrize("depth", [0, 1, 2, 9])
def test_depth_rounds_of_rows_are_requested_ahead(depth: int) -> None:
    layout = shard_layouts(*graph_and_parts(5))[1]
    transport = Wires(layout)
    rows = randn(layout.num_own, 2)
    fetched = transport.fetch([rows], "forward", depth)
    for k in range(5):
        next(fetched)  # dropped at once, as a part's rows are when it is done
        posted = [to for event, to in transport.events if event == "post"]
        waited = [source for event, source in transport.events if event == "wait"]
        assert posted == [layout.receiver(i) for i in range(1, min(5, k + depth + 1))]
        assert waited == [layout.sender(i) for i in range(1, k + 1)]
    assert transport.most_alive == min(4, depth + 1)


def test_rows_are_requested_ahead_when_the_caller_has_memory() -> None:
    layout = shard_layouts(*graph_and_parts(4))[1]
    transport = Wires(layout)
    later = list[Callable[[], None]]()
    fetched = transport.fetch([randn(layout.num_own, 2)], "forward", 1, later)
    for k in range(4):
        next(fetched)
        assert sum(event == "post" for event, _ in transport.events) == k
        if k < 2:
            later.pop()()  # after that the caller forgets
            assert sum(event == "post" for event, _ in transport.events) == k + 1
    assert len(list(fetched)) == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_depth_rounds_of_gradients_are_under_way(depth: int) -> None:
    layout = shard_layouts(*graph_and_parts(5))[1]
    transport = Wires(layout)
    returns = transport.start_return([randn(layout.num_own, 2)], depth)
    for k in range(5):
        returns.buffers(k)
        returns.push(k)
        waited = [source for event, source in transport.events if event == "wait"]
        assert waited == [layout.receiver(i) for i in range(1, max(1, k + 1 - depth))]
    returns.settle()
    assert transport.under_way["gradient"] == max(0, depth - 1)
    (total,) = returns.finish()
    expected = torch.bincount(torch.cat(layout.sends[1:]), minlength=layout.num_own)
    assert torch.equal(total[:, 0], expected.double())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_on_a_gpu_go_directly_by_nccl():
    """One GPU has one rank of NCCL, which can only write to itself: that a message arrives, and all exchanges run."""
    store = serve("127.0.0.1", 0, 60, local=True)
    world = World.join(RankSpec(device="cuda:0", backend="nccl", timeout_s=60, port=store.port))
    try:
        transport = P2PTransport(shard_layouts(*graph_and_parts(1))[0], world=world)
        rows = randn(50, 2).cuda()
        more = randn(50).cuda()
        received = transport.wait(*transport.post([rows, more], 0, [(50, 2), (50,)], 0, "forward"))
        assert torch.equal(received[0], rows)
        assert torch.equal(received[1], more)
        assert all(t.device.type == "cuda" for t in received)
        assert torch.equal(transport.fetch_all(rows, "forward"), rows)
        assert torch.equal(transport.return_all(rows), rows)
        assert world._reduce([2.0, 3.0], dist.ReduceOp.SUM) == [2.0, 3.0]
        world._broadcast(rows, 0)
    finally:
        world.close()
