"""The golden record: what small fixed runs of every method gave, in files that tests compare with.

    python -m tests.golden --compare              how far every case is from the record
    python -m tests.golden --write                add this machine, or cases that the record lacks
    python -m tests.golden --write --because WHY  replace numbers that changed on purpose

With `--device cuda` the same for the GPU's record. All need PYTHONPATH=src and the project's folder.

tests/records/cpu.json and gpu.json hold draws once, since these are equal on every machine, and the
results of the cases (`golden_cases.py`) once per *key*: processor, torch and compiler. On a key that
the record holds, a case must be equal to the bit. On another one, a float64 case must be within 1e-10
of any key's numbers, and other cases are not compared.

A case that two runs on one machine give different bits for is written down with `apart`, their
distance, or named under `not_reproducible` with the reason, and compared within a tolerance. A change
of the order of summation changes the record: `--because` names the place, and the distance of the
float64 cases, which must be around 1e-12, is printed and kept under `changes`. Cases that such a
change touched are removed from all other keys.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numba
import torch
from llvmlite import binding

from hopline.distributed.launch import run
from hopline.distributed.launch_settings import LaunchSettings
from tests.support.golden_cases import (
    CASES,
    DRAWN_BY_TORCH,
    DRAWS,
    DRAWS_ON_A_DEVICE,
    GPU_CASES,
    INFERENCE_MODELS,
    NOT_REPRODUCIBLE,
    RANK_CASES,
    Case,
    Result,
    checksum,
    infer_exactly,
    train,
    train_ranks,
)

FOLDER = Path(__file__).parent / "records"
TOLERANCE = 1e-10
"""Largest distance of float64 cases between machines."""
APART_TOLERANCES = {torch.float64: TOLERANCE, torch.float32: 1e-4}
"""Largest distance on one machine of cases that do not reproduce to the bit."""
INFERENCE = "inference "
"""The prefix of the names of inference cases."""


# ---- keys


def cpu_key() -> str:
    """What decides the bits of a run on a CPU.

    The model's name alone does not: virtual machines hide it. LLVM's name of the core decides what Numba
    compiles, and torch's capability which of its kernels run.
    """
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].partition(":")[2].strip() if lines else name
    capability = torch.backends.cpu.get_cpu_capability()
    core = binding.get_host_cpu_name()  # type: ignore[attr-defined]
    return f"{name} ({core}, {capability}); torch {torch.__version__}; numba {numba.__version__}"


def gpu_key() -> str:
    """What decides the bits of a run on a GPU."""
    import triton

    return f"{torch.cuda.get_device_name()}; torch {torch.__version__}; triton {triton.__version__}"


def command(device: str) -> str:
    """The command line that adds this machine to a record."""
    option = " --device cuda" if device == "cuda" else ""
    return f"PYTHONPATH=src python -m tests.golden --write{option}"


# ---- cases by name


def case_names(device: str) -> list[str]:
    """All cases of a device, in the order of the record."""
    inference = [f"{INFERENCE}{model}" for model in INFERENCE_MODELS]
    return [*GPU_CASES, *inference] if device == "cuda" else [*CASES, *RANK_CASES, *inference]


def find_case(name: str, device: str) -> Case | None:
    """The case of that name; None for inference."""
    return (GPU_CASES if device == "cuda" else CASES | RANK_CASES).get(name)


@cache
def rank_results(attempt: int) -> dict[str, Result]:
    """Results of all cases of two ranks. The cache makes processes start once per attempt."""
    settings = LaunchSettings(devices=2, timeout_s=120)
    return run(train_ranks, settings, list(RANK_CASES))


def compute(name: str, device: str, attempt: int = 0) -> Result:
    """Run a case. attempt: number of earlier runs, which matters only for ranks."""
    if name.startswith(INFERENCE):
        return infer_exactly(name.removeprefix(INFERENCE), device)
    if device == "cpu" and name in RANK_CASES:
        return rank_results(attempt)[name]
    case = find_case(name, device)
    assert case is not None
    return train(case, device)


def draw_names(device: str) -> list[str]:
    """The names of all draws of a device."""
    return list(DRAWS_ON_A_DEVICE if device == "cuda" else DRAWS)


def compute_draws(name: str, device: str) -> str:
    """The checksum of some draws."""
    return checksum(DRAWS_ON_A_DEVICE[name](device) if device == "cuda" else DRAWS[name]())


# ---- comparing


def distance(ours: Result, expected: Result) -> float:
    """The largest difference of two numbers, over the larger of 1 and the expected one.

    Infinite where counts differ or lists have other lengths.
    """
    largest = 0.0
    for name in {*ours, *expected} - {"bits", "apart"}:
        our_values = ours.get(name)
        expected_values = expected.get(name)
        if name == "counts":
            largest = largest if our_values == expected_values else math.inf
            continue
        if our_values is None or expected_values is None or len(our_values) != len(expected_values):
            return math.inf
        for our_value, expected_value in zip(our_values, expected_values, strict=True):
            difference = abs(our_value - expected_value) / max(1.0, abs(expected_value))
            largest = math.inf if math.isnan(difference) else max(largest, difference)
    return largest


def differences(ours: Result, expected: Result, tolerance: float | None) -> list[str]:
    """One line for each field that differs. tolerance: None compares bits."""
    lines = []
    for name in [*expected, *(other for other in ours if other not in expected)]:
        if name == "apart" or (name == "bits" and tolerance is not None):
            continue
        our_value = ours.get(name)
        expected_value = expected.get(name)
        if name == "counts" or tolerance is None:
            is_equal = our_value == expected_value
        else:
            is_equal = distance({name: our_value}, {name: expected_value}) <= tolerance
        if not is_equal:
            lines.append(f"{name}: found {our_value}, the record has {expected_value}")
    return lines


@dataclass
class Expectation:
    """The result that a case is compared with."""

    result: Result
    tolerance: float | None
    """None: bits."""


@dataclass
class Record:
    """One file."""

    draws: dict[str, str] = field(default_factory=dict)
    """Name -> checksum."""
    runs: dict[str, dict[str, Result]] = field(default_factory=dict)
    """Key -> case -> result."""
    changes: list[dict[str, Any]] = field(default_factory=list)
    """Numbers that changed on purpose, the oldest first."""
    not_reproducible: dict[str, str] = field(default_factory=dict)
    """Cases that are known to give other bits -> why."""

    @classmethod
    def read(cls, device: str) -> Record:
        path = path_of(device)
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def write(self, device: str) -> None:
        """One line per field of a case, so that a change shows in a diff."""
        self.not_reproducible = {} if device == "cuda" else NOT_REPRODUCIBLE
        fields = {name: getattr(self, name) for name in ("changes", "not_reproducible", "draws", "runs")}
        path_of(device).write_text(_text(fields) + "\n")

    def expected(self, name: str, key: str, device: str) -> Expectation | str:
        """What a case is compared with on a machine, or why with nothing."""
        case = find_case(name, device)
        dtype = torch.float64 if case is None else case.dtype
        result_of_key = self.runs.get(key, {}).get(name)
        if result_of_key is not None:
            is_apart = "apart" in result_of_key or name in self.not_reproducible
            return Expectation(result_of_key, APART_TOLERANCES[dtype] if is_apart else None)
        unknown = f"the record does not hold this case for {key}: add it by `{command(device)}`"
        others = {other: runs[name] for other, runs in self.runs.items() if name in runs}
        if dtype != torch.float64:
            return unknown
        if case is not None and case.model in DRAWN_BY_TORCH:
            others = {other: result for other, result in others.items() if release(other) == release(key)}
            if not others:
                return f"{unknown}; other versions of torch draw other numbers"
        if not others:
            return unknown
        return Expectation(next(iter(others.values())), TOLERANCE)


def path_of(device: str) -> Path:
    """The file of a device's record."""
    return FOLDER / ("gpu.json" if device == "cuda" else "cpu.json")


def release(key: str) -> str:
    """The part of a key that names torch."""
    return next(part for part in key.split("; ") if part.startswith("torch ")).partition("+")[0]


def _text(value: Any, depth: int = 0) -> str:
    """JSON with one line per field down to the fields of a case, and everything deeper on one line."""
    if not isinstance(value, dict) or not value or depth == 4:
        return json.dumps(value)
    inner = " " * (depth + 1)
    fields = [f"{inner}{json.dumps(name)}: {_text(item, depth + 1)}" for name, item in value.items()]
    return "{\n" + ",\n".join(fields) + "\n" + " " * depth + "}"


# ---- writing


@dataclass
class ComputedCases:
    """All draws and cases as this machine computes them."""

    draws: dict[str, str] = field(default_factory=dict)
    runs: dict[str, Result] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Case -> error."""


def compute_all(device: str, times: int, only: str = "") -> ComputedCases:
    """Run every case `times` times; a case that fails is reported, and the others still run."""
    computed = ComputedCases()

    def selected(names: list[str]) -> Iterator[str]:
        yield from (name for name in names if only in name)

    def run_and_report(name: str, compute_it: Callable[[], None]) -> None:
        """Run one case, print its time, and record its error if it fails."""
        start_s = time.perf_counter()
        try:
            compute_it()
        except Exception as error:
            computed.failed[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        print(f"{time.perf_counter() - start_s:6.2f} s  {name}", flush=True)

    for name in selected(draw_names(device)):
        run_and_report(name, lambda name=name: computed.draws.update({name: compute_draws(name, device)}))
    for name in selected(case_names(device)):
        run_and_report(name, lambda name=name: computed.runs.update({name: _compute_again(name, device, times)}))
    return computed


def _compute_again(name: str, device: str, times: int) -> Result:
    """A case's first result, with the distance of later ones if they have other bits."""
    first = compute(name, device)
    farthest = 0.0
    is_other = False
    for attempt in range(1, times):
        other_result = compute(name, device, attempt)
        is_other = is_other or other_result != first
        farthest = max(farthest, distance(other_result, first))
    return first | {"apart": farthest} if is_other else first


def update(record: Record, computed: ComputedCases, key: str, device: str, because: str | None) -> list[str]:
    """Put what was computed into a record; returns lines to show.

    Raises ValueError where that would change numbers and nobody says why.
    """
    lines = []
    changed_cases = []
    farthest = 0.0
    changed_draws = [name for name, bits in computed.draws.items() if record.draws.get(name, bits) != bits]
    for name, result in computed.runs.items():
        expected = record.expected(name, key, device)
        if isinstance(expected, str) or not differences(result, expected.result, expected.tolerance):
            continue
        apart = distance(result, expected.result)
        case = find_case(name, device)
        if case is None or case.is_float64:
            farthest = max(farthest, apart)
        changed_cases.append(name)
        lines.append(f"changed by {apart:.1e}: {name}")
    lines += [f"drawn otherwise: {name}" for name in changed_draws]
    if (changed_cases or changed_draws) and because is None:
        lines.append("nothing is written: if this is meant, say where and why by --because")
        raise ValueError("\n".join(lines))
    if changed_cases or changed_draws:
        change = {"because": because, "key": key, "float64 distance": farthest, "cases": changed_draws + changed_cases}
        record.changes.append(change)
        # Other machines have not computed the new numbers: they are compared within 1e-10 until they do.
        for other in [runs for other, runs in record.runs.items() if other != key]:
            for name in changed_cases:
                other.pop(name, None)
    record.draws = _in_order(record.draws | computed.draws, draw_names(device))
    results_of_key = record.runs.setdefault(key, {})
    for name, result in computed.runs.items():
        # A case that never gives the same bits keeps what it has as long as that is near enough.
        must_keep = "apart" in results_of_key.get(name, {}) or name in record.not_reproducible
        if name not in results_of_key or name in changed_cases or not must_keep:
            results_of_key[name] = result
    for other, runs in record.runs.items():
        record.runs[other] = _in_order(runs, case_names(device))
    return lines


def _in_order(entries: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The entries whose names are known, in the order of the names."""
    return {name: entries[name] for name in names if name in entries}


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the golden record, or compare with it.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="add this machine to the record")
    action.add_argument("--compare", action="store_true", help="show how far every case is from the record")
    parser.add_argument("--because", help="the place and the reason of numbers that changed on purpose")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", default="", help="only cases whose name has this text")
    parser.add_argument("--times", type=int, default=2, help="how often each case runs, to see whether it reproduces")
    options = parser.parse_args()

    key = gpu_key() if options.device == "cuda" else cpu_key()
    print(key, flush=True)
    record = Record.read(options.device)
    if not any(options.only in name for name in (*case_names(options.device), *draw_names(options.device))):
        parser.error(f"no case has {options.only!r} in its name")
    computed = compute_all(options.device, options.times, options.only)
    for name, result in computed.runs.items():
        if "apart" in result:
            print(f"does not reproduce, apart by {result['apart']:.1e}: {name}")
    if options.compare:
        _show(record, computed, key, options.device)
    else:
        try:
            print("\n".join(update(record, computed, key, options.device, options.because)))
        except ValueError as error:
            print(error)
            return 1
        record.write(options.device)
        print(f"{len(computed.runs)} cases and {len(computed.draws)} draws are in {path_of(options.device).name}")
    for name, error in computed.failed.items():
        print(f"failed: {name}: {error}")
    return 1 if computed.failed else 0


def _show(record: Record, computed: ComputedCases, key: str, device: str) -> None:
    """A line per case: equal to the bit, or how far from the record."""
    for name, bits in computed.draws.items():
        print(f"{'equal' if record.draws.get(name) == bits else 'drawn otherwise'}: {name}")
    for name, result in computed.runs.items():
        expected = record.expected(name, key, device)
        if isinstance(expected, str):
            print(f"{name}: {expected}")
        elif result != expected.result:
            print(f"{distance(result, expected.result):.1e}: {name}")
        else:
            print(f"equal: {name}")


if __name__ == "__main__":
    sys.exit(main())
