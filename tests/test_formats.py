"""Files of earlier commits (tests/formats/COMMIT) are opened and resumed, or refused by name, never misread."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hopline as hl
from hopline.run.settings import load_config
from hopline.training import checkpoint
from tests.formats.write import DATASET, OVERRIDES, dataset_checksums, historical_trainer, made_dataset, weights_of
from tests.runs import Outcome, assert_refused, command, records

WRITTEN = sorted(path.parent for path in (Path(__file__).parent / "formats").glob("*/expected.json"))
"""A folder per commit whose files are kept."""
FLOAT32 = 1e-5
"""Relative tolerance of what was trained in float32 on another machine."""


@pytest.fixture(params=WRITTEN, ids=lambda path: path.name)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of one commit's files, whose runs know where their dataset is."""
    folder = tmp_path / request.param.name
    shutil.copytree(request.param, folder)
    for config in folder.glob("*/config.json"):
        config.write_text(config.read_text().replace(DATASET, str(folder / "dataset")))
    return folder


def read_expected(files: Path, name: str) -> Any:
    return json.loads((files / "expected.json").read_text())[name]


def succeed(*arguments: object) -> Outcome:
    outcome = command(*arguments)
    assert outcome.status == 0, outcome.err
    return outcome


def test_there_are_files_of_an_earlier_commit():
    assert "62f3d73" in [folder.name for folder in WRITTEN]


def test_a_dataset_folder_is_intact_and_every_value_is_read(files: Path):
    assert "is intact" in succeed("verify", files / "dataset").out
    data = hl.open(files / "dataset")
    assert (data.name, data.num_nodes, data.num_edges, data.num_classes, data.task) == ("kept", 48, 240, 4, "single")
    assert isinstance(data.tables["counts"], hl.extend.SparseTable)
    assert dataset_checksums(data) == read_expected(files, "dataset")


def test_the_second_split_is_another_one(files: Path):
    data = hl.open(files / "dataset", split=1)
    assert data.splits["train"].tolist() == list(range(16, 48))
    assert data.splits["test"].tolist() == list(range(8))


def test_shards_are_those_of_the_dataset(files: Path):
    assert "is intact" in succeed("verify", files / "shards").out
    data = hl.open(files / "dataset")
    shards = [hl.shards.open_shard(files / "shards", rank) for rank in range(2)]
    assert torch.cat([shard.nodes for shard in shards]).sort().values.tolist() == list(range(48))
    for shard in shards:
        assert torch.equal(shard.tables["x"].read(torch.arange(shard.num_own)), data.x.read(shard.nodes))
        assert torch.equal(shard.labels, data.labels[shard.nodes])
        assert torch.equal(shard.layout.degrees, data.graph.in_degrees(shard.nodes))
        assert torch.equal(shard.edge["weight"], data.graph.edge["weight"][shard.edge_ids])


def _knows_its_data(files: Path) -> bool:
    return "inputs" in json.loads((files / "run" / "config.json").read_text())


def test_a_run_predicts_what_it_predicted_or_is_refused_by_name(files: Path):
    out = files / "scores.npy"
    infer = ("infer", files / "run", "write=scores", f"out={out}")
    if not _knows_its_data(files):
        for arguments in ((*infer, f"weights={files / 'run' / 'best.pt'}"), ("test", files / "run")):
            refusal = "does not say on which columns and classes the run was trained"
            assert_refused(command(*arguments), refusal, "train again")
        return
    expected = np.array(read_expected(files, "scores"))
    succeed(*infer)
    np.testing.assert_allclose(np.load(out), expected, rtol=FLOAT32, atol=FLOAT32)
    succeed(*infer, f"data={files / 'shards'}")
    np.testing.assert_allclose(np.load(out), expected, rtol=FLOAT32, atol=FLOAT32)


def test_a_run_is_reported_and_exported_or_refused_by_name(files: Path):
    (files / "run" / "report.html").unlink()
    succeed("report", files / "run")
    assert "gcn" in (files / "run" / "report.html").read_text()
    export = ("export", files / "run", files / "weights.pt")
    if not _knows_its_data(files):
        assert_refused(command(*export), "does not say on which columns and classes")
        return
    succeed(*export)
    exported = torch.load(files / "weights.pt", weights_only=True)
    best = torch.load(files / "run" / "best.pt", weights_only=True)
    assert list(exported) == list(best)
    assert all(torch.equal(exported[name], best[name]) for name in best)


def _format_of_checkpoints(files: Path) -> int:
    payload = (files / "run" / "checkpoint.pt").read_bytes().partition(b"\n")[2]
    return torch.load(io.BytesIO(payload), weights_only=True)["format"]


def test_a_run_is_resumed_with_the_losses_of_an_uninterrupted_one_or_refused_by_name(files: Path):
    resume = ("train", files / "dataset", *OVERRIDES, "epochs=4", f"out={files / 'run'}", "resume=true")
    if _format_of_checkpoints(files) != checkpoint.FORMAT:
        assert_refused(command(*resume), "checkpoint.pt has format 1, this version of hopline reads")
        return
    before = [record["loss"] for record in records(files / "run") if "loss" in record]
    succeed(*resume)
    losses = [record["loss"] for record in records(files / "run") if "loss" in record]
    assert losses[:2] == before
    assert losses == pytest.approx(read_expected(files, "losses"), rel=FLOAT32)


def test_a_failed_historical_run_is_resumed_exactly_or_refused_by_name(files: Path):
    trainer = historical_trainer(made_dataset(), files / "historical", resume=True)
    if _format_of_checkpoints(files) != checkpoint.FORMAT:
        with pytest.raises(ValueError, match=r"checkpoint.pt has format 1, this version of hopline reads \d+: train"):
            trainer.fit()
        return
    losses = [epoch.loss for epoch in trainer.fit().history]
    assert trainer.num_steps == 6
    assert losses == pytest.approx(read_expected(files, "historical losses"), rel=1e-10)
    assert weights_of(trainer) == pytest.approx(read_expected(files, "historical weights"), rel=1e-10, abs=1e-10)


def _change(run: Path, **settings: Any) -> None:
    """Other settings of a stored run."""
    path = run / "config.json"
    stored = json.loads(path.read_text())
    stored["config"] |= settings
    path.write_text(json.dumps(stored))


def _change_model(run: Path, **settings: Any) -> None:
    """Another model in the settings of a stored run."""
    model = json.loads((run / "config.json").read_text())["config"]["model"]
    _change(run, model=model | settings)


def test_the_shares_of_a_drawn_split_are_read_as_the_split_that_they_became(files: Path):
    assert load_config(files / "run").split == 0
    _change(files / "run", split_shares=[0.5, 0.25, 0.25])
    assert load_config(files / "run").split == (0.5, 0.25, 0.25)


@pytest.mark.parametrize(("first", "meant"), [(False, "after"), (True, "before")])
def test_the_two_settings_of_a_residual_are_read_as_the_one_they_became(files: Path, first: bool, meant: str):
    assert load_config(files / "run").model.residual == "none"
    assert load_config(files / "run").schedule == hl.Schedule(), "every and patience were two settings"
    _change_model(files / "run", residual=True, residual_first=first)
    assert load_config(files / "run").model.residual == meant


@pytest.mark.parametrize(
    ("how", "where", "meant"),
    [
        ("async", "host", "async"),
        ("async", "device", "async"),
        ("async_cpu", "device", "async"),
        ("blocking", "host", "blocking"),
    ],
)
def test_a_run_that_a_process_evaluated_is_read_as_one_that_a_thread_evaluates(
    files: Path, how: str, where: str, meant: str
):
    _change(files / "run", evaluate=how, evaluate_on=where)
    assert load_config(files / "run").evaluate == meant


def test_how_edges_were_cut_is_read_as_a_part_of_over_budget(files: Path):
    _change(files / "run", budget={"device": "1GiB", "over_budget": "cut", "cut_by": "degree"})
    assert load_config(files / "run").budget == hl.Budget(device="1GiB", over_budget="cut_by_degree")


def test_an_option_of_a_conv_that_is_now_in_model_conv_is_refused_with_what_to_type(files: Path):
    _change_model(files / "run", heads=8)
    assert_refused(command("infer", files / "run"), "config.json", "model.heads was removed: set model.conv.heads=")


# ---- other versions are refused


def _as_version(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest with something changed, and a checksum that agrees."""
    fields = json.loads(path.read_text())
    fields.pop("manifest_checksum")
    change(fields)
    text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    path.write_text(json.dumps(fields | {"manifest_checksum": f"crc32:{zlib.crc32(text):08x}"}))


def test_a_dataset_of_a_later_version_is_refused(files: Path):
    path = files / "dataset" / "manifest.json"
    _as_version(path, lambda fields: None)
    hl.open(files / "dataset")
    _as_version(path, lambda fields: fields.update(version=99))
    with pytest.raises(ValueError, match=r"manifest\.json .* format version 99"):
        hl.open(files / "dataset")
    assert_refused(command("verify", files / "dataset"), "format version 99")
    _as_version(path, lambda fields: fields.update(version=1, format="another-dataset"))
    with pytest.raises(ValueError, match="its format is not 'hopline-dataset'"):
        hl.open(files / "dataset")


def test_shards_of_a_later_version_are_refused(files: Path):
    for folder in ("shards", "shards/shard-0"):
        _as_version(files / folder / "manifest.json", lambda fields: fields["meta"]["shards"].update(version=99))
    with pytest.raises(ValueError, match=r"has version 99, this hopline reads \d+: cut the dataset again"):
        hl.shards.open_shard(files / "shards", 0)
    assert_refused(command("verify", files / "shards"), "version 99")


def test_a_checkpoint_of_a_later_version_is_refused(files: Path):
    path = files / "run" / "checkpoint.pt"
    state = torch.load(io.BytesIO(path.read_bytes().partition(b"\n")[2]), weights_only=True)
    buffer = io.BytesIO()
    torch.save(state | {"format": 99}, buffer)
    payload = buffer.getvalue()
    header = f"hopline-checkpoint {hashlib.sha256(payload).hexdigest()} {len(payload)}\n".encode()
    path.write_bytes(header + payload)
    outcome = command("train", files / "dataset", *OVERRIDES, "epochs=4", f"out={files / 'run'}", "resume=true")
    assert_refused(outcome, "checkpoint.pt has format 99")
    assert path.read_bytes() == header + payload


def test_settings_that_this_version_does_not_know_are_refused(files: Path):
    path = files / "run" / "config.json"
    stored = json.loads(path.read_text())
    stored["config"]["warp"] = 9
    path.write_text(json.dumps(stored))
    assert_refused(command("infer", files / "run"), "config.json", "warp")
