"""Layer-wise inference in a folder: killed and resumed, it ends with the same bits and repeats no finished chunk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch_geometric.nn import GATConv

import hopline as hl
from hopline import infer
from hopline.inference import layerwise_chunks, resumable
from hopline.inference.resumable import PROGRESS, LayerFiles, weights_checksum
from hopline.nn.gnn import State
from tests.support.runs import sage, small
from tests.support.warm import run_python

CHUNK = 200
"""Edges of a chunk: on `small()` each of the three layers has 23 chunks."""
ROOT = Path(__file__).resolve().parents[2]


def model_of(data: hl.Dataset) -> hl.nn.GNN:
    """Three layers with an encoder, an initial residual and jumping knowledge: all kinds of tables."""
    torch.manual_seed(2)
    convs = [GATConv(8, 8), GATConv(8, 8), GATConv(8, 8)]
    head = torch.nn.Linear(24, data.num_classes)
    return hl.nn.GNN(convs, encoder=torch.nn.Linear(8, 8), initial_residual=0.2, jk="cat", head=head)


class Stopped(Exception):
    # Raised in place of a kill.
    pass


def stop_after_chunks(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the write thread fail after a number of chunks, counted over all layers."""
    num_done = [0]
    write_chunk = LayerFiles.mark_chunk

    def mark_chunk(self: LayerFiles) -> None:
        write_chunk(self)
        num_done[0] += 1
        if num_done[0] == chunks:
            raise Stopped

    monkeypatch.setattr(LayerFiles, "mark_chunk", mark_chunk)


def infer_counting_nodes(model: hl.nn.GNN, data: hl.Dataset, folder: Path | None, ids: torch.Tensor | None = None):
    """(outputs, number of nodes computed by layer) of exact inference."""
    sizes: dict[int, int] = {}

    compute_layer = hl.nn.GNN.layer

    def layer(self: hl.nn.GNN, l: int, state: State, block: hl.extend.Block) -> State:
        sizes[l] = sizes.get(l, 0) + block.num_dst
        return compute_layer(self, l, state, block)

    with mock.patch.object(hl.nn.GNN, "layer", layer):
        return infer.exact(model, data, ids, chunk_edges=CHUNK, folder=folder), sizes


@pytest.mark.parametrize("chunks", [1, 10, 24, 40, 62])
def test_stopping_at_any_chunk_loses_only_chunks_not_yet_recorded(
    chunks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(resumable, "SAVE_S", 0.0)
    data = small()
    model = model_of(data)
    expected, all_sizes = infer_counting_nodes(model, data, None)
    assert all_sizes == {0: 400, 1: 400, 2: 400}

    num_chunks = len(layerwise_chunks.Chunks(model, data, 1, layerwise_chunks.CPU).chunks(torch.arange(400), CHUNK))
    with monkeypatch.context() as patch:
        stop_after_chunks(chunks, patch)
        with pytest.raises(RuntimeError, match=r"stage .infer.write. failed"):
            infer_counting_nodes(model, data, tmp_path)
    progress = json.loads((tmp_path / PROGRESS).read_text())
    num_marked = progress["layer"] * num_chunks + progress["chunks"]
    # Chunks that wait in the write queue when the run stops are still written.
    assert chunks <= num_marked <= chunks + layerwise_chunks.WRITE_QUEUE_CHUNKS

    ours, sizes = infer_counting_nodes(model, data, tmp_path)
    assert torch.equal(ours, expected)

    layer = progress["layer"]
    assert sorted(sizes) == list(range(layer, 3))
    assert sizes[layer] < 400 or not progress["chunks"]

    again, sizes = infer_counting_nodes(model, data, tmp_path)
    assert torch.equal(again, expected)
    assert sizes == {}
    assert {p.name for p in tmp_path.glob("*.bin")} == {"layer2.bin"}


KILLED = """
import os, signal, sys
from pathlib import Path
from hopline import infer
from hopline.inference import resumable
from tests.support.runs import small
from tests.inference.test_resumable import CHUNK, model_of

resumable.SAVE_S, plain = 0.0, resumable.LayerFiles.mark_chunk
def mark_chunk(self):
    plain(self)
    if (self.layer, self.chunks) == (1, 5):
        os.kill(os.getpid(), signal.SIGKILL)
resumable.LayerFiles.mark_chunk = mark_chunk
data = small()
infer.exact(model_of(data), data, chunk_edges=CHUNK, folder=Path(sys.argv[1]))
"""


def test_inference_killed_and_resumed_equals_one_never_interrupted(tmp_path: Path):
    assert run_python("-c", KILLED, str(tmp_path)).returncode == -9
    data = small()
    model = model_of(data)
    ours, sizes = infer_counting_nodes(model, data, tmp_path)
    assert torch.equal(ours, infer_counting_nodes(model, data, None)[0])
    assert sorted(sizes) == [1, 2]
    assert sizes[1] < 400


def test_inference_at_some_nodes_reads_its_folder_again(tmp_path: Path):
    data = small()
    ids = torch.tensor([7, 3, 7, 399])
    expected = infer.exact(model_of(data), data, ids)
    for _ in range(2):
        assert torch.equal(infer.exact(model_of(data), data, ids, folder=tmp_path), expected)


def test_another_inference_is_refused_by_name(tmp_path: Path):
    data = small()
    infer.exact(sage(data), data, folder=tmp_path)
    other = sage(data)
    torch.nn.init.zeros_(other.convs[1].lin_l.weight)  # type: ignore[union-attr,arg-type]
    with pytest.raises(ValueError, match=r"another inference \(other weights\)"):
        infer.exact(other, data, folder=tmp_path)
    with pytest.raises(ValueError, match="other nodes"):
        infer.exact(sage(data), data, torch.tensor([1]), folder=tmp_path)
    with pytest.raises(ValueError, match="other chunks"):
        infer.exact(sage(data), data, chunk_edges=7, folder=tmp_path)
    with pytest.raises(ValueError, match="other edges"):
        infer.exact(sage(data), small(num_edges=3000), folder=tmp_path)


def test_damaged_files_are_refused_by_name(tmp_path: Path):
    data = small()
    infer.exact(sage(data), data, folder=tmp_path)
    os.truncate(tmp_path / "layer1.bin", 100)
    with pytest.raises(ValueError, match=r"layer1\.bin is missing .*remove"):
        infer.exact(sage(data), data, folder=tmp_path)
    (tmp_path / PROGRESS).write_text("{}")
    with pytest.raises(ValueError, match=r"inference\.json cannot .*remove"):
        infer.exact(sage(data), data, folder=tmp_path)


def test_a_full_disk_is_reported_by_file_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    data = small()
    with pytest.raises(ValueError, match=r"layer0\.bin \(No space left"):
        infer.exact(sage(data), data, folder=tmp_path)


def test_weights_checksums_tell_weights_apart():
    data = small()
    model = sage(data, norm="batch")
    before = weights_checksum(model)
    assert weights_checksum(sage(data, norm="batch")) == before
    model.get_buffer("norms.0.module.running_mean").add_(1)
    assert weights_checksum(model) != before
