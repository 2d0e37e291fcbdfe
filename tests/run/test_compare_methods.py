"""Comparing methods before a run: each is planned and timed, and the fastest that fits is recommended."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.nn import SAGEConv

from hopline.budget.memory_plan import RunOutline
from hopline.budget.plan import Budget, DoesNotFit, Plan
from hopline.core.examples import Examples
from hopline.methods.full_batch.settings import FullBatch
from hopline.methods.historical.settings import Historical
from hopline.methods.plan_within import plan_of
from hopline.methods.sampled.settings import Sampled
from hopline.nn import GNN
from hopline.run import compare_methods as choosing
from hopline.run.compare_methods import Candidate, choose, compare, first_nodes, outline_of_run, recommend, table_of
from hopline.run.settings import Auto
from hopline.training.settings import TrainSettings
from hopline.training.trainer import Trainer
from hopline.util.config import parse_size
from tests.support.helpers import dataset_of, randn, random_graph, stack_of
from tests.support.own_modules import opaque

SAMPLED = Sampled(fanouts=(5, 5), batch_size=100)


def outline_of(num_nodes: int = 600) -> RunOutline:
    data = dataset_of(random_graph(num_nodes, 8 * num_nodes, attr=2), randn(num_nodes, 6))
    torch.manual_seed(0)
    return outline_of_run(GNN(stack_of("sage-mean", 6, 16, 3)).double(), data, TrainSettings())


def test_every_method_is_planned_and_timed():
    outline = outline_of()
    choices = compare(SAMPLED, outline, Budget(host="1GiB"))
    assert [c.name for c in choices] == ["sampled", "historical", "full_batch"]
    assert all(c.plan is not None and 0 < c.epoch_s < 60 for c in choices)
    assert [c.plan.steps for c in choices if c.plan] == [3, 4, 1]
    best = recommend(choices)
    assert best is min(choices, key=lambda c: c.epoch_s / c.plan.steps)  # type: ignore[union-attr]
    rows = table_of(choices)
    assert [len(row) for row in rows] == [7] * 3
    assert rows[0][-1] == "batches of 100 seeds, whole"
    assert rows[2][-1] == "a graph in 8 shards, whole"
    assert all(p.grad is None for p in outline.job.module.parameters())


@pytest.mark.parametrize("limit", ["600KiB", "1MiB"])
def test_the_plan_of_a_method_is_that_of_a_run_with_the_same_settings(limit: str):
    budget = Budget(host=limit)
    choices = compare(None, outline_of(), budget)
    assert any(choice.plan is not None for choice in choices)
    for choice in choices:
        kind: Any = {"sampled": Sampled, "historical": Historical, "full_batch": FullBatch}[choice.name]
        method = kind(**({"folder": choice.method.folder} if getattr(choice.method, "folder", None) else {}))
        outline = outline_of()
        if choice.plan is None:
            with pytest.raises(DoesNotFit):
                Trainer(outline.job.module, outline.data, method, budget=budget, show=False)
            continue
        plan = Trainer(outline.job.module, outline.data, method, budget=budget, show=False).plan
        assert plan is not None
        assert _without_times(plan) == _without_times(choice.plan)
        if plan.partition is not None and choice.plan.partition is not None:
            assert torch.equal(plan.partition.part_of, choice.plan.partition.part_of)
            is_changed = plan.partition.num_parts != method.num_shards
            assert (f"num_shards={method.num_shards}" in plan.step_summary) == is_changed


def _without_times(plan: Plan) -> list[str]:
    return replace(plan, price=None, process_bytes=0).lines()


def test_what_does_not_fit_in_memory_is_tried_with_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    outline = outline_of()
    memory, files = (m for m in choosing.alternatives(SAMPLED, outline) if isinstance(m, FullBatch))
    smallest_bytes = [plan_of(m, outline, Budget(host="1KiB")).smallest_bytes("host") for m in (memory, files)]
    assert smallest_bytes[1] < smallest_bytes[0]
    limit = sum(smallest_bytes) // 2
    choices = compare(SAMPLED, outline, Budget(host=str(limit)))
    full_batch = choices[-1]
    assert isinstance(full_batch.method, FullBatch)
    assert (full_batch.plan is None, full_batch.method.folder) == (False, Path("tables"))
    assert choosing.settings_to_type(full_batch.method) == "method=full_batch method.folder=tables"
    assert list(tmp_path.iterdir()) == []


def test_the_fastest_step_is_recommended_of_those_that_fit():
    plan = plan_of(SAMPLED, outline_of(), Budget())  # of three steps
    slow, fast = (Candidate(method=SAMPLED, plan=plan, epoch_s=s) for s in (3.0, 1.0))
    refused = Candidate(method=Historical(), refusal="it does not fit")
    unknown = Candidate(method=FullBatch(), plan=plan)
    assert recommend([slow, fast, refused, unknown]) is fast
    assert recommend([refused]) is None
    assert table_of([refused]) == [["historical", *["-"] * 5, "it does not fit"]]


def test_auto_says_why_it_chose_and_refuses_a_budget_that_no_method_fits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choosing, "NUM_TIMED_STEPS", 1)
    method, why = choose(outline_of(), Budget(host="1GiB"))
    assert why.startswith(f"method={choosing.kind_of(type(method))}: an epoch takes about ")
    assert "the fastest steps of those that fit" in why
    with pytest.raises(ValueError, match="method=auto"):
        Auto().bind(outline_of().job)
    with pytest.raises(ValueError, match=r"no method fits .*1 KiB"):
        choose(outline_of(), Budget(host="1KiB"))


def test_the_first_nodes_are_the_graph_between_them():
    data = outline_of(60).data
    part = first_nodes(data, 25)
    assert (part.num_nodes, part.folder) == (25, None)
    for node in range(25):
        before = data.graph.indices[data.graph.indptr[node] : data.graph.indptr[node + 1]]
        edges = slice(int(data.graph.indptr[node]), int(data.graph.indptr[node + 1]))
        inside = before < 25
        now = slice(int(part.graph.indptr[node]), int(part.graph.indptr[node + 1]))
        assert torch.equal(part.graph.indices[now], before[inside])
        assert torch.equal(part.graph.edge["attr"][now], data.graph.edge["attr"][edges][inside])
    assert torch.equal(part.x.read(torch.arange(25)), data.x.read(torch.arange(25)))
    assert part.splits["train"].max() < 25


def test_a_large_graph_is_timed_on_a_part(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choosing, "MAX_TIMED_EDGES", 1000)
    outline, scale = choosing._shrink(outline_of())
    assert outline.data.num_nodes < 600
    assert scale == 4800 / outline.data.num_edges
    assert outline.train_ids.numel() > 0


def test_a_part_without_training_nodes_is_timed_at_a_node_with_a_label(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choosing, "MAX_TIMED_EDGES", 1000)
    outline = outline_of()
    y = outline.data.labels.clone()
    y[:500] = -1
    last = torch.arange(550, 600)
    data = replace(outline.data, y=y, splits={"train": last})
    job = replace(outline.job, data=data, examples=Examples(last))
    part, _ = choosing._shrink(replace(outline, job=job))
    labels = part.job.examples.labels(part.data.y)
    assert labels is not None
    assert (part.train_ids.tolist(), labels.tolist()) == ([0], y[550:551].tolist())


def test_a_large_graph_in_the_parts_of_a_budget_is_timed_on_a_part(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choosing, "MAX_TIMED_EDGES", 4000)
    (full_batch,) = (c for c in compare(SAMPLED, outline_of(), Budget(host="600KiB")) if c.name == "full_batch")
    assert full_batch.refusal == ""
    assert full_batch.epoch_s > 0


# ---- what is refused


def trainer_of(how: str, budget: dict[str, Any]) -> Trainer:
    data = dataset_of(random_graph(600, 4800), randn(600, 6))
    torch.manual_seed(0)
    if how == "whole":
        model: torch.nn.Module = UnlayeredModel()
    else:
        model = GNN(stack_of("sage-mean", 6, 16, 3), norm="batch" if how == "batch norm" else None)
    return Trainer(model.double(), data, SAMPLED, budget=budget, epochs=1, show=False)


class UnlayeredModel(torch.nn.Module):
    """A model that is not made of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = SAGEConv(6, 16)
        self.second = SAGEConv(16, 3)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        x = opaque(x)
        return self.second(self.first(x, edge_index).relu(), edge_index)


@pytest.mark.parametrize("over_budget", ["split", "resample", "cut", "refuse"])
@pytest.mark.parametrize("how", ["layers", "batch norm", "whole"])
def test_the_budget_that_a_refusal_names_would_do_whatever_becomes_of_batches(how: str, over_budget: str):
    with pytest.raises(DoesNotFit, match="at least budget=") as refused:
        trainer_of(how, {"device": "1KiB", "over_budget": over_budget})
    named = str(refused.value).split("budget=")[1].split(" ")[0]
    largest_item = re.search(r"alone takes? ([\d.]+) (\w+)\)", str(refused.value))
    assert largest_item is None or parse_size("".join(largest_item.groups())) <= 1.01 * parse_size(named)
    run = trainer_of(how, {"device": named, "over_budget": over_budget}).fit()
    assert sum(e.counters.get("budget.steps_over", 0) for e in run.history) == 0
    with pytest.raises(DoesNotFit):
        trainer_of(how, {"device": str(int(0.3 * parse_size(named))), "over_budget": over_budget})


def test_a_refusal_names_the_limit_that_was_given():
    with pytest.raises(DoesNotFit, match=r"at least budget\.host="):
        trainer_of("layers", {"device": "1GiB", "host": "1KiB"})
    with pytest.raises(DoesNotFit, match=r"at least budget="):
        trainer_of("layers", {"device": "1KiB", "host": "1GiB"})


def test_a_method_whose_steps_are_refused_leaves_the_others(monkeypatch: pytest.MonkeyPatch):
    estimate_epoch_s = choosing._estimate_epoch_s

    def refused(plan: Plan, budget: Budget, outline: RunOutline) -> float:
        if isinstance(plan.method, Sampled):
            raise ValueError("a batch may take more")
        return estimate_epoch_s(plan, budget, outline)

    monkeypatch.setattr(choosing, "_estimate_epoch_s", refused)
    choices = compare(SAMPLED, outline_of(), Budget(host="1GiB"))
    assert [c.plan is None for c in choices] == [True, False, False]
    assert choices[0].refusal == "a batch may take more"
    assert recommend(choices) is not choices[0]
