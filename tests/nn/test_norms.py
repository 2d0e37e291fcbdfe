"""Norms by name, and batch norms by their running statistics."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hopline.nn.norms import make_norm, running_statistics


@pytest.mark.parametrize("name", ["batch", "layer"])
def test_a_norm_by_name_is_pygs_and_is_taken(name: str) -> None:
    norm = make_norm(name, 4)
    assert norm(torch.randn(3, 4)).shape == (3, 4)
    assert type(norm).__module__.startswith("torch_geometric")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'batch', 'layer'.*not 'group'"):
        make_norm("group", 4)


def test_batch_norms_go_by_their_running_statistics_while_the_context_lasts() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with running_statistics([inner]):
        assert not inner[1].training
        assert inner(torch.ones(1, 4)).shape == (1, 4)
    assert inner[1].training
