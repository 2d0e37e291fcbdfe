"""How a case is run in each mode, and compared with plain PyG on the whole graph.

Training is compared by the loss, the outputs at the training nodes and the gradients of all parameters, summed over the
batches of an epoch; inference by its outputs. Everything is float64, so equal means equal to rounding. At full fan-out,
and with exact tables of rows and gradients, batches together are the whole graph.

A batch norm goes by the rows of its batch, in PyG too. Where a mode has batches, batch norms therefore go by their
running statistics on both sides.
"""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import hopline as hl
from hopline.contract import Method
from hopline.core.batch import Batch
from hopline.nn.whole_module import Whole, as_batch_model
from tests.conv_table.cases import Case
from tests.conv_table.graph import BATCH_SIZE, HUB, NUM_CLASSES, NUM_PARTS, SEEDS, SOME_IDS, max_degree
from tests.support.helpers import randn, usual_task

TOLERANCE = 1e-8
Word = Literal["equal", "refused", "needs", "differs", "wrong", "error"]
SOURCE = Path(hl.__file__).parent


@dataclass(frozen=True)
class Verdict:
    """What became of one cell."""

    word: Word
    """equal: to plain PyG. refused: by an error that says why. needs: something that hopline or this machine has not.
    differs: unequal, and said so. wrong: unequal without a word. error: something broke."""
    why: str = ""

    @property
    def is_fault(self) -> bool:
        return self.word in ("wrong", "error")


class Unequal(Exception):
    """Two numbers that should be equal are not."""


class Differs(Exception):
    """They are not, and hopline has said so."""


def compare(what: str, found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    found, expected = found.detach().cpu(), expected.detach().cpu()
    if found.shape != expected.shape:
        raise Unequal(f"{what} has shape {list(found.shape)}, not {list(expected.shape)}")
    off = (found - expected).abs()
    if not bool((off <= tolerance * (1 + expected.abs())).all()):
        raise Unequal(f"{what} is off by {float(off.max()):.0e}")


# ---- what plain PyG makes of a case


@dataclass(frozen=True)
class Training:
    """A step over all training nodes."""

    loss: Tensor
    outputs: Tensor | None
    """[num_seeds, num_classes], if they are known."""
    gradients: dict[str, Tensor]


class Expected:
    """A case by plain PyG on the whole graph, on the CPU."""

    def __init__(self, case: Case) -> None:
        self.case, self.data = case, case.data()

    @cached_property
    def outputs(self) -> Tensor:
        """[num_nodes, num_classes] in evaluation."""
        with torch.no_grad():
            return _finite(self._plain(make_model(self.case).eval()))

    @cached_property
    def training(self) -> Training:
        return self._train(frozen=False)

    @cached_property
    def frozen_training(self) -> Training:
        """The same with batch norms by their running statistics."""
        return self._train(frozen=True) if batch_norms(make_model(self.case)) else self.training

    def _train(self, frozen: bool) -> Training:
        model = make_model(self.case).train()
        if frozen:
            freeze_batch_norms(model)
        outputs = _finite(self._plain(model)[SEEDS])
        loss = nn.functional.cross_entropy(outputs, self.data.labels[SEEDS])
        loss.backward()
        found = gradients(model)
        assert any(bool(g.any()) for g in found.values()), f"{self.case.name} has no gradient"
        return Training(loss.detach(), outputs.detach(), {name: _finite(g) for name, g in found.items()})

    def _plain(self, model: nn.Module) -> Tensor:
        if self.case.plain is None:
            raise Unequal(f"it ran, though PyG needs {self.case.needs}")
        return self.case.plain(model, self.data)


def _finite(rows: Tensor) -> Tensor:
    assert bool(rows.isfinite().all()), "plain PyG's numbers are not finite, so nothing could be told from them"
    return rows


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def make_model(case: Case) -> nn.Module:
    """A new model, whose batch norms have statistics that are not those of a new module."""
    model = case.model()
    for norm in batch_norms(model):
        if norm.running_mean is not None:
            norm.running_mean.copy_(randn(norm.num_features, seed=8) / 4)
    return model


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def freeze_batch_norms(model: nn.Module) -> None:
    for norm in batch_norms(model):
        norm.eval()


# ---- modes


def _train(case: Case, expected: Expected, method: Method, device: str, *, frozen: bool, records: bool = True) -> None:
    """An epoch by a method, and what it adds up to compared with plain PyG.

    records: compare the outputs too, which a captured step cannot give.
    """
    model, usual_loss = make_model(case), usual_task(NUM_CLASSES).loss
    outputs: dict[int, Tensor] = {}

    def recorded(model: nn.Module, batch: Batch) -> Tensor:
        def remembered(batch: Batch) -> Tensor:
            rows = model(batch)
            if not isinstance(rows, Tensor) or len(rows) != batch.num_seeds:
                raise Unequal(f"a batch of {batch.num_seeds} seeds has an output that is not a row for each")
            outputs.update(zip(batch.seeds.tolist(), rows.detach().cpu(), strict=True))
            return rows

        return usual_loss(remembered, batch)  # type: ignore[arg-type]

    trainer = hl.Trainer(
        model, expected.data, method, epochs=1, device=device, show=False, train_step=recorded if records else None
    )
    trainer.job.model.train()
    model.train()
    if frozen:
        freeze_batch_norms(model)
    losses = [unit.forward_backward(SEEDS.numel()) for unit in trainer.work.units(1)]
    found = Training(
        loss=torch.stack([loss.cpu() for loss in losses]).sum() / SEEDS.numel(),
        outputs=torch.stack([outputs[node] for node in SEEDS.tolist()]) if records else None,
        gradients=gradients(model),
    )
    try:
        compare_training(found, expected.frozen_training if frozen else expected.training)
    except Unequal:
        if expected.case.plain is not None:
            _raise_if_said(expected, method, device)
        raise
    if any(getattr(module, "cached", False) for module in model.modules()):
        inference(case, expected, device, model)  # what the conv keeps must not be the edges of a batch


def compare_training(found: Training, expected: Training) -> None:
    if found.outputs is not None and expected.outputs is not None:
        compare("an output in training", found.outputs, expected.outputs)
    compare("the loss", found.loss, expected.loss)
    for name, gradient in expected.gradients.items():
        compare(f"the gradient of {name}", found.gradients[name], gradient)


def _raise_if_said(expected: Expected, method: Method, device: str) -> None:
    """Run the trainer as a user does: if it says that the model is an approximation in batches, nobody is misled."""
    with heard() as lines:
        hl.Trainer(make_model(expected.case), expected.data, method, epochs=1, device=device, show=False).fit()
    for line in lines:
        if "approximation" in line:
            raise Differs(line)


def sampled(case: Case, expected: Expected, device: str, layout: Literal["block", "tree"]) -> None:
    """At full fan-out; a tree has a fixed number of slots, so there it is the largest degree."""
    fanout = -1 if layout == "block" else max_degree(expected.data.graph)
    method = hl.Sampled(
        fanouts=(fanout,) * case.num_layers, batch_size=BATCH_SIZE, layout=layout, shuffle=False, workers=0
    )
    captured = layout == "tree" and device != "cpu"
    _train(case, expected, method, device, frozen=True, records=not captured)


def historical(case: Case, expected: Expected, device: str) -> None:
    """Parts one by one, with exact tables of rows and of gradients."""
    method = hl.Historical(num_parts=NUM_PARTS, parts_per_batch=1, partition="range", groups="fixed", compensate=True)
    _train(case, expected, method, device, frozen=True)


def full_batch(case: Case, expected: Expected, device: str, **settings: Any) -> None:
    """All shards of the graph; the last has no edges."""
    method = hl.FullBatch(num_shards=NUM_PARTS, partition="range", **settings)
    _train(case, expected, method, device, frozen=False)


def sweep(case: Case, expected: Expected, device: str) -> None:
    full_batch(case, expected, device, aggregation="sweep")
    full_batch(case, expected, device, aggregation="sweep", trim=True)


def inference(case: Case, expected: Expected, device: str, model: nn.Module | None = None) -> None:
    """All nodes, in small chunks too; a few; a node without in-edges alone; the hub alone. model: a new one if none."""
    model = model or make_model(case).to(device)
    every = torch.arange(expected.data.num_nodes)
    isolated, hub = torch.tensor([expected.data.num_nodes - 1]), torch.tensor([HUB])
    runs: list[tuple[Tensor | None, int | None]] = [
        (isolated, None), (None, None), (None, 7), (SOME_IDS, None), (SOME_IDS, 3), (hub, None)
    ]  # fmt: skip
    is_whole = isinstance(as_batch_model(model), Whole)
    # A model without parameters, such as LabelPropagation, makes the weights of GCN in float32.
    tolerance = TOLERANCE if any(True for _ in model.parameters()) else 1e-5
    for ids, chunk_edges in runs:
        options: dict[str, Any] = {} if chunk_edges is None else {"chunk_edges": chunk_edges}
        if is_whole and chunk_edges is not None:
            options["hops"] = case.num_layers
        try:
            found = hl.infer.exact(model, expected.data, ids, device=device, **options)
        except ValueError:
            if not is_whole or chunk_edges is None:
                raise
            continue  # no number of hops is enough for such a module, which runs on the whole graph at once
        where = "all nodes" if ids is None else f"nodes {ids.tolist()}"
        compare(f"the output at {where}", found, expected.outputs[every if ids is None else ids], tolerance)


MODES: dict[str, Callable[[Case, Expected, str], None]] = {
    "block": lambda *given: sampled(*given, layout="block"),
    "tree": lambda *given: sampled(*given, layout="tree"),
    "historical": historical,
    "sweep": sweep,
    "sequential": lambda *given: full_batch(*given, aggregation="sequential"),
    "one-shot": lambda *given: full_batch(*given, aggregation="one_shot"),
    "trimmed": lambda *given: full_batch(*given, aggregation="sequential", trim=True),
    "inference": inference,
}
"""The columns of the table."""


# ---- verdicts


def judge(case: Case, mode: str, device: str = "cpu", expected: Expected | None = None) -> Verdict:
    """Run one cell."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyG's own, about libraries that would be faster
        try:
            expected = expected or Expected(case)
            # First of all PyG itself: a case that it cannot run says nothing about hopline.
            make_model(case) if case.plain is None else expected.outputs
        except ImportError as error:
            return Verdict("needs", case.needs or _one_line(error))
        try:
            MODES[mode](case, expected, device)
        except Unequal as error:
            return Verdict("wrong", str(error))
        except Differs as error:
            return Verdict("differs", str(error))
        except ValueError as error:
            return _refusal(case, error)
        except Exception as error:
            return Verdict("error", f"{type(error).__name__}: {_one_line(error)}")
        return Verdict("equal")


def _refusal(case: Case, error: ValueError) -> Verdict:
    """An error of hopline's own with a reason in it; another one's ValueError is no refusal."""
    text = _one_line(error)
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    if SOURCE not in raised_in.parents:
        return Verdict("error", f"ValueError of {raised_in.name}: {text}")
    if text.endswith(":") or len(text) < 30:
        return Verdict("error", f"refused without a reason: {text}")
    if case.plain is not None and "cannot be called" in text:
        return Verdict("error", f"refused, though PyG can call it: {text}")
    return Verdict("needs", case.needs) if case.needs else Verdict("refused", text)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


@contextmanager
def heard() -> Iterator[list[str]]:
    """What hopline says while this lasts."""
    logger, lines = logging.getLogger("hopline"), list[str]()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, level = Heard(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
