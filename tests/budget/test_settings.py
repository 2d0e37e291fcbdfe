import pytest
import torch

from hopline.budget.settings import Budget


def test_a_size_alone_is_the_devices():
    assert Budget.of("8GiB") == Budget(device="8GiB")
    assert Budget.of(1000).bytes_on(torch.device("cpu")) == 1000
    assert Budget.of({"device": "2GiB", "host": "1GiB"}).bytes_on(torch.device("cpu")) == 1 << 30
    assert Budget.of({"device": "2GiB", "host": "1GiB"}).bytes_on(torch.device("cuda")) == 2 << 30
    assert Budget(disk="1GiB").bytes_on(torch.device("cpu")) is None
    budget = Budget(host="1GiB")
    assert Budget.of(budget) is budget


def test_what_is_not_a_budget_is_refused():
    for given, message in (
        ("a lot", "Cannot read 'a lot' as a size"),
        ({"devce": "1GiB"}, "no 'devce'.*Did you mean 'device'"),
        ({"host": "0"}, r"budget\.host=8GiB"),
        ({"over_budget": "cut"}, "a budget needs a size: write budget=8GiB"),
        ({"over_budget": "pray"}, "over_budget must be 'split' or 'resample' or 'cut' or 'refuse'"),
    ):
        with pytest.raises(ValueError, match=message):
            Budget.of(given)


def test_metis_that_is_not_there_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hopline.budget.settings.find_spec", lambda name: None)
    assert Budget().split_by == "balance"
    with pytest.raises(ValueError, match=r"pip install pymetis`, or set budget.split_by=balance"):
        Budget(split_by="metis")
