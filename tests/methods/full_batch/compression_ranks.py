"""What each rank checks of messages that carry less than all rows, or rows of the step before."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from hopline.core.partition import make_partition
from hopline.distributed.world import World
from hopline.methods.full_batch.compression import (
    Codec,
    DrawnRows,
    HalfPrecision,
    LargestRows,
    LossyTransport,
    codecs_of,
)
from hopline.methods.full_batch.convs.block import ShardBlock, run_conv
from hopline.methods.full_batch.stale import StaleTransport
from hopline.methods.full_batch.transports import P2PTransport, Transport
from hopline.shards.layout import ShardLayout, shard_layouts
from hopline.util import trace
from tests.helpers import randn
from tests.shards.cases import case, model, sharded

KINDS = ("forward", "refetch", "gradient")


def layout_of(world: World, name: str = "gat") -> ShardLayout:
    graph, _ = case(name)
    return shard_layouts(graph, make_partition(graph, world.size, "random", seed=2))[world.rank]


def for_all(codec: Codec) -> dict[str, Codec]:
    return dict.fromkeys(KINDS, codec)


def check_neutral(world: World, make: Callable[[ShardLayout], Transport], modes: tuple[str, ...]) -> None:
    """At its neutral setting a transport gives the same bits."""
    for name in ("gat", "sage-max", "gcn"):
        (graph, x), conv, layout = case(name), model(name), layout_of(world, name)
        for mode in modes:
            expected = sharded(conv, graph, x, layout, P2PTransport(layout), mode=mode)
            found = sharded(conv, graph, x, layout, make(layout), mode=mode)
            assert all(torch.equal(found[key], expected[key]) for key in expected), (name, mode)


def fetched(transport: Transport, rows: list[Tensor], kind: str = "forward") -> list[list[Tensor]]:
    return list(transport.fetch(rows, kind, 1))


def exact(layout: ShardLayout, rows: list[Tensor]) -> list[list[Tensor]]:
    return fetched(P2PTransport(layout), rows)


def check_half(world: World) -> None:
    layout = layout_of(world)
    transport, rows = (
        LossyTransport(layout, world, for_all(HalfPrecision())),
        [randn(layout.num_own, 3, seed=world.rank)],
    )
    whole, counters = exact(layout, rows), trace.Counters()
    with trace.listen(counters):
        found = fetched(transport, rows)
        transport.end_step()
    assert torch.equal(found[0][0], rows[0])
    assert all(torch.equal(a[0], b[0].bfloat16().double()) for a, b in zip(found[1:], whole[1:], strict=True))
    at_once = transport.fetch_all(rows[0], "forward")
    assert torch.equal(at_once, torch.cat([part[0] for part in found]))
    assert torch.equal(transport.fetch_all(rows[0], "degrees"), torch.cat([part[0] for part in whole]))
    num_values = 3 * sum(halo.numel() for halo in layout.halos[1:])
    assert transport.traffic == {"forward": 2 * 2 * num_values, "degrees": 8 * num_values}
    sent = torch.cat([rows[0][index] for index in layout.sends[1:]])
    error = float((sent - sent.bfloat16().double()).norm() / sent.norm())
    assert math.isclose(counters.totals()["error.forward"], error, rel_tol=1e-9)
    assert 1e-4 < error < 2**-8


def check_largest(world: World) -> None:
    layout = layout_of(world)
    transport = LossyTransport(layout, world, for_all(LargestRows(0.3)))
    rows = [randn(layout.num_own, 3, seed=world.rank), randn(layout.num_own, seed=9 + world.rank)]
    for (a, b), (whole_a, whole_b) in zip(fetched(transport, rows)[1:], exact(layout, rows)[1:], strict=True):
        norms = whole_a.square().sum(1) + whole_b.square()
        chosen = norms >= norms.sort().values[-math.ceil(0.3 * norms.numel())]
        assert torch.equal(a, torch.where(chosen[:, None], whole_a, 0.0))
        assert torch.equal(b, torch.where(chosen, whole_b, 0.0))
    counts = [math.ceil(0.3 * halo.numel()) for halo in layout.halos[1:]]
    assert transport.traffic["forward"] == sum(counts) * (4 * 8 + 4)
    gradient = randn(sum(halo.numel() for halo in layout.halos), 2, seed=5)
    returned = LossyTransport(layout, world, codecs_of("topk", 0.3)).return_all(gradient)  # those stay as they are
    assert torch.equal(returned, P2PTransport(layout).return_all(gradient))


def check_drawn(world: World, steps: int = 300) -> None:
    """A layer that is linear is right in the mean, outputs and gradients; one step draws the same rows throughout."""
    _, x = case("sage-mean")
    layout = layout_of(world, "sage-mean")
    torch.manual_seed(0)
    conv = pyg.SAGEConv(4, 4).double()
    weight = randn(40, 4, seed=7)[layout.own_ids]

    def outputs(transport: Transport) -> Tensor:
        h = x[layout.own_ids].requires_grad_()
        out = run_conv(conv, h, ShardBlock.of(layout, transport))
        (of_input,) = torch.autograd.grad((out * weight).sum(), h)
        return torch.stack([out.detach(), of_input])

    expected, found = outputs(P2PTransport(layout)), []
    transport = LossyTransport(layout, world, codecs_of(rate=0.4))
    for key in range(steps):
        transport.begin_step(key)
        found.append(outputs(transport))
    mean, deviation = torch.stack(found).mean(0), torch.stack(found).std(0) / steps**0.5
    assert ((mean - expected).abs() <= 5 * deviation + 1e-12).all()
    assert (deviation > 0).any()
    whole = steps * 4 * 8 * sum(halo.numel() for halo in layout.halos[1:])
    assert 0.3 < transport.traffic["forward"] / whole < 0.5
    rows = [x[layout.own_ids]]
    again = [fetched(transport, rows, kind) for kind in ("forward", "refetch")]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(*again, strict=True))
    assert torch.equal(transport.fetch_all(rows[0], "forward"), torch.cat([part[0] for part in again[0]]))


def check_stale(world: World) -> None:
    """From the second step on, rows and gradients of others are those of the step before."""
    layout = layout_of(world)
    transport, one = StaleTransport(layout, world), torch.ones(layout.num_own, 2, dtype=torch.float64)
    for step in range(1, 5):
        late = max(1, step - 1)
        transport.begin_step(step)
        for place in (0, 100):
            found = fetched(transport, [one * (step + place)])
            assert [set(part[0].unique().tolist()) for part in found] == [
                {float((late if k else step) + place)} if halo.numel() else set() for k, halo in enumerate(layout.halos)
            ]
        returns = transport.returns([one], 1)
        for k in range(layout.num_shards):
            returns.buffers(k)[0].add_(float(step))
            returns.push(k)
        times = torch.bincount(torch.cat(layout.sends[1:]), minlength=layout.num_own)
        assert torch.equal(returns.finish()[0][:, 0], step + late * times.double())
        if step == 2:  # what is known goes through a checkpoint
            transport.end_step()
            content, transport = transport.memory.to_bytes(), StaleTransport(layout, world)
            transport.memory.read_bytes(content)
        transport.end_step()


def check(world: World) -> Mapping[str, Any]:
    """All of it; an assertion that fails ends the run."""
    every = ("sequential", "stored", "one_shot")
    check_neutral(world, lambda layout: LossyTransport(layout, world, {}), every)
    check_neutral(world, lambda layout: LossyTransport(layout, world, for_all(LargestRows(1.0))), every)
    check_neutral(world, lambda layout: LossyTransport(layout, world, for_all(DrawnRows(1.0))), every)
    check_neutral(world, lambda layout: StaleTransport(layout, world), ("stored",))  # the first step
    check_half(world)
    check_largest(world)
    check_drawn(world)
    check_stale(world)
    return {"size": world.size}
