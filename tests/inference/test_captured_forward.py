"""Captured inference: a replay equals inference without capture, and inputs that moved are noticed.

The first call of a `CapturedInference` runs as usual, the second is captured as a CUDA graph, and later ones
replay it. A replay reads fixed addresses: it sees new weights, but not a weight tensor that was replaced. Tests
without a GPU use `FakeCuda`, which logs captures and replays; tests with the marker `gpu` compare numbers.
"""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv

import hopline as hl
from hopline import infer
from hopline.contract import Job
from hopline.core.examples import Examples
from hopline.data.synthetic import planted_partition
from hopline.inference import captured_forward as replayed
from hopline.inference.cache import LAST_INFERENCE
from hopline.inference.captured_forward import CapturedInference, CapturedInferences, repeats
from hopline.nn.gnn import GNN
from hopline.training.evaluation import Measure
from tests.support.fake_cuda import FakeCuda, Stream
from tests.support.helpers import usual_task
from tests.support.runs import sage, small

GPU_MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def mark_gpu(test: Any) -> Any:
    """Mark a test that needs a GPU."""
    for mark in GPU_MARKS:
        test = mark(test)
    return test


class CountsCalls(nn.Module):
    """A module whose output depends on the number of its calls, so that a replay would be wrong."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


class SubclassOfGNN(GNN):
    # Its layers might do anything, so it is not captured.
    pass


def squared(x: Tensor) -> Tensor:
    """An activation from outside torch, PyG and hopline."""
    return x * x


def test_only_models_whose_kernels_repeat_are_captured():
    convs = [SAGEConv(8, 8), SAGEConv(8, 4)]
    assert repeats(GNN(convs))
    assert repeats(GNN(convs, act="elu", norm="batch", head=nn.Linear(4, 4)))
    assert repeats(GNN(convs, act=torch.relu))
    assert repeats(GNN(convs, act=nn.PReLU()))
    assert repeats(GNN([GATConv(8, 8), GCNConv(8, 4)], act=None))
    assert not repeats(GNN(convs, act=squared))
    assert not repeats(GNN(convs, head=CountsCalls()))
    assert not repeats(SubclassOfGNN(convs))
    assert not repeats(nn.Linear(8, 4))

    hooked = GNN(copy.deepcopy(convs), head=nn.Linear(4, 4))
    hooked.lin.register_forward_hook(lambda *_: None)
    assert not repeats(hooked)


def test_inference_is_not_captured_on_a_cpu_nor_under_a_budget():
    data = small()
    trainer = hl.Trainer(sage(data), data, hl.Sampled(fanouts=(3, 3)), show=False)
    captured = CapturedInferences()
    assert captured.of(trainer.job, data.splits["valid"]) is None
    assert Measure(trainer.method).captured_inference(trainer.job) is None

    gpu = Job(
        data=data,
        model=GNN([SAGEConv(8, 4)]),
        module=nn.Identity(),
        examples=Examples(data.splits["train"]),
        task=usual_task(4),
        device=torch.device("cuda"),
    )
    inference = Measure(trainer.method, captured=captured).captured_inference(gpu)
    assert inference is not None
    assert Measure(trainer.method, captured=captured).captured_inference(gpu) is inference
    assert Measure(trainer.method, split="test", captured=captured).captured_inference(gpu) is not inference
    assert captured.of(replace(gpu), data.splits["valid"]) is not inference
    assert Measure(trainer.method).captured_inference(gpu) is not inference, "it is of another owner"
    for limit in ({"chunk_bytes": 1000}, {"rows_on_disk": True}, {"exact": False}):
        assert Measure(trainer.method, **limit).captured_inference(gpu) is None  # type: ignore[arg-type]

    freed = weakref.ref(inference)
    del gpu, inference
    gc.collect()

    assert freed() is None, "what was captured goes with its job"


def test_a_trainer_owns_what_its_evaluations_capture(monkeypatch: pytest.MonkeyPatch):
    owners: list[CapturedInferences] = []
    monkeypatch.setattr(CapturedInferences, "of", lambda captured, job, ids: owners.append(captured))
    data = small()
    trainers = [hl.Trainer(sage(data), data, hl.Sampled(fanouts=(3, 3)), show=False) for _ in range(2)]
    for trainer in trainers:
        for split in ("valid", "test", "valid"):
            trainer.evaluate(split)
    assert owners == [trainers[0].measure.captured] * 3 + [trainers[1].measure.captured] * 3
    assert owners[0] is not owners[3]


def job_with(model: GNN, data: hl.Dataset, say: Any = print) -> Job:
    """A job on the CPU; `say` gets the messages of the capture."""
    return Job(
        data=data,
        model=model,
        module=model,
        examples=Examples(data.splits["train"]),
        task=usual_task(4),
        say=say,
    )


def next_call_of(inference: CapturedInference, fake_cuda: FakeCuda) -> str:
    """What the next call does: "run" (no CUDA graph), "captured" (and replayed) or "replayed"."""
    fake_cuda.log.clear()
    inference()
    words = [line.split()[0] for line in fake_cuda.log if "waits" not in line]
    return {"": "run", "capture end replay": "captured", "replay": "replayed"}[" ".join(words)]


def test_the_second_call_is_captured_and_another_one_after_its_inputs_moved(fake_cuda: FakeCuda):
    data = small()
    lines = []
    model = GNN([SAGEConv(8, 8), SAGEConv(8, 4)])
    job = job_with(model, data, lines.append)
    ids = torch.tensor([3, 5, 90])
    weight = next(model.parameters())
    rows = data.x.read(torch.arange(400)).clone()
    graph = data.graph

    def move() -> None:
        """Replace the storage of a weight: a graph would read the old address."""
        weight.data = weight.data.clone()

    changes = [
        move,
        lambda: ids.add_(1),
        lambda: data.tables.update(x=hl.extend.TensorTable(rows)),
        lambda: rows.mul_(2),
        lambda: graph.indices.copy_(graph.indices.flip(0)),
    ]
    for first, second in itertools.pairwise(changes):
        inference = CapturedInference(job, ids)
        assert [next_call_of(inference, fake_cuda) for _ in range(3)] == ["run", "captured", "replayed"]
        for perturb_weights in (first, second):
            with torch.no_grad():
                weight.add_(1)  # in place: a replay reads the new values
            assert next_call_of(inference, fake_cuda) == "replayed"
            perturb_weights()
            assert [next_call_of(inference, fake_cuda) for _ in range(3)] == ["run", "captured", "replayed"]
        move()
        assert [next_call_of(inference, fake_cuda) for _ in range(3)] == ["run"] * 3, (
            "what keeps moving is not worth another graph"
        )
        assert inference.is_settled

    assert not lines


def test_with_left_to_others_a_call_is_not_captured_until_capture_is_called(fake_cuda: FakeCuda):
    data = small()
    inference = CapturedInference(job_with(GNN([SAGEConv(8, 8), SAGEConv(8, 4)]), data), torch.tensor([3, 5, 90]))
    inference.left_to_others = True
    assert [next_call_of(inference, fake_cuda) for _ in range(3)] == ["run"] * 3
    assert inference.is_due

    inference.capture(Stream(fake_cuda.log, "evaluate"))  # type: ignore[arg-type]
    assert "capture 0 on evaluate in pool of 0" in fake_cuda.log
    assert next_call_of(inference, fake_cuda) == "replayed"


def test_a_cuda_graph_of_too_many_bytes_is_dropped_without_a_message(fake_cuda: FakeCuda):
    data = small()
    lines = []
    inference = CapturedInference(
        job_with(GNN([SAGEConv(8, 8), SAGEConv(8, 4)]), data, lines.append), torch.tensor([3, 5, 90])
    )
    fake_cuda.bytes_per_graph = (1 << 30) // replayed.SHARE + 1
    inference()
    inference()

    assert not inference.is_captured
    assert inference.is_settled
    assert next_call_of(inference, fake_cuda) == "run"
    assert not lines


def test_features_outside_the_gpu_are_not_captured_and_training_modes_are_restored(fake_cuda: FakeCuda):
    data = small()
    lines = []
    model = GNN([GATConv(8, 8), SAGEConv(8, 4)], norm="batch").train()
    inference = CapturedInference(job_with(model, data, lines.append), torch.tensor([3, 5, 90]))
    assert [next_call_of(inference, fake_cuda) for _ in range(3)] == ["run"] * 3
    assert inference.is_settled
    assert all(module.training for module in model.modules())
    assert not lines


MODELS = {
    "sage": lambda: GNN([SAGEConv(16, 32), SAGEConv(32, 32), SAGEConv(32, 4)]),
    "max": lambda: GNN([SAGEConv(16, 32, aggr="max"), SAGEConv(32, 4)]),
    "gcn": lambda: GNN([GCNConv(16, 32), GCNConv(32, 4)], norm="layer"),
    "narrow gcn": lambda: GNN([GCNConv(16, 4), GCNConv(4, 4)]),
    "gin": lambda: GNN([GINConv(nn.Linear(16, 32)), GINConv(nn.Linear(32, 4))], norm="batch"),
    "gat": lambda: GNN([GATConv(16, 8, heads=4), GATConv(32, 4)]),
    "gatv2": lambda: GNN([GATv2Conv(16, 8, heads=4), GATv2Conv(32, 4)]),
    "residual": lambda: GNN([SAGEConv(16, 16), SAGEConv(16, 16), SAGEConv(16, 4)], residual=True, norm="batch"),
    "jk": lambda: GNN([SAGEConv(16, 32), SAGEConv(32, 32)], jk="cat", head=nn.Linear(64, 4)),
    "encoder": lambda: GNN(
        [SAGEConv(32, 32), SAGEConv(32, 32)], encoder=nn.Linear(16, 32), initial_residual=0.1, head=nn.Linear(32, 4)
    ),
}


def job_on_gpu(model: GNN, data: hl.Dataset, lines: list[str] | None = None, **placement: Any) -> Job:
    """A job whose data are on a GPU as a Trainer places them. lines: gets the messages of the capture."""
    trainer = hl.Trainer(
        model,
        data,
        hl.Sampled(fanouts=(3,) * model.num_layers),
        device="cuda",
        show=False,
        placement=hl.Placement(**placement),
    )
    messages = [] if lines is None else lines
    job = trainer.job
    return Job(
        data=job.data,
        model=job.model,
        module=job.module,
        examples=job.examples,
        task=job.task,
        device=job.device,
        say=messages.append,
    )


def perturb_weights(model: nn.Module) -> None:
    """Change all weights and running statistics in place, as an epoch of training does."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.rand_like(tensor))


def infer_without_capture(job: Job, ids: Tensor) -> Tensor:
    """The oracle: exact inference kernel by kernel, without a cache."""
    job.data.graph.get_cached(LAST_INFERENCE, dict).clear()
    return infer.exact(job.model, job.data, ids.clone(), device=job.device)


def dataset() -> hl.Dataset:
    """A planted graph of 5000 nodes."""
    return planted_partition(num_nodes=5000, num_edges=60_000, num_classes=4, num_features=16, num_train=1000)


@mark_gpu
@pytest.mark.parametrize("placement", [{}, {"graph": "host"}, {"features": "pinned", "cache": "100kB"}], ids=str)
@pytest.mark.parametrize("name", [*MODELS])
def test_a_replay_equals_inference_without_capture_to_the_bit(name: str, placement: dict[str, Any]):
    torch.manual_seed(0)
    data = dataset()
    lines = []
    job = job_on_gpu(MODELS[name](), data, lines, **placement)
    ids = data.splits["valid"]
    inference = CapturedInferences().of(job, ids)
    assert inference is not None
    for _ in range(5):
        perturb_weights(job.model)
        ours = inference()
        assert torch.equal(ours, infer_without_capture(job, ids))
    assert not lines

    reads_features = name in ("narrow gcn", "gat", "gatv2", "encoder")
    are_features_on_gpu = placement.get("features") != "pinned" and (name != "encoder" or "graph" not in placement)
    assert inference.is_captured == (are_features_on_gpu or not reads_features)


@mark_gpu
def test_changed_features_ids_and_weight_tensors_are_noticed():
    torch.manual_seed(0)
    data = dataset()
    job = job_on_gpu(MODELS["gat"](), data)
    ids = data.splits["valid"]
    inference = CapturedInference(job, ids)
    for _ in range(3):
        inference()
    assert inference.is_captured

    stored = job.data.x.storage()
    assert stored is not None
    stored.mul_(1.5)
    assert torch.equal(inference(), infer_without_capture(job, ids))

    inference()
    assert inference.is_captured

    weight = next(job.model.parameters())

    def move() -> None:
        weight.data = weight.data * 2

    for change, is_captured_again in (
        (move, True),
        (lambda: ids.copy_(ids.flip(0)), True),
        (move, False),
    ):  # MAX_CAPTURES is reached
        change()
        for _ in range(3):
            assert torch.equal(inference(), infer_without_capture(job, ids))
        assert inference.is_captured == is_captured_again


@mark_gpu
def test_a_cuda_graph_above_the_share_of_memory_is_dropped(monkeypatch: pytest.MonkeyPatch):
    data = dataset()
    lines = []
    job = job_on_gpu(MODELS["sage"](), data, lines)
    monkeypatch.setattr(replayed, "SHARE", 1 << 20)
    inference = CapturedInference(job, data.splits["valid"])
    for _ in range(4):
        perturb_weights(job.model)
        assert torch.equal(inference(), infer_without_capture(job, data.splits["valid"]))

    assert not inference.is_captured
    assert inference.is_settled
    assert not lines


@mark_gpu
@pytest.mark.parametrize("layout", ["tree", "block"])
def test_training_draws_the_same_numbers_next_to_a_replayed_evaluation(layout: str):
    """Attention drops out edges by torch's own generator, which every CUDA graph has a part in."""
    data = planted_partition(num_nodes=20_000, num_edges=200_000, num_features=16, num_train=4096)
    results = {}
    for evaluate in ("blocking", "async"):
        torch.manual_seed(0)
        model = GNN([GATConv(16, 8, heads=2, dropout=0.3), GATConv(16, data.num_classes, dropout=0.3)], dropout=0.2)
        method = hl.Sampled(fanouts=(5, 5), batch_size=256, layout=layout)  # type: ignore[arg-type]
        run = hl.Trainer(model, data, method, epochs=12, evaluate=evaluate, device="cuda", show=False, lr=0.01).fit()
        results[evaluate] = [e.loss for e in run.history], [e.metrics for e in run.evaluations]
    assert results["blocking"] == results["async"]


@mark_gpu
def test_two_launches_with_different_weights_may_be_under_way():
    torch.manual_seed(0)
    data = dataset()
    job = job_on_gpu(MODELS["residual"](), data)
    ids = data.splits["valid"]
    stream = torch.cuda.Stream()
    inference = CapturedInference(job, ids)
    assert inference.launch({}, torch.cuda.Event(), stream) is None

    inference.left_to_others = True
    inference()
    assert inference.is_due

    inference.capture(stream)
    for _ in range(3):
        weights = []
        expected = []
        for _ in range(2):
            perturb_weights(job.model)
            weights.append({name: t.clone() for name, t in job.module.state_dict().items()})
            expected.append(infer_without_capture(job, ids))
        launched = [inference.launch(launch, torch.cuda.current_stream().record_event(), stream) for launch in weights]
        for launch, expected_scores in zip(launched, expected, strict=True):
            assert launch is not None
            scores, seconds = launch.wait()
            assert torch.equal(scores, expected_scores)
            assert seconds > 0
