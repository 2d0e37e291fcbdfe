"""Datasets from DGL's partitions, read through a fake `dgl.distributed.load_partition`."""

from __future__ import annotations

import itertools
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hopline.core.partition import make_partition
from hopline.data.dataset import Dataset
from hopline.data.formats.dgl import from_dgl, is_dgl_folder
from hopline.data.store import verify
from hopline.shards.write import cut
from hopline.tables import TensorTable
from tests.helpers import randint, randn, random_graph
from tests.runs import assert_refused, command


class FakePartitionGraph:
    """The part of a DGL graph that the reader uses: edges, node data and edge data."""

    def __init__(self, ends: tuple[Tensor, Tensor], ndata: dict[str, Tensor], edata: dict[str, Tensor]) -> None:
        self.ends = ends
        self.ndata = ndata
        self.edata = edata

    def edges(self) -> tuple[Tensor, Tensor]:
        return self.ends


def make_dataset() -> Dataset:
    """40 nodes with weighted edges, edge attributes, two tables, four classes and three splits."""
    graph = random_graph(40, 200, weight=True, attr=3, dtype=torch.int32)
    ids = torch.arange(40)
    return Dataset(
        name="test",
        graph=graph,
        tables={"x": TensorTable(randn(40, 5).float()), "year": TensorTable(randint(0, 9, 40)[:, None])},
        y=randint(0, 4, 40, seed=1).clamp(max=3),
        splits={"train": ids[::2], "valid": ids[1::4], "test": ids[3::4]},
        num_classes=4,
    )


def make_dgl_partitions(data: Dataset, folder: Path, *, with_original_ids: bool = True) -> tuple[Any, Tensor]:
    """(a fake `load_partition`, [40] int64 the part of each node) of a dataset in three parts.

    As in DGL, nodes and edges are renumbered part by part, and a part has halo nodes and edges.
    with_original_ids: parts store the ids from before the renumbering, as `orig_id`.
    """
    part_of = make_partition(data.graph, 3, "random").part_of.long()
    order = part_of.argsort(stable=True)
    new = torch.empty_like(order)
    new[order] = torch.arange(40)
    src, dst = data.graph.edge_index()
    edge_order = part_of[dst].argsort(stable=True)
    new_edge = torch.empty_like(edge_order)
    new_edge[edge_order] = torch.arange(edge_order.numel())
    bounds, edge_bounds = ([0, *torch.bincount(p, minlength=3).cumsum(0).tolist()] for p in (part_of, part_of[dst]))
    fields = {"graph_name": "test", "num_parts": 3, "num_nodes": 40, "num_edges": src.numel()}
    fields |= {"node_map": {"_N": [list(b) for b in itertools.pairwise(bounds)]}}
    fields |= {"edge_map": {"_N:_E:_N": [list(b) for b in itertools.pairwise(edge_bounds)]}}
    folder.mkdir()
    (folder / "test.json").write_text(json.dumps(fields | {f"part-{p}": {} for p in range(3)}))
    masks = {f"{n}_mask": torch.isin(torch.arange(40), data.splits[s]) for n, s in MASKS.items()}

    def load(config: str, part: int) -> tuple[Any, ...]:
        assert Path(config) == folder / "test.json"
        own_nodes = order[bounds[part] : bounds[part + 1]]
        touching = (part_of[dst] == part) | (part_of[src] == part)  # halo edges too
        local = torch.cat([own_nodes, torch.cat([src, dst])[torch.cat([touching, touching])].unique()]).unique()
        local = torch.cat([own_nodes, local[part_of[local] != part]])
        place = torch.full((40,), -1)
        place[local] = torch.arange(local.numel())
        edges = touching.nonzero().view(-1)
        edges = edges[torch.randperm(edges.numel(), generator=torch.Generator().manual_seed(part))]
        ndata = {"_ID": new[local], "inner_node": (part_of[local] == part).to(torch.uint8)}
        edata = {"_ID": new_edge[edges], "inner_edge": (part_of[dst[edges]] == part).to(torch.uint8)}
        if with_original_ids:
            ndata["orig_id"] = local
            edata["orig_id"] = edges
        graph = FakePartitionGraph((place[src[edges]].int(), place[dst[edges]].int()), ndata, edata)
        rows = {"_N/feat": data.x.read(own_nodes), "_N/label": data.labels[own_nodes], "_N/trainer_id": own_nodes}
        rows |= {f"_N/{name}": mask[own_nodes].to(torch.uint8) for name, mask in masks.items()}
        rows["_N/half"] = data.x.read(own_nodes).bfloat16()
        rows["_N/year"] = data.tables["year"].read(own_nodes).view(-1)
        inner = edge_order[edge_bounds[part] : edge_bounds[part + 1]]
        edge = {"_N:_E:_N/w": data.graph.edge["weight"][inner], "_N:_E:_N/feat": data.graph.edge["attr"][inner]}
        return graph, rows, edge, None, "test", ["_N"], [("_N", "_E", "_N")]

    return load, part_of


MASKS = {"train": "train", "val": "valid", "test": "test"}


@pytest.fixture
def dgl(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("dgl")
    distributed = types.ModuleType("dgl.distributed")
    module.distributed = distributed  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dgl", module)
    monkeypatch.setitem(sys.modules, "dgl.distributed", distributed)
    return distributed


@pytest.mark.parametrize("to_folder", [False, True])
def test_joining_the_parts_gives_the_graph_that_was_partitioned(dgl: Any, tmp_path: Path, to_folder: bool) -> None:
    expected = make_dataset()
    dgl.load_partition, part_of = make_dgl_partitions(expected, tmp_path / "dgl")
    assert is_dgl_folder(tmp_path / "dgl")
    assert is_dgl_folder(tmp_path / "dgl" / "test.json")
    ours = from_dgl(tmp_path / "dgl", **({"folder": tmp_path / "out"} if to_folder else {}))
    everyone = torch.arange(40)
    assert torch.equal(ours.graph.indptr, expected.graph.indptr)
    assert torch.equal(ours.graph.indices, expected.graph.indices)  # each node's in-edges in the order they had
    for name, rows in expected.graph.edge.items():
        assert torch.equal(ours.graph.edge[name], rows)
    assert torch.equal(ours.x.read(everyone), expected.x.read(everyone))
    assert torch.equal(ours.labels, expected.labels)
    assert ours.tables.keys() == {"x", "half", "year", "part"}
    assert ours.tables["part"].read(everyone).view(-1).tolist() == part_of.tolist()
    assert all(torch.equal(ours.splits[name], ids) for name, ids in expected.splits.items())
    assert (ours.name, ours.num_classes) == ("out" if to_folder else "test", 4)
    if to_folder:
        verify(tmp_path / "out")
        assert not list(tmp_path.glob(".dgl-*"))


def test_the_command_converts_and_cuts_the_same_parts(dgl: Any, tmp_path: Path) -> None:
    dgl.load_partition, part_of = make_dgl_partitions(make_dataset(), tmp_path / "dgl")
    outcome = command("convert", tmp_path / "dgl", tmp_path / "out")
    assert outcome.status == 0, outcome.err
    settings = ("shards=3", "how=labels", "labels=part")
    assert command("partition", tmp_path / "out", tmp_path / "shards", *settings).status == 0
    partition = make_partition(make_dataset().graph, 3, labels=part_of)
    cut(make_dataset(), partition, tmp_path / "expected")
    for rank in range(3):
        ours, theirs = ((tmp_path / f / f"shard-{rank}" / "nodes.npy").read_bytes() for f in ("shards", "expected"))
        assert ours == theirs
    assert_refused(
        command("partition", tmp_path / "out", tmp_path / "more", "shards=3", "how=labels", "labels=parts"),
        "labels=parts must name one whole number per node",
        "part",
    )


def test_without_original_ids_nodes_keep_dgls_ids_and_a_warning_says_so(
    dgl: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dgl.load_partition, part_of = make_dgl_partitions(make_dataset(), tmp_path / "dgl", with_original_ids=False)
    ours = from_dgl(tmp_path / "dgl" / "test.json")
    assert "do not say which ids nodes had before DGL numbered them anew" in caplog.text
    order = part_of.argsort(stable=True)
    assert torch.equal(ours.labels, make_dataset().labels[order])
    assert torch.equal(ours.graph.in_degrees(), make_dataset().graph.in_degrees()[order])


def test_parts_of_which_only_some_have_original_ids_are_refused(dgl: Any, tmp_path: Path) -> None:
    load, _ = make_dgl_partitions(make_dataset(), tmp_path / "dgl")

    def load_partition(config: str, part: int) -> tuple[Any, ...]:
        graph, *others = load(config, part)
        if part == 1:
            del graph.ndata["orig_id"]
        return graph, *others

    dgl.load_partition = load_partition
    with pytest.raises(ValueError, match=r"Only the parts \[0, 2\] of the 3 .* have orig_id"):
        from_dgl(tmp_path / "dgl")


def test_what_cannot_be_read_is_refused_with_a_sentence(
    dgl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_dgl_folder(tmp_path)
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "torn.json").write_text("{")
    assert not is_dgl_folder(tmp_path)
    with pytest.raises(ValueError, match="no graph partitioned by DGL"):
        from_dgl(tmp_path)
    dgl.load_partition, _ = make_dgl_partitions(make_dataset(), tmp_path / "dgl")
    config = tmp_path / "dgl" / "test.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps(fields | {"node_map": {"a": [[0, 1]], "b": [[1, 2]]}}))
    with pytest.raises(ValueError, match=r"2 types in its node_map.*to_homogeneous"):
        from_dgl(config)
    config.write_text(json.dumps(fields | {"num_parts": 2}))
    with pytest.raises(ValueError, match="do not hold every node once"):
        from_dgl(config)
    monkeypatch.setitem(sys.modules, "dgl", None)
    monkeypatch.setitem(sys.modules, "dgl.distributed", None)
    with pytest.raises(ValueError, match="is not installed: type `pip install dgl`"):
        from_dgl(config)
    (tmp_path / "broken" / "dgl").mkdir(parents=True)
    (tmp_path / "broken" / "dgl" / "__init__.py").write_text("raise OSError('libgraphbolt.so cannot be opened')")
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "dgl")
        patch.delitem(sys.modules, "dgl.distributed")
        patch.syspath_prepend(tmp_path / "broken")
        with pytest.raises(ValueError, match=r"DGL, .*, cannot be imported \(libgraphbolt.so cannot be opened\): mend"):
            from_dgl(config)
    assert_refused(command("convert", tmp_path / "dgl", tmp_path / "out"), "pip install dgl")
