"""Models wrapped by DDP, Fabric or `torch.compile`, and models called with what they cannot read."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch_geometric.nn import GraphSAGE

import hopline as hl
from tests.support.runs import sage, small


@pytest.fixture(params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process group of so many ranks, of which the others are only said to be there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


class _FabricModule(nn.Module):
    """As much of Lightning Fabric's wrapper as is looked at: its class and its module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def batch_for(model: nn.Module) -> hl.Batch:
    return next(iter(hl.Sampled(fanouts=(3, 2), batch_size=16).loader(small(), model=model)))


def test_ddp_is_taken_off_for_loaders_and_inference(ranks: int):
    data = small()
    model = sage(small())
    wrapped = DistributedDataParallel(model)
    batch = batch_for(wrapped)
    assert torch.equal(wrapped(batch), model(batch)), "DDP around a model of batches is trained as it is"
    assert torch.equal(hl.infer.exact(wrapped, data), hl.infer.exact(model, data))


def test_what_was_taken_out_of_ddp_does_not_train_ranks_apart(ranks: int):
    data = small()
    model = GraphSAGE(data.num_features, 8, 2, data.num_classes)
    batch_model = hl.nn.as_batch_model(DistributedDataParallel(model))
    batch = batch_for(model)
    if ranks == 1:
        assert torch.equal(batch_model(batch), hl.nn.as_batch_model(model)(batch))
        return
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel\(hl\.nn\.as_batch_model"):
        batch_model(batch)
    with torch.no_grad():
        assert torch.equal(batch_model(batch), hl.nn.as_batch_model(model)(batch))
    around = DistributedDataParallel(hl.nn.as_batch_model(model))
    assert around(batch).requires_grad


def test_the_trainer_takes_the_model_out_or_says_what_to_give_it(ranks: int):
    data = small()
    model = sage(small())
    if ranks == 1:
        assert hl.Trainer(DistributedDataParallel(model), data, epochs=1, show=False).model is model
    else:
        with pytest.raises(ValueError, match=r"2 ranks, .*1: .*world="):
            hl.Trainer(DistributedDataParallel(model), data, world=hl.World.alone(), epochs=1, show=False)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_compiled_ddp_is_refused_as_ddp_is(ranks: int):
    data = small()
    model = GraphSAGE(data.num_features, 8, 2, data.num_classes)
    batch = batch_for(model)
    compiled = torch.compile(DistributedDataParallel(model))
    assert isinstance(compiled, nn.Module)
    with pytest.raises(RuntimeError, match="not summed over ranks"):
        hl.nn.as_batch_model(compiled)(batch)
    with pytest.raises(ValueError, match=r"wrapped for 2 ranks, .*1"):
        hl.Trainer(compiled, data, world=hl.World.alone(), epochs=1, show=False)


@pytest.mark.parametrize("package", ["lightning.fabric", "lightning_fabric"])
def test_fabric_and_compiled_models_are_taken_out(package: str, monkeypatch: pytest.MonkeyPatch):
    wrappers = ModuleType(f"{package}.wrappers")
    monkeypatch.setattr(wrappers, "_FabricModule", _FabricModule, raising=False)
    monkeypatch.setitem(sys.modules, wrappers.__name__, wrappers)
    data = small()
    model = sage(small())
    for wrapped in (_FabricModule(model), torch.compile(model), _FabricModule(_FabricModule(model))):
        assert isinstance(wrapped, nn.Module)
        assert hl.nn.as_batch_model(wrapped) is model
        assert torch.equal(hl.infer.exact(wrapped, data), hl.infer.exact(model, data))


@patch.dict(os.environ)  # which Fabric adds to
def test_a_model_set_up_by_lightning_fabric_is_unwrapped():
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model = sage(small())
    assert hl.nn.as_batch_model(fabric.setup(model)) is model


def test_a_pyg_model_that_is_called_with_a_batch_says_what_to_call():
    data = small()
    model = GraphSAGE(data.num_features, 8, 2, data.num_classes)
    batch = batch_for(model)
    for _ in range(2):  # a second loader adds nothing
        batch_for(model)
    assert len(model._forward_pre_hooks) == 1
    with pytest.raises(TypeError, match=r"GraphSAGE takes \(x, edge_index\).*hl\.nn\.as_batch_model\(model\)\(batch\)"):
        model(batch)
    for name in ("edge_index", "batch_size", "n_id"):
        with pytest.raises(
            AttributeError, match=rf"no '{name}'.*hl\.nn\.as_batch_model\(model\)\(batch\).*NeighborLoader"
        ):
            getattr(batch, name)
    with pytest.raises(AttributeError, match="no attribute 'zzz'"):
        _ = batch.zzz
    assert isinstance(hl.nn.as_batch_model(model), hl.nn.GNN), "the answer does not change how the model is run"
    x = torch.randn(4, data.num_features)
    edges = torch.tensor([[0, 1], [1, 2]])
    assert isinstance(model(x, edges), Tensor)
    assert hl.nn.as_batch_model(model)(batch).shape == (batch.num_seeds, data.num_classes)


def test_reprs_fit_in_a_few_lines():
    data = small()
    batch = batch_for(sage(data))
    assert len(repr(batch).splitlines()) == len(batch.blocks) + 2
    for thing in (batch, batch.blocks[0], batch.blocks[0].part, batch.x, data, data.graph, data.tables["x"]):
        assert "tensor(" not in repr(thing)
        assert all(len(line) < 120 for line in repr(thing).splitlines())
    assert f"Batch({batch.num_seeds} seeds, x=[" in repr(batch)
    assert f"{batch.blocks[1].num_edges} edges" in repr(batch)
