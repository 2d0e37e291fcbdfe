"""Predictions of a finished run."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.nn

import hopline as hl
from hopline import infer
from hopline.core.partition import make_partition
from hopline.distributed import launch
from hopline.distributed.launch_settings import LaunchSettings
from hopline.distributed.world import World
from hopline.run import train as run
from hopline.run.infer import predict_rank
from hopline.run.models import make_model
from hopline.run.saved import bare_values
from hopline.run.settings import InferConfig, RunConfig
from hopline.shards.write import cut
from hopline.tasks.kinds import LabelKind
from tests.support.helpers import usual_task
from tests.support.runs import method, predictions, quick, small


def test_predictions_are_those_of_the_best_weights(config: RunConfig, run_folder: Path):
    data = hl.open(config.data)
    model = make_model(config.model, data)
    model.load_state_dict(torch.load(run_folder / "best.pt", weights_only=True))
    scores = infer.exact(model, data)
    np.testing.assert_allclose(predictions(run_folder, write="scores"), scores.numpy(), rtol=1e-5, atol=1e-6)
    classes = predictions(run_folder)
    assert classes.dtype == np.int64
    np.testing.assert_array_equal(classes, scores.argmax(dim=-1).numpy())
    np.testing.assert_array_equal(predictions(run_folder, nodes="test"), classes[data.splits["test"].numpy()])


def test_predictions_can_be_by_sampling_and_by_the_last_weights(run_folder: Path, tmp_path: Path):
    out = tmp_path / "new" / "scores.npy"
    sampled = predictions(run_folder, inference="sampled", weights="last", write="scores", nodes="valid", out=out)
    assert out.exists()
    assert sampled.shape == (80, 4)
    assert not (run_folder / "predictions.npy").exists()


@pytest.mark.parametrize(
    ("task", "outputs", "shape", "dtype"),
    [
        ("single", 4, (3,), np.int64),
        ("multi", 4, (3, 4), np.uint8),
        ("binary", 2, (3,), np.int64),
        ("binary", 1, (3,), np.uint8),
    ],
)
def test_classes_follow_the_task(task: LabelKind, outputs: int, shape: tuple[int, ...], dtype: type):
    classes = bare_values(usual_task(max(2, outputs), task), torch.randn(3, outputs), "classes")
    assert (classes.shape, classes.dtype) == (shape, dtype)


def test_a_split_that_the_data_lacks_is_named(run_folder: Path, tmp_path: Path):
    bare = dataclasses.replace(small(), splits={})
    bare.save(tmp_path / "bare")
    with pytest.raises(ValueError, match=r"split 'test': .*all"):
        predictions(run_folder, nodes="test", data=str(tmp_path / "bare"))
    assert predictions(run_folder, data=str(tmp_path / "bare")).shape == (400,)


def test_predictions_that_cannot_be_written_name_the_file(run_folder: Path):
    with pytest.raises(ValueError, match=r"cannot write .*config\.json/p\.npy"):
        predictions(run_folder, out=run_folder / "config.json" / "p.npy")
    with pytest.raises(ValueError, match=r"out=p\.txt .*\.csv, \.parquet, \.npy"):
        predictions(run_folder, out=Path("p.txt"))


def test_chunks_and_a_folder_change_no_prediction(run_folder: Path, tmp_path: Path):
    expected = predictions(run_folder, write="scores")
    np.testing.assert_allclose(
        predictions(run_folder, write="scores", chunk_bytes="100KiB"), expected, rtol=1e-5, atol=1e-6
    )
    hidden = tmp_path / "hidden"
    for _ in range(2):  # the second time from what is there
        np.testing.assert_array_equal(predictions(run_folder, write="scores", folder=hidden), expected)
        assert [path.name for path in hidden.glob("*.bin")] == ["layer1.bin"]
    torch.save(
        {k: v + 1 for k, v in torch.load(run_folder / "best.pt", weights_only=True).items()}, tmp_path / "other.pt"
    )
    with pytest.raises(ValueError, match=r"another inference \(other weights\)"):
        predictions(run_folder, weights=tmp_path / "other.pt", folder=hidden)
    with pytest.raises(ValueError, match=r"folder= .*inference=exact"):
        predictions(run_folder, inference="sampled", folder=hidden)
    with pytest.raises(ValueError, match=r"chunk_bytes .*at least 1"):
        predictions(run_folder, chunk_bytes=0)
    with pytest.raises(ValueError, match=r"device='nowhere' .*device=cpu"):
        predictions(run_folder, device="nowhere")


def test_rows_are_written_piece_by_piece(run_folder: Path, monkeypatch: pytest.MonkeyPatch):
    for write in ("scores", "classes"):
        expected = predictions(run_folder, write=write)
        with monkeypatch.context() as patched:
            patched.setattr("hopline.run.saved.CHUNK_NODES", 77)
            ours = predictions(run_folder, write=write)
        assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(ours, expected)


def test_weights_can_be_read_from_a_file(config: RunConfig, run_folder: Path, tmp_path: Path):
    """PyG's own, and those saved from within DDP."""
    data = hl.open(config.data)
    torch.manual_seed(5)
    stock = torch_geometric.nn.GraphSAGE(data.num_features, 8, 2, data.num_classes)
    plain, wrapped, foreign = (tmp_path / name for name in ("plain.pt", "ddp.pt", "foreign.pt"))
    torch.save(stock.state_dict(), plain)
    torch.save({f"module.{name}": value for name, value in stock.state_dict().items()}, wrapped)
    torch.save(torch_geometric.nn.GCN(data.num_features, 8, 2, data.num_classes).state_dict(), foreign)
    expected = stock.eval()(data.x.read(torch.arange(400)), data.graph.edge_index()).detach().numpy()
    for file in (plain, wrapped):
        np.testing.assert_allclose(
            predictions(run_folder, weights=file, write="scores"), expected, rtol=1e-4, atol=1e-5
        )
    with pytest.raises(ValueError, match=r"foreign\.pt .*Missing key"):
        predictions(run_folder, weights=foreign)
    with pytest.raises(ValueError, match=r"none\.pt: .*weights=best, weights=last"):
        predictions(run_folder, weights=tmp_path / "none.pt")


# ---- shards


def test_shards_in_one_process_give_what_the_dataset_gives(config: RunConfig, run_folder: Path, tmp_path: Path):
    dataset = hl.open(config.data)
    cut(dataset, make_partition(dataset.graph, 3, "random", seed=1), tmp_path / "shards")
    shards = str(tmp_path / "shards")
    for nodes in ("all", "test"):
        expected = predictions(run_folder, nodes=nodes, write="scores")
        for folder in (None, tmp_path / nodes):
            ours = predictions(
                run_folder, nodes=nodes, write="scores", data=shards, folder=folder, chunk_bytes="100KiB"
            )
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(predictions(run_folder, data=shards), predictions(run_folder))
    sampled = [
        predictions(run_folder, data=data, write="scores", inference="sampled") for data in (shards, config.data)
    ]
    np.testing.assert_allclose(*sampled, rtol=1e-5, atol=1e-6)
    for features in ("standardized", "normalized", "one_hot"):
        made = run.train(dataclasses.replace(config, features=features, out=tmp_path / features)).folder
        assert made is not None
        if features == "one_hot":
            with pytest.raises(ValueError, match="in shards: give data="):
                predictions(made, data=shards)
            continue
        ours = predictions(made, data=shards, write="scores")
        np.testing.assert_allclose(ours, predictions(made, write="scores"), rtol=1e-5, atol=1e-5)
    shutil.rmtree(tmp_path / "shards" / "shard-1")
    with pytest.raises(ValueError, match=r"no shard 1 in .*is missing"):
        predictions(run_folder, data=shards)


def predict_on_ranks(world: World, folder: str, shards: str) -> list[Any]:
    """Predictions of several ranks for each of `SETTINGS`, as the first rank has written them."""
    by_settings = []
    for settings in SETTINGS:
        out = Path(folder) / "ranks.npy"
        written = predict_rank(world, folder, InferConfig(data=shards, out=out, **settings))
        by_settings.append(None if written is None else np.load(written["file"], allow_pickle=False).tolist())
    with pytest.raises(ValueError, match=r"devices=2 .*shards=2` and give data=FOLDER"):
        predict_rank(world, folder, InferConfig())
    with pytest.raises(ValueError, match="folder= is for one process"):
        predict_rank(world, folder, InferConfig(data=shards, folder=Path("hidden")))
    return by_settings


SETTINGS: list[dict[str, Any]] = [
    {"nodes": "all", "write": "scores"},
    {"nodes": "valid", "write": "scores", "chunk_bytes": "100KiB"},
    {"nodes": "all", "inference": "sampled", "write": "scores"},
    {"nodes": "valid", "inference": "sampled", "write": "scores"},
    {"nodes": "test"},
]


def test_several_ranks_give_what_one_process_gives(tmp_path: Path):
    config = quick(tmp_path, method=method(fanouts=(-1, -1)))
    dataset = hl.open(config.data)
    folder = run.train(config).folder
    assert folder is not None
    cut(dataset, make_partition(dataset.graph, 2, "random", seed=1), tmp_path / "shards")
    by_settings = launch.run(predict_on_ranks, LaunchSettings(devices=2), str(folder), str(tmp_path / "shards"))
    for settings, rows in zip(SETTINGS, by_settings, strict=True):
        np.testing.assert_allclose(np.array(rows), predictions(folder, **settings), rtol=1e-5, atol=1e-5)
