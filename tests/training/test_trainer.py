"""The training loop: epochs, evaluation, best weights, extension by the user, and failures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GIN, GATConv, GraphSAGE, SAGEConv

import hopline as hl
from hopline import infer
from hopline.ops import derive_key
from hopline.util.errors import StageError
from tests.support.own_modules import opaque
from tests.support.runs import (
    Recorder,
    copied,
    evaluated,
    fit,
    in_float64,
    labels,
    losses,
    method,
    records,
    sage,
    same_weights,
    small,
    without,
)

# ---- epochs and evaluation


@pytest.mark.parametrize(
    ("epochs", "every", "expected"),
    [(3, 2, [2, 3]), (4, 2, [2, 4]), (3, 1, [1, 2, 3]), (2, 20, [2]), (1, 1, [1])],
)
def test_trains_exactly_the_epochs_and_evaluates_on_time(epochs: int, every: int, expected: list[int]):
    run = fit(small(), epochs=epochs, evaluate_every=every)
    assert run.epochs == len(run.history) == epochs
    assert [e.epoch for e in run.history] == list(range(1, epochs + 1))
    assert evaluated(run) == expected
    assert evaluated(run, "test") == [run.best_epoch]
    assert run.reason == ("1 epoch is trained" if epochs == 1 else f"all {epochs} epochs are trained")


def test_early_stop_says_why_and_stops():
    values = iter([0.3, 0.5, 0.4, 0.5, 0.2, 0.9])

    def scripted(model: nn.Module, data: hl.Dataset, ids: Tensor) -> dict[str, float]:
        return {"score": next(values)}

    run = fit(without(small(), "test"), epochs=6, patience=3, test_step=scripted, metric_mode="max")
    assert run.epochs == 5
    assert run.reason == "validation score has not risen above 0.5000 (epoch 2) for 3 evaluations"
    assert (run.best_epoch, run.valid) == (2, 0.5)


def test_stop_in_any_hook_ends_after_the_epoch_and_evaluates_it():
    class Stop(hl.Callback):
        def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
            if step.step == 4:
                trainer.stop("enough")

    run = fit(small(), epochs=9, evaluate_every=5, callbacks=[Stop()])
    assert (run.epochs, evaluated(run), run.reason) == (2, [2], "enough")


def test_a_plateau_schedule_keeps_its_state_over_evaluations():
    """Rebuilding the scheduler at each evaluation, as some trainers do, would reset its patience for ever."""
    schedule = hl.Schedule(name="plateau", every=1, factor=0.1)

    def flat(model: nn.Module, data: hl.Dataset, ids: Tensor) -> dict[str, float]:
        return {"score": 1.0}

    run = fit(small(), epochs=8, evaluate_every=2, lr=1.0, schedule=schedule, test_step=flat, optimizer="sgd")
    assert [e.lr for e in run.history] == pytest.approx([1.0] * 6 + [0.1] * 2)


def test_without_a_validation_split_a_plateau_goes_by_the_loss():
    def flat(model: nn.Module, batch: hl.Batch) -> Tensor:
        return 0 * model(batch).sum() + 1.0

    schedule = hl.Schedule(name="plateau", every=1, factor=0.5)
    run = fit(without(small(), "valid"), epochs=4, lr=1.0, schedule=schedule, train_step=flat)
    assert [e.lr for e in run.history] == [1.0, 1.0, 1.0, 0.5]


# ---- the best weights


def test_the_model_ends_with_the_best_weights_and_the_test_is_theirs(tmp_path: Path):
    """Validation scores are scripted, so that the best epoch is neither the first nor the last."""
    data = small()
    scores = {1: 0.1, 2: 0.9, 3: 0.5}
    weights_by_epoch: list[dict[str, Tensor]] = []

    class Scripted(hl.Trainer):
        def evaluate(self, split: str, *, exact: bool = True) -> dict[str, float]:
            if split == "valid":
                weights_by_epoch.append(copied(self.model.state_dict()))
                return {"accuracy": scores[len(weights_by_epoch)]}
            return super().evaluate(split, exact=exact)

    torch.manual_seed(1)
    model = GraphSAGE(data.num_features, 16, 2, data.num_classes, dropout=0.5)
    run = Scripted(model, data, method(), epochs=3, lr=0.05, show=False, out=tmp_path).fit()
    assert (run.best_epoch, run.valid) == (2, 0.9)
    assert same_weights(model.state_dict(), weights_by_epoch[1])
    assert same_weights(torch.load(tmp_path / "best.pt", weights_only=True), weights_by_epoch[1])
    assert same_weights(torch.load(tmp_path / "last.pt", weights_only=True), weights_by_epoch[2])
    assert not same_weights(weights_by_epoch[1], weights_by_epoch[2])

    pyg = data.to_pyg()
    ids = data.splits["test"]
    with torch.no_grad():
        predicted = model.eval()(pyg.x, pyg.edge_index)[ids].argmax(dim=-1)
    assert run.test == pytest.approx((predicted == labels(data, "test")).double().mean().item())


@pytest.mark.parametrize("kind", [GraphSAGE, GCN, GAT])
def test_kept_weights_load_into_the_plain_pyg_model(kind: Any, tmp_path: Path):
    data = small()
    run = fit(data, kind(data.num_features, 16, 2, data.num_classes), out=tmp_path)
    pyg = data.to_pyg()
    ids = data.splits["test"]
    plain = kind(data.num_features, 16, 2, data.num_classes)
    for name in ("last.pt", "best.pt"):
        plain.load_state_dict(torch.load(tmp_path / name, weights_only=True))
    with torch.no_grad():
        scores = plain.eval()(pyg.x, pyg.edge_index)[ids]
    assert run.test == pytest.approx(hl.metrics.accuracy(scores, labels(data, "test")))


def test_without_validation_the_last_weights_are_the_best(tmp_path: Path):
    run = fit(without(small(), "valid"), epochs=2, out=tmp_path)
    assert run.best_epoch == 2
    assert math.isnan(run.valid)
    assert 0 < run.test < 1
    assert evaluated(run) == []
    last, best = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("last", "best"))
    assert same_weights(last, best)


def test_without_a_test_split_the_test_is_nan():
    run = fit(without(small(), "test"))
    assert math.isnan(run.test)
    assert run.valid > 0


def test_an_empty_split_counts_as_none():
    data = small()
    data = dataclasses.replace(data, splits=data.splits | {"valid": torch.empty(0, dtype=torch.int64)})
    assert evaluated(fit(data)) == []


# ---- steps


@dataclasses.dataclass(frozen=True)
class Pieces(hl.extend.Method):
    """One step's seeds in pieces of given sizes, all drawn with the step's key."""

    sizes: tuple[int, ...]
    fanouts: tuple[int, ...] = (3, 2)

    def bind(self, job: hl.extend.Job) -> PiecesWork:
        return PiecesWork(self, job, hl.extend.NeighborSampler(job.data.graph, self.fanouts))


@dataclasses.dataclass
class PiecesWork(hl.extend.Work):
    spec: Pieces
    job: hl.extend.Job
    sampler: hl.extend.NeighborSampler

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[hl.extend.Unit]:
        key = derive_key(self.job.seed, epoch)
        data = self.job.data
        assert data.y is not None
        for seeds in self.job.train_ids[: sum(self.spec.sizes)].split(list(self.spec.sizes))[done:]:
            blocks = self.sampler.sample(seeds, key)
            rows = hl.extend.Rows(data.x, blocks[0].src_ids)
            yield hl.extend.BatchUnit(self.job, hl.Batch(seeds, blocks, rows, data.y[seeds], key=key))


def test_accumulated_batches_equal_one_batch_of_all_their_seeds():
    data = in_float64(small())
    weights = []
    for sizes in ((60,), (25, 5, 30)):
        model = sage(data, dropout=0.5).double()
        run = fit(data, model, Pieces(sizes), accumulate=len(sizes), optimizer="sgd", lr=0.5, epochs=1)
        weights.append((copied(model.state_dict()), losses(run)))
    (whole, loss), (pieces, loss_of_pieces) = weights
    assert loss == pytest.approx(loss_of_pieces, abs=1e-10)
    assert not same_weights(whole, copied(sage(data).double().state_dict()))
    for name in whole:
        torch.testing.assert_close(pieces[name], whole[name], rtol=1e-10, atol=1e-10)


def test_accumulation_makes_fewer_steps_and_keeps_the_rest():
    watch = Recorder()
    fit(small(), how=method(batch_size=40), accumulate=3, epochs=1, callbacks=[watch])
    assert [step.size for step in watch.payloads("step")] == [120, 30]


def test_bf16_computes_in_bfloat16_and_keeps_float32_weights():
    data = small()
    score_dtypes = set()

    def step(model: nn.Module, batch: hl.Batch) -> Tensor:
        scores = model(batch)
        score_dtypes.add(scores.dtype)
        return nn.functional.cross_entropy(scores.float(), batch.labels)

    model = sage(data)
    run = fit(data, model, epochs=8, precision="bf16", train_step=step)
    assert score_dtypes == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert losses(run)[-1] < losses(run)[0]


# ---- seeds


def test_a_seed_gives_the_same_run_for_any_number_of_workers():
    data = small()
    outcomes = []
    for workers in (0, 1, 3):
        model = sage(data, dropout=0.5)
        run = fit(data, model, method(workers=workers), epochs=3, seed=5)
        outcomes.append((losses(run), run.test, copied(model.state_dict())))
    for other in outcomes[1:]:
        assert other[:2] == outcomes[0][:2]
        assert same_weights(other[2], outcomes[0][2])


def test_the_seed_reaches_draws_inside_convs():
    data = small()
    losses_by_state = []
    for state in (1, 2):
        torch.manual_seed(3)
        model = GAT(data.num_features, 8, 2, data.num_classes, dropout=0.5)
        torch.manual_seed(state)  # must not matter
        losses_by_state.append(losses(fit(data, model, seed=4)))
    assert losses_by_state[0] == losses_by_state[1]


def test_another_seed_gives_another_run():
    data = small()
    assert losses(fit(data, seed=1)) != losses(fit(data, seed=2))


# ---- extension


def test_hooks_are_called_in_order_with_their_payloads():
    data = small()
    watch = Recorder()
    run = fit(data, how=method(batch_size=100), epochs=2, callbacks=[watch])
    epoch = ["step", "step", "epoch", "evaluate"]
    assert [name for name, _ in watch.calls] == ["fit_start", *epoch, *epoch, "evaluate", "fit_end"]
    steps = watch.payloads("step")
    assert [(s.epoch, s.step, s.size) for s in steps] == [(1, 1, 100), (1, 2, 50), (2, 3, 100), (2, 4, 50)]
    assert all(not s.loss.requires_grad and s.loss.dim() == 0 for s in steps)
    mean = (steps[0].loss * 100 + steps[1].loss * 50) / 150
    assert run.history[0].loss == pytest.approx(float(mean), rel=1e-6)
    assert watch.payloads("epoch") == run.history
    assert watch.payloads("evaluate") == run.evaluations
    assert [(e.split, e.epoch) for e in run.evaluations[:2]] == [("valid", 1), ("valid", 2)]
    assert watch.payloads("fit_end") == [run]
    last = run.history[-1]
    assert last.seeds_per_s == pytest.approx(150 / last.seconds)
    assert last.slowest_stage in last.stages
    assert {"sample", "gather", "move", "forward", "backward", "optimizer"} <= last.stages.keys()
    assert last.counters["edges.sampled"] > 0
    assert "forward" in {region.name for region in run.stages}


def test_what_a_test_step_draws_is_not_what_training_draws():
    """So that the run is the same, whoever evaluates."""

    def drawing(model: nn.Module, data: hl.Dataset, ids: Tensor) -> dict[str, float]:
        return {"drawn_score": float(torch.rand(1))}

    data = small()
    loss_curves = []
    for test_step in (drawing, None):
        torch.manual_seed(3)
        model = hl.nn.GNN([GATConv(8, 4, dropout=0.5), GATConv(4, 4, dropout=0.5)])  # which draws by itself
        run = hl.Trainer(model, data, method(), epochs=3, test_step=test_step, show=False).fit()
        loss_curves.append([epoch.loss for epoch in run.history])
    assert loss_curves[0] == loss_curves[1]


def test_own_training_and_test_steps_are_used():
    data = small()
    calls = []

    def train_step(model: nn.Module, batch: hl.Batch) -> Tensor:
        return model(batch).square().mean()

    def test_step(model: nn.Module, data: hl.Dataset, ids: Tensor) -> dict[str, float]:
        calls.append((ids, model.training, torch.is_grad_enabled()))
        return {"size": float(ids.numel()), "other": 0.0}

    run = fit(data, epochs=3, lr=0.1, train_step=train_step, test_step=test_step, metric_mode="max")
    assert losses(run)[-1] < losses(run)[0]
    assert (run.metric, run.valid, run.test) == ("size", 80.0, 170.0)
    assert [ids is data.splits["valid"] for ids, *_ in calls] == [True, True, True, False]
    assert all(not training and not grad for _, training, grad in calls)


def test_units_commit_after_the_optimizer_step():
    data = small()
    order = []

    class Noted(hl.extend.BatchUnit):
        def forward_backward(self, total: int) -> Tensor:
            order.append(("backward", total))
            return super().forward_backward(total)

        def commit(self) -> None:
            order.append(("commit", self.size))

    class Watched(hl.Trainer):
        def make_optimizer(self) -> torch.optim.Optimizer:
            optimizer = super().make_optimizer()
            optimizer.register_step_post_hook(lambda *_: order.append(("step", 0)))
            return optimizer

    class Work(PiecesWork):
        def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[hl.extend.Unit]:
            units = super().units(epoch, done, examples)
            return (Noted(unit.job, unit.batch) for unit in units if isinstance(unit, hl.extend.BatchUnit))

    class Own(Pieces):
        def bind(self, job: hl.extend.Job) -> PiecesWork:
            return Work(**vars(super().bind(job)))

    Watched(sage(data), data, Own((20, 30)), epochs=1, accumulate=2, show=False).fit()
    assert order == [("backward", 50), ("backward", 50), ("step", 0), ("commit", 20), ("commit", 30)]


def test_units_with_other_arguments_are_refused_by_name():
    with pytest.raises(TypeError, match=r"Begun\.units .*units\(self, epoch, done=0, ex"):

        class Begun(hl.extend.Work):
            def units(self, epoch: int) -> Iterator[hl.extend.Unit]:  # type: ignore[override]
                yield from ()


def test_a_method_that_binds_no_work_is_refused_by_name():
    class Bare(hl.extend.Method):
        def bind(self, job: hl.extend.Job) -> Any:
            return self

    data = small()
    with pytest.raises(ValueError, match=r"Bare: .*class from hl"):
        hl.Trainer(sage(data), data, Bare(), show=False)


@pytest.mark.parametrize("kind", ["gnn", "pyg"])
def test_the_last_layer_has_a_weight_decay_of_its_own(kind: str):
    data = small()
    model = sage(data) if kind == "gnn" else GCN(8, 16, 2, 4)
    trainer = hl.Trainer(model, data, method(), weight_decay=0.5, weight_decay_rest=0.0)
    main, rest = trainer.make_optimizer().param_groups
    assert (main["weight_decay"], rest["weight_decay"]) == (0.5, 0.0)
    assert [id(p) for p in rest["params"]] == [id(p) for p in model.convs[-1].parameters()]  # type: ignore[index]
    assert len(main["params"]) + len(rest["params"]) == len(list(model.parameters()))


def test_a_model_without_layers_refuses_a_weight_decay_of_the_rest():
    data = small()

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gcn = GCN(8, 16, 2, 4)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            x = opaque(x)
            return self.gcn(x, edge_index)

    trainer = hl.Trainer(Own(), data, method(), weight_decay_rest=0.0)
    with pytest.raises(ValueError, match=r"weight_decay_rest= .*Own .*layers"):
        trainer.make_optimizer()


def test_a_subclass_can_replace_the_optimizer_and_the_evaluation():
    class Own(hl.Trainer):
        def make_optimizer(self) -> torch.optim.Optimizer:
            return torch.optim.RMSprop(self.model.parameters(), lr=self.settings.lr)

        def evaluate(self, split: str, *, exact: bool = True) -> dict[str, float]:
            return {"half": super().evaluate(split, exact=exact)["accuracy"] / 2}

    data = small()
    trainer = Own(sage(data), data, method(), epochs=1, metric_mode="max", show=False)
    run = trainer.fit()
    assert run.metric == "half"
    assert 0 < run.test <= 0.5
    assert isinstance(trainer.optimizer, torch.optim.RMSprop)


# ---- tasks


def test_several_labels_are_scored_by_micro_f1():
    data = small()
    assert data.y is not None
    several = nn.functional.one_hot(data.y, 4) | nn.functional.one_hot((data.y + 1) % 4, 4)
    data = dataclasses.replace(data, y=several, task="multi")
    model = sage(data)
    run = fit(data, model, epochs=15, lr=0.02)
    ids = data.splits["test"]
    assert run.metric == "micro_f1"
    assert run.test == pytest.approx(hl.metrics.micro_f1(infer.exact(model, data, ids), several[ids]))
    assert run.test > 0.6


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_binary_task_is_scored_by_roc_auc_with_one_output_or_two(outputs: int):
    data = small(num_classes=2)
    data = dataclasses.replace(data, task="binary")
    model = sage(data, outputs=outputs)
    run = fit(data, model, epochs=15, lr=0.02)
    ids = data.splits["test"]
    scores = infer.exact(model, data, ids)
    score = scores[:, 1] - scores[:, 0] if outputs == 2 else scores[:, 0]
    assert data.y is not None
    assert run.metric == "roc_auc"
    assert run.test == pytest.approx(hl.metrics.roc_auc(score, data.y[ids]))
    assert run.test > 0.8


def test_nodes_without_a_label_take_part_as_neighbours_only():
    data = small(num_test=20)
    assert data.y is not None
    labelled = torch.cat(list(data.splits.values()))
    y = torch.full_like(data.y, -1)
    y[labelled] = data.y[labelled]
    assert (y < 0).any()
    assert losses(fit(dataclasses.replace(data, y=y))) == losses(fit(data))


def test_without_labels_the_error_says_what_to_give():
    data = dataclasses.replace(small(), y=None)
    with pytest.raises(ValueError, match=r"labels .*give it y, .*train_step="):
        fit(data, sage(small()))


# ---- models


@pytest.mark.parametrize("kind", [GraphSAGE, GCN, "gnn"])
def test_layers_that_learn_their_width_from_the_data_train(kind: Any):
    data = small()
    torch.manual_seed(0)
    if kind == "gnn":
        model: nn.Module = hl.nn.GNN([SAGEConv(-1, 16), SAGEConv(-1, data.num_classes)])
    else:
        model = kind(-1, 16, 2, data.num_classes)
    run = fit(data, model, epochs=4)
    assert losses(run)[-1] < losses(run)[0]
    assert model.convs[0].in_channels in (-1, data.num_features)  # pyright: ignore


def test_a_module_with_another_forward_is_refused_by_name():
    with pytest.raises(ValueError, match=r"Linear\.forward .*forward\(x, edge_index, \.\.\.\)"):
        fit(small(), nn.Linear(8, 4))


def test_sampled_inference_validates_on_samples_and_tests_exactly(monkeypatch: pytest.MonkeyPatch):
    calls: list[int | None] = []
    plain = infer.sampled

    def spy(*args: Any, **options: Any) -> Tensor:
        calls.append(options["num_nodes"])
        return plain(*args, **options)

    monkeypatch.setattr(infer, "sampled", spy)
    data = small()
    model = sage(data)
    run = fit(data, model, epochs=2, inference="sampled")
    assert calls == [80, 80]
    scores = infer.exact(model, data, data.splits["test"])
    assert run.test == hl.metrics.accuracy(scores, labels(data, "test"))


# ---- failures


def test_a_loss_that_is_not_a_number_ends_training_with_advice():
    def step(model: nn.Module, batch: hl.Batch) -> Tensor:
        return model(batch).sum() * math.nan

    with pytest.raises(ValueError, match="nan in epoch 1: lower lr="):
        fit(small(), train_step=step)


def test_a_method_without_batches_is_an_error():
    with pytest.raises(ValueError, match=r"drop_last=false, .*batch_size smaller"):
        fit(small(), how=method(batch_size=1000, drop_last=True))


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("hook", ["on_step_end", "on_epoch_end", "on_evaluate_end"])
def test_an_exception_in_a_callback_ends_cleanly_with_a_report(kind: type[BaseException], hook: str, tmp_path: Path):
    """That no thread is left is checked after every test."""

    def fail(*_: Any) -> None:
        raise kind("no more")

    broken = hl.Callback()
    watch = Recorder()
    setattr(broken, hook, fail)
    with pytest.raises(kind, match="no more"):
        fit(small(), how=method(workers=3, batch_size=10), out=tmp_path, callbacks=[broken, watch])
    (end,) = records(tmp_path, "end")
    (close,) = records(tmp_path, "close")
    assert end["reason"] == f"{kind.__name__}: no more"
    expected = "interrupted: no more" if kind is KeyboardInterrupt else f"failed: {kind.__name__}: no more"
    assert close["status"] == expected
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "trace.json").exists()
    assert watch.calls[-1][0] == "fit_end"


class Faulty(hl.extend.TensorTable):
    """A table that cannot be read any more once it is broken."""

    broken = False

    def read(self, ids: Tensor) -> Tensor:
        if self.broken:
            raise OSError("the disk is gone")
        return super().read(ids)


@pytest.mark.parametrize("workers", [0, 3])
def test_an_exception_in_a_stage_names_it_and_ends_cleanly_with_a_report(workers: int, tmp_path: Path):
    data = small()
    table = data.tables["x"] = Faulty(data.x.read(torch.arange(data.num_nodes)))

    class Break(hl.Callback):
        def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
            table.broken = True  # batches that are prepared already are trained all the same

    how = method(workers=workers, batch_size=10)
    with pytest.raises(StageError, match="'gather' failed: the disk is gone"):
        fit(data, sage(data, input_dropout=0.1), how, out=tmp_path, callbacks=[Break()], evaluate_every=5)
    assert "the disk is gone" in records(tmp_path, "end")[0]["reason"]
    assert "failed" in records(tmp_path, "close")[0]["status"]


def test_a_batch_of_one_seed_trains_with_batch_norm_inside_the_conv():
    data = small(num_train=51)
    model = GIN(data.num_features, 8, 2, data.num_classes, norm="batch_norm")
    run = fit(data, model, method(batch_size=50), epochs=1)
    assert run.epochs == 1


def test_evaluation_is_counted_to_the_epoch_it_follows_and_the_test_to_none():
    run = fit(small(), epochs=3)
    (evaluate,) = [region for region in run.stages if region.name == "evaluate"]
    assert evaluate.calls == 3
    assert evaluate.first_epoch_s > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": Data(x=torch.ones(2, 2))}, "hl.from_pyg"),
        ({"data": [Data(x=torch.ones(2, 2))]}, "Batch.from_data_list"),
        ({"data": "cora"}, "hl.open"),
        ({"model": nn.Identity()}, "nothing to train"),
        ({"model": "sage"}, r"hl.nn.GNN\("),
        ({"model": GraphSAGE}, r"GraphSAGE\(\.\.\.\)"),
        ({"model": nn.Linear(2, 2).half()}, r"model.float\(\).*precision='bf16'"),
        ({"settings": {"patience": 2}, "splits": "valid"}, "patience=2 .*valid"),
        ({"settings": {"patience": 0}}, "patience must be at least 1"),
        ({"settings": {"device": "tpu"}}, "device='tpu'"),
        ({"outputs": 2}, "puts out 2 columns for 4 classes"),
        ({"test_step": lambda *_: {}}, "evaluation gave no metric"),
    ],
    ids=[
        "pyg data",
        "graphs",
        "a name",
        "frozen",
        "model name",
        "model class",
        "half",
        "no valid",
        "no patience",
        "no device",
        "narrow",
        "no metric",
    ],
)
def test_what_cannot_train_is_said_at_once(arguments: dict[str, Any], message: str):
    data = small()
    data = without(data, arguments["splits"]) if "splits" in arguments else data
    model = arguments.get("model") or sage(data, outputs=arguments.get("outputs"))
    settings = {"epochs": 1, "show": False} | arguments.get("settings", {})
    with pytest.raises(ValueError, match=message):
        hl.Trainer(model, arguments.get("data", data), method(), test_step=arguments.get("test_step"), **settings).fit()


def test_the_default_method_follows_the_models_depth():
    data = small()

    def fanouts(model: nn.Module) -> object:
        return hl.Trainer(model, data, show=False, epochs=1).method.fanouts  # type: ignore[attr-defined]

    assert fanouts(sage(data)) == (15, 10)
    deep = hl.nn.GNN(
        [SAGEConv(data.num_features, 8), *(SAGEConv(8, 8) for _ in range(3)), SAGEConv(8, data.num_classes)]
    )
    assert fanouts(deep) == (15, 10, 5, 5, 5)
    assert fanouts(GraphSAGE(data.num_features, 8, 4, data.num_classes)) == (15, 10, 5, 5)

    class Net(nn.Module):
        def __init__(self, *convs: nn.Module) -> None:
            super().__init__()
            self.convs = nn.ModuleList(convs)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            for conv in self.convs:
                x = conv(x, edge_index)
            return x

    assert fanouts(Net(SAGEConv(data.num_features, 8), SAGEConv(8, data.num_classes))) == (15, 10)

    class Own(nn.Linear):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    with pytest.raises(ValueError, match=r"depth of Own .*fanouts=\(15, 10\)"):
        fanouts(Own(data.num_features, data.num_classes))
    assert hl.Trainer(sage(data), data, show=False, epochs=1).fit().epochs == 1
    with pytest.raises(ValueError, match=r"fanouts='auto' .*model="):
        hl.Sampled().loader(data)
    assert len(next(iter(hl.Sampled().loader(data, model=sage(data)))).blocks) == 2


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("auto", "hopline plan"),
        ("histrical", r"such as hl.Historical\(\), not "),
        (hl.FullBatch, r"such as hl.FullBatch\(\), not "),
        (17, r"such as hl.Sampled\(\), not 17"),
    ],
)
def test_what_is_no_method_is_refused_with_what_to_write(method: Any, words: str):
    data = small()
    with pytest.raises(ValueError, match=words):
        hl.Trainer(sage(data), data, method)


@pytest.mark.parametrize("name", ["cluster_gcn", "Cluster-GCN"])
def test_cluster_gcn_is_found_by_its_name(name: str):
    data = small()
    trainer = hl.Trainer(sage(data), data, name, show=False)
    assert trainer.method == hl.ClusterGCN() == hl.Historical(halo="drop")
    assert hl.ClusterGCN(num_parts=4, parts_per_batch=2) == hl.Historical(num_parts=4, parts_per_batch=2, halo="drop")
    with pytest.raises(TypeError, match="num_parts"):
        hl.ClusterGCN(num_part=4)


@pytest.mark.parametrize("name", ["sampled", "historical", "full_batch"])
def test_a_method_and_a_schedule_are_given_by_name_as_on_the_command_line(name: str):
    by_name = fit(small(), how=name, schedule="cosine")  # type: ignore[arg-type]
    kinds = {"sampled": hl.Sampled, "historical": hl.Historical, "full_batch": hl.FullBatch}
    by_object = fit(small(), how=kinds[name](), schedule=hl.Schedule(name="cosine"))
    assert [e.loss for e in by_name.history] == [e.loss for e in by_object.history]
    assert [e.lr for e in by_name.history] == [e.lr for e in by_object.history]


def test_a_misspelt_argument_is_refused_with_the_one_that_was_meant():
    data = small()
    for name, meant in (
        ("epoch", "epochs"),
        ("bugdet", "budget"),
        ("callback", "callbacks"),
        ("weights_decay", "weight_decay"),
    ):
        with pytest.raises(TypeError, match=rf"'{name}'.*'{meant}'"):
            hl.Trainer(sage(data), data, **{name: None})  # type: ignore[arg-type]
    for name, meant in (("metrics", "task="), ("loss", "task="), ("logger", "callbacks=")):
        with pytest.raises(TypeError, match=f"'{name}': give {meant}"):
            hl.Trainer(sage(data), data, **{name: None})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"fanouts=\(15, 10, 5\), not '5,5'"):
        hl.Sampled(fanouts="5,5")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"'fanout'.*'fanouts'"):
        hl.Sampled(fanout=(1, 2))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"by name, such as fanouts=\(1, 2\)"):
        hl.Sampled((1, 2))  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"callbacks .*hl\.Callback"):
        hl.Trainer(sage(data), data, callbacks=[hl.EarlyStop])  # type: ignore[list-item]


def test_a_failed_start_leaves_no_folder(tmp_path: Path):
    data = small()
    out = tmp_path / "runs" / "one"

    def broken(model: nn.Module, batch: hl.Batch) -> Tensor:
        raise RuntimeError("no step was possible")

    for out, existed_before in ((tmp_path / "runs" / "one", False), (tmp_path, True)):
        (tmp_path / "mine.txt").write_text("mine")
        with pytest.raises(RuntimeError, match="no step was possible"):
            hl.Trainer(sage(data), data, method(), train_step=broken, out=out, show=False).fit()
        assert out.exists() == existed_before
        assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    hl.Trainer(sage(data), data, method(), epochs=1, out=tmp_path, show=False).fit()

    class Later(hl.Callback):
        def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
            raise RuntimeError("after a step")

    with pytest.raises(RuntimeError, match="after a step"):
        hl.Trainer(sage(data), data, method(), callbacks=[Later()], out=tmp_path / "later", show=False).fit()
    assert "failed: RuntimeError: after a step" in (tmp_path / "later" / "run.log").read_text()


def test_a_split_that_is_not_there_is_refused_by_name():
    data = small()
    trainer = hl.Trainer(sage(data), data, method(), show=False)
    with pytest.raises(ValueError, match=r"split 'vaild': .*train, valid, test"):
        trainer.evaluate("vaild")
