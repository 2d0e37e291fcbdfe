"""Compressed rows of full-batch training: exact for kinds of rows that are not named, and rounded for the others."""

from __future__ import annotations

from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from hopline.methods.full_batch.compression import COMPRESSED
from tests.methods.full_batch.compression_ranks import check


def test_gradients_are_compressed_only_by_bf16_both() -> None:
    assert COMPRESSED["none"] == set()
    assert COMPRESSED["bf16"] == {"forward", "refetch"}
    assert COMPRESSED["bf16_both"] == {"forward", "refetch", "gradient"}


def test_half_precision_rounds_only_the_named_kinds_of_rows() -> None:
    assert run(check, LaunchSettings(devices=3, timeout_s=60)) == {"size": 3}
