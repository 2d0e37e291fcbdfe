"""Numbers as people read them."""

import pytest

from hopline.report.format import amount, duration, percent


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (3.848e-05, "38.5 µs"),
        (0.0004688, "469 µs"),
        (0.0009996, "1 ms"),
        (0.3052, "305 ms"),
        (0.9996, "1 s"),
        (6.119, "6.12 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (125, "2 min 5 s"),
        (3599.6, "1 h 0 min"),
        (12_000, "3 h 20 min"),
        (5_000_000, "1,388 h 53 min"),
    ],
)
def test_a_single_time_has_the_unit_that_fits_it(seconds: float, text: str):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0.357, "36%"), (0.0432, "4.3%"), (1, "100%"), (0, "0%"), (0.0999, "10%"), (0.0994, "9.9%")]
)
def test_shares_are_percentages_of_two_digits(share: float, text: str):
    assert percent(share) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1_615_685_872, "1,615,685,872"), (54_855.3, "54,855"), (13.5234, "13.52"), (True, "True"), ("cpu", "cpu")],
)
def test_amounts_have_separators_or_at_most_two_decimals(value: float | str, text: str):
    assert amount(value) == text
