"""What `import hopline.pyg` changes in PyG, in either order of imports, and how it is undone."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_geometric.typing
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader

import hopline.pyg

FLAGS = ("WITH_PYG_LIB", "WITH_EDGE_TIME_NEIGHBOR_SAMPLE", "WITH_WEIGHTED_NEIGHBOR_SAMPLE", "WITH_METIS")


def flags() -> dict[str, bool]:
    return {name: getattr(torch_geometric.typing, name) for name in (*FLAGS, "WITH_SEGMM", "WITH_GMM", "WITH_KNN")}


def copies(name: str) -> dict[str, object]:
    """Every copy of a name of `torch_geometric.typing` in PyG's modules, by module."""
    loaded = {path: module for path, module in sys.modules.items() if path.split(".")[0] == "torch_geometric"}
    return {path: vars(module)[name] for path, module in loaded.items() if name in getattr(module, "__dict__", {})}


def test_flags_say_what_is_there():
    assert flags() == {**dict.fromkeys(FLAGS, True), "WITH_SEGMM": False, "WITH_GMM": False, "WITH_KNN": False}
    hopline.pyg.use(matmul=True)
    assert flags() == {**dict.fromkeys(FLAGS, True), "WITH_SEGMM": True, "WITH_GMM": True, "WITH_KNN": False}


def test_copies_in_modules_of_pyg_change_too():
    assert "torch_geometric.nn.models.node2vec" in copies("WITH_PYG_LIB")
    assert "torch_geometric.loader.cluster" in copies("pyg_lib")
    for name in ("WITH_PYG_LIB", "pyg_lib"):
        assert {id(value) for value in copies(name).values()} == {id(getattr(torch_geometric.typing, name))}


def test_reset_leaves_pyg_as_it_was():
    data = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2)
    hopline.pyg.reset()
    assert not any(flags().values())
    assert {*copies("pyg_lib").values()} == {object}
    with pytest.warns(UserWarning, match="pyg-lib"):
        loader = NeighborLoader(data, [1])
    with pytest.raises(ImportError, match="requires either 'pyg-lib' or 'torch-sparse'"):
        next(iter(loader))
    hopline.pyg.use()
    assert next(iter(loader)).num_nodes > 0


def test_info_says_whose_the_operators_are():
    assert {*hopline.pyg.info().values()} == {"hopline"}
    assert {"neighbor_sample", "hetero_neighbor_sample", "random_walk", "metis"} <= {*hopline.pyg.info()}


@pytest.mark.parametrize("name", hopline.pyg.__all__)
def test_public_names_have_examples_that_run(name: str):
    text = inspect.cleandoc(getattr(hopline.pyg, name).__doc__)
    example = doctest.DocTestParser().get_doctest(text, {"hopline": hopline}, name, None, 0)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


LOADED_LATE = """
import torch, {first}
import {second}
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import Node2Vec
edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
assert next(iter(NeighborLoader(Data(edge_index=edges, num_nodes=3), [1, 1], batch_size=3))).num_edges == 3
Node2Vec(edges, 4, 2, 2)
print("sampled")
"""


def run(program: str, *path: Path) -> str:
    environment = {"PYTHONPATH": ":".join(map(str, (*path, *sys.path)))}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize("first", ["torch_geometric.nn, torch_geometric.loader", "hopline.pyg"])
def test_the_order_of_imports_does_not_matter(first: str):
    second = "hopline.pyg" if first != "hopline.pyg" else "torch_geometric.nn"
    assert run(LOADED_LATE.format(first=first, second=second)) == "sampled\n"


PYG_LIB = """
import torch
from types import SimpleNamespace
__version__ = "0.9.0"
library = torch.library.Library("pyg", "FRAGMENT")
library.define("neighbor_sample(Tensor rowptr, Tensor col, Tensor seed, int[] num_neighbors) -> Tensor")
library.impl("neighbor_sample", lambda rowptr, col, seed, num_neighbors: seed - 1, "CompositeExplicitAutograd")
ops = SimpleNamespace()
sampler = SimpleNamespace(neighbor_sample=lambda edge_time, edge_weight: None)
"""

WITH_PYG_LIB = """
import torch, hopline.pyg, torch_geometric.typing as typing
graph = (torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([0]), [1])
before = (typing.pyg_lib, typing.WITH_METIS)
assert hopline.pyg.info()["neighbor_sample"] == "pyg-lib" and hopline.pyg.info()["random_walk"] == "hopline"
assert torch.ops.pyg.neighbor_sample(*graph).tolist() == [-1]
hopline.pyg.use()
assert hopline.pyg.info()["neighbor_sample"] == "hopline"
assert torch.ops.pyg.neighbor_sample(*graph)[2].tolist() == [0]
hopline.pyg.reset()
assert torch.ops.pyg.neighbor_sample(*graph).tolist() == [-1]
assert (typing.pyg_lib, typing.WITH_METIS) == before and typing.pyg_lib.__name__ == "pyg_lib"
print("left alone")
"""


def test_an_installed_pyg_lib_is_left_alone_unless_ours_is_asked_for(tmp_path: Path):
    (tmp_path / "pyg_lib.py").write_text(PYG_LIB)
    assert run(WITH_PYG_LIB, tmp_path) == "left alone\n"


COMPILED = """
import torch, hopline.pyg
from hopline.ops.cpu import hops, sampling, walks
def signatures():
    kernels = [v for module in (hops, sampling, walks) for v in vars(module).values() if hasattr(v, "signatures")]
    return [len(kernel.signatures) for kernel in kernels]
before = signatures()
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
data = Data(edge_index=torch.randint(60, (2, 500)), w=torch.rand(500), t=torch.randint(9, (500,)), num_nodes=60)
options = [{}, {"replace": True}, {"disjoint": True}, {"weight_attr": "w"}, {"weight_attr": "w", "replace": True}]
options += [{"time_attr": "t", "input_time": torch.full((60,), 5), "temporal_strategy": s} for s in ("uniform", "last")]
for option in options:
    assert sum(batch.num_edges for batch in NeighborLoader(data, [3, -1], batch_size=20, **option)) > 0
torch.ops.pyg.random_walk(torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([0]), 3, 2.0, 1.0)
assert sum(before) > 0
print(signatures() == before)
"""


def test_the_import_compiles_all_that_a_forked_worker_calls():
    assert run(COMPILED) == "True\n"
