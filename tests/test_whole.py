"""Modules of the user's own, which are not made of layers: what is refused, and what is said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import hopline as hl
from hopline import infer
from tests.runs import fit, method, small


class Net(nn.Module):
    """Two convs and a ReLU."""

    def __init__(self, make: Callable[[int, int], nn.Module], data: hl.Dataset, hidden: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = make(data.num_features, hidden)
        self.second = make(hidden, data.num_classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


CACHED: dict[str, Callable[[int, int], nn.Module]] = {
    "GCNConv": lambda i, o: pyg.GCNConv(i, o, cached=True),
    "SGConv": lambda i, o: pyg.SGConv(i, o, cached=True),
    "SSGConv": lambda i, o: pyg.SSGConv(i, o, alpha=0.1, K=2, cached=True),
    "EGConv": lambda i, o: pyg.EGConv(i, o, num_heads=4, cached=True),
}


class Alone(nn.Module):
    """A linear layer, then one conv that has no weights."""

    def __init__(self, data: hl.Dataset, conv: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.conv = nn.Linear(data.num_features, data.num_classes), conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(self.lin(x), edge_index)


def cached_model(name: str, data: hl.Dataset) -> nn.Module:
    return Alone(data, pyg.APPNP(2, 0.1, cached=True)) if name == "APPNP" else Net(CACHED[name], data)


# ---- convs that cache the edges of a graph


@pytest.mark.parametrize("name", [*CACHED, "APPNP"])
def test_a_conv_that_caches_edges_is_refused_by_name_in_batches(name: str):
    data = small()
    model = cached_model(name, data)
    sentence = rf"{name}\(cached=True\) keeps the edges of the first batch .*: build it with cached=False"
    with pytest.raises(ValueError, match=sentence):
        fit(data, model)
    batch = next(iter(method().loader(data, data.splits["train"])))
    with pytest.raises(ValueError, match=sentence):
        hl.nn.as_walkable(model)(batch)


@pytest.mark.parametrize("name", [*CACHED, "APPNP"])
def test_exact_inference_uses_no_cache_of_another_graph_and_leaves_the_caches_alone(name: str):
    data, other = small(), small(num_nodes=300, num_edges=2000)
    model = cached_model(name, data).eval()
    expected = [cached_model(name, data).eval()(one.to_pyg().x, one.to_pyg().edge_index) for one in (data, other)]
    model(other.to_pyg().x, other.to_pyg().edge_index)  # fills the caches
    before = caches_of(model)
    assert any(value is not None for value in before)

    found = [infer.exact(model, one) for one in (data, other)]

    for rows, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(rows, wanted.detach())
    assert [a is b for a, b in zip(caches_of(model), before, strict=True)] == [True] * len(before)


def caches_of(model: nn.Module) -> list[object]:
    return [value for part in model.modules() for name, value in vars(part).items() if name.startswith("_cached_")]


def test_a_cache_that_is_switched_off_but_full_is_not_used_in_batches():
    data = small()
    model = Net(CACHED["GCNConv"], data).eval()
    fresh = Net(CACHED["GCNConv"], data).eval()
    model(data.to_pyg().x, data.to_pyg().edge_index)
    for net in (model, fresh):
        net.first.cached = net.second.cached = False  # type: ignore[assignment]
    batch = next(iter(method().loader(data, data.splits["train"])))
    torch.testing.assert_close(hl.nn.as_walkable(model)(batch), hl.nn.as_walkable(fresh)(batch))
