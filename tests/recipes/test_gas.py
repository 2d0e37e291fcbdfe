"""Recipes for GNNAutoScale's tables: each can be built and trained on a graph of its kind."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import hopline as hl
from hopline import infer
from hopline.data.registry import names
from hopline.methods.historical.work import HistoricalWork
from hopline.recipes import RunConfig, find_recipe
from hopline.recipes.gas import LARGE, ROWS, SMALL, history
from hopline.run.models import make_model
from hopline.tables import TensorTable
from hopline.training.settings import TrainSettings
from hopline.util.config import from_dict, to_dict
from tests.support.helpers import randint, randn, random_graph

WIDTHS = {
    "cora": (1433, 7), "citeseer": (3703, 6), "pubmed": (500, 3), "coauthor-cs": (6805, 15),
    "coauthor-physics": (8415, 5), "amazon-computers": (767, 10), "amazon-photo": (745, 8), "wikics": (300, 10),
    "reddit": (602, 41), "flickr": (500, 7), "arxiv": (128, 40), "products": (100, 47), "cluster": (7, 6),
    "ppi": (50, 121), "yelp": (300, 100),
}  # fmt: skip
MULTI = ("ppi", "yelp")
each_run = pytest.mark.parametrize("name", ROWS)
SMALL_OF_EACH_MODEL = {row.model: name for name, row in ROWS.items() if row in SMALL}
each_kind_of_run = pytest.mark.parametrize(
    "name", [name for name, row in ROWS.items() if row in LARGE or name in SMALL_OF_EACH_MODEL.values()]
)
"""All runs on large graphs, and one per model of those on small ones, which differ in numbers only."""


def tiny_dataset(data: str) -> hl.Dataset:
    """60 nodes with a dataset's widths and task."""
    num_features, num_classes = WIDTHS[data]
    several = data in MULTI
    return hl.Dataset(
        name=data,
        graph=random_graph(num_nodes=60, num_edges=240),
        tables={"x": TensorTable(randn(60, num_features))},
        y=(randn(60, num_classes, seed=9) > 0).float() if several else randint(0, num_classes, 60, 9),
        splits={"train": torch.arange(30), "test": torch.arange(30, 60)},
        task="multi" if several else "single",
        num_classes=num_classes,
    )


def shrink(config: RunConfig) -> RunConfig:
    """The run with fewer parts, layers and units."""
    hidden = config.model.hidden if config.model.name == "gat" else min(config.model.hidden, 24)
    model = dataclasses.replace(config.model, hidden=hidden, layers=min(config.model.layers, 4))
    assert isinstance(config.method, hl.Historical)
    method = dataclasses.replace(config.method, num_parts=6, parts_per_batch=2, partition="random")
    return dataclasses.replace(config, model=model, method=method)


def trainer_of(name: str) -> hl.Trainer:
    config = shrink(find_recipe(name)())
    data = tiny_dataset(ROWS[name].data)
    torch.manual_seed(0)
    model = make_model(config.model, data).double()
    settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(TrainSettings)}
    return hl.Trainer(model, data, config.method, **(settings | {"show": False, "epochs": 1}))


def work_of(trainer: hl.Trainer) -> HistoricalWork:
    assert isinstance(trainer.work, HistoricalWork)
    return trainer.work


@each_kind_of_run
def test_a_run_takes_a_step_on_a_graph_of_its_kind(name: str):
    trainer = trainer_of(name)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    run = trainer.fit()
    assert trainer.num_steps == 3
    assert run.test >= 0
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    assert any(not torch.equal(p, old) for p, old in zip(trainer.model.parameters(), before, strict=True))


@each_kind_of_run
def test_with_exact_tables_outputs_are_those_of_the_full_batch(name: str):
    trainer = trainer_of(name)
    work = work_of(trainer)
    model = trainer.model
    model.eval()
    work.refresh()
    expected = infer.exact(model, trainer.data)
    with torch.no_grad():
        for group in work.partitioned.parts.own_groups:
            hist_batch = work.batch(group, None)
            assert hist_batch is not None
            ours = model(dataclasses.replace(hist_batch.batch, output_idx=None))
            torch.testing.assert_close(ours, expected[hist_batch.nodes], rtol=1e-6, atol=1e-6)


@each_run
def test_a_run_survives_the_run_folder_and_names_a_dataset_that_can_be_opened(name: str, tmp_path: Path):
    config = history(name)
    assert trainer_of(name).data.name == ROWS[name].data  # it can be built
    assert from_dict(RunConfig, to_dict(config)) == config
    openable = {info.name.lower() for info in names(data_root=tmp_path)} | {"cluster"}
    assert config.data in openable


def test_the_tables_are_complete():
    assert (len(SMALL), len(LARGE), len(ROWS)) == (30, 19, 49)
    of = {model: sum(row.model == model for row in ROWS.values()) for model in dict.fromkeys(r.model for r in SMALL)}
    assert of == {"gcn": 14, "gat": 6, "appnp": 8, "gcnii": 14}


def settings_of(name: str, *keys: str) -> list[Any]:
    config = history(name)
    places = {"model": config.model, "method": config.method}
    return [
        config.model.conv.get(key.rpartition(".")[2])
        if key.startswith("model.conv.")
        else getattr(places.get(key.partition(".")[0], config), key.rpartition(".")[2])
        for key in keys
    ]


def test_rows_reach_the_run_as_they_are_written():
    common = ("model.layers", "model.hidden", "model.dropout", "lr", "weight_decay", "weight_decay_rest", "clip_norm")
    common += ("method.num_parts", "method.parts_per_batch", "epochs")
    assert settings_of("gas-gcn-cora", *common) == [2, 16, 0.5, 0.01, 5e-4, 0.0, 1.0, 40, 10, 200]
    assert settings_of("gas-gcnii-cora", *common) == [64, 64, 0.6, 0.01, 0.01, 5e-4, None, 2, 1, 1000]
    assert settings_of("gas-gcnii-ppi", *common) == [9, 2048, 0.2, 0.001, 0.0, None, 1.0, 20, 2, 2000]
    gat = ("model.act", "model.conv.heads", "model.out_heads", "model.conv.dropout", "model.input_dropout")
    assert settings_of("gas-gat-pubmed", *gat) == ["elu", 8, 8, 0.6, 0.6]
    more = ("model.conv.alpha", "model.conv.theta", "model.conv.shared_weights", "model.norm", "model.residual")
    assert settings_of("gas-gcnii-pubmed", *more) == [None, 0.4, None, "none", "none"]
    assert settings_of("gas-gcnii-ppi", *more) == [0.5, 1.0, False, "none", "before"]
    assert settings_of("gas-gcnii-arxiv", *more) == [0.2, None, True, "batch", "none"]
    pna = ("model.name", "model.jk", "model.linear", "model.conv.aggregators", "model.conv.scalers")
    scalers = ["identity", "amplification"]
    assert settings_of("gas-pna-arxiv", *pna) == ["pna", "none", False, ["mean"], scalers]
    assert settings_of("gas-pna-jk-reddit", *pna) == ["pna", "cat", True, ["mean", "max"], scalers]
    assert settings_of("gas-gcn-yelp", "method.max_batches", "features") == [4, "standardized"]
    assert settings_of("gas-pna-products", "method.edge_dropout", "features") == [0.8, "given"]
    assert settings_of("gas-gin-cluster", "method.lipschitz", "model.residual") == [1.0, "after"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gas-pna-reddit", ["gas-pna-ppi, gas-pna-arxiv", "gas-gcn-reddit"]),
        ("gas-gat-amazon-photo", ["gas-gat-cora", "gas-appnp-amazon-photo"]),
        ("gas-pna-jk-flickr", ["gas-pna-jk-reddit", "gas-gcn-flickr"]),
        ("gas-gcm-cora", ["gas-gat-cora", "Did you mean 'gas-gcn-cora'?"]),
        ("gas-", ["gas-gcn-cora"]),
    ],
)  # fmt: skip
def test_a_pair_that_does_not_exist_is_refused_with_those_that_do(name: str, words: list[str]):
    with pytest.raises(ValueError, match=f"there is no run '{name}'") as error:
        find_recipe(name)()
    assert all(word in str(error.value) for word in words)


def test_the_docstring_of_a_run_begins_with_its_command():
    command, blank, *more = (inspect.getdoc(history) or "").splitlines()
    assert (command, blank) == ("hopline train gas-MODEL-DATASET", "")
    assert " ".join(more).endswith(".")


def test_any_other_name_is_a_dataset():
    assert find_recipe("some/folder")() == RunConfig(data="some/folder")
    assert find_recipe("demo")().method == hl.Sampled(fanouts=(10, 10), batch_size=1024)
