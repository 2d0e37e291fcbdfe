"""Examples are not seeds: a node may be an example several times, with other labels.

Training by every method is compared with plain loops in `tests/equivalence`. Here is all else.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hopline as hl
from hopline.core.examples import ExampleIndex, Examples
from tests.equivalence.training_cases import (
    DATA,
    EXAMPLE_LABELS,
    EXAMPLE_NODES,
    NUM_NODES,
    SCENARIOS,
    WAYS,
    Scenario,
    Steps,
    Votes,
    make,
    trainer_of,
)

WAY = WAYS["sampled-block"]


@pytest.mark.parametrize("way", ["sampled-block", "historical", "sweep", "sequential"])
def test_a_run_under_a_budget_plans_for_repeated_ids(way: str) -> None:
    scenario = SCENARIOS["repeated training ids"]
    losses = []
    for budget in (None, "64MiB"):
        steps = Steps()
        trainer_of(scenario, WAYS[way], make(scenario.model), callbacks=[steps], budget=budget).fit()
        losses.append(list(steps.losses.values()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


def test_a_resumed_run_with_repeated_ids_is_the_one_that_never_stopped(tmp_path: Path) -> None:
    class Stop(hl.Callback):
        def on_step_end(self, trainer: hl.Trainer, step: hl.extend.StepEnd) -> None:
            if step.step == 7:  # within the second epoch
                raise KeyboardInterrupt

    def weights(out: Path | None, callbacks: list[hl.Callback], **options: Any) -> list[Tensor]:
        model = make(Scenario().model)
        trainer = trainer_of(Scenario(), WAY, model, out=out, callbacks=callbacks, task=Votes(), **options)
        try:
            trainer.fit()
        except KeyboardInterrupt:
            assert callbacks
        return [p.detach() for p in model.parameters()]

    uninterrupted = weights(None, [])
    weights(tmp_path / "run", [Stop()], checkpoint_s=0.0)
    resumed = weights(tmp_path / "run", [], resume=True)
    for ours, expected in zip(resumed, uninterrupted, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("inference", ["exact", "sampled", "async"])
def test_a_metric_counts_every_example(inference: str) -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    class Watched(Votes):
        def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
            seen.append((outputs, y))
            return super().measure(outputs, y)

    data = hl.from_pyg(DATA)
    settings: dict[str, Any] = {"evaluate": "async"} if inference == "async" else {"inference": inference}
    model = make(Scenario().model)
    method = hl.Sampled(fanouts=(-1, -1), batch_size=7)
    hl.Trainer(model, data, method, task=Watched(), epochs=1, show=False, **settings).fit()
    expected = hl.infer.exact(model, data)[EXAMPLE_NODES]
    outputs, y = seen[0]
    assert torch.equal(y, EXAMPLE_LABELS)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "method",
    [hl.Sampled(fanouts=(-1, -1)), hl.Historical(num_parts=2, parts_per_batch=1), hl.FullBatch()],
    ids=lambda m: type(m).__name__,
)
def test_a_loader_of_repeated_ids_has_a_row_per_example(method: Any) -> None:
    data = hl.from_pyg(DATA)
    model = make(Scenario().model).eval()
    expected = hl.infer.exact(model, data)
    num_examples = 0
    for batch in method.loader(data, EXAMPLE_NODES, model=model):
        assert len(batch.seeds.unique()) == batch.num_seeds
        torch.testing.assert_close(model(batch), expected[batch.example_ids], rtol=0, atol=1e-12)
        assert torch.equal(batch.labels, DATA.y[batch.example_ids])
        num_examples += batch.num_examples
        if isinstance(method, hl.Historical):
            batch.commit()
    assert num_examples == len(EXAMPLE_NODES)


def test_examples_of_nodes_are_found_in_the_order_of_nodes_and_then_of_examples() -> None:
    index = ExampleIndex(Examples(torch.tensor([4, 1, 4, 0, 4]), torch.arange(5)), num_nodes=6)
    found = index.find(torch.tensor([2, 4, 5, 1]))
    assert found.seed_idx.tolist() == [1, 3]
    assert found.output_idx.tolist() == [1, 1, 1, 3]
    assert found.numbers is not None
    assert found.numbers.tolist() == [0, 2, 4, 1]
    nothing = index.find(torch.empty(0, dtype=torch.int64))
    assert nothing.output_idx.numel() == 0


@pytest.mark.parametrize(
    ("nodes", "y", "words"),
    [
        (torch.tensor([0.0]), None, "1-D int64"),
        (torch.tensor([[0]]), None, "1-D int64"),
        (torch.tensor([0, 1]), torch.tensor([0]), "one label per example"),
    ],
)
def test_examples_without_a_label_each_are_refused(nodes: Tensor, y: Tensor | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hl.extend.Examples(nodes, y)


class Outside(Votes):
    def examples(self, splits: Mapping[str, Tensor], split: str) -> Tensor | Examples:
        return torch.tensor([0, NUM_NODES])


class Nothing(Votes):
    def examples(self, splits: Mapping[str, Tensor], split: str) -> Tensor | Examples:
        return torch.empty(0, dtype=torch.int64)


@pytest.mark.parametrize(("task", "words"), [(Outside(), "0 to 39"), (Nothing(), r"examples\(\) of Nothing gave none")])
def test_examples_that_are_no_nodes_are_refused_before_training(task: Votes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hl.Trainer(make(Scenario().model), hl.from_pyg(DATA), task=task, show=False)
