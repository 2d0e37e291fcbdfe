"""`Budget`: sizes by place, and invalid values."""

import pytest
import torch

from hopline.budget.plan import Budget


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


def test_an_unknown_field_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'devices': .*device, host, disk, over_budget"):
        Budget.of({"devices": "1GiB"})
