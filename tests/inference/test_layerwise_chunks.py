"""Layer-wise inference in chunks: threads change no bit, prefetching has a limit, and chunks keep to their bytes."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv, GENConv, SAGEConv, TransformerConv

import hopline as hl
from hopline import infer
from hopline.data.dataset import Dataset
from hopline.device.meter import TensorMeter
from hopline.inference import layerwise_chunks
from hopline.inference.layerwise_chunks import PREFETCH_CHUNKS
from hopline.layerwise import engine
from hopline.nn import GNN
from hopline.pipeline.stages import Pipeline
from hopline.tables import TensorTable, allocators
from hopline.util.errors import StageError
from tests.support.helpers import GNN_OPTIONS, assert_close, gnn_of, randn, random_graph
from tests.support.runs import sage, small


def make_serial_pipeline(stages: Any, **_: Any) -> Pipeline:
    """A pipeline without threads, in place of the one of the engine."""
    return Pipeline(stages, workers=0)


@pytest.mark.parametrize(
    "name", ["plain", "batch-norm", "residual", "encoder", "jk-cat", "jk-lstm", "appnp", "gcn2", "everything"]
)
def test_threaded_and_serial_pipelines_are_equal_to_the_bit(name: str, monkeypatch: pytest.MonkeyPatch):
    model = gnn_of(name).float()
    data = small(num_features=6)
    threaded = infer.exact(model, data, chunk_edges=300)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "Pipeline", make_serial_pipeline)
        assert torch.equal(infer.exact(model, data, chunk_edges=300), threaded)


def test_chunks_are_prefetched_up_to_a_limit(monkeypatch: pytest.MonkeyPatch):
    data = small()
    built = []
    threads = set()
    full_block = layerwise_chunks.full_block
    num_prefetched = []

    def block(*args: Any) -> hl.extend.Block:
        built.append(0)
        threads.add(threading.current_thread().name)
        return full_block(*args)

    class Slow(hl.nn.GNN):
        def layer(self, *args: Any) -> Any:
            time.sleep(0.01)
            num_prefetched.append(len(built) - len(num_prefetched))
            return super().layer(*args)

    monkeypatch.setattr(layerwise_chunks, "full_block", block)
    model = Slow([SAGEConv(8, 8), SAGEConv(8, 4)])
    infer.exact(model, data, chunk_edges=300)
    assert len(num_prefetched) == len(built) > 20
    assert 2 <= max(num_prefetched) <= PREFETCH_CHUNKS + 1
    assert threading.main_thread().name not in threads

    threads.clear()
    infer.exact(model, data, torch.arange(3))  # one chunk: there is no next one to prefetch
    assert threads == {threading.main_thread().name}


@pytest.mark.parametrize("name", [*GNN_OPTIONS])
def test_a_single_chunk_of_all_nodes_builds_no_block(name: str, monkeypatch: pytest.MonkeyPatch):
    model = gnn_of(name)
    data = small(num_features=6)
    expected = infer.exact(model, data, chunk_edges=1000)
    monkeypatch.delattr(layerwise_chunks, "full_block")
    torch.testing.assert_close(infer.exact(model, data), expected)


def test_a_single_chunk_of_all_nodes_refuses_an_edge_index_out_of_range():
    graph = hl.Graph(torch.tensor([0, 1, 2]), torch.tensor([1, 2]))
    data = hl.Dataset(name="wrong", graph=graph, tables={"x": hl.extend.TensorTable(torch.randn(2, 8))})
    with pytest.raises(ValueError, match=r"edge index .*`hopline verify FOLDER`"):
        infer.exact(hl.nn.GNN([SAGEConv(8, 4)]), data)


class UnreadableTable(hl.extend.TensorTable):
    """A table whose reads fail."""

    def read(self, ids: Tensor) -> Tensor:
        raise OSError("the disk is gone")


def test_an_error_of_a_table_or_of_the_prefetch_stage_ends_inference(monkeypatch: pytest.MonkeyPatch):
    data = small()
    model = hl.nn.GNN([GATConv(8, 8), GATConv(8, 4)])
    data.tables["x"] = UnreadableTable(data.x.read(torch.arange(400)))
    with pytest.raises(OSError, match="the disk is gone"):
        infer.exact(model, data, chunk_edges=100)

    def fail_to_build_block(*_: Any) -> hl.extend.Block:
        raise OSError("the disk is gone too")

    monkeypatch.setattr(layerwise_chunks, "full_block", fail_to_build_block)
    with pytest.raises(StageError, match=r"'infer\.prepare' failed: the disk is gone too"):
        infer.exact(sage(small()), small(), chunk_edges=100)


@pytest.mark.parametrize("kind", [SAGEConv, GATConv, GATv2Conv, TransformerConv, GENConv])
def test_the_peak_of_a_chunk_keeps_to_chunk_bytes(kind: Any):
    torch.manual_seed(0)
    indptr = torch.arange(1001) * 20  # 20 in-edges each: no single node exceeds chunk_bytes
    graph = hl.Graph(indptr, torch.randint(0, 1000, (20_000,)))
    data = hl.Dataset(name="even", graph=graph, tables={"x": hl.extend.TensorTable(torch.randn(1000, 16))})
    model = hl.nn.GNN([kind(16, 32), kind(32, 4)])
    expected = infer.exact(model, data)
    table_bytes = 1000 * 4 * (32 + 4 + 4)
    for chunk_bytes in (300_000, 2_000_000):
        with TensorMeter() as meter:
            ours = infer.exact(model, data, chunk_bytes=chunk_bytes)
        torch.testing.assert_close(ours, expected)
        assert meter.peak_bytes <= chunk_bytes + table_bytes
    if kind is not SAGEConv:  # its chunk is mostly prefetched in a thread, which the meter does not see
        assert meter.peak_bytes - table_bytes > chunk_bytes / 4


def test_wider_layers_have_chunks_of_fewer_edges(monkeypatch: pytest.MonkeyPatch):
    sizes = []
    split = layerwise_chunks.Chunks.chunks

    def note_size(work: layerwise_chunks.Chunks, nodes: Tensor, chunk_edges: int) -> list[Tensor]:
        sizes.append(chunk_edges)
        return split(work, nodes, chunk_edges)

    monkeypatch.setattr(layerwise_chunks.Chunks, "chunks", note_size)
    for hidden in (4, 256):
        infer.exact(hl.nn.GNN([SAGEConv(8, hidden)]), small(), chunk_bytes=1_000_000)

    narrow, wide = sizes
    assert narrow > 5 * wide > 100


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("options", [{}, {"chunk_edges": 300}])
def test_without_an_encoder_jumping_knowledge_includes_the_features(num_layers: int, options: dict[str, Any]):
    data = small()
    convs = [SAGEConv(8, 8) for _ in range(num_layers)]
    head = torch.nn.Linear(8 * (num_layers + 1), 4)
    model = hl.nn.GNN(convs, jk="cat", jk_encoder=True, head=head).double()
    features = data.x.read(torch.arange(data.num_nodes)).double()
    data.tables["x"] = TensorTable(features)
    with torch.no_grad():
        expected = model(features, data.graph.edge_index())

    assert_close(infer.exact(model, data, **options), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_bytes": 0}, "chunk_bytes must be at least 1, not 0"),
        ({"chunk_bytes": "much"}, "much"),
        ({"folder": "f", "keep": print}, "would not come to keep=: give one of them"),
    ],
    ids=["none", "no size", "two keepers"],
)
def test_invalid_options_are_refused_with_a_message(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        infer.exact(sage(small()), small(), **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [*GNN_OPTIONS])
def test_hidden_rows_beyond_the_gpu_memory_are_written_to_the_host(name: str, monkeypatch: pytest.MonkeyPatch):
    model = gnn_of(name).float()
    data = small(num_features=6)
    expected = infer.exact(model, data)
    model.cuda()
    written = set()
    write_rows = layerwise_chunks.TensorTable.write

    def write(table: Any, ids: Tensor, rows: Tensor) -> None:
        written.add((ids.device.type, table.rows.is_cuda))
        write_rows(table, ids, rows)

    monkeypatch.setattr(layerwise_chunks.TensorTable, "write", write)
    few_ids = torch.tensor([7, 3, 399])
    is_close = partial(torch.allclose, rtol=1e-4, atol=1e-5)
    for chunk_bytes in (40_000, 400_000):  # many chunks, few
        assert is_close(infer.exact(model, data, chunk_bytes=chunk_bytes, device="cuda"), expected)
        assert is_close(infer.exact(model, data, few_ids, chunk_bytes=chunk_bytes, device="cuda"), expected[few_ids])
    assert written == {("cuda", False)}  # kernels of the GPU write to host memory

    monkeypatch.setattr(allocators.pinned, "register", lambda table: "refused")
    assert is_close(infer.exact(model, data, chunk_bytes=40_000, device="cuda"), expected)
    assert ("cpu", False) in written


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("features_device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["plain", "jk-cat", "encoder", "gcn2"])
def test_on_a_gpu_a_chunk_whose_sources_are_all_nodes_in_another_order_is_exact(name: str, features_device: str):
    torch.manual_seed(0)
    graph = hl.Graph(torch.arange(101) * 60, torch.stack([torch.randperm(100)[:60] for _ in range(100)]).view(-1))
    table = hl.extend.TensorTable(torch.randn(100, 6, device=features_device))
    on_host = hl.Dataset(name="dense", graph=graph, tables={"x": hl.extend.TensorTable(table.rows.cpu())})
    placed = hl.Dataset(name="dense", graph=graph, tables={"x": table})
    model = gnn_of(name).float()
    expected = infer.exact(model, on_host)
    for options in ({"chunk_edges": 1000}, {"chunk_bytes": 100_000}):
        ours = infer.exact(model.cuda(), placed, device="cuda", **options)  # type: ignore[arg-type]
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: pyg.TAGConv(a, b, K=2),
        lambda a, b: pyg.SGConv(a, b, K=2, cached=True),
        lambda a, b: pyg.SAGEConv(a, b, aggr="lstm"),
    ],
    ids=["tag", "sg-cached", "lstm"],
)
def test_a_conv_that_sees_more_than_a_nodes_edges_is_run_on_the_whole_graph(make: Any) -> None:
    torch.manual_seed(0)
    graph = random_graph(loops=True)
    x = randn(50, 4)
    data = Dataset(name="ugly", graph=graph, tables={"x": TensorTable(x)})
    model = GNN([make(4, 6), pyg.SAGEConv(6, 5), make(5, 3)]).double().eval()
    hidden = model.convs[0](x, graph.edge_index()).relu()
    for conv in model.convs[0], model.convs[2]:
        vars(conv).update({name: None for name in vars(conv) if name.startswith("_cached")})
    hidden = model.convs[1](hidden, graph.edge_index()).relu()
    expected = model.convs[2](hidden, graph.edge_index())

    assert_close(infer.exact(model, data, chunk_edges=20), expected)
    assert_close(infer.exact(model, data, torch.tensor([7, 0, 49])), expected[[7, 0, 49]])
