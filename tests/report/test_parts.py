"""Tables of the page, and its sections on memory."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from hopline.report.page import MANY_ROWS, Html, budget_section, plan_section, table, thin_out
from tests.report.test_html import text

MIB = 2**20


def record(epoch: int, **changes: Any) -> dict[str, Any]:
    fields = {"event": "budget", "epoch": epoch, "limit_bytes": 64 * MIB, "promised_bytes": 60.5 * MIB}
    fields |= {"peak_bytes": 58 * MIB, "num_steps": 3, "steps_per_point": 1, "split": 2, "pieces": 5}
    fields |= {"before": [100.0 * MIB, 50.0 * MIB, 90.0 * MIB], "after": [58 * MIB, 50 * MIB, 57 * MIB]}
    return fields | {"resampled": 0, "cut": 0, "edges_cut": 0, "over": 0, "oom": 1} | changes


def test_thinning_keeps_the_largest_of_every_stretch():
    values = [random.Random(7).random() for _ in range(1000)]
    points, per_point = thin_out(values, 300)
    assert per_point == 4
    assert len(points) == 250
    assert points == [max(values[first : first + 4]) for first in range(0, 1000, 4)]
    assert thin_out(values[:300], 300) == (values[:300], 1)
    assert thin_out([], 300) == ([], 1)


def test_the_budget_table_has_predicted_and_measured_bytes_by_epoch():
    html = budget_section([record(1), record(2, num_steps=1200, split=0, pieces=0, oom=0)])
    assert "1 3 64 MiB 60.5 MiB 58 MiB 2 5 0 0 0 1" in text(html)
    assert "2 1,200 64 MiB 60.5 MiB 58 MiB 0 0 0 0 0 0" in text(html)
    assert budget_section([]) == ""


def test_a_plan_is_summed_up_by_place():
    items = [{"name": "weights", "place": "device", "num_bytes": 2 * MIB}]
    items.append({"name": "graph", "place": "host", "num_bytes": 5 * MIB})
    totals = [{"place": "device", "promised_bytes": 6 * MIB, "budget_bytes": 8 * MIB}]
    totals.append({"place": "host", "promised_bytes": 5 * MIB, "budget_bytes": None})
    section = text(plan_section({"event": "plan", "items": items, "totals": totals}))
    assert "device weights 2 MiB device a step 4 MiB device predicted peak 6 MiB device budget 8 MiB" in section
    assert "host graph 5 MiB host predicted peak 5 MiB host budget –" in section
    assert plan_section({}) == ""


def test_the_budget_chart_has_bytes_per_step_and_the_limit():
    html = budget_section([record(1), record(2, steps_per_point=2, num_steps=6)])
    hovers = re.findall(r"<title>([^<]+)</title>", html)
    assert "Bytes per step, in MiB" in html
    assert [h for h in hovers if h.startswith("before")] == [
        f"before splitting, step {step}: {size}"
        for step, size in zip((1, 2, 3, 4, 6, 8), (100, 50, 90) * 2, strict=True)
    ]
    assert [h for h in hovers if h.startswith("after")][:3] == [
        "after splitting, step 1: 58",
        "after splitting, step 2: 50",
        "after splitting, step 3: 57",
    ]
    assert [h for h in hovers if h.startswith("limit")] == [f"limit, step {step}: 64" for step in (1, 3, 4, 9)]
    line = re.findall(r'points="([^"]+)"', html)[2]
    heights = {point.split(",")[1] for point in line.split()}
    assert len(heights) == 1, "the budget is a level line"
    above = [float(p.split(",")[1]) for p in re.findall(r'points="([^"]+)"', html)[1].split()]
    assert all(y > float(*heights) for y in above), "after splitting all is below it"


@pytest.mark.parametrize("broken", [{"before": None, "after": None}, {"num_steps": None}, {"limit_bytes": None}])
def test_what_is_missing_is_left_out(broken: dict[str, Any]):
    assert "Memory budget" in budget_section([record(1, **broken)])


def test_a_long_run_stays_small():
    points = {"before": [float(i) for i in range(300)], "after": list(range(300)), "num_steps": 3000}
    html = budget_section([record(epoch, steps_per_point=10, **points) for epoch in range(1, 101)])
    assert html.count("<circle") <= 3 * 400
    assert "before splitting, step 299991:" in html, "the largest step of the last epoch is there"


def test_a_long_table_by_epoch_is_folded_away():
    assert "<details>" not in budget_section([record(epoch) for epoch in range(1, MANY_ROWS + 1)])
    folded = budget_section([record(epoch) for epoch in range(1, MANY_ROWS + 2)])
    assert folded.index("<details>") < folded.index("<table>")


def test_cells_are_written_as_settings_are_typed_and_escaped_unless_they_are_html():
    html = table(("a",), [(None,), (True,), ([10, 5],), ("<b>",), (Html("<i></i>"),)])
    assert re.findall("<td>(.*?)</td>", html) == ["none", "true", "10,5", "&lt;b&gt;", "<i></i>"]
