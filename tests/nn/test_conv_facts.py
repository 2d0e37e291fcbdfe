"""What is found out about a conv once holds until the conv changes, and then at once no longer."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

import hopline as hl
from hopline.core.row_handles import Rows
from hopline.nn import GNN
from hopline.nn.conv_adapter import convolve
from hopline.nn.conv_facts import facts_of, is_fused
from hopline.nn.fused import read_ahead
from hopline.tables import TensorTable
from tests.support.helpers import assert_close, batch_of, conv_of, dataset_of, randn, random_graph, stock, stock_layers

WIDTH = 4


def scale_messages(conv: Any) -> None:
    conv.message = lambda x_j: 2 * x_j


def observe_messages(conv: Any) -> None:
    """PyG's hook: it may change what is sent."""
    conv.register_message_forward_hook(lambda conv, inputs, out: 3 * out)


def add_hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, inputs, out: 2 * out)  # type: ignore[operator]


def give_own_linear_a_bias(conv: Any) -> None:
    conv.lin_r.bias = nn.Parameter(torch.ones(3, dtype=torch.float64))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "aggregation": lambda conv: setattr(conv, "aggr_module", pyg.aggr.MaxAggregation()),
    "aggregation that is not fused": lambda conv: setattr(conv, "aggr_module", pyg.aggr.StdAggregation()),
    "hook of the conv": add_hook,
    "hook of a linear layer": lambda conv: add_hook(conv.lin_l),
    "hook of messages": observe_messages,
    "message of one object": scale_messages,
    "linear layer": lambda conv: setattr(conv, "lin_r", nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh()).double()),
    "bias of the own rows": give_own_linear_a_bias,
    "no own rows": lambda conv: setattr(conv, "root_weight", False),
    "normalised outputs": lambda conv: setattr(conv, "normalize", True),
    "explained": lambda conv: setattr(conv, "explain", False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_calls_is_seen(change: str) -> None:
    graph = random_graph()
    block = batch_of(graph, None, (3,)).blocks[0]
    x = randn(50, WIDTH)[block.src_ids]
    conv = conv_of("sage-mean", WIDTH, 3)
    assert_close(convolve(conv, x, block), stock(conv, x, block))
    torch.manual_seed(1)
    CHANGES[change](conv)
    assert_close(convolve(conv, x, block), stock(conv, x, block))


def test_facts_are_found_once() -> None:
    conv = conv_of("sage-mean", WIDTH, 3)
    facts = facts_of(conv)
    assert facts_of(conv.eval()) is facts
    assert facts_of(conv.train()) is facts
    conv.load_state_dict(conv.state_dict())
    with torch.no_grad():
        conv.lin_l.weight.mul_(2)  # type: ignore[operator]
    assert facts_of(conv) is facts
    assert facts_of(conv_of("sage-mean", WIDTH, 3)) is not facts


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_backward_hooks_run_where_a_fused_conv_would_leave_them_out() -> None:
    block = batch_of(random_graph(), None, (3,)).blocks[0]
    for observed in (lambda conv: conv, lambda conv: conv.lin_l):
        conv = conv_of("sage-mean", WIDTH, 3)
        seen: list[Any] = []
        observed(conv).register_full_backward_hook(lambda module, grad_in, grad_out, seen=seen: seen.append(grad_out))
        convolve(conv, randn(50, WIDTH)[block.src_ids].requires_grad_(), block).sum().backward()
        assert seen


def test_a_hook_that_is_removed_makes_the_conv_fused_again() -> None:
    conv = conv_of("sage-mean", WIDTH, 3)
    hook = conv.register_forward_hook(lambda module, inputs, out: None)
    assert not facts_of(conv).is_fused
    hook.remove()
    assert facts_of(conv).is_fused


def model_of() -> GNN:
    torch.manual_seed(0)
    return GNN([conv_of("sage-mean", WIDTH, 6), conv_of("sage-mean", 6, 3)])


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_of_a_model_has_facts_of_its_own(copied: Callable[[GNN], GNN]) -> None:
    graph = random_graph()
    batch = batch_of(graph, randn(50, WIDTH), (3, 3))
    model = model_of()
    expected = model(batch)
    other = copied(model)
    other.convs[0].aggr_module = pyg.aggr.MaxAggregation()
    changed = other(batch)
    assert not torch.allclose(changed, expected)
    assert_close(model(batch), expected)
    model.convs[0].aggr_module = pyg.aggr.MaxAggregation()
    assert_close(model(batch), changed)


def test_a_saved_model_is_loaded_without_facts() -> None:
    batch = batch_of(random_graph(), randn(50, WIDTH), (3, 3))
    model = model_of()
    expected = model(batch)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert_close(torch.load(file, weights_only=False)(batch), expected)


def change_after_step(step: int, model: Any) -> None:
    """What a callback does to a model while it trains."""
    if step == 1:
        model.convs[0].aggr_module = pyg.aggr.SumAggregation()
    if step == 2:
        add_hook(model.convs[1].lin_l)
    if step == 3:
        model.convs[1].register_forward_hook(lambda module, inputs, out: out.tanh())
    if step == 4:
        model.convs[0].normalize = True


class Change(hl.Callback):
    """`change_after_step`, in the middle of an epoch and at its end."""

    def on_step_end(self, trainer: Any, step: Any) -> None:
        if step.step != 3:
            change_after_step(step.step, trainer.model)

    def on_epoch_end(self, trainer: Any, epoch: Any) -> None:
        if epoch.epoch == 1:
            change_after_step(3, trainer.model)


def test_what_a_callback_changes_holds_from_the_next_step_on() -> None:
    graph = random_graph()
    x = randn(50, WIDTH)
    data = dataset_of(graph, x)
    method = hl.Sampled(fanouts=(-1, -1), batch_size=10, shuffle=False)  # 25 seeds: 3 steps an epoch
    ours = model_of()
    trainer = hl.Trainer(
        ours,
        data,
        method,
        epochs=2,
        optimizer=torch.optim.SGD,
        lr=0.1,
        callbacks=[Change()],
        show=False,
    )
    trainer.fit()
    plain = model_of()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    step = 0
    for _ in range(2):
        for seeds in data.splits["train"].split(10):
            outputs = stock_layers(list(plain.convs), x, graph)[seeds]
            optimizer.zero_grad()
            nn.functional.cross_entropy(outputs, data.labels[seeds]).backward()
            optimizer.step()
            step += 1
            change_after_step(step, plain)
    for name, expected in plain.state_dict().items():
        assert_close(ours.state_dict()[name], expected)


def test_a_conv_that_replaces_another_is_run_as_what_it_is() -> None:
    graph = random_graph()
    x = randn(50, WIDTH)
    batch = batch_of(graph, x, (-1, -1))
    model = model_of()
    model(batch)
    for name in ("gin", "gat", "gcn", "sage-max"):
        model.convs[0] = conv_of(name, WIDTH, 6)
        assert_close(model(batch), stock_layers(list(model.convs), x, graph))


def test_a_trainer_refuses_a_conv_that_a_callback_replaces() -> None:
    class Replace(hl.Callback):
        def on_step_end(self, trainer: Any, step: Any) -> None:
            trainer.model.convs[0] = conv_of("gin", WIDTH, 6)

    data = dataset_of(random_graph(), randn(50, WIDTH))
    trainer = hl.Trainer(model_of(), data, hl.Sampled(fanouts=(2, 2)), epochs=1, callbacks=[Replace()], show=False)
    with pytest.raises(ValueError, match=r"convs\.0\..* registered, replaced or removed"):
        trainer.fit()


@pytest.mark.parametrize("name", ["sage-mean", "sage-max", "gcn"])
def test_rows_aggregated_ahead_are_not_used_by_a_conv_that_has_changed(name: str) -> None:
    """A thread prepares the next batches while a callback changes the conv that they are for."""
    graph = random_graph(loops=True)
    block = batch_of(graph, None, (-1,), torch.arange(9)).blocks[0]
    table = TensorTable(randn(50, WIDTH))
    conv: Any = conv_of(name, WIDTH, WIDTH)
    ahead = read_ahead(conv, Rows(table, block.src_ids), block)
    if name == "gcn":
        conv.add_self_loops = False
    else:
        conv.aggr_module = pyg.aggr.SumAggregation()
    x = table.read(block.src_ids)
    for other in (conv, conv_of("gcn", WIDTH, 3), conv_of("gin", WIDTH, 3), conv_of("sage-max", WIDTH, 3)):
        assert is_fused(other)
        assert_close(convolve(other, ahead, block), convolve(other, x, block), 1e-12)
