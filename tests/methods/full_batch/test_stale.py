"""Rows of the step before. With real messages between ranks: tests/methods/full_batch/compression_ranks.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hopline.core.partition import make_partition
from hopline.methods.full_batch.compression import Step
from hopline.methods.full_batch.stale import Memory, StaleTransport
from hopline.methods.full_batch.transports import Transport
from hopline.shards.layout import shard_layouts
from tests.helpers import random_graph


class Echo(StaleTransport):
    """Messages come back at once, but are there only when they are waited for."""

    def __init__(self) -> None:
        graph = random_graph()
        Transport.__init__(self, shard_layouts(graph, make_partition(graph, 3, "random", seed=1))[0])
        self.codecs, self.step, self.memory, self.on_host = {}, Step(), Memory(), True

    def post(
        self, sent: list[Tensor], to: int, shapes: list[tuple[int, ...]], source: int, kind: str
    ) -> tuple[list[Tensor], list[Any]]:
        received, value = [t.new_zeros(shape) for t, shape in zip(sent, shapes, strict=True)], sent[0].flatten()[0]

        class Work:
            def wait(self) -> None:
                for t in received:
                    t.fill_(value)

        return received, [Work()]


def values(transport: Transport, value: float, kind: str = "forward") -> list[float]:
    rows = torch.full((transport.layout.num_own, 2), float(value))
    return [float(part[0].mean()) for part in transport.fetch([rows], kind, 1)]


def test_rows_are_those_of_the_step_before() -> None:
    transport = Echo()
    for step, late in ((1, 1), (2, 1), (3, 2), (4, 3)):
        transport.begin_step(step)
        assert values(transport, step) == [step, late, late]
        assert values(transport, 10 * step) == [10 * step, 10 * late, 10 * late]  # another layer's
        assert values(transport, step, "degrees") == [step, step, step]
        transport.end_step()


def test_layers_with_layouts_of_their_own_share_what_is_known() -> None:
    transport = Echo()
    other = transport.on(transport.layout)
    for step, late in ((1, 1), (2, 1), (3, 2)):
        assert [values(transport, step)[1], values(other, 10 * step)[1]] == [late, 10 * late]
        transport.end_step()


def test_what_is_known_goes_through_bytes() -> None:
    transport, again = Echo(), Echo()
    values(transport, 5)
    transport.end_step()
    again.memory.read_bytes(transport.memory.to_bytes())
    assert values(again, 7) == [7, 5, 5]
    assert Memory().to_bytes().numel() > 0
