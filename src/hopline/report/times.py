"""Sections of the page of a run that say where its time went: by part of the run, and by stage of the pipeline."""

import statistics
from collections.abc import Mapping, Sequence
from html import escape

from hopline.report.charts import bar_chart, swatch
from hopline.report.format import percent, unit_of
from hopline.report.parts import Html, Record, folded, is_number, numbers, table


def time_by_part(elapsed_s: float, epochs: Sequence[Record], evaluations: Sequence[Record]) -> dict[str, float]:
    """The seconds of each part of the run; their sum is the total.

    elapsed_s: the stamp of the last record.
    evaluations: those that training waited for.
    """
    stages = [numbers(record.get("stages")) for record in epochs]
    # Written within the seconds of an epoch, and after its evaluation.
    within_s = sum(seconds.get("checkpoint", 0.0) for seconds in stages)
    after_s = sum(seconds.get("evaluate.checkpoint", 0.0) for seconds in stages)
    parts = {
        "training": _sum_of(epochs, "seconds") - within_s,
        "evaluation": _sum_of(evaluations, "seconds"),
        "checkpoints": within_s + after_s,
    }
    # Of a run that was killed within an epoch and resumed, the seconds of that epoch count what no stamp does.
    parts["everything else"] = max(0.0, elapsed_s - sum(parts.values()))
    return parts


def _sum_of(records: Sequence[Record], name: str) -> float:
    return sum(record[name] for record in records if is_number(record.get(name)))


def time_section(parts: Mapping[str, float], evaluation_stages: Sequence[Record], is_async: bool) -> str:
    """Time by part as a table with bars.

    evaluation_stages: statistics of the stages of evaluation, which run side by side.
    is_async: whether validation ran beside training.
    """
    total_s = sum(parts.values())
    unit = unit_of([total_s])
    rows = [
        (name, unit.write(seconds), percent(seconds / total_s), Html(f'<i style="width:{seconds / total_s:.1%}"></i>'))
        for name, seconds in parts.items()
    ]
    total = ("total", unit.write(total_s), "100%", Html(""))
    note = "From the start of training: opening the dataset came before."
    if is_async:
        note += " Validation ran beside training, and is in none of the parts."
    heads = ("part", f"time ({unit.name})", "share", "")
    shown = table(heads, rows, numbers_from=1, sums=[total], kind="bars")
    return f'<h2>Time by part</h2><p class="dim">{note}</p>{shown}{_evaluation(evaluation_stages)}'


def _evaluation(stages: Sequence[Record]) -> str:
    columns = ("first_epoch_s", "mean_s")
    times = [stage[column] for stage in stages for column in columns if is_number(stage.get(column))]
    if not times:
        return ""
    unit = unit_of(times)
    rows = [(str(stage.get("name")), *(unit.write(stage.get(column)) for column in columns)) for stage in stages]
    heads = ("stage", f"first epoch ({unit.name})", f"later epochs, mean ({unit.name})")
    return folded("Stages of evaluation", table(heads, rows, numbers_from=1))


def stages_of(epoch: Record) -> dict[str, float]:
    """Seconds of each stage in an epoch: its own work, or of old runs its spans, which hold waiting too."""
    return numbers(epoch.get("work")) or numbers(epoch.get("stages"))


def pipeline_section(pipeline: Record, epochs: Sequence[Record]) -> str:
    """The bottleneck and what to change, the stages by epoch, and what their overlap gains.

    pipeline: the explanation of the run, or of its last epoch; empty where there is none.
    """
    shares = numbers(pipeline.get("shares"))
    work = [stages_of(epoch) for epoch in epochs]
    found = dict.fromkeys(name for stages in work for name in stages)
    # In the order in which a batch goes through them.
    names = [name for name in shares if name in found] + [name for name in found if name not in shares]
    if not names:
        return ""
    unit = unit_of([statistics.median(sum(stages.values()) for stages in work)])
    has_work = any(numbers(epoch.get("work")) for epoch in epochs)
    parts = ["<h2>Pipeline</h2>"]
    if pipeline.get("sentence"):
        parts.append(f'<p class="notice">{escape(str(pipeline["sentence"]))}</p>')
    parts.append(f'<p class="dim">{_note(pipeline, has_work)}</p>')
    several = len(epochs) > 1
    if several:  # of one epoch the table says it all
        bars = [(epoch["epoch"], stages) for epoch, stages in zip(epochs, work, strict=True)]
        parts.append(bar_chart("Work by stage" if has_work else "Time by stage", names, bars, unit))

    times = [f"first epoch ({unit.name})", f"later epochs, mean ({unit.name})", "± std"]
    heads = ["stage", *(times if several else [f"epoch ({unit.name})"]), *(["share of the work"] if shares else [])]
    rows = []
    for at, name in enumerate(names):
        first, *later = [stages.get(name, 0.0) for stages in work]
        cells = [Html(swatch(at, name)), unit.write(first)]
        if several:
            cells.append(unit.write(statistics.fmean(later)))
            cells.append(unit.write(statistics.stdev(later) if len(later) > 1 else None))
        if shares:
            cells.append(percent(shares[name]) if name in shares else "")
        rows.append(cells)

    sums = []
    if shares:
        serial_s, bound, seconds = pipeline["serial_s"], pipeline["bound"], pipeline["seconds"]
        for name, time_s, share in (
            ("all stages, one after the other", serial_s, 1.0),
            ("least with perfect overlap", serial_s * bound, bound),
            ("measured epoch", seconds, pipeline["achieved"]),
        ):
            time = unit.write(time_s)
            sums.append([name, *(["", time, ""] if several else [time]), percent(share)])
    return "".join([*parts, table(heads, rows, numbers_from=1, sums=sums)])


def _note(pipeline: Record, has_work: bool) -> str:
    sentences = ["Work of each stage per epoch, without waiting." if has_work else "Time in each stage per epoch."]
    if pipeline.get("shares"):
        workers = pipeline.get("workers")
        if workers:
            sentences.append(f"Prefetch by {workers} thread{'s' * (workers > 1)}: stages overlap.")
        else:
            sentences.append("No prefetch: the thread that trains also prepares the batches.")
        sentences.append(f"{pipeline['num_batches']:,} batches per epoch.")
        if not has_work:
            sentences.append("Times include waiting for a core, shares do not.")
    return " ".join(sentences)
