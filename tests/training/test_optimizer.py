"""The optimizer's step; on a GPU as a graph (tests/methods/sampled/test_captured_step.py trains with it)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hopline.training.optimizer import MAX_CAPTURES, MAX_SEEN_KEYS, Update, make_optimizer, split_decay
from tests.support.fake_cuda import FakeCuda, capture_lock_elsewhere

GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")])


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd"])
def test_steps_are_torchs_with_clipping(kind: str, device: str):
    torch.manual_seed(0)
    ours = nn.Linear(6, 4).to(device)
    theirs = nn.Linear(6, 4).to(device)
    theirs.load_state_dict(ours.state_dict())
    update = Update(ours, make_optimizer(kind, [(list(ours.parameters()), 0.01)], 0.05), 0.5, print)
    plain = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind]
    optimizer = plain(theirs.parameters(), lr=0.05, weight_decay=0.01)
    # Gradients that stay where they are are captured; those of other places must not be taken for them.
    gradient_buffers = [[torch.empty_like(p) for p in ours.parameters()] for _ in range(2)]
    for step, which in enumerate([0] * 5 + [1] * 3 + [0, 1] * 3):
        for p, q, place in zip(ours.parameters(), theirs.parameters(), gradient_buffers[which], strict=True):
            q.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(device)
            p.grad = place.copy_(q.grad)
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        update()
        if step == 4:  # by then it is captured
            for group in update.optimizer.param_groups:
                group["lr"] = group["lr"].fill_(0.01) if device == "cuda" else 0.01
            for group in optimizer.param_groups:
                group["lr"] = 0.01
    assert update.num_graphs == (2 if device == "cuda" else 0)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd"])
def test_settings_that_a_callback_changes_are_followed(kind: str, device: str):
    """A number in place of the rate, another weight decay, a parameter that is added."""
    torch.manual_seed(0)
    ours, theirs = (nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).to(device) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    update = Update(ours, make_optimizer(kind, [(list(ours[0].parameters()), 0.01)], 0.05), 0.5, print)
    plain = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind]
    optimizer = plain(theirs[0].parameters(), lr=0.05, weight_decay=0.01)
    places = [torch.empty_like(p) for p in ours.parameters()]
    for step in range(24):
        for p, q, place in zip(ours.parameters(), theirs.parameters(), places, strict=True):
            q.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(device)
            p.grad = place.copy_(q.grad)
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(stepped, 0.5)
        optimizer.step()
        update()
        for either in (update.optimizer, optimizer):
            if step == 6:
                either.param_groups[0]["weight_decay"] = 0.3
            if step == 12:
                either.param_groups[0]["lr"] = 0.01
            if step == 18:
                module = ours if either is update.optimizer else theirs
                either.add_param_group({"params": list(module[1].parameters()), "lr": 0.02, "weight_decay": 0.1})
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("_", [pytest.param(0, marks=GPU.marks, id="gpu")])
@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_captured_steps_equal_eager_steps_to_the_bit_for_gradients_in_any_memory(
    kind: str, clip_norm: float | None, _: int
):
    """Gradients come by turns at more places than the optimizer's kernel remembers."""
    torch.manual_seed(0)
    modules = [nn.Linear(30, 20).cuda() for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    updates = [Update(m, make_optimizer(kind, [(list(m.parameters()), 0.01)], 0.05), clip_norm, print) for m in modules]
    updates[1].can_capture = False
    places = [[torch.empty_like(p) for p in modules[0].parameters()] for _ in range(12)]
    for step in range(30):
        for module, update in zip(modules, updates, strict=True):
            for p, place in zip(module.parameters(), places[step % 12], strict=True):
                p.grad = place.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(step)))
            update()
    assert updates[0].num_graphs == MAX_CAPTURES
    for p, q in zip(*(module.parameters() for module in modules), strict=True):
        assert torch.equal(p, q)


class LoggedUpdate:
    """An optimizer on a fake GPU. `step` runs one step and returns what it did."""

    def __init__(self, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = nn.Linear(2, 1)
        self.log = fake_cuda.log
        self.lines = []
        optimizer = make_optimizer("adam", [(list(self.module.parameters()), 0.0)], 0.1)
        self.update = Update(self.module, optimizer, None, self.lines.append)
        self.update.can_capture = True
        self.fails = False
        monkeypatch.setattr(self.update, "_run", self._run)

    def _run(self) -> None:
        is_captured = bool(self.log) and self.log[-1].startswith("capture")
        self.log.append("run")
        if self.fails and is_captured:
            raise ZeroDivisionError("no more")

    def new_gradients(self) -> list[torch.Tensor]:
        """A new tensor per parameter; steps are captured by the memory of their gradients."""
        return [torch.zeros_like(p) for p in self.module.parameters()]

    def step(self, gradients: list[torch.Tensor]) -> str:
        """Run one step with these gradients. Returns its actions, such as `replay of 0` for CUDA graph 0."""
        for p, grad in zip(self.module.parameters(), gradients, strict=True):
            p.grad = grad
        self.log.clear()
        self.update()
        words = [line.split(" on ")[0] for line in self.log if "waits" not in line]
        return ", ".join(words)


CAPTURED = "capture {0}, run, end of capture {0}, replay of {0}"


def test_a_graph_is_replayed_only_for_gradients_in_the_memory_it_reads(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
):
    logged = LoggedUpdate(fake_cuda, monkeypatch)
    gradients = [logged.new_gradients(), logged.new_gradients()]
    actions = [logged.step(gradients[which]) for which in [0] * 4 + [1] * 3 + [0, 1, 0]]
    assert actions[:4] == ["run", "run", CAPTURED.format(0), "replay of 0"]
    assert actions[4:7] == ["run", CAPTURED.format(1), "replay of 1"]
    assert actions[7:] == ["replay of 0", "replay of 1", "replay of 0"]
    for _ in range(MAX_CAPTURES + 2):  # places that come twice, one after the other
        gradients.append(logged.new_gradients())
        actions = [logged.step(gradients[-1]) for _ in range(2)]
    assert logged.update.num_graphs == MAX_CAPTURES
    assert actions == ["run", "run"]
    assert logged.step(gradients[0]) == "replay of 0"


def test_gradient_memory_that_never_comes_again_is_forgotten_but_graphs_are_kept(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
):
    logged = LoggedUpdate(fake_cuda, monkeypatch)
    first = logged.new_gradients()
    later_buffers = []
    for _ in range(3):
        logged.step(first)
    for _ in range(MAX_SEEN_KEYS + 5):
        later_buffers.append(logged.new_gradients())  # all at once, so that each is at another place
        logged.step(later_buffers[-1])
    assert len(logged.update.captured) < MAX_SEEN_KEYS
    assert logged.step(first) == "replay of 0"
    assert logged.step(later_buffers[0]) == "run", "it was forgotten"
    assert logged.step(later_buffers[0]) == CAPTURED.format(1)


def test_a_step_that_cannot_be_captured_is_run_and_none_is_tried_again(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
):
    logged = LoggedUpdate(fake_cuda, monkeypatch)
    gradients = [logged.new_gradients(), logged.new_gradients()]
    for _ in range(3):
        logged.step(gradients[0])
    logged.fails = True
    actions = [logged.step(gradients[which]) for which in (1, 1, 1, 0)]
    assert actions == ["run", "capture 1, run, end of capture 1, run", "run", "run"]
    assert logged.update.num_graphs == 0
    assert len(logged.lines) == 1
    assert logged.lines[0].startswith("the optimizer's step is not captured in a CUDA graph")
    assert logged.lines[0].endswith(": no more")


def test_a_step_is_run_while_another_thread_has_the_capture_lock_and_captured_later(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
):
    logged = LoggedUpdate(fake_cuda, monkeypatch)
    gradients = logged.new_gradients()
    with capture_lock_elsewhere():
        actions = [logged.step(gradients) for _ in range(4)]
    assert actions == ["run"] * 4
    assert logged.step(gradients) == CAPTURED.format(0)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd"])
def test_the_rest_has_a_weight_decay_of_its_own(kind: str, device: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(device)
    optimizer = make_optimizer(kind, split_decay(model, model[1].parameters(), 0.5, 0.0), 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert moved == [True, True, False, False]
    first, second = (group["lr"] for group in optimizer.param_groups)
    assert device == "cpu" or first.data_ptr() != second.data_ptr()


def test_without_another_weight_decay_all_parameters_are_in_one_group():
    model = nn.Linear(3, 3)
    optimizer = make_optimizer("adam", split_decay(model, [model.bias], 0.5, None), 0.1)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]
    every = make_optimizer("adam", split_decay(model, model.parameters(), 0.5, 0.0), 0.1)
    assert [(len(group["params"]), group["weight_decay"]) for group in every.param_groups] == [(2, 0.0)]
