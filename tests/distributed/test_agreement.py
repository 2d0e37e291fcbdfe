"""Ranks that were given different things: which differences count, and how the error names them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import hopline as hl
from hopline.data.fingerprint import ids_fact
from hopline.distributed.agreement import Fact, check_same
from hopline.units.rank_facts import settings_facts
from tests.distributed.test_existing_group import run_in_group
from tests.support.different_ranks import REFUSED, REFUSED_BY_TRAINER
from tests.support.runs import small


def test_ranks_that_were_given_different_things_are_refused_by_name_and_harmless_differences_train(tmp_path: Path):
    results = run_in_group("differ", tmp_path, 2)
    assert results[0] == results[1]  # every rank says the same
    for call, outcomes in results[0].items():
        for case, outcome in outcomes.items():
            expected = {**REFUSED, **REFUSED_BY_TRAINER}.get(case)
            if expected is None:
                weights = ", the same weights" if "Trainer" in call else ""
                assert outcome == f"29 seeds{weights}", (call, case)
            else:
                assert outcome.startswith(f"rank 1 and rank 0 differ in {expected}"), (call, case)
    assert (tmp_path / "runsampled" / "checkpoint.pt").exists()  # of rank 0, which alone was given out=
    assert not (tmp_path / "none").exists()  # of rank 1, which writes nothing


class ThreadRank:
    """A rank of a group of threads, which gathers bytes."""

    def __init__(self, rank: int, board: list[bytes], barrier: threading.Barrier) -> None:
        self.size = len(board)
        self.rank = rank
        self.board = board
        self.barrier = barrier
        self.num_calls = 0

    def gather_bytes(self, content: bytes) -> list[bytes]:
        self.num_calls += 1
        self.board[self.rank] = content
        self.barrier.wait(10)
        gathered = list(self.board)
        self.barrier.wait(10)
        return gathered


def compare(*facts: dict[str, Fact]) -> tuple[list[str], int]:
    """(the error of each rank, "" for none; the number of collective calls) of ranks with these facts."""
    board = [b""] * len(facts)
    barrier = threading.Barrier(len(facts))
    ranks = [ThreadRank(rank, board, barrier) for rank in range(len(facts))]
    errors = [""] * len(facts)

    def run(rank: int) -> None:
        try:
            check_same(ranks[rank], facts[rank])
        except ValueError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(facts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors, ranks[0].num_calls


def array(checksum: str, sample: str) -> dict[str, Fact]:
    return {"table 'x'": Fact("float32 [3]", checksum=checksum, sample=lambda: sample)}


def test_ranks_that_agree_make_one_call_and_compute_no_sample_of_a_stored_array():
    def never() -> str:
        raise AssertionError("rows were read")

    facts = {"lr": Fact("0.1"), "table 'x'": Fact("float32 [3]", checksum="a", sample=never)}
    assert compare(facts, facts, facts) == ([""] * 3, 1)


def test_every_rank_names_the_first_that_differs_from_rank_0():
    errors, _ = compare({"lr": Fact("0.1")}, {"lr": Fact("0.1")}, {"lr": Fact("0.2")})
    assert errors == ["rank 2 and rank 0 differ in lr (0.2 against 0.1): give every rank the same"] * 3


@pytest.mark.parametrize(
    ("first", "other", "values"),
    [
        (("a", "s"), ("a", "s"), None),
        (("a", "s"), ("", "s"), None),  # stored on one rank, in memory on the other
        (("a", "s"), ("b", "s"), " (both float32 [3], with other values)"),  # rows that are not in the sample differ
        (("a", "s"), ("", "t"), " (both float32 [3], with other values)"),
        (("", "s"), ("", "t"), " (both float32 [3], with other values)"),
    ],
)
def test_arrays_are_compared_by_the_best_that_both_ranks_have(
    first: Sequence[str], other: Sequence[str], values: str | None
):
    errors, _ = compare(array(*first), array(*other))
    expected = "" if values is None else f"rank 1 and rank 0 differ in table 'x'{values}: give every rank the same"
    assert errors == [expected] * 2


def test_long_values_and_missing_ones():
    assert compare({"a": Fact("x" * 100)}, {"a": Fact("y" * 100)})[0][0].startswith("rank 1 and rank 0 differ in a: ")
    assert "differ in b (none against 1)" in compare({"b": Fact("1")}, {})[0][1]
    assert "differ in b (1 against none)" in compare({}, {"b": Fact("1")})[0][0]


def test_addresses_of_objects_and_paths_of_folders_may_differ():
    def names(value: object) -> dict[str, Fact]:
        return settings_facts({"method": {"weight": value, "folder": f"/scratch/{id(value)}"}})

    assert names(object()) == names(object())
    assert settings_facts({"method": {"folder": None}}) != settings_facts({"method": {"folder": "a"}})
    assert settings_facts({"method": {"workers": 1}, "device": "cuda:1", "budget": {"device": "1GiB"}}) == {
        "budget.device": Fact("'1GiB'")
    }


def test_a_dataset_in_memory_has_the_facts_of_its_folder(tmp_path: Path):
    data = small(num_edges=4500)
    sparse = dataclasses.replace(data, tables={"x": hl.extend.SparseTable.from_dense(torch.eye(400))})
    for dataset in (data, sparse):
        dataset.save(tmp_path / "graph")
        mapped = hl.open(tmp_path / "graph").facts()
        assert all(fact.checksum for fact in mapped.values())
        assert compare(dataset.facts(), mapped) == (["", ""], 2)


def test_a_sample_has_a_thousand_rows_from_the_first_to_the_last():
    rows = torch.zeros(5001, 2)
    table = hl.extend.TensorTable(rows)
    base = small(num_nodes=5001)
    data = dataclasses.replace(base, tables={"x": table})

    def checksum() -> str:
        sample = data.facts()["table 'x'"].sample
        assert sample is not None
        return sample()

    before = checksum()
    for row, is_seen in ((0, True), (5000, True), (1, False), (5, True)):
        rows[row, 1] = 1
        assert (checksum() != before) == is_seen
        rows[row, 1] = 0


def test_ids_are_read_whole_up_to_a_million_and_sampled_beyond(monkeypatch: pytest.MonkeyPatch):
    ids = torch.arange(3000)
    others = ids.clone()
    others[1] = 0  # not among the thousand of the sample
    assert compare({"s": ids_fact(ids)}, {"s": ids_fact(others)})[0][0].startswith("rank 1 and rank 0 differ in s")
    monkeypatch.setattr("hopline.data.fingerprint.MAX_IDS", 100)
    assert compare({"s": ids_fact(ids.clone())}, {"s": ids_fact(others.clone())})[0] == ["", ""]
    halves = [{"s": ids_fact(ids[rank::2].clone())} for rank in range(2)]
    assert "both 1,500 nodes, with other values" in compare(*halves)[0][0]
