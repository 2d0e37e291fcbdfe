"""Invalid settings and environments of commands, and the refusal that each must get.

    python -m tests.support.ugly_runs

prints the table in Markdown; `test_ugly_runs.py` checks every row. `data/ugly_inputs.py` has invalid files.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from tests.support.runs import Outcome, command, small

TRAIN = ("train", "demo", "data=graph", "epochs=1", "show=false", "model.layers=2", "model.hidden=4")


class Case(NamedTuple):
    """One command, typed in a folder as `prepare` makes it."""

    words: str
    """Words that the refusal must have; "" if the command must end with status 0."""
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = {}

    @property
    def name(self) -> str:
        """The command as it is typed, without the settings that all cases have."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        shown = [a for a in self.arguments if a not in TRAIN[1:]]
        return " ".join([*variables, "hopline", *shown])


def train(words: str, *settings: str, **environment: str) -> Case:
    """A case of `hopline train`."""
    return Case(words, (*TRAIN, *settings), environment)


CASES = [
    train("epochs must be at least 1, not 0", "epochs=0"),
    train("lr=nan is not valid", "lr=nan"),
    train("lr must be a finite number", "lr=inf"),
    train("checkpoint_s must be a finite number", "checkpoint_s=inf"),
    train("checkpoint_s must be at least 0", "checkpoint_s=-1"),
    train("seed must be between 0 and 2**63 - 1", "seed=-1"),
    train("clip_norm must be above 0 or none", "clip_norm=0"),
    train("patience must be at least 1", "patience=-1"),
    train("Did you mean 'bf16'?", "precision=fp16"),
    train("batch_size must be at least 1", "method.batch_size=0"),
    train("the model has 2 layers and fanouts=(3,) names 1", "method.fanouts=3"),
    train("400 nodes make from 1 to 400 parts", "method=historical", "method.num_parts=4000"),
    train("schedule.factor must be between 0 and 1", "schedule.factor=1"),
    train("set evaluate=blocking", "schedule.name=plateau", "evaluate=async"),
    train("it needs at least budget=", "budget=1B"),
    train("Cannot read 'lots' as a size", "budget=lots"),
    train("is not here, ", "device=cuda:7"),
    train("'gpu' is not a device", "device=gpu"),
    train("devices must be at least 1", "devices=0"),
    train("Did you mean 'method.workers'?", "workers=2"),
    train("is already converted: leave out symmetrize", "symmetrize=false"),
    train("already holds a run. Resume it with resume=true", "out=held"),
    train("file.txt is a file", "out=file.txt"),
    train("file.txt is damaged", "weights=file.txt"),
    train("there are no weights at none.pt", "weights=none.pt"),
    train("model.hidden must be at least 1", "model.hidden=0"),
    train("Did you mean 'sage'?", "model.name=sage2"),
    train("has no split 3", "split=3"),
    train("an integer or 3 numbers separated by commas", "split=0.5,0.5"),
    train("RANK is 'x', which is not a whole number", RANK="x", WORLD_SIZE="2", MASTER_ADDR="localhost"),
    train("LOCAL_WORLD_SIZE is missing", RANK="5", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="localhost"),
    train("", "out=first", HOME="/nonexistent"),
    train("", "out=second", TMPDIR="/nonexistent"),
    train("", "out=third", COLUMNS="x"),
    Case("is neither all, train, valid or test nor a file of ids", ("infer", "held", "nodes=valid2")),
    Case("file.txt is damaged", ("infer", "held", "weights=file.txt")),
    Case("hops= is for a module that is not made of layers", ("infer", "held", "hops=2")),
    Case("chunk_bytes must be at least 1", ("infer", "held", "chunk_bytes=0")),
    Case("badrun/config.json is damaged", ("infer", "badrun")),
    Case("the module os would be imported and run: add trust=true", ("infer", "received")),
    Case("empty must end in .pt or .safetensors", ("export", "held", "empty")),
]


def prepare(folder: Path) -> None:
    """A dataset, a run, a run of somebody else, a damaged one, a file that is none of these, and an empty folder."""
    small().save(folder / "graph")
    with chdir(folder):
        assert command(*TRAIN, "out=held").status == 0
        for name, text in (("badrun", "{"), ("received", Path("held/config.json").read_text())):
            Path(name).mkdir()
            Path(name, "config.json").write_text(text.replace('"name": "sage"', '"name": "os:system"'))
        Path("file.txt").write_text("x")
        Path("empty").mkdir()


def outcome(case: Case, folder: Path) -> Outcome:
    """Run the command of a case in its folder and environment."""
    with chdir(folder), mock.patch.dict(os.environ, case.environment):
        return command(*case.arguments)


def main() -> None:
    print("| command | what it gets |\n|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for case in CASES:
            result = outcome(case, Path(folder))
            last = (result.err.strip().splitlines() or [""])[-1]
            print(f"| `{case.name}` | {last if result.status else 'trains'} |")


if __name__ == "__main__":
    main()
