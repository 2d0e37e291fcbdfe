"""`Budget`: sizes by place, invalid values, and settings of earlier versions."""

import pytest
import torch

from hopline.contract import Budget, upgrade_budget
from hopline.util.config import from_dict


def test_a_size_alone_is_the_budget_of_the_device():
    assert Budget.of("8GiB") == Budget(device="8GiB")
    assert Budget.of(1000).bytes_on(torch.device("cpu")) == 1000
    assert Budget.of({"device": "2GiB", "host": "1GiB"}).bytes_on(torch.device("cpu")) == 1 << 30
    assert Budget.of({"device": "2GiB", "host": "1GiB"}).bytes_on(torch.device("cuda")) == 2 << 30
    assert Budget(disk="1GiB").bytes_on(torch.device("cpu")) is None
    budget = Budget(host="1GiB")
    assert Budget.of(budget) is budget


def test_invalid_budgets_are_refused_with_a_message():
    for budget, message in (
        ("a lot", "Cannot read 'a lot' as a size"),
        ({"devce": "1GiB"}, "no 'devce'.*Did you mean 'device'"),
        ({"host": "0"}, r"budget\.host=8GiB"),
        ({"over_budget": "cut"}, "a budget needs a size: write budget=8GiB"),
        ({"over_budget": "pray"}, "over_budget must be 'split' or .* 'cut_by_pagerank' or 'refuse'"),
    ):
        with pytest.raises(ValueError, match=message):
            Budget.of(budget)


def test_split_by_was_removed_and_is_read_where_it_had_its_default():
    budgets_with_split_by = (
        lambda: Budget(split_by="metis"),  # type: ignore[call-arg]
        lambda: Budget.of({"device": "1GiB", "split_by": "metis"}),
        lambda: from_dict(Budget, {"split_by": "metis"}),
    )
    for make_budget in budgets_with_split_by:
        with pytest.raises((TypeError, ValueError), match=r"split_by was removed: micro-batches .* leave it out"):
            make_budget()
    assert from_dict(Budget, {"split_by": "balance"}) == Budget()


def test_cut_by_was_removed_and_is_read_where_it_had_its_default():
    budgets_with_cut_by = (
        lambda: Budget(device="1GiB", over_budget="cut", cut_by="degree"),  # type: ignore[call-arg]
        lambda: Budget.of({"device": "1GiB", "over_budget": "cut", "cut_by": "degree"}),
        lambda: from_dict(Budget, {"over_budget": "cut", "cut_by": "degree"}),
    )
    for make_budget in budgets_with_cut_by:
        with pytest.raises(
            (TypeError, ValueError), match=r"cut_by was removed: set budget\.over_budget=cut_by_degree or"
        ):
            make_budget()
    assert from_dict(Budget, {"cut_by": "random"}) == Budget()


@pytest.mark.parametrize(
    ("over_budget", "cut_by", "expected"),
    [("cut", "random", "cut"), ("cut", "pagerank", "cut_by_pagerank"), ("split", "degree", "split")],
)
def test_a_stored_cut_by_is_read_as_a_part_of_over_budget(over_budget: str, cut_by: str, expected: str):
    stored = {"device": "1GiB", "over_budget": over_budget, "cut_by": cut_by}
    assert from_dict(Budget, upgrade_budget(stored)) == Budget(device="1GiB", over_budget=expected)  # type: ignore[arg-type]


def test_an_unknown_field_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"has no 'devices': give some of device, host, disk, over_budget\."):
        Budget.of({"devices": "1GiB"})
