"""What goes to the process that evaluates: handles and a model without weights; and how it fails."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import hopline as hl
from hopline import infer
from hopline.contract import Job
from hopline.training.async_evaluation_process import (
    EvaluationError,
    EvaluationProcess,
    Layout,
    Room,
    SentData,
    without_weights,
)
from hopline.units.batch_unit import supervised
from tests.runs import copied, labels, sage, same_weights, small


def sums(job: Job) -> dict[str, float]:
    """Of data and weights, so that both can be compared."""
    rows = job.data.x.read(torch.arange(job.data.num_nodes))
    found = {"rows": rows.sum().item(), "edges": float(job.data.graph.indices.sum())}
    found["threads"] = float(torch.get_num_threads())
    found["weights"] = sum(t.double().sum().item() for t in job.module.state_dict().values())
    found["accuracy"] = infer.measure(
        job.data, infer.exact(job.model, job.data, job.data.splits["valid"]), labels(job.data, "valid")
    )["accuracy"]
    return found


def fail_at_large_weights(job: Job) -> dict[str, float]:
    if next(job.module.parameters()).max() > 5:
        raise ZeroDivisionError("no\nmore")
    return {"fine": 1.0}


def sleep(job: Job) -> dict[str, float]:
    time.sleep(600)
    return {}


def start(data: hl.Dataset, model: nn.Module, measure: Any) -> tuple[EvaluationProcess, Layout]:
    layout = Layout.of(model.state_dict())
    return EvaluationProcess(measure, SentData.of(data), model, layout, seed=0), layout


def room_of(layout: Layout, model: nn.Module) -> Room:
    room = Room(layout)
    room.fill(model.state_dict())
    return room


def wait_for(process: EvaluationProcess, count: int) -> list[dict[str, Any]]:
    found = []
    while len(found) < count:
        found += process.answers(wait=True)
    return found


def test_weights_lie_one_after_another_as_they_are():
    state = {"a": torch.arange(3.0), "b": torch.tensor(7), "none": torch.empty(0, 2), "c": torch.ones(2, 2).bfloat16()}
    layout = Layout.of(state)
    room = Room(layout)
    room.fill(state)
    assert same_weights(room.weights, state)
    assert [t.dtype for t in room.weights.values()] == [t.dtype for t in state.values()]
    assert all(t.data_ptr() % 64 == 0 for t in room.weights.values() if t.numel())
    room.close()


def test_a_copy_without_weights_has_all_else():
    model = sage(small(), norm="batch")
    model.register_buffer("kept", torch.arange(3.0), persistent=False)
    before = copied(model.state_dict())
    bare = without_weights(model)
    assert all(t.is_meta for t in bare.state_dict().values())
    assert torch.equal(bare.kept, model.kept)  # type: ignore[arg-type]
    bare.load_state_dict(before, assign=True)
    data = small()
    assert torch.equal(infer.exact(bare, data), infer.exact(model, data))
    assert same_weights(model.state_dict(), before)


def test_data_that_is_mapped_is_not_copied(tmp_path: Path):
    small().save(tmp_path / "d")
    data = hl.open(str(tmp_path / "d"))
    before = data.graph.indices.data_ptr(), data.x.storage().data_ptr()  # type: ignore[union-attr]
    sent = SentData.of(data)
    assert sent.data.graph.indices.data_ptr() == before[0]
    assert sent.data.x.storage().data_ptr() == before[1]  # type: ignore[union-attr]
    again = sent.open()
    assert list(again.splits) == list(data.splits)
    assert all(torch.equal(again.splits[name], ids) for name, ids in data.splits.items())
    assert torch.equal(again.labels, data.labels)


def test_it_answers_in_order_with_what_this_process_finds():
    data, model = small(), sage(small(), norm="batch")
    process, layout = start(data, model, sums)
    here = Job(data=data, model=model, module=model, train_ids=data.splits["train"], train_step=supervised("single", 4))
    rooms, expected = [], []
    try:
        for epoch in (3, 5):
            nn.init.normal_(model.convs[0].lin_l.weight)  # type: ignore[union-attr,arg-type]
            rooms.append(room_of(layout, model))
            expected.append(sums(here))
            process.ask(epoch, rooms[-1])
        found = wait_for(process, 2)
        assert [(one["epoch"], one["metrics"]) for one in found] == list(zip((3, 5), expected, strict=True))
        assert process.answers() == []
    finally:
        process.close()
        for room in rooms:
            room.close()


def test_a_failure_comes_after_the_answers_before_it_with_its_traceback():
    data, model = small(), sage(small())
    process, layout = start(data, model, fail_at_large_weights)
    first = room_of(layout, model)
    nn.init.constant_(model.convs[0].lin_l.weight, 6)  # type: ignore[union-attr,arg-type]
    second = room_of(layout, model)
    try:
        process.ask(1, first)
        process.ask(2, second)
        assert [one["epoch"] for one in wait_for(process, 1)] == [1]
        for _ in range(2):
            with pytest.raises(EvaluationError, match="after epoch 2 failed: ZeroDivisionError: no more") as caught:
                wait_for(process, 1)
        assert 'raise ZeroDivisionError("no\\nmore")' in caught.value.__notes__[0]
    finally:
        process.close()
        first.close()
        second.close()


def test_a_process_that_is_killed_is_said_to_be_and_closing_ends_one_that_hangs():
    data, model = small(), sage(small())
    for kill in (True, False):
        process, layout = start(data, model, sleep)
        room = room_of(layout, model)
        process.ask(1, room)
        child = psutil.Process(process._process.pid)
        if kill:
            child.kill()
            with pytest.raises(EvaluationError, match="that evaluates was ended by SIGKILL: it may have run out of"):
                wait_for(process, 1)
        process.close()
        room.close()
        assert not child.is_running()


def test_what_cannot_be_sent_is_refused():
    data, model = small(), sage(small())
    with pytest.raises(ValueError, match="the model, the method or test_step cannot be sent to the process"):
        start(data, model, lambda job: {})
    moved: Any = SimpleNamespace(graph=SimpleNamespace(device=torch.device("cuda")))
    with pytest.raises(ValueError, match="this dataset is on a GPU: give it in the host's memory"):
        SentData.of(moved)
