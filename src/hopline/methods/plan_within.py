"""A method's plan within a budget, or an error that names limits and a method that would fit.

The memory of a step is predicted. Before any step has run, the prediction is a bound by the model's widths,
far above what steps take. If the plan does not fit by the bound, a few steps are measured, and the method
plans again:

    plan_of       measures steps that fit the budget
    _find_plan    measures larger steps too, before it gives up
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hopline.budget.memory_plan import RunOutline
from hopline.budget.plan import PLACES, Budget, DoesNotFit, Place, Plan
from hopline.budget.predictor import Predictor
from hopline.budget.probe import measure_steps
from hopline.contract import Method
from hopline.core.batch import Batch
from hopline.methods.full_batch.settings import FullBatch
from hopline.methods.historical.settings import Historical
from hopline.methods.sampled.memory_plan import draw_batches
from hopline.methods.sampled.settings import Sampled
from hopline.nn.layered import Layered
from hopline.util.config import CHANGES_TRAINING, kind_of
from hopline.util.host import process_bytes

PROBED_FANOUT = 10
MAX_TRIED_BUDGETS = 5
"""Most budgets that are tried before an error names one."""
FOLDER = Path("tables")
"""The folder that an error suggests for tables that do not fit in memory."""


def plan_within(method: Method, outline: RunOutline, budget: Budget) -> Plan:
    """The method's plan; if it does not fit, an error that names a method that would."""
    other_bytes = _other_process_bytes(outline)
    try:
        return replace(plan_or_raise(method, outline, budget), process_bytes=other_bytes)
    except DoesNotFit as error:
        others = alternatives(method, outline)
        fitting = next((other for other in others if _fits(other, outline.forget(), budget)), None)
        if fitting is None:
            tip = "no other method fits this budget either"
        else:
            tip = f"with this budget {settings_to_type(fitting)} fits {CHANGES_TRAINING}"
        raise DoesNotFit(f"{error}; {tip}", error.smallest_bytes) from None


def _other_process_bytes(outline: RunOutline) -> int:
    """Host memory that the process takes now, without the data and weights that a plan counts by themselves."""
    tensors = [*outline.data_on_host(), *outline.resident_items()[:1]]
    return max(0, process_bytes() - sum(item.num_bytes for item in tensors if item.place == "host"))


def plan_or_raise(method: Method, outline: RunOutline, budget: Budget) -> Plan:
    """The method's plan; if it does not fit, an error with limits that do."""
    plan = replace(_find_plan(method, outline, budget), budget_key=budget.key_on(outline.device))
    if plan.fits:
        return plan
    raise plan.refusal(_find_sufficient_limits(method, outline, budget, plan.smallest_limits))


def plan_of(method: Method, outline: RunOutline, budget: Budget) -> Plan:
    """The method's plan, whether it fits or not.

    If the largest step exceeds its limit by the bound, a few steps within the limit are measured first.
    """
    plan = method.plan(outline, budget)
    # A limit of 0 or less: the data alone exceed the budget, so no step can be measured within it.
    if plan.step_bytes > plan.limit_bytes > 0 and not _is_sure(plan, outline):
        learn(outline, plan.num_blocks, plan.limit_bytes)
        plan = method.plan(outline, budget)
    return plan


def learn(outline: RunOutline, num_blocks: int | None, limit: float = math.inf) -> Predictor:
    """Teach the predictor of steps over `num_blocks` blocks by sampled batches, and return it.

    num_blocks: as `Plan.num_blocks`. None, for a plan that steps cannot improve, is an error. limit: the
    bytes that a measured step may take.
    """
    assert num_blocks is not None
    predictor = outline.predictor(num_blocks)
    method = Sampled(fanouts=(PROBED_FANOUT,) * num_blocks)

    def draw(num_seeds: int) -> Batch:
        return next(draw_batches(method, outline, num_seeds))

    measure_steps(predictor, outline, draw, limit)
    return predictor


def _is_sure(plan: Plan, outline: RunOutline) -> bool:
    # None: no measured step improves the plan.
    return plan.num_blocks is None or outline.predictor(plan.num_blocks).is_sure


def _find_sufficient_limits(
    method: Method, outline: RunOutline, budget: Budget, guess: dict[Place, int]
) -> dict[Place, int]:
    """By place: limits with which the method fits. The smallest that a few tries find.

    Every try begins with a new predictor: the user who types these limits begins a new run, which knows
    nothing of the steps measured here. If no try fits, the last guess is returned.

    guess: by place, limits that the method seems to need.
    """
    sufficient: dict[Place, int] | None = None
    for _ in range(MAX_TRIED_BUDGETS):
        new_outline = outline.forget()
        plan = _find_plan(method, new_outline, _raise_limits(budget, guess, outline))
        if not plan.fits:
            # Sufficient limits have been lowered too far: the try before this one counts.
            if sufficient is not None:
                break
            higher: dict[Place, int] = {
                place: max(guess.get(place, 0), plan.smallest_limits.get(place, 0)) for place in PLACES
            }
            guess = {place: limit for place, limit in higher.items() if limit > 0}
            continue
        # These limits fit. With measured steps, smaller ones may.
        if not _is_sure(plan, new_outline):
            learn(new_outline, plan.num_blocks, plan.limit_bytes)
        sufficient = guess
        guess = plan_of(method, new_outline, budget).smallest_limits
        is_lower = any(limit < sufficient.get(place, 0) for place, limit in guess.items())
        if not is_lower:
            break
    return guess if sufficient is None else sufficient


def _find_plan(method: Method, outline: RunOutline, budget: Budget) -> Plan:
    """The method's plan, which may still not fit.

    Within a small budget `plan_of` measures few steps or none, and the plan relies on the bound. So before
    a plan is given up, larger steps are measured, within limits that fit by the bound.
    """
    plan = plan_of(method, outline, budget)
    if plan.fits or _is_sure(plan, outline):
        return plan
    sufficient_plan = plan_of(method, outline, _raise_limits(budget, plan.smallest_limits, outline))
    learn(outline, plan.num_blocks, sufficient_plan.limit_bytes)
    return plan_of(method, outline, budget)


def _raise_limits(budget: Budget, limits: Mapping[Place, int], outline: RunOutline) -> Budget:
    """The budget with these limits in place of its own. On a CPU the host's limit is that of the device too."""
    settings = {place: str(limit) for place, limit in limits.items()}
    if "host" in settings and outline.compute_place == "host":
        settings["device"] = settings["host"]
    return replace(budget, **settings)


def _fits(method: Method, outline: RunOutline, budget: Budget) -> bool:
    """Whether a method has a plan that fits the budget."""
    try:
        return plan_of(method, outline, budget).fits
    except ValueError:  # the method does not go with the model
        return False


def alternatives(method: Method | None, outline: RunOutline) -> list[Method]:
    """The library's methods but `method`, with their default settings; some a second time, with tables in files."""
    methods: list[Method] = [Sampled()]
    if isinstance(outline.model, Layered):
        methods += [Historical(), FullBatch(), Historical(folder=FOLDER), FullBatch(folder=FOLDER)]
    others = [other for other in methods if type(other) is not type(method)]
    return [other.for_model(outline.model).for_graph(outline.data.num_nodes) for other in others]


def settings_to_type(method: Method) -> str:
    folder = getattr(method, "folder", None)
    folder_setting = "" if folder is None else f" method.folder={folder}"
    return f"method={kind_of(type(method))}{folder_setting}"
