"""Datasets from CSV and Parquet tables: ids, labels and splits, and errors that name row and column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import torch

from hopline.data.formats.csv_parquet import from_csv
from hopline.data.formats.npz import from_npz
from hopline.data.ids import IdMap, original_ids
from hopline.data.options import Columns
from hopline.run.settings import ConvertConfig
from hopline.util.config import override

NODES = "id,a,b,label,split\n2,0.2,1,1,test\n0,0.0,5,0,train\n1,0.1,3,,\n3,0.3,7,1,val\n"


@pytest.fixture
def edges(tmp_path: Path) -> Path:
    (tmp_path / "edges.csv").write_text("src,dst,weight\n0,1,0.5\n2,1,1.5\n3,0,2.5\n")
    return tmp_path / "edges.csv"


def test_an_edge_list_alone_makes_a_graph(edges: Path, tmp_path: Path) -> None:
    dataset = from_csv(edges)
    assert (dataset.name, dataset.num_nodes) == ("edges", 4)
    assert dataset.graph.indices.tolist() == [3, 0, 2]
    weighted = from_csv(edges, columns=Columns(edge=("weight",)), symmetrize=True, folder=tmp_path / "out")
    assert weighted.graph.edge["weight"].tolist() == [0.5, 2.5, 0.5, 1.5, 1.5, 2.5]
    (tmp_path / "bare.csv").write_text("0 1\n2 1\n")
    bare = from_csv(tmp_path / "bare.csv", columns=Columns(header=("src", "dst"), delimiter=" "), num_nodes=9)
    assert (bare.num_nodes, bare.num_edges) == (9, 2)


def test_nodes_are_put_in_the_order_of_their_ids(edges: Path, tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text(NODES)
    dataset = from_csv(edges, tmp_path / "nodes.csv")
    assert dataset.x.read(torch.arange(4))[:, 1].tolist() == [5, 3, 1, 7]
    assert dataset.labels.tolist() == [0, -1, 1, 1]
    assert {k: v.tolist() for k, v in dataset.splits.items()} == {"train": [0], "valid": [3], "test": [2]}
    only = from_csv(edges, tmp_path / "nodes.csv", columns=Columns(features=("b",)))
    assert only.num_features == 1


def test_texts_can_be_ids(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("src,dst\nzoë,bob\nbob,al\n")
    (tmp_path / "n.csv").write_text("id,f,label\nbob,1,cat\nzoë,2,dog\nal,3,\n")
    dataset = from_csv(tmp_path / "e.csv", tmp_path / "n.csv", ids="map", folder=tmp_path / "out")
    assert original_ids(dataset.tables["node_ids"]).tolist() == ["bob", "zoë", "al"]
    assert dataset.graph.edge_index().tolist() == [[1, 0], [0, 2]]
    assert (dataset.labels.tolist(), dataset.meta["classes"]) == ([0, 1, -1], ["cat", "dog"])
    (tmp_path / "e.csv").write_text("src,dst\nzoë,bob\nbob,eve\n")
    with pytest.raises(ValueError, match=r"e\.csv, edge 1: node eve"):
        from_csv(tmp_path / "e.csv", tmp_path / "n.csv", ids="map")


def test_bad_ids_say_where_and_what_to_do(edges: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Edge 1 .*2 to 1.* 2 nodes"):
        from_csv(edges, num_nodes=2)
    (tmp_path / "t.csv").write_text("src,dst\na,b\n")
    with pytest.raises(ValueError, match=r"t\.csv, edge 0: node id 'a' .*ids=map"):
        from_csv(tmp_path / "t.csv")
    (tmp_path / "n.csv").write_text("id,f\n0,1\n5,2\n")
    with pytest.raises(ValueError, match=r"0 to 1, each once.*ids=map"):
        from_csv(edges, tmp_path / "n.csv")
    (tmp_path / "n.csv").write_text("f\n0\n5\n")
    with pytest.raises(ValueError, match=r"ids=map .*no column 'id', only f"):
        from_csv(edges, tmp_path / "n.csv", ids="map")
    with pytest.raises(ValueError, match="choose 'number' or 'map'"):
        from_csv(edges, ids="hash")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has id 4 twice"):
        IdMap(np.array([4, 3, 4]))


@pytest.mark.parametrize("ids", ["number", "map"])
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0,1\n,2\n", "edge 1: there is no node id: correct the file"),
        ("a,b\nb,\n", "edge 1: there is no node id: correct the file"),
        ("0,1\n1,2.5\n", "edge 1: node id 2.5 is not a whole number: correct the file"),
    ],
)
def test_an_edge_without_an_end_is_refused(tmp_path: Path, ids: Any, rows: str, message: str) -> None:
    (tmp_path / "e.csv").write_text(f"src,dst\n{rows}")
    if rows.startswith("a") and ids == "number":
        message = "edge 0: node id 'a' is not a number|" + message
    with pytest.raises(ValueError, match=message):
        from_csv(tmp_path / "e.csv", ids=ids, num_nodes=5)


def test_a_node_without_an_id_is_refused(edges: Path, tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text("id,f\n0,1\n,2\n")
    for ids in ("number", "map"):
        with pytest.raises(ValueError, match=r"n\.csv, row 1: .*no node id"):
            from_csv(edges, tmp_path / "n.csv", ids=ids)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("header", "columns", "words"),
    [
        (
            "source,target",
            Columns(),
            [
                "has no column 'src' and 'dst', only source, target: type columns.src=source columns.dst=target",
                "(in Python Columns(src='source', dst='target'))",
                "or columns.header=src,dst if its first line holds no names",
            ],
        ),
        ("Target,Source", Columns(), ["columns.src=Source columns.dst=Target "]),
        ("from,to,weight", Columns(), ["columns.src=from columns.dst=to "]),
        (
            "src,to",
            Columns(),
            ["has no column 'dst', only src, to: type columns.dst=to (in Python Columns(dst='to'))."],
        ),
        ("source,target", Columns(src="sorce", dst="target"), ["no column 'sorce'", "type columns.src=source ("]),
        ("from node,to node", Columns(), ["type 'columns.src=from node' 'columns.dst=to node' (in Python"]),
        (
            "src,dst,weight,time",
            Columns(edge=("wieght", "time")),
            ["type columns.edge=weight,time (in Python Columns(edge=('weight', 'time')))"],
        ),
        ("src,dst", Columns(edge=("w",)), ["type columns.edge=NAME (in Python Columns(edge=('NAME',)))"]),
        ("0,1,0.5", Columns(), ["its first line holds no names, so type columns.header=src,dst,column2."]),
        ("src;dst", Columns(), ["if ';' separates its columns, type columns.delimiter=';'."]),
        ("src\tdst", Columns(), ["type columns.delimiter=tab."]),
    ],
)
def test_an_edge_file_with_other_columns_says_what_to_type(
    tmp_path: Path, header: str, columns: Columns, words: list[str]
) -> None:
    (tmp_path / "e.csv").write_text(f"{header}\n{header}\n")
    with pytest.raises(ValueError, match=r"e\.csv has no column") as refused:
        from_csv(tmp_path / "e.csv", columns=columns, num_nodes=3)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("columns", "ids", "words"),
    [
        (Columns(), "map", ["ids=map needs the ids of the nodes", "only name, age, kind: type columns.id=name ("]),
        (Columns(id="nmae"), "map", ["has no column 'nmae'", "type columns.id=name ("]),
        (
            Columns(label="kidn"),
            "number",
            ["has no column 'kidn'", "type columns.label=kind (in Python Columns(label="],
        ),
        (Columns(split="fold"), "number", ["has no column 'fold'", "type columns.split=NAME ("]),
        (Columns(features=("agee",)), "number", ["no column 'agee'", "columns.features=age (", "(features=('age',))"]),
        (Columns(id="nam", label="kin"), "map", ["'nam' and 'kin'", "columns.id=name columns.label=kind ("]),
        (
            Columns(),
            "number",
            ["column 'name' and 'kind' holds text", "columns.id=, columns.label= or", "columns.features=age."],
        ),
    ],
)
def test_a_node_file_with_other_columns_says_what_to_type(
    edges: Path, tmp_path: Path, columns: Columns, ids: Any, words: list[str]
) -> None:
    (tmp_path / "n.csv").write_text("name,age,kind\nann,3,cat\nbob,4,dog\n")
    with pytest.raises(ValueError, match=r"n\.csv") as refused:
        from_csv(edges, tmp_path / "n.csv", columns=columns, ids=ids)
    for word in words:
        assert word in str(refused.value)


def test_the_origin_names_both_files(edges: Path, tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text("id,f,label\n0,1,cat\n1,2,dog\n2,3,cat\n3,4,\n")
    assert from_csv(edges).meta == {"origin": "edges.csv"}
    meta = dict(from_csv(edges, tmp_path / "n.csv").meta)
    assert "split=0.6,0.2,0.2" in meta.pop("split")
    columns = [["f", "number", 1]]
    assert meta == {"origin": "edges.csv and n.csv", "columns": columns, "classes": ["cat", "dog"]}


def test_columns_of_edges_that_are_left_out_are_named(edges: Path, caplog: pytest.LogCaptureFixture) -> None:
    from_csv(edges)
    assert "not taken: weight; to make edge arrays of them, columns.edge=weight" in caplog.text
    caplog.clear()
    assert list(from_csv(edges, columns=Columns(edge=("weight",))).graph.edge) == ["weight"]
    assert "not taken" not in caplog.text


def test_without_a_split_column_nodes_are_split_as_those_of_an_npz(tmp_path: Path) -> None:
    labels = np.arange(200) % 3
    labels[::7] = -1
    rows = [f"{node},{node / 7:.3f},{'' if label < 0 else label}" for node, label in enumerate(labels)]
    order = np.random.default_rng(0).permutation(200)
    (tmp_path / "n.csv").write_text("\n".join(["id,f,label", *(rows[i] for i in order)]))
    (tmp_path / "e.csv").write_text("src,dst\n0,1\n1,2\n")
    np.savez(tmp_path / "g.npz", edge_index=np.array([[0, 1], [1, 2]]), y=labels, x=np.zeros((200, 1), np.float32))
    tables = from_csv(tmp_path / "e.csv", tmp_path / "n.csv")
    arrays = from_npz(tmp_path / "g.npz")
    assert {name: len(ids) for name, ids in tables.splits.items()} == {"train": 60, "valid": 90, "test": 21}
    for name, ids in arrays.splits.items():
        assert tables.splits[name].tolist() == ids.tolist()
    assert tables.meta["split"] == arrays.meta["split"]
    by_shares = from_csv(tmp_path / "e.csv", tmp_path / "n.csv", split_shares=(0.5, 0.25, 0.25))
    assert len(by_shares.splits["train"]) == round(171 / 2)


def test_text_where_numbers_belong_is_refused(edges: Path, tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text("id,f\n0,a\n1,b\n2,c\n3,d\n")
    with pytest.raises(ValueError, match="column 'f' holds text"):
        from_csv(edges, tmp_path / "n.csv")
    (tmp_path / "e.csv").write_text("src,dst,kind\n0,1,x\n")
    with pytest.raises(ValueError, match="'kind' holds text"):
        from_csv(tmp_path / "e.csv", columns=Columns(edge=("kind",)))


def test_parquet_is_read_like_csv(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 20, (2, 100))
    parquet.write_table(arrow.table({"from": src, "to": dst, "w": rng.random(100)}), tmp_path / "e.parquet")
    features = rng.random((20, 3)).astype(np.float32)
    parquet.write_table(arrow.table({"x": features.tolist(), "label": np.arange(20) % 4}), tmp_path / "n.parquet")
    columns = Columns(src="from", dst="to", edge=("w",))
    dataset = from_csv(tmp_path / "e.parquet", tmp_path / "n.parquet", columns=columns, folder=tmp_path / "out")
    assert (dataset.num_edges, dataset.num_features, dataset.num_classes) == (100, 3, 4)
    assert np.array_equal(dataset.x.read(torch.arange(20)).numpy(), features)
    order = np.argsort(dst, kind="stable")
    assert dataset.graph.indices.tolist() == src[order].tolist()


def test_a_column_of_ids_by_another_name_is_no_feature(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "e.csv").write_text("src,dst\n0,1\n1,2\n")
    (tmp_path / "n.csv").write_text("node_id,f,label\n2,0.5,1\n0,0.1,0\n1,0.2,0\n")
    with pytest.raises(ValueError, match=r"'node_id' .*columns\.id=node_id"):
        from_csv(tmp_path / "e.csv", tmp_path / "n.csv")
    data = from_csv(tmp_path / "e.csv", tmp_path / "n.csv", columns=Columns(id="node_id"))
    assert data.labels.tolist() == [0, 0, 1]
    with_id_feature = from_csv(tmp_path / "e.csv", tmp_path / "n.csv", columns=Columns(features=("node_id", "f")))
    assert with_id_feature.labels.tolist() == [1, 0, 0]
    assert "rows are nodes 0, 1, 2" in caplog.text


@pytest.mark.parametrize("delimiter", ["tab", "\t", "\\t"])
def test_tabs_can_be_typed(tmp_path: Path, delimiter: str) -> None:
    (tmp_path / "e.tsv").write_text("0\t1\n1\t2\n")
    config = override(ConvertConfig(), [f"columns.delimiter={delimiter}", "columns.header=src,dst"])
    assert from_csv(tmp_path / "e.tsv", columns=config.columns).num_edges == 2
    with pytest.raises(ValueError, match=r"columns\.delimiter .*',,'"):
        Columns(delimiter=",,")


LABELS = {
    "true and false": ("true,FALSE,,True,NA", [2, 0, -1, 1, -1], ["FALSE", "True", "true"]),
    "dates": ("2020-02-01,2020-01-01,,2020-01-01,null", [1, 0, -1, 0, -1], ["2020-01-01", "2020-02-01"]),
    "times": ("2020-01-01 10:00:00,10:00,,10:00,10:00", [1, 0, -1, 0, 0], ["10:00", "2020-01-01 10:00:00"]),
    "whole numbers": ("007,+1, 0 ,,2", [7, 1, 0, -1, 2], None),
    "fractions that are whole": ("1.0,0,2e0,NaN,-nan", [1, 0, 2, -1, -1], None),
    "numbers in base 16": ("0x1,0x0,,0x1,0x0", [1, 0, -1, 1, 0], ["0x0", "0x1"]),
}


@pytest.mark.parametrize("kind", LABELS)
def test_a_column_of_labels_means_what_is_written(edges: Path, tmp_path: Path, kind: str) -> None:
    cells, expected, classes = LABELS[kind]
    rows = "".join(f"{node},{node}.5,{cell}\n" for node, cell in enumerate(cells.split(",")))
    (tmp_path / "nodes.csv").write_text(f"id,f,label\n{rows}")
    ours = from_csv(edges, tmp_path / "nodes.csv")
    assert ours.labels.tolist() == expected
    assert ours.meta.get("classes") == classes


def test_true_and_false_are_1_and_0_in_features_and_edge_arrays(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("src,dst,friends\n0,1,true\n1,2,False\n")
    (tmp_path / "n.csv").write_text("id,old,new,label\n0,true,1,a\n1,FALSE,true,b\n2,True,0,a\n")
    ours = from_csv(tmp_path / "e.csv", tmp_path / "n.csv", columns=Columns(edge=("friends",)))
    assert ours.x.read(torch.arange(3)).tolist() == [[1, 1], [0, 1], [1, 0]]
    assert ours.graph.edge["friends"].tolist() == [1, 0]
    (tmp_path / "n.csv").write_text("id,old\n0,true\n1,\n2,false\n")
    with pytest.raises(ValueError, match="column 'old' holds nan in row 1"):
        from_csv(tmp_path / "e.csv", tmp_path / "n.csv")
    (tmp_path / "n.csv").write_text("id,old\n0,true\n1,yes\n2,false\n")
    with pytest.raises(ValueError, match=r"column 'old' holds text"):
        from_csv(tmp_path / "e.csv", tmp_path / "n.csv")


def test_parquet_columns_of_true_and_false_and_dates_mean_what_they_do_in_csv(edges: Path, tmp_path: Path) -> None:
    day = np.array(["2020-02-01", "2020-01-01", "NaT", "2020-01-01"], "datetime64[D]")
    for label, expected, classes in (
        (arrow.array([True, None, False, True]), [1, -1, 0, 1], ["false", "true"]),
        (arrow.array(day), [1, 0, -1, 0], ["2020-01-01", "2020-02-01"]),
    ):
        columns = {"id": range(4), "f": [True, False, False, True], "label": label}
        parquet.write_table(arrow.table(columns), tmp_path / "nodes.parquet")
        ours = from_csv(edges, tmp_path / "nodes.parquet")
        assert (ours.labels.tolist(), ours.meta["classes"]) == (expected, classes)
        assert ours.x.read(torch.arange(4)).view(-1).tolist() == [1, 0, 0, 1]
