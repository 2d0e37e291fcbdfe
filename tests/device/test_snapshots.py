"""Snapshots restore weights, modes and random states, also after an error."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch_geometric.nn import SAGEConv

from hopline.device.snapshots import (
    RandomState,
    copy_weights,
    eval_mode,
    preserve_rng,
    preserve_weights,
    random_states,
    restore_random_states,
)
from hopline.nn.conv_adapter import initialise

CPU = torch.device("cpu")


def frozen_in_part() -> nn.Sequential:
    """In training, but for a norm that a user has put into evaluation mode."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    model[1].eval()
    return model


def modes_of(module: nn.Module) -> list[bool]:
    return [part.training for part in module.modules()]


def test_each_part_gets_its_own_mode_back_after_an_error():
    model = frozen_in_part()
    with contextlib.suppress(RuntimeError), eval_mode(model):
        assert modes_of(model) == [False] * 4
        raise RuntimeError
    assert modes_of(model) == [True, True, False, True]


def test_weights_and_buffers_are_restored_after_an_error():
    model = frozen_in_part()
    before = copy_weights(model.state_dict())
    with contextlib.suppress(RuntimeError), preserve_weights(model):
        for tensor in model.state_dict().values():
            tensor.add_(1)
        raise RuntimeError
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_random_draws_continue_as_if_none_had_been_made():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with preserve_rng(CPU):
        torch.rand(5)
    assert torch.equal(torch.rand(3), expected)


def test_random_draws_continue_from_a_restored_state():
    state = RandomState.of(CPU)
    all_states = random_states()
    expected = torch.rand(3)
    state.restore()
    assert torch.equal(torch.rand(3), expected)
    restore_random_states(all_states)
    assert torch.equal(torch.rand(3), expected)


def test_a_conv_without_widths_keeps_the_modes_of_its_parts():
    conv = SAGEConv((-1, -1), 4)
    conv.lin_l.eval()
    before = modes_of(conv)
    initialise(conv, 3, {}, None)
    assert conv.lin_l.weight.shape == (4, 3)
    assert modes_of(conv) == before
