"""Checks of messages in half precision that each rank runs.

A `HalfPrecisionTransport` rounds the kinds of rows that it is given to bfloat16, and sends all others exactly. The
oracle is `P2PTransport`, which rounds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hopline.core.partition import make_partition
from hopline.distributed.world import World
from hopline.methods.full_batch.compression import COMPRESSED, HalfPrecisionTransport
from hopline.shards.layout import ShardLayout, shard_layouts
from hopline.shards.transports import P2PTransport, Transport
from hopline.util import trace
from tests.shards.cases import case, model, sharded
from tests.support.helpers import randn


def layout_of(world: World, name: str = "gat") -> ShardLayout:
    """The layout of this rank's shard of a case."""
    graph, _ = case(name)
    return shard_layouts(graph, make_partition(graph, world.size, "random", seed=2))[world.rank]


def check_neutral(world: World, make_transport: Callable[[ShardLayout], Transport], modes: tuple[str, ...]) -> None:
    """A transport that compresses nothing gives the bits of the exact one."""
    for name in ("gat", "sage-max", "gcn"):
        graph, x = case(name)
        conv = model(name)
        layout = layout_of(world, name)
        for mode in modes:
            expected = sharded(conv, graph, x, layout, P2PTransport(layout), mode=mode)
            ours = sharded(conv, graph, x, layout, make_transport(layout), mode=mode)
            assert all(torch.equal(ours[key], expected[key]) for key in expected), (name, mode)


def fetch_parts(transport: Transport, rows: list[Tensor], kind: str = "forward") -> list[list[Tensor]]:
    """The rows that a transport fetches, part by part; the first part are the rows of this rank itself."""
    return list(transport.fetch(rows, kind, 1))


def fetch_exact_parts(layout: ShardLayout, rows: list[Tensor]) -> list[list[Tensor]]:
    """The oracle: the same rows without compression."""
    return fetch_parts(P2PTransport(layout), rows)


def check_half(world: World) -> None:
    """Rows of other ranks are rounded, own rows are not; traffic and error are counted."""
    layout = layout_of(world)
    transport = HalfPrecisionTransport(layout, world, COMPRESSED["bf16_both"])
    rows = [randn(layout.num_own, 3, seed=world.rank)]
    exact_parts = fetch_exact_parts(layout, rows)
    counters = trace.Counters()
    with trace.listen(counters):
        ours = fetch_parts(transport, rows)
        transport.end_step()
    assert torch.equal(ours[0][0], rows[0])
    assert all(torch.equal(a[0], b[0].bfloat16().double()) for a, b in zip(ours[1:], exact_parts[1:], strict=True))
    at_once = transport.fetch_all(rows[0], "forward")
    assert torch.equal(at_once, torch.cat([part[0] for part in ours]))
    assert torch.equal(transport.fetch_all(rows[0], "degrees"), torch.cat([part[0] for part in exact_parts]))
    num_values = 3 * sum(halo.numel() for halo in layout.halos[1:])
    assert transport.traffic == {"forward": 2 * 2 * num_values, "degrees": 8 * num_values}
    sent = torch.cat([rows[0][index] for index in layout.sends[1:]])
    error = float((sent - sent.bfloat16().double()).norm() / sent.norm())
    assert math.isclose(counters.totals()["error.forward"], error, rel_tol=1e-9)
    assert 1e-4 < error < 2**-8


def check_gradients(world: World) -> None:
    """Returned gradients: "bf16" leaves them exact, "bf16_both" rounds those of other ranks alone."""
    layout = layout_of(world)
    gradient = randn(sum(halo.numel() for halo in layout.halos), 2, seed=5 + world.rank)
    exact_sum = P2PTransport(layout).return_all(gradient)
    as_rows = HalfPrecisionTransport(layout, world, COMPRESSED["bf16"]).return_all(gradient)
    assert torch.equal(as_rows, exact_sum)
    rounded = gradient.clone()
    first = layout.halos[0].numel()
    rounded[first:] = gradient[first:].bfloat16().double()
    ours = HalfPrecisionTransport(layout, world, COMPRESSED["bf16_both"]).return_all(gradient)
    assert torch.equal(ours, P2PTransport(layout).return_all(rounded))
    assert not torch.equal(ours, exact_sum)


def check(world: World) -> Mapping[str, Any]:
    """All checks; an assertion that fails ends the run."""
    all_modes = ("sequential", "stored", "one_shot")
    check_neutral(world, lambda layout: HalfPrecisionTransport(layout, world), all_modes)
    check_half(world)
    check_gradients(world)
    return {"size": world.size}
