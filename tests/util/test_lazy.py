"""Imports on demand: help, listings and refusals load neither torch nor what is built on it."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import json
import operator
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import hopline as hl
import hopline.data
from hopline import cli
from hopline.util.lazy import on_first_use
from tests.support.launched import environment

HEAVY = ("torch", "torch_geometric", "numba", "numpy", "triton", "pandas", "scipy")
COMMANDS = {
    "--help": 0,
    "--version": 0,
    "train --help": 0,
    "train --keys": 0,
    "infer RUN --keys": 0,
    "datasets": 0,
    "trian demo": 2,
    "train demo epoch=3": 2,
    "train demo method.fanouts=a": 2,
    "train demo method.fanuots=3": 2,
    "train demo method=nonesuch": 2,
    "train demo model=sgae": 2,
    "train demo epochs=0": 2,
    "train gas-gcn-nonesuch": 2,
    "train nonesuch": 2,
    "train missing.npz": 2,
    "train missing/folder": 2,
    "plan nonesuch": 2,
    "convert missing.csv out": 2,
    "convert nonesuch out": 2,
    "partition nonesuch out shards=2": 2,
    "infer missing": 2,
    "export missing weights.pt": 2,
    "verify missing": 2,
    "report missing": 2,
}
"""Commands that compute nothing, with their exit status."""
PROBE = """
import contextlib, io, json, sys
heavy = json.loads(sys.argv[1])
loaded = lambda: [name for name in heavy if name in sys.modules]
import hopline
found = {"import hopline": [0, loaded(), ""]}
from hopline.cli import main
for command in json.loads(sys.argv[2]):
    sys.argv = ["hopline", *command.split()]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as done:
            status = done.code or 0
    found[command] = [status, loaded(), said.getvalue()]
print(json.dumps(found))
"""


def test_commands_that_compute_nothing_import_nothing_heavy(tmp_path: Path):
    words = [sys.executable, "-c", PROBE, json.dumps(HEAVY), json.dumps(list(COMMANDS))]
    process = subprocess.run(words, env=environment(), cwd=tmp_path, capture_output=True, text=True, check=True)

    results = json.loads(process.stdout)
    assert {command: loaded for command, (_, loaded, _) in results.items() if loaded} == {}
    statuses = {command: status for command, (status, _, _) in results.items()}
    assert statuses == {"import hopline": 0, **COMMANDS}
    assert all(printed.startswith("error: ") for status, _, printed in results.values() if status)
    assert list(tmp_path.iterdir()) == []


def test_every_module_can_be_imported():
    has_triton = importlib.util.find_spec("triton") is not None

    for module in pkgutil.walk_packages(hl.__path__, "hopline."):
        needs_triton = module.name.startswith("hopline.ops.gpu.")
        if module.name != "hopline.__main__" and (has_triton or not needs_triton):
            importlib.import_module(module.name)


@pytest.mark.parametrize("package", [hl, hl.extend, hl.shards, hopline.data], ids=lambda package: package.__name__)
def test_every_public_name_can_be_used_and_is_listed(package):
    for name in package.__all__:
        assert getattr(package, name) is not None

    assert dir(package) == sorted(package.__all__)
    assert not hasattr(package, "nonesuch")


def test_a_name_is_imported_once(monkeypatch: pytest.MonkeyPatch):
    get, names = on_first_use("hopline.data", {"math": ("square_root=sqrt", "pi"), "os.path": ()})

    assert (get("square_root")(9), get("pi") > 3, get("path").sep) == (3.0, True, "/")
    assert names() == ["path", "pi", "square_root"]
    assert vars(hopline.data)["pi"] is get("pi")
    for name in ("square_root", "pi", "path"):
        monkeypatch.delattr(hopline.data, name)  # what the lookups above have put there
    with pytest.raises(AttributeError, match=r"'hopline\.data' has no attribute 'e'"):
        get("e")


def test_the_garbage_collector_is_off_only_while_a_command_imports(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "torch")

    with cli._loading():
        assert not gc.isenabled()

    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
    atexit.unregister(gc.unfreeze)


@pytest.mark.parametrize(("name", "now"), [("TensorTable", "hl.extend.TensorTable"), ("cut", "hl.shards.cut")])
def test_a_name_of_another_package_says_where_it_is(name: str, now: str):
    with pytest.raises(AttributeError, match=f"use {now}"):
        getattr(hl, name)
    assert callable(operator.attrgetter(now.removeprefix("hl."))(hl))


@pytest.mark.parametrize(
    ("name", "words"), [("LinkNeighborLoader", "keep torch_geometric.loader"), ("HeteroData", "to_homogeneous")]
)
def test_a_name_of_pyg_that_is_not_supported_says_what_to_do(name: str, words: str):
    with pytest.raises(AttributeError, match=f"not supported yet.*{words}"):
        getattr(hl, name)
