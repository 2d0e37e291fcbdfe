"""Rules for unusual training: one output column, frozen parameters, duplicates, changed data, hooks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCN, GCNConv, GraphConv

import hopline as hl
from hopline import infer
from hopline.tables import TensorTable
from tests.support.helpers import dataset_of, randn, random_graph
from tests.support.runs import copied, fit, losses, method, sage, same_weights, small


def name_of(how: hl.extend.Method) -> str:
    return type(how).__name__


HISTORICAL = hl.Historical(num_parts=4, parts_per_batch=2, partition="random")

# ---- one output column


@pytest.mark.parametrize("has_own_step", [False, True])
def test_a_single_score_for_more_classes_is_refused(has_own_step: bool):
    data = small()
    step: Any = (lambda model, batch: model(batch).square().mean()) if has_own_step else None
    with pytest.raises(ValueError, match="1 column for 4 classes"):
        fit(data, sage(data, outputs=1), epochs=1, train_step=step)


# ---- what the optimizer steps


def _layers(trainer: hl.Trainer) -> nn.ModuleList:
    assert isinstance(trainer.model, hl.nn.GNN)
    return trainer.model.convs


class GradientNorms(hl.Callback):
    """The norm, after each step, of the gradient of the parameters that the optimizer steps."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
        grads = [p.grad for group in trainer.optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.norms.append(float(torch.stack([g.norm() for g in grads]).norm()))


class Unfreeze(hl.Callback):
    """Trains the first layer from a given step on."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
        if step.step == self.at:
            _layers(trainer)[0].requires_grad_(True)


def test_parameters_that_are_unfrozen_are_clipped_with_the_others():
    data = small()
    norms = GradientNorms()
    model = sage(data)
    model.convs[0].requires_grad_(False)
    first = copied(model.convs[0].state_dict())
    fit(data, model, epochs=2, clip_norm=0.01, callbacks=[Unfreeze(2), norms])
    assert norms.norms == pytest.approx([0.01] * 6, rel=1e-4)
    assert not same_weights(first, copied(model.convs[0].state_dict()))


def test_gradients_of_parameters_that_the_optimizer_does_not_step_are_neither_added_up_nor_clipped_with():
    class Some(hl.Trainer):
        def make_optimizer(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(_layers(self)[1].parameters(), lr=0.0)

    data = small()
    norms = GradientNorms()
    unstepped_norms = list[float]()

    class Others(hl.Callback):
        def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
            grads = [p.grad.flatten() for p in _layers(trainer)[0].parameters() if p.grad is not None]
            unstepped_norms.append(float(torch.cat(grads).norm()))

    how = method(batch_size=150, fanouts=(-1, -1), shuffle=False)
    Some(sage(data), data, how, epochs=4, clip_norm=0.01, callbacks=[norms, Others()], show=False).fit()
    assert norms.norms == pytest.approx([0.01] * 4, rel=1e-4)
    assert unstepped_norms == pytest.approx(unstepped_norms[:1] * 4)  # the same weights at every step


def test_a_parameter_that_is_not_the_models_is_refused():
    class Own(hl.Trainer):
        def make_optimizer(self) -> torch.optim.Optimizer:
            return torch.optim.SGD([*self.model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)

    data = small()
    with pytest.raises(ValueError, match=r"shape \[3\] .*no checkpoint"):
        Own(sage(data), data, method(), show=False).fit()


# ---- training nodes, and fitting twice


@pytest.mark.parametrize("settings", [{}, {"compensate": True}, {"lag": 1}, {"warm_up": False}], ids=str)
def test_a_second_fit_leaves_nothing_of_the_first_in_the_tables(settings: dict[str, Any]):
    data = small()
    how = hl.Historical(num_parts=4, parts_per_batch=1, partition="random", **settings)
    trainer = hl.Trainer(sage(data), data, how, epochs=2, lr=0.02, show=False)
    trainer.fit()
    weights = copied(trainer.model.state_dict())
    second = trainer.fit()
    fresh = sage(data)
    fresh.load_state_dict(weights)
    assert losses(second) == losses(fit(data, fresh, how, epochs=2, lr=0.02))


# ---- compensated histories


# ---- arrays that are changed in place


def weighted_dataset() -> hl.Dataset:
    return dataset_of(random_graph(60, 300, loops=True, weight=True), randn(60, 5))


@pytest.mark.parametrize("kind", [GCNConv, GraphConv])
@pytest.mark.parametrize("chunk_edges", [None, 50])
def test_edge_weights_that_changed_are_read_again_by_inference(kind: Any, chunk_edges: int | None):
    data = weighted_dataset()
    ids = torch.arange(60)
    model = hl.nn.GNN([kind(5, 4), kind(4, 3)]).double().eval()

    def plain() -> Tensor:
        index = data.graph.edge_index()
        weight = data.graph.edge["weight"]
        h = model.convs[0](data.x.read(ids), index, weight).relu()
        return model.convs[1](h, index, weight).detach()

    for _ in range(3):
        outputs = [infer.exact(model, data, ids, chunk_edges=chunk_edges) for _ in range(3)]
        assert all(torch.allclose(ours, plain(), atol=1e-10) for ours in outputs)
        data.graph.edge["weight"].mul_(randn(data.num_edges, seed=8).abs())


def test_edge_weights_that_changed_are_read_again_by_batches():
    data = weighted_dataset()
    model = hl.nn.GNN([GCNConv(5, 4), GCNConv(4, 3)]).double().eval()
    ids = torch.arange(60)
    loader = hl.Sampled(fanouts=(-1, -1), batch_size=60, shuffle=False).loader(data, ids, model=model)
    infer.sampled(model, loader)
    data.graph.edge["weight"].mul_(randn(data.num_edges, seed=8).abs())
    fresh = dataclasses.replace(data, graph=hl.Graph(data.graph.indptr, data.graph.indices, dict(data.graph.edge)))
    assert torch.allclose(infer.sampled(model, loader), infer.exact(model, fresh, ids), atol=1e-10)


@pytest.mark.parametrize("how", [method(), HISTORICAL, hl.FullBatch(num_shards=2)], ids=name_of)
@pytest.mark.parametrize("name", ["edge array 'weight'", "table 'x'"])
def test_a_dataset_that_changes_under_a_trainer_is_refused(how: hl.extend.Method, name: str):
    data = weighted_dataset()

    class Change(hl.Callback):
        def on_epoch_end(self, trainer: hl.Trainer, epoch: hl.extend.EpochEnd) -> None:
            array = data.graph.edge["weight"] if name.startswith("edge") else data.x.storage()
            assert array is not None
            array.mul_(2)

    model = hl.nn.GNN([GCNConv(5, 4), GCNConv(4, 3)]).double()
    with pytest.raises(ValueError, match=f"{name} of the dataset was changed"):
        fit(data, model, how, callbacks=[Change()])


@pytest.mark.parametrize("name", ["indices", "edge array 'weight'", "table 'x'", "labels"])
@pytest.mark.parametrize("past", ["numpy", "inference_mode"])
def test_changes_that_torch_does_not_count_are_refused_too(name: str, past: str):
    data = weighted_dataset()
    with torch.inference_mode(past == "inference_mode"):
        arrays = {key: array.clone() for key, array in data.graph.edge.items()}
        graph = hl.Graph(data.graph.indptr.clone(), data.graph.indices.clone(), arrays)
        x = data.x.read(torch.arange(60)).clone()
        assert data.y is not None
        data = dataclasses.replace(data, graph=graph, tables={"x": TensorTable(x)}, y=data.y.clone())
    trainer = hl.Trainer(hl.nn.GNN([GCNConv(5, 3)]).double(), data, hl.Sampled(fanouts=(4,)), epochs=1, show=False)
    array = {"table 'x'": x, "labels": data.y, **data.graph.named_arrays}[name]
    assert array is not None
    with torch.inference_mode(past == "inference_mode"):
        if past == "numpy":
            array.numpy()[:] = array.numpy()[::-1].copy()
        else:
            array[1] = array[1] + 1 if array.is_floating_point() else 1 - array[1].clamp(max=1)
    with pytest.raises(ValueError, match=f"{name} of the dataset was changed"):
        trainer.fit()


def test_exact_inference_takes_ids_made_in_inference_mode():
    data = weighted_dataset()
    model = hl.nn.GNN([GCNConv(5, 3)]).double().eval()
    with torch.inference_mode():
        ids = torch.arange(5, 20)
    for _ in range(3):
        outputs = infer.exact(model, data, ids)
        torch.testing.assert_close(outputs, infer.exact(model, data, ids.clone()))
        with torch.inference_mode():
            ids += 1


# ---- hooks


@pytest.mark.parametrize(
    "listen", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_hooks_that_layers_would_pass_by_are_refused_or_run(listen: str):
    ours = hl.nn.GNN([GCNConv(5, 4), GCNConv(4, 3)])
    theirs = GCN(5, 4, 2, 3, dropout=0.5)
    getattr(ours, listen)(lambda *_: None)
    getattr(theirs.dropout, listen)(lambda *_: None)
    with pytest.raises(ValueError, match="GNN has hooks"):
        hl.nn.as_batch_model(ours)
    assert not isinstance(hl.nn.as_batch_model(theirs), hl.nn.GNN)  # the model's own forward runs


def test_a_hook_on_the_dropout_of_a_pyg_model_acts_in_training_and_in_evaluation():
    data = weighted_dataset()
    torch.manual_seed(0)
    model = GCN(5, 4, 2, 3, dropout=0.5).double()
    model.dropout.register_forward_hook(lambda module, inputs, out: out + 1)  # type: ignore[operator]
    ids = torch.arange(60)
    ours = infer.exact(model, data, ids)
    weight = data.graph.edge["weight"]
    assert torch.allclose(ours, model.eval()(data.x.read(ids), data.graph.edge_index(), edge_weight=weight))


def test_a_hook_that_is_put_on_a_model_after_the_trainer_was_made_is_refused():
    data = small()
    trainer = hl.Trainer(sage(data), data, hl.FullBatch(num_shards=2), show=False)
    trainer.model.register_forward_hook(lambda module, inputs, out: -out)
    with pytest.raises(ValueError, match="GNN has hooks"):
        trainer.fit()
    trainer = hl.Trainer(GCN(8, 4, 2, 4), data, hl.FullBatch(num_shards=2), show=False)
    trainer.model.register_forward_hook(lambda module, inputs, out: -out)
    with pytest.raises(ValueError, match=r"hooks .*GCN after the Trainer"):
        trainer.fit()


# ---- draws


@pytest.mark.parametrize(
    "how",
    [
        method(),
        method(layout="tree"),
        HISTORICAL,
        hl.FullBatch(num_shards=2, aggregation="sequential"),
        hl.FullBatch(num_shards=2, aggregation="one_shot"),
    ],
    ids=["block", "tree", "historical", "sequential", "one shot"],
)
def test_two_calls_draw_the_same_dropout_unless_the_batch_is_redrawn(how: hl.extend.Method):
    data = small()
    distances = list[tuple[float, float, float, float]]()

    def distance(model: nn.Module, one: hl.Batch, other: hl.Batch) -> float:
        return float((model(one) - model(other)).norm().detach())

    def step(model: nn.Module, batch: hl.Batch) -> Tensor:
        first = batch.with_other_dropout(1)
        second = batch.with_other_dropout(2)
        same = distance(model, batch, batch)
        other = distance(model, batch, first)
        distances.append(
            (same, other, distance(model, first, second), distance(model, first, batch.with_other_dropout(1)))
        )
        return nn.functional.cross_entropy(model(batch), batch.labels)

    fit(data, sage(data, dropout=0.5, input_dropout=0.2), how, epochs=1, train_step=step)
    for same, other, another, again in distances:
        assert (same, again) == (0, 0)
        assert min(other, another) > 1e-2


def test_a_redrawn_batch_of_evaluation_is_the_batch():
    data = small()
    batch = dataclasses.replace(next(iter(method().loader(data))), key=None)
    assert batch.with_other_dropout() is batch
