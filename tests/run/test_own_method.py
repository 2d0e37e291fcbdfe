"""`method=package.module:Class` and `method=file.py:Class`: a method of the user's own on the command line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hopline.contract import Method
from hopline.run import train as run
from hopline.run.settings import NotImported, RunConfig, load_config
from hopline.util.config import from_dict, override, settings_of, to_dict
from hopline.util.own_code import own_settings
from tests.support.runs import assert_refused, command, losses, records, small

MODULE = '''
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import hopline as hl
import torch

Path("imported").touch()


@dataclass(frozen=True)
class InTurn(hl.extend.Method):
    """Seeds in their order, over all edges or over few."""

    size: int = 50
    """Seeds of a step."""
    edges: Literal["all", "few"] = "few"
    """How many edges are drawn."""
    fanouts: tuple[int, ...] = (4, 3)
    rate: float = 1
    notes: Path | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, not {self.size}")

    def bind(self, job: hl.extend.Job) -> InTurnWork:
        fanouts = self.fanouts if self.edges == "few" else [-1] * len(self.fanouts)
        return InTurnWork(self, job, hl.extend.NeighborSampler(job.data.graph, fanouts))


@dataclass
class InTurnWork(hl.extend.Work):
    spec: InTurn
    job: hl.extend.Job
    sampler: hl.extend.NeighborSampler

    def units(self, epoch: int, done: int = 0, examples: int = 0) -> Iterator[hl.extend.Unit]:
        data = self.job.data
        for step, seeds in enumerate(self.job.train_ids.split(self.spec.size)[done:], start=done):
            key = epoch * 1000 + step
            blocks = self.sampler.sample(seeds, key)
            x = hl.extend.Rows(data.x, blocks[0].src_ids)
            yield hl.extend.BatchUnit(self.job, hl.Batch(seeds, blocks, x, data.labels[seeds], key=key))


class Doubled(InTurn):
    """The same, without settings of its own."""


class Undecorated(InTurn):
    more: int = 3


class NoDataclass(hl.extend.Method):
    def bind(self, job):
        raise NotImplementedError


@dataclass
class NoBind(hl.extend.Method):
    size: int = 3


@dataclass(frozen=True)
class Unreadable(InTurn):
    where: torch.device = torch.device("cpu")


@dataclass(frozen=True)
class Unknown(InTurn):
    what: Nowhere = 3  # noqa: F821


@dataclass(frozen=True)
class Kind(InTurn):
    kind: str = "a"


@dataclass
class Needs(hl.extend.Method):
    size: int

    def bind(self, job: hl.extend.Job) -> InTurnWork:
        return InTurn(size=self.size).bind(job)


def function():
    pass


class Other:
    pass
'''


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with a graph and the module `own_turns`, as the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, ""])
    small().save(tmp_path / "graph")
    (tmp_path / "own_turns.py").write_text(MODULE)
    yield
    for name in [name for name in sys.modules if "own_turns" in name]:
        del sys.modules[name]


QUICK = ("epochs=2", "model.layers=2", "model.hidden=8", "show=false")


def stored(folder: str) -> dict[str, object]:
    return json.loads((Path(folder) / "config.json").read_text())["config"]["method"]


@pytest.mark.parametrize("place", ["own_turns", "own_turns.py", "./own_turns.py", "{}/own_turns.py"])
def test_a_run_keeps_the_method_and_its_settings(place: str, tmp_path: Path) -> None:
    name = f"{place.format(tmp_path)}:InTurn"
    typed = [f"method={name}", "method.size=30", "method.fanouts=3,3", "method.rate=2"]
    assert command("train", "graph", *typed, *QUICK, "out=run").status == 0
    whole = name if ".py" not in name else f"{tmp_path}/own_turns.py:InTurn"
    settings = {"size": 30, "edges": "few", "fanouts": [3, 3], "rate": 2.0, "notes": None}
    assert stored("run") == {"kind": whole, **settings}
    assert [r["epoch"] for r in records(tmp_path / "run", "epoch")] == [1, 2]
    changed = json.loads((tmp_path / "run" / "config.json").read_text())["changed"]
    assert {"method.kind", "method.size", "method.fanouts", "method.rate"} <= set(changed)
    assert "method.edges" not in changed


def test_settings_change_what_is_trained() -> None:
    losses_of = {}
    for name, typed in {"few": [], "all": ["method.edges=all"], "as before": ["method.edges=few"]}.items():
        out = f"out={name.replace(' ', '_')}"
        assert command("train", "graph", "method=own_turns:InTurn", *typed, *QUICK, out).status == 0
        losses_of[name] = [r["loss"] for r in records(Path(out.partition("=")[2]), "epoch")]
    assert losses_of["few"] == losses_of["as before"] != losses_of["all"]
    assert command("train", "graph", "method=own_turns:Doubled", *QUICK, "out=doubled").status == 0
    assert [r["loss"] for r in records(Path("doubled"), "epoch")] == losses_of["few"]


def test_a_run_is_resumed_with_and_without_its_folder() -> None:
    typed = ["graph", "method=own_turns.py:InTurn", "method.size=20", *QUICK[1:]]
    assert command("train", *typed, "epochs=4", "out=whole").status == 0
    assert command("train", *typed, "epochs=2", "out=cut").status == 0
    assert command("train", *typed, "epochs=4", "out=cut", "resume=true").status == 0
    for name in ("loss", "lr"):
        columns = [[r[name] for r in records(Path(folder), "epoch")] for folder in ("whole", "cut")]
        assert columns[0] == columns[1]
    other = [word if word != "method.size=20" else "method.size=10" for word in typed]
    assert_refused(command("train", *other, "epochs=5", "out=cut", "resume=true"), "method is")
    assert command("train", *typed, "epochs=1").status == 0
    assert command("train", *typed, "epochs=2", "resume=true").status == 0
    (folder,) = Path("runs").iterdir()
    assert len(records(folder, "epoch")) == 2
    assert command("train", *other, "epochs=1", "resume=true").status == 0
    assert len(list(Path("runs").iterdir())) == 2, "other settings are another run"


def test_two_ranks_train_by_an_own_method(tmp_path: Path) -> None:
    """The method knows nothing of ranks: each has all seeds, and trains as one process does."""
    typed = ["method=own_turns.py:InTurn", "data=graph", "model.dropout=0", *QUICK]
    one = run.train(override(RunConfig(), [*typed, "out=one"]))
    two = run.train(override(RunConfig(), [*typed, "out=two", "devices=2"]))
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)


def test_infer_export_and_report_need_no_code_of_the_method(tmp_path: Path) -> None:
    assert command("train", "graph", "method=own_turns:InTurn", *QUICK, "out=run").status == 0
    del sys.modules["own_turns"]
    os.remove("imported")
    for arguments in (["infer", "run"], ["export", "run", "weights.pt"], ["report", "run"]):
        assert command(*arguments).status == 0, arguments
    assert_refused(command("infer", "run", "inference=sampled"), "method=sampled")
    assert load_config(tmp_path / "run").method == NotImported(name="own_turns:InTurn")
    # A run without out= looks through the runs of others: it must not import what they name.
    Path("runs").mkdir()
    os.rename("run", "runs/graph-20200101-000000")
    assert command("train", "graph", *QUICK, "method.fanouts=4,3", "resume=true").status == 0
    assert not Path("imported").exists()
    assert len(list(Path("runs").iterdir())) == 2


def test_a_method_that_was_not_imported_cannot_train(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="method=own_turns:InTurn"):
        NotImported(name="own_turns:InTurn").bind(None)  # type: ignore[arg-type]


def test_plan_has_a_row_for_an_own_method(tmp_path: Path) -> None:
    outcome = command("plan", "graph", "method=own_turns:InTurn", *QUICK[1:])
    assert outcome.status == 0, outcome.err
    assert "in_turn" in outcome.out
    assert "InTurn has no plan" in " ".join(outcome.out.split())
    assert_refused(command("train", "graph", "method=own_turns:InTurn", "budget=1GiB", *QUICK), "InTurn has no plan")


@pytest.mark.parametrize("before", [["train"], ["train", "demo"], ["plan"]])
def test_keys_shows_the_settings_of_an_own_method(before: list[str]) -> None:
    title = "method=own_turns.py:InTurn"
    for arguments in ([*before, "--keys", title], [*before, title, "--keys", title]):
        status, text, err = command(*arguments)
        assert (status, err) == (0, "")
        assert text.startswith(f"\n{title}\n")
        assert "  method.size=50\n      Seeds of a step. (an integer)\n" in text
        assert "  method.edges=few\n      How many edges are drawn. ('all' or 'few')\n" in text
        assert "  method.fanouts=4,3\n" in text
        assert "model.hidden" not in text
    text = command(*before, title, "--keys").out
    assert f"\n{title}\n  method.size=50" in text
    assert "model.hidden" in text
    assert title not in command(*before, "--keys").out


def test_settings_go_to_json_and_back() -> None:
    config = override(RunConfig(), ["method=own_turns:Needs", "method.size=7"])
    again = from_dict(RunConfig, json.loads(json.dumps(to_dict(config))))
    assert again == config
    changed = override(again, ["method.size=9"])
    assert (type(changed.method).__name__, changed.method.size) == ("Needs", 9)  # type: ignore[attr-defined]
    assert type(override(again, ["method=sampled"]).method).__name__ == "Sampled"


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["method=nowhere.at_all:X"], ["'nowhere.at_all'", "method=path/to/file.py:X"]),
        (["method=nowhere.py:X"], ["no file nowhere.py"]),
        (["method=own_turns:InTrun"], ["Did you mean method=own_turns:InTurn?"]),
        (["method=own_turns.py:InTrun"], ["Did you mean method=own_turns.py:InTurn?"]),
        (["method=own_turns:function"], ["`class function(hl.extend.Method)`"]),
        (["method=own_turns:Other"], ["not derived from hl.extend.Method"]),
        (["method=own_turns:NoDataclass"], ["@dataclass(frozen=True)"]),
        (["method=own_turns:Undecorated"], ["`class Undecorated`"]),
        (["method=own_turns:NoBind"], ["bind", "class NoBind"]),
        (["method=own_turns:Unreadable"], ["where is device(type='cpu')", "config.json"]),
        (["method=own_turns:Unknown"], ["Nowhere"]),
        (["method=own_turns:Kind"], ["'kind'"]),
        (["method=own_turns:"], ["method=package.module:Name", "path/to/file.py:Name"]),
        (["method=broken.py:X"], ["broken.py", "(ZeroDivisionError: ", "--debug"]),
        (["method=needing:X"], ["needing", "(ModuleNotFoundError: ", "'absent'"]),
        (["method=own_turns:InTurn", "method.sise=3"], ["Did you mean 'method.size'?"]),
        (["method=own_turns:InTurn", "method.size=x"], ["method.size=x", "an integer"]),
        (["method=own_turns:InTurn", "method.size=0"], ["size must be at least 1"]),
        (["method=own_turns:Needs"], ["method.size=VALUE"]),
        (["method=smapled"], ["Did you mean 'sampled'?", "package.module:Class"]),
    ],
)
def test_what_is_no_method_is_refused_by_name(typed: list[str], words: list[str]) -> None:
    Path("broken.py").write_text("1 / 0\n")
    Path("needing.py").write_text("import absent\n")
    assert_refused(command("train", "graph", *typed, *QUICK, "out=run"), *words)
    assert not Path("run").exists()


def test_a_method_file_imports_modules_of_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "own_turns_more.py").write_text("from own_turns_base import InTurn as More\n")
    (tmp_path / "there" / "own_turns_base.py").write_text(MODULE)
    method_class = own_settings("method", "there/own_turns_more.py:More", Method)
    assert method_class.__module__ == "own_turns_base"
    keys = [
        setting.key
        for setting in settings_of(RunConfig, None, {"method=x:More": method_class})
        if setting.group == "method=x:More"
    ]
    assert keys == ["method.size", "method.edges", "method.fanouts", "method.rate", "method.notes"]
