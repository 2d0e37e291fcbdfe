"""Messages that carry less: exact at their neutral settings, and what they should be at others."""

from __future__ import annotations

import pytest
import torch

from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.methods.full_batch.compression import Both, Codec, DrawnRows, HalfPrecision, LargestRows, codecs_of
from tests.helpers import randn
from tests.methods.full_batch.compression_ranks import check


@pytest.mark.parametrize(
    "codec",
    [HalfPrecision(), LargestRows(0.3), DrawnRows(0.6), Both(DrawnRows(0.6), LargestRows(0.5))],
    ids=lambda codec: type(codec).__name__,
)
@pytest.mark.parametrize("num_rows", [0, 1, 20])
def test_both_ends_agree_on_what_travels(codec: Codec, num_rows: int) -> None:
    rows = [randn(num_rows, 3), torch.arange(num_rows)]
    encoded = codec.encode(rows, 7)
    assert codec.shapes([tuple(t.shape) for t in rows], 7) == [tuple(t.shape) for t in encoded]
    decoded = codec.decode(encoded, rows, 7)
    assert [(t.shape, t.dtype) for t in decoded] == [(t.shape, t.dtype) for t in rows]
    again = codec.encode(decoded, 7)
    assert num_rows != 20 or sum(t.nbytes for t in again) < sum(t.nbytes for t in rows)


def test_what_is_lost_is_counted() -> None:
    rows = [torch.tensor([[3.0], [0.0], [4.0], [1.0]])]
    codec = LargestRows(0.5)
    assert codec.lost(rows, codec.encode(rows, 0), 0).tolist() == pytest.approx([1.0, 26.0], rel=1e-5)
    assert DrawnRows(0.5).lost(rows, rows, 0).tolist() == [0.0, 0.0]
    both = Both(DrawnRows(1.0), codec)
    assert both.lost(rows, both.encode(rows, 0), 0).tolist() == pytest.approx([1.0, 26.0], rel=1e-5)


def test_neutral_settings_have_no_codec() -> None:
    assert codecs_of() == {}
    assert codecs_of("bf16").keys() == {"forward", "refetch"}
    assert codecs_of("bf16", gradients=True).keys() == codecs_of(rate=0.5).keys() == {"forward", "refetch", "gradient"}
    both = codecs_of("topk", 0.1, rate=0.5)
    assert both["forward"] == Both(DrawnRows(0.5), LargestRows(0.1))
    assert both["gradient"] == DrawnRows(0.5)


def test_ranks() -> None:
    assert run(check, LaunchSettings(devices=3, timeout_s=60)) == {"size": 3}
