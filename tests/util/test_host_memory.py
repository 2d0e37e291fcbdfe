"""The memory of the host: that of the machine, or of the containers around the process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from hopline.budget.plan import Item, Plan
from hopline.core import partition
from hopline.core.graph import Graph
from hopline.methods.full_batch.settings import FullBatch
from hopline.util.host import HostMemory, host_memory

MIB = 1 << 20
MACHINE = SimpleNamespace(total=64_000 * MIB, available=32_000 * MIB)
NO_LIMIT_V1 = "9223372036854771712\n"


@pytest.mark.parametrize(
    ("process", "files", "expected"),
    [
        pytest.param("", {}, (64_000, 32_000, False), id="no control groups"),
        pytest.param("0::/\n", {"memory.max": "max\n"}, (64_000, 32_000, False), id="no limit"),
        pytest.param(
            "0::/\n",
            {"memory.max": f"{620 * MIB}\n", "memory.current": f"{200 * MIB}\n"},
            (620, 420, True),
            id="container with a namespace of its own",
        ),
        pytest.param(
            "0::/\n",
            {
                "memory.max": f"{620 * MIB}\n",
                "memory.current": f"{600 * MIB}\n",
                "memory.stat": f"anon 5\ninactive_file {500 * MIB}\n",
            },
            (620, 520, True),
            id="file pages can be taken back",
        ),
        pytest.param(
            "0::/a/b\n",
            {
                "a/b/memory.max": f"{900 * MIB}\n",
                "a/b/memory.current": f"{100 * MIB}\n",
                "a/memory.max": f"{800 * MIB}\n",
                "a/memory.current": f"{700 * MIB}\n",
                "memory.stat": "",
            },
            (800, 100, True),
            id="nested: an outer group leaves less",
        ),
        pytest.param(
            "0::/a\n",
            {"a/memory.max": "max\n", "a/memory.high": f"{300 * MIB}\n", "a/memory.current": "0\n"},
            (300, 300, True),
            id="throttled from memory.high on",
        ),
        pytest.param(
            "0::/machine/path/of/the/container\n",
            {"memory.max": f"{620 * MIB}\n", "memory.current": "0\n"},
            (620, 620, True),
            id="path of the machine, not seen from inside",
        ),
        pytest.param("0::/../other\n", {"memory.max": "max\n"}, (64_000, 32_000, False), id="outside the namespace"),
        pytest.param(
            "5:cpu,cpuacct:/x\n4:memory:/docker/id\n0::/\n",
            {
                "memory/docker/id/memory.limit_in_bytes": f"{620 * MIB}\n",
                "memory/docker/id/memory.usage_in_bytes": f"{120 * MIB}\n",
                "memory/docker/id/memory.stat": f"inactive_file 1\ntotal_inactive_file {20 * MIB}\n",
                "memory/memory.limit_in_bytes": NO_LIMIT_V1,
            },
            (620, 520, True),
            id="version 1",
        ),
        pytest.param(
            "4:memory:/\n", {"memory/memory.limit_in_bytes": NO_LIMIT_V1}, (64_000, 32_000, False), id="v1, no limit"
        ),
    ],
)
def test_the_memory_is_the_least_of_the_machine_and_all_groups(
    process: str,
    files: dict[str, str],
    expected: tuple[int, int, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: MACHINE)
    cgroup = tmp_path / "cgroup"
    for name, text in files.items():
        (cgroup / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroup / name).write_text(text)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(process)
    total, available, is_container = expected
    assert host_memory(cgroup, tmp_path / "proc") == (total * MIB, available * MIB, is_container)


def test_this_machine_has_memory():
    memory = host_memory()
    assert 0 < memory.available <= memory.total <= psutil.virtual_memory().total


def test_metis_is_refused_in_a_small_container(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("pymetis")
    indptr = torch.arange(0, 3_000_001, 3)
    graph = Graph(indptr, torch.randint(0, 1_000_000, (3_000_000,), dtype=torch.int32))
    container = HostMemory(total=620 * MIB, available=300 * MIB, is_container=True)
    monkeypatch.setattr(partition, "host_memory", lambda: container)
    with pytest.raises(ValueError, match=r"METIS would take about .* and 300 MiB are free: use how='streaming'"):
        partition.make_partition(graph, 4, how="metis")


def test_a_plan_warns_if_tensors_and_process_exceed_the_container():
    item = Item("weights", "host", 10 * MIB)
    plan = Plan(
        method=FullBatch(),
        items=(item,),
        limits={"device": None, "host": 500 * MIB, "disk": None},
        compute_place="host",
        step_bytes=5 * MIB,
        min_step_bytes=5 * MIB,
        steps=1,
        count=8,
        covers="a graph in {} shards",
        process_bytes=200 * MIB,
    )
    assert "plan: the process takes 200 MiB beside these tensors" in plan.lines()
    assert plan.excess_warning(800 * MIB) == ""
    assert "620 MiB" in plan.excess_warning(620 * MIB)
    assert plan.excess_warning(620 * MIB).endswith("set budget.host=420MiB or less")
