"""The standard recipes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from hopline.data.built_in import BUILT_IN
from hopline.data.registry import names
from hopline.data.synthetic import planted_partition
from hopline.recipes import RECIPES, RunConfig
from hopline.run import train as run
from hopline.run.model_settings import NAMES
from hopline.util.config import from_dict, to_dict

each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


@each_recipe
def test_a_recipe_names_one_fanout_per_layer_and_a_model_that_exists(recipe: Callable[[], RunConfig]):
    config = recipe()
    assert len(config.method.fanouts) == config.model.layers
    assert config.model.name in NAMES


@each_recipe
def test_a_recipe_begins_with_its_command_and_says_what_to_expect(recipe: Callable[[], RunConfig]):
    command, blank, *more = (inspect.getdoc(recipe) or "").splitlines()
    assert command == f"hopline train {recipe.__name__}"
    assert blank == ""
    assert " ".join(more).endswith(".")


@each_recipe
def test_a_recipe_names_a_dataset_that_can_be_opened(recipe: Callable[[], RunConfig], tmp_path: Path):
    openable = {info.name.lower() for info in names(data_root=tmp_path)}
    assert recipe().data.lower() in openable


@each_recipe
def test_a_recipe_survives_the_run_folder(recipe: Callable[[], RunConfig]):
    assert from_dict(RunConfig, to_dict(recipe())) == recipe()


def test_the_demo_learns_on_a_smaller_copy_of_its_graph(tmp_path: Path):
    settings = BUILT_IN["demo"][0].scaled(0.05)
    planted_partition(settings, folder=tmp_path / "graph")
    config = dataclasses.replace(RECIPES["demo"](), data=str(tmp_path / "graph"), out=tmp_path / "run", show=False)
    outcome = run.train(config)
    assert outcome.epochs == config.epochs
    assert outcome.history[-1].loss < outcome.history[0].loss
    assert outcome.test > 3 / settings.num_classes
