"""Datasets and run folders from others choose neither where files go nor what is imported."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest

from hopline.run import commands
from hopline.run import train as run
from hopline.run.infer import predict
from hopline.run.model_settings import ModelSpec
from hopline.run.settings import ExportConfig, InferConfig, RunConfig
from tests.support.runs import assert_refused, command, method, quick, small

OUTSIDE = "escaped-by-a-name"


@pytest.mark.parametrize(
    "name",
    [
        *(f"../../{OUTSIDE}", f"FOLDER/{OUTSIDE}", f"a/{OUTSIDE}", f"a\\{OUTSIDE}", "..", ".", "", "  "),
        *("a\nb", "\x1b[2J", "a\0", "\u202egpj", "x" * 300),
    ],
)
def test_a_dataset_whose_name_is_a_path_or_no_text_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    dataclasses.replace(small(), name=name.replace("FOLDER", str(tmp_path))).save(tmp_path / "graph")
    for out in (None, tmp_path / "out"):
        config = RunConfig(
            data=str(tmp_path / "graph"), model=ModelSpec(layers=2), method=method(), out=out, show=False
        )
        with pytest.raises(ValueError, match="`hopline convert DATASET FOLDER`") as it:
            run.train(config)
        assert str(it.value).isprintable()
    assert sorted(os.listdir(tmp_path)) == ["graph", "here"]
    assert not os.listdir(tmp_path / "here")


@pytest.mark.parametrize("name", ["my graph", "cora-2.1", "граф", "a'b", "[x]"])
def test_names_that_are_only_unusual_are_taken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    dataclasses.replace(small(), name=name).save(tmp_path / "graph")
    config = dataclasses.replace(quick(tmp_path / "other"), data=str(tmp_path / "graph"), out=None)
    folder = run.train(config).folder
    assert folder is not None
    assert folder.name.startswith(f"{name}-")
    again = run.train(dataclasses.replace(config, resume=True)).folder
    assert again == folder


MODULE = """
from pathlib import Path
Path("imported").touch()
from hopline.run.models import make_model
from hopline.run.model_settings import ModelSpec

def build(spec, data):
    return make_model(ModelSpec(hidden=8, layers=2), data)
"""


def test_a_module_that_a_run_folder_names_is_imported_only_if_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "their_code.py").write_text(MODULE)
    config = quick(tmp_path, model=ModelSpec(name="their_code:build", layers=2))
    folder = run.train(config).folder
    assert folder is not None
    del sys.modules["their_code"]
    (tmp_path / "imported").unlink()
    words = ("model=their_code:build", "the module their_code would be imported and run", "add trust=true")
    for arguments in (["infer", folder], ["export", folder, "weights.pt"]):
        assert_refused(command(*arguments), *words)
        assert not (tmp_path / "imported").exists()
    with pytest.raises(ValueError, match="add trust=true"):
        predict(folder, InferConfig())
    with pytest.raises(ValueError, match="add trust=true"):
        commands.export(folder, tmp_path / "w.pt", ExportConfig())
    assert not (tmp_path / "imported").exists()
    for arguments in (["infer", folder, "trust=true"], ["export", folder, "weights.pt", "trust=true"]):
        assert command(*arguments).status == 0
    assert (tmp_path / "imported").exists()
    del sys.modules["their_code"]
