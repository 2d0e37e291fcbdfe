"""The settings of the historical method, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hopline.contract import Job
from hopline.core.examples import Examples
from hopline.distributed.world import World
from hopline.methods.historical.settings import Historical
from hopline.util.config import override
from tests.methods.historical.test_work import DATA, model_of, trainer_of
from tests.support.helpers import own_task
from tests.support.own_modules import opaque


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_parts": 0}, "num_parts must be at least 1"),
        ({"num_parts": 3, "parts_per_batch": 4}, "make it smaller"),
        ({"refresh_every": 0}, "refresh_every must be at least 1, 'evaluation' or none, not 0"),
        ({"refresh_every": "always"}, "refresh_every must be a whole number or 'evaluation' or None"),
        ({"lag": -1}, "lag"),
        ({"max_batches": 0}, "max_batches must be at least 1 or none, not 0"),
        ({"edge_dropout": 1.0}, "edge_dropout must be at least 0 and below 1, not 1.0"),
        ({"lipschitz": -0.1}, "lipschitz must be at least 0, not -0.1"),
        ({"compensate": True, "halo": "drop"}, "choose one of them"),
        ({"partition": "cut"}, "partition must be"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused_with_a_message(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Historical(**settings)


@pytest.mark.parametrize(("text", "value"), [("none", None), ("3", 3), ("evaluation", "evaluation")])
def test_refresh_every_is_read_from_text(text: str, value: Any):
    assert override(Historical(), [f"refresh_every={text}"]).refresh_every == value


def test_a_model_without_layers_is_refused():
    class ModuleWithoutLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = pyg.GCNConv(6, 4)
            self.second = pyg.GCNConv(4, 3)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            x = opaque(x)
            return self.second(self.first(x, edge_index), edge_index)

    with pytest.raises(ValueError, match="push_and_pull"):
        trainer_of(ModuleWithoutLayers())


def test_refresh_by_evaluation_is_refused_with_several_ranks():
    world = World.alone()
    world.size = 2
    ids = torch.arange(3)
    job = Job(
        data=DATA,
        model=model_of(),
        module=model_of(),
        examples=Examples(ids),
        task=own_task(lambda m, b: ids),
        world=world,
    )
    with pytest.raises(ValueError, match="is for one process"):
        Historical(refresh_every="evaluation").bind(job)
