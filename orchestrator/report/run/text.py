"""A run in plain text: performance_summary.txt, for terminals, mails and diffs. At most 100 columns wide."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable
from statistics import fmean

from orchestrator.record.events.decoding import finite
from orchestrator.record.events.kinds import Checkpoint, Evaluation, Failure, OutOfMemory, Step, Warned
from orchestrator.record.experts.expert_changes import change_counts
from orchestrator.report.draw.text import failure_text
from orchestrator.report.run.figures import stats
from orchestrator.report.run.figures.expert_load import IDLE_RATIO, busiest_layer, layer_loads
from orchestrator.report.run.figures.host_load import (
    ExchangeCost,
    HostLoad,
    exchange_cost,
    host_load,
    num_experts_text,
    slowest_text,
    steps_text,
)
from orchestrator.report.run.figures.outcome import (
    compile_text,
    identity_text,
    repeated_text,
    score_text,
    status_text,
    weights_text,
)
from orchestrator.report.run.figures.read import RunRecord, section
from orchestrator.report.run.findings.finding import Finding
from orchestrator.report.run.findings.learning import learning_finding
from orchestrator.report.run.findings.verdict import uneven_experts_finding, verdict
from orchestrator.types import (
    bytes_text,
    count_text,
    counted,
    flops_text,
    memory_part_text,
    printable,
    seconds_text,
)

WIDTH = 100
LABEL_WIDTH = 22
BAR_WIDTH = 30
MAX_LISTED = 8
FACTS = ("task", "strategy", "gate", "device", "precision")

Line = tuple[str, str]
"""Label and text."""


def performance_summary(record: RunRecord) -> str:
    """Return the text of performance_summary.txt; sections without data are left out."""
    sections: dict[str, list[Line]] = {
        "Run": _run_lines(record),
        "Learning": _finding_lines(learning_finding(record)),
        "Bound by": _finding_lines(verdict(record)),
        "Uneven experts": _optional_lines(uneven_experts_finding(record)),
        "Quality": _quality_lines(record),
        "Speed": _speed_lines(record),
        "A step": _bar_lines(stats.phase_seconds(record)),
        "The whole time": _bar_lines(stats.wall_seconds(record)),
        "Memory": _memory_lines(record),
        "Experts": _experts_lines(record),
        "Hosts": _hosts_lines(record),
        "Device use": _device_lines(record),
        "Course": _course_lines(record),
    }
    title = f"Performance summary: {printable(record.name)}"[:WIDTH]
    body = [title, "=" * len(title)]
    for name, lines in sections.items():
        if lines:
            body += ["", name, "-" * len(name), *_aligned(lines)]
    return "\n".join(body) + "\n"


def verdict_lines(record: RunRecord) -> list[str]:
    """Return how the model learnt and what the run was bound by, in a line each, for the terminal."""
    verdicts = {"learning": learning_finding(record), "speed": verdict(record)}
    return [
        f"{name}: {finding.headline[0].lower()}{finding.headline[1:]} ({printable(finding.evidence[0])})"
        for name, finding in verdicts.items()
        if finding.kind not in ("too short", "unknown")
    ]


def _run_lines(record: RunRecord) -> list[Line]:
    lines = [("status", status_text(record))]
    facts = {name: stats.device_name(record) if name == "device" else record.fact(name) for name in FACTS}
    lines += [(name, str(value)) for name, value in facts.items() if value not in (None, "")]
    lines.append(("workers", stats.workers_text(record)))
    total = record.fact("total_steps")
    done = record.steps[-1].step if record.steps else 0
    of_total = f" of {total}" if isinstance(total, int) and total != done else ""
    lines.append(("steps", f"{done}{of_total}"))
    if record.epochs:
        lines.append(("epochs", str(record.epochs[-1].epoch + 1)))
    if record.seconds is not None:
        lines.append(("time", seconds_text(record.seconds)))
    num_parameters = finite(record.fact("parameters"))
    if num_parameters:
        lines.append(("parameters", count_text(num_parameters)))
    lines.append(("identity", identity_text(record)))
    return [(label, text) for label, text in lines if text]


def _quality_lines(record: RunRecord) -> list[Line]:
    names = ["loss", *stats.metric_names(record)]
    lines = []
    if record.steps:
        lines.append(("train, last step", _scores_text(record.steps[-1], names)))
    final = stats.final_evaluation(record)
    if final is not None:
        lines.append(("validation", f"{_scores_text(final, names)}   at step {final.step}"))
        last = record.evaluations[-1]
        if last.step != final.step:
            lines.append(("validation, last", _scores_text(last, names)))
    lines.append(("final weights", weights_text(record)))
    best = stats.best_evaluation(record)
    if best is not None:
        name = stats.watched_metric(record)
        lines.append((f"best {name}", f"{score_text(stats.score_number(best, name))} at step {best.step}"))
    non_finite = stats.non_finite_text(record)
    if non_finite is not None:
        lines.append(("nan or infinite", non_finite))
    return [(label, text) for label, text in lines if text]


def _scores_text(event: Step | Evaluation, names: Iterable[str]) -> str:
    scores = {name: stats.score(event, name) for name in names}
    return "   ".join(f"{name} {score_text(value)}" for name, value in scores.items() if value is not None)


def _speed_lines(record: RunRecord) -> list[Line]:
    lines = []
    measured = stats.speed(record)
    if measured is not None:
        lines.append(("samples per second", f"{measured.samples:,.1f}"))
        if measured.units != measured.samples:
            lines.append((f"{stats.unit_name(record)} per second", f"{measured.units:,.0f}"))
        lines.append(("median step", seconds_text(measured.median_step_s)))
        lines.append(("mean step", seconds_text(measured.mean_step_s)))
        lines.append(("measured over", measured.basis))
        flops = stats.flops_per_second(record)
        if flops is not None:
            lines.append(("compute", f"{flops_text(flops)}/s by the plan's count"))
    return [*lines, ("compilation", compile_text(record))]


def _bar_lines(parts: dict[str, float]) -> list[Line]:
    lines = []
    for name, share in stats.shares(parts).items():
        bar = "#" * round(share * BAR_WIDTH)
        lines.append((name, f"{seconds_text(parts[name]):>9} {share:>6.1%}  {bar}".rstrip()))
    return lines


def _memory_lines(record: RunRecord) -> list[Line]:
    lines: list[Line] = []
    peak = stats.memory(record)
    if peak is not None:
        label = "peak allocated" if record.on_gpu else "peak of the process"
        lines.append((label, bytes_text(peak.allocated)))
        if peak.reserved:
            lines.append(("peak reserved", bytes_text(peak.reserved)))
            lines.append(("efficiency", f"{peak.efficiency:.1%} of the reserved memory was in use"))
    planned = section(record.plan, "memory")
    estimate = finite(planned.get("total"))
    if estimate is not None:
        # A process also holds the interpreter and its libraries: only a device's peak compares with
        # the estimate.
        error = ""
        if peak and record.on_gpu:
            error = f", {estimate / peak.allocated - 1:+.0%} against the measured peak"
        lines.append(("estimated", f"{bytes_text(estimate)}{error}"))
    limit = finite(planned.get("limit"))
    if limit is not None:
        lines.append(("limit", bytes_text(limit)))
    return lines + _memory_part_lines(record)


def _memory_part_lines(record: RunRecord) -> list[Line]:
    """Return the parts of the memory, each as it was measured and as the plan estimated it."""
    parts = stats.memory_parts(record)
    peak = stats.memory(record)
    lines: list[Line] = []
    if peak is not None and peak.worker is not None:
        lines.append(("parts", f"of worker {peak.worker}, whose peak is the largest"))
    is_measured = any(part.measured is not None for part in parts)
    for part in parts:
        estimated = f"{bytes_text(part.estimated):>9} estimated" if part.estimated else ""
        measured = f"{bytes_text(part.measured):>9} measured" if part.measured is not None else ""
        text = f"{measured:<18}   {estimated}" if is_measured else estimated
        lines.append((memory_part_text(part.name), text.rstrip()))
    return lines


def _experts_lines(record: RunRecord) -> list[Line]:
    layers = layer_loads(record)
    busiest = busiest_layer(layers)
    if busiest is None:
        return []
    layer, ratio = busiest
    recent = [ratio for layer in layers for ratio in layer.recent()]
    num_idle = sum(ratio < IDLE_RATIO for ratio in recent)
    lines = [
        ("layers × experts", f"{len(layers)} × {max(layer.num_experts for layer in layers)}"),
        ("busiest", f"{ratio:.2f} times its even share, in layer {layer} (mean of the second half)"),
        ("idle", f"{num_idle} of {len(recent)} receive less than a twentieth of it"),
    ]
    counts = change_counts(record.expert_changes)
    if counts:
        lines.append(("changes", ", ".join(f"{count} {kind}" for kind, count in counts.items())))
    return lines


def _hosts_lines(record: RunRecord) -> list[Line]:
    """Return the placement of the experts, the balance of their hosts, and the cost of the exchange."""
    lines: list[Line] = []
    load = host_load(record)
    if load is not None:
        lines.append(("placement", load.placement.sentence or load.placement.method))
        balance = slowest_text(load.imbalance, load.predicted_imbalance, "slowest host of each step")
        lines.append(("imbalance", f"{balance} ({steps_text(load)})"))
        if load.work and len(load.hosts) <= MAX_LISTED:
            lines += [(load.label(index), _host_text(load, index)) for index in range(len(load.hosts))]
    cost = exchange_cost(record)
    if cost is not None:
        lines += _exchange_lines(cost)
    return [(label, text) for label, text in lines if text]


def _host_text(load: HostLoad, index: int) -> str:
    parts = [num_experts_text(load, index), load.relative_speed_text(index)]
    if load.work:
        parts.append(f"{load.work[index]:.1%} of the work")
    if load.measured:
        parts.append(f"time {load.measured[index]:.2f}× the mean")
    return ", ".join(part for part in parts if part)


def _exchange_lines(cost: ExchangeCost) -> list[Line]:
    sent = []
    if cost.bytes is not None:
        sent.append(bytes_text(cost.bytes))
    if cost.rows is not None:
        sent.append(f"{cost.rows:,.0f} rows")
    waiting = f"{seconds_text(cost.seconds)} per step" if cost.seconds is not None else ""
    share = f", {cost.share:.1%} of a step" if cost.share is not None else ""
    exchanged = f"{' and '.join(sent)} per step to other hosts" if sent else ""
    return [("exchange", exchanged), ("waiting for it", waiting + share)]


def _device_lines(record: RunRecord) -> list[Line]:
    lines = []
    for figure in stats.monitored_figures(record):
        mean = _figure_text(figure.mean, figure.unit)
        peak = _figure_text(figure.peak, figure.unit)
        lines.append((figure.name, f"{mean} mean   {peak} max"))
    return lines


def _figure_text(value: float, unit: str) -> str:
    return f"{bytes_text(value):>9}" if unit == "B" else f"{value:>6.1f} {unit:<2}"


def _course_lines(record: RunRecord) -> list[Line]:
    """Return checkpoints, out-of-memory errors, resumes, failures and warnings, with their costs."""
    lines = _checkpoint_lines(record)
    ooms = record.of(OutOfMemory)
    oom_text = "never"
    if ooms:
        micro_batch = ooms[-1].next_micro_batch or "?"
        oom_text = f"{counted(len(ooms), 'recovery', 'recoveries')}, micro-batch now {micro_batch}"
    lines.append(("out of memory", oom_text))
    if record.resumes:
        times = counted(len(record.resumes), "time")
        steps = ", ".join(
            "?" if event.step is None else str(event.step) for event in record.resumes[-MAX_LISTED:]
        )
        repeated = counted(record.replayed_steps, "step")
        lines.append(("resumed", f"{times} (at step {steps}); {repeated} done again"))
    return lines + _failure_lines(record) + _warning_lines(record)


def _checkpoint_lines(record: RunRecord) -> list[Line]:
    checkpoints = record.of(Checkpoint)
    totals = record.totals
    if not totals.num_checkpoints:
        return []
    text = str(totals.num_checkpoints)
    if totals.checkpoint_seconds:
        text += f", {seconds_text(totals.checkpoint_seconds / totals.num_checkpoints)} each"
    sizes = stats.values(checkpoints, "bytes")
    if sizes:
        text += f", the last {bytes_text(sizes[-1])}"
    # Without stalls the checkpoints blocked the training for their whole duration.
    if totals.num_stalls and any(event.stall is not None for event in checkpoints):
        text += f"; training blocked {seconds_text(totals.stall_seconds / totals.num_stalls)} each"
    return [("checkpoints", text)]


def _failure_lines(record: RunRecord) -> list[Line]:
    """Return the failures, the recoveries and their cost."""
    failures = record.of(Failure)
    recovered = [event for event in failures if event.final is False]
    lines = [("worker lost", failure_text(event)) for event in recovered[-MAX_LISTED:]]
    if record.recoveries:
        times = counted(len(record.recoveries), "time")
        durations = stats.values(record.recoveries, "total_seconds")
        mean = f" in {seconds_text(fmean(durations))} on average" if durations else ""
        lines.append(("recovered", f"{times}{mean}; {repeated_text(record)}"))
        goodput = finite(record.summary.get("goodput"))
        if goodput is not None:
            text = f"{goodput:.1%} of the time in steps and recoveries went into steps that count"
            lines.append(("goodput", text))
    final = [event for event in failures if event.final is not False]
    lines += [("failure", f"{event.kind}: {event.message}") for event in final]
    return lines


def _warning_lines(record: RunRecord) -> list[Line]:
    """Return each warning once, with the number of times it occurred."""
    counts = Counter(event.message for event in record.of(Warned))
    return [("warning", text + (f" (×{count})" if count > 1 else "")) for text, count in counts.items()]


def _optional_lines(finding: Finding | None) -> list[Line]:
    return _finding_lines(finding) if finding is not None else []


def _finding_lines(finding: Finding) -> list[Line]:
    lines = [("verdict", f"{finding.kind}: {finding.headline}")]
    lines += [("because", line) for line in finding.evidence]
    return lines + [("try", line) for line in finding.advice]


def _aligned(lines: Iterable[Line]) -> list[str]:
    """Return labels in a column of their own, a repeated label once; long texts are wrapped."""
    aligned: list[str] = []
    previous = ""
    indent = " " * (LABEL_WIDTH + 2)
    for label, text in lines:
        wrapped = textwrap.wrap(printable(text), WIDTH - LABEL_WIDTH - 2, break_on_hyphens=False)
        first, *rest = wrapped or [""]
        shown = "" if label == previous else printable(label)[: LABEL_WIDTH - 1]
        aligned.append(f"  {shown:<{LABEL_WIDTH}}{first}".rstrip())
        aligned += [indent + line for line in rest]
        previous = label
    return aligned
