"""Historical batches in a custom loop: the gradients of the Trainer, exact tables, state, and refused misuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.nn import SAGEConv

import hopline as hl
from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import World
from tests.methods.historical.loops import DATA, difference, method_of, model_of, on_ranks, own_loop, trainers
from tests.support.helpers import assert_close
from tests.support.own_modules import opaque

CASES: list[dict[str, Any]] = [
    {"kind": "gnn"},
    {"kind": "pyg", "refresh_every": 2},
    {"kind": "norm", "lag": 1, "groups": "fixed"},
    {"kind": "norm", "max_batches": 3},
    {"kind": "gnn", "warm_up": False, "max_batches": 3, "edge_dropout": 0.2},
]


@pytest.mark.parametrize("case", [*CASES, {"kind": "gnn", "accumulate": 2}], ids=str)
def test_gradients_of_every_step_equal_those_of_the_trainer(case: dict[str, Any]):
    assert difference(own_loop(World.alone(), **case), trainers(World.alone(), **case)) < 1e-12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu_gradients_equal_those_of_the_trainer(case: dict[str, Any]):
    world = World.alone("cuda")
    assert difference(own_loop(world, **case), trainers(world, **case)) < 1e-9


def test_over_ranks_gradients_equal_those_of_the_trainer():
    differences = run(on_ranks, LaunchSettings(devices=2, timeout_s=30), CASES)
    assert max(differences) < 1e-12


def loader_of(model: nn.Module, ids: torch.Tensor | str = "train", **settings: Any) -> hl.HistoricalLoader:
    """A loader on the CPU. settings: of `Historical`."""
    return method_of(**settings).loader(DATA, ids, model=model)


def train_epoch(model: nn.Module, loader: hl.HistoricalLoader, *, commits: bool = True) -> list[float]:
    """The losses of an epoch by SGD. commits: whether each batch pushes its rows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), batch.labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if commits:
            batch.commit()
    return losses


def test_each_seed_is_trained_once_an_epoch_and_all_rows_are_pushed():
    model = model_of("gnn")
    loader = loader_of(model, torch.tensor([3, 59, 20]), warm_up=False)
    assert len(loader) in (2, 3)
    seeds = []
    for batch in loader:
        seeds += batch.seeds.tolist()
        model(batch).sum().backward()
        batch.commit()
    assert sorted(seeds) == [3, 20, 59]
    assert (loader.work.partitioned.histories.written >= 0).all()  # of parts without seeds too


def test_inference_from_refreshed_tables_is_exact():
    model = model_of("gnn").eval()
    loader = loader_of(model)
    loader.refresh()
    all_ids = torch.arange(DATA.num_nodes)
    batches = list(loader.reading(all_ids))
    order = torch.cat([batch.seeds for batch in batches]).argsort()
    labels = torch.cat([batch.labels for batch in batches])[order]
    assert torch.equal(labels, DATA.labels)

    estimate = hl.infer.sampled(model, loader.reading(all_ids))[order]
    assert_close(estimate, hl.infer.exact(model, DATA))  # of exact tables

    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    other_loader = loader_of(model, refresh_every="evaluation")
    assert loader.keep_rows is None

    exact = hl.infer.exact(model, DATA, keep=other_loader.keep_rows)
    assert_close(hl.infer.sampled(model, other_loader.reading(all_ids))[order], exact)


def test_a_loader_resumes_from_its_state():
    uninterrupted_model = model_of("gnn")
    loader = loader_of(uninterrupted_model)
    expected_losses = [train_epoch(uninterrupted_model, loader) for _ in range(3)]

    first_model = model_of("gnn")
    first_loader = loader_of(first_model)
    losses = [train_epoch(first_model, first_loader)]
    resumed_model = model_of("gnn")
    resumed_model.load_state_dict(first_model.state_dict())
    resumed_loader = loader_of(resumed_model)
    resumed_loader.load_state_dict(first_loader.state_dict())
    losses += [train_epoch(resumed_model, resumed_loader) for _ in range(2)]

    assert losses == expected_losses


def test_misuse_that_would_train_wrongly_is_refused():
    model = model_of("gnn")
    loader = loader_of(model)
    train_epoch(model, loader, commits=False)
    with pytest.raises(ValueError, match=r"batch\.commit\(\)"):
        next(iter(loader))

    batch = next(iter(loader_of(model)))
    with pytest.raises(ValueError, match=r"call model\(batch\)"):
        batch.commit()

    model(batch)
    batch.commit()
    with pytest.raises(ValueError, match="was committed already"):
        batch.commit()
    with pytest.raises(ValueError, match=r"leave out batch\.commit\(\)"):
        next(loader_of(model).reading("test")).commit()
    with pytest.raises(ValueError, match=r"compensate= .*hl\.Trainer"):
        loader_of(model, compensate=True)
    with pytest.raises(ValueError, match=r"lipschitz= .*hl\.Trainer"):
        loader_of(model, lipschitz=0.1)
    with pytest.raises(ValueError, match=r"split 'trian': .*train, test"):
        loader_of(model, "trian")
    with pytest.raises(ValueError, match="there are no seeds"):
        loader_of(model, torch.tensor([], dtype=torch.int64))
    with pytest.raises(ValueError, match=r"0 to 59"):
        loader_of(model, torch.tensor([60]))


class OneModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(6, 6)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        x = opaque(x)
        return self.conv(self.conv(x, edge_index), edge_index)


def test_a_model_without_layers_and_one_called_with_a_batch_are_told():
    with pytest.raises(ValueError, match=r"OneModule .*push_and_pull"):
        loader_of(OneModule())
    model = model_of("pyg")
    with pytest.raises(TypeError, match=r"hl\.nn\.as_batch_model\(model\)\(batch\)"):
        model(next(iter(loader_of(model))))
