"""A run in plain text: performance_summary.txt, for terminals, mails and diffs. Never wider than 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from statistics import fmean

from orchestrator.record.events import Event
from orchestrator.record.text import failure_text
from orchestrator.report.run.expert_load import IDLE, busiest, layer_loads
from orchestrator.report.run.host_load import (
    ExchangeCost,
    HostLoad,
    exchange_cost,
    held_text,
    host_load,
    slowest_text,
    span_text,
)
from orchestrator.report.run.read import UNFINISHED, RunRecord, finite, number, section
from orchestrator.report.run.stats import (
    best_evaluation,
    compiled,
    device_name,
    device_use,
    flops_per_second,
    flops_text,
    memory,
    metric,
    metric_names,
    not_finite,
    phase_seconds,
    plural,
    score,
    shares,
    stalls,
    throughput,
    unit_name,
    values,
    wall_seconds,
    watched_metric,
    workers_text,
)
from orchestrator.report.run.verdict import verdict
from orchestrator.types import bytes_text, count_text, seconds_text

WIDTH = 100
LABEL = 22
BAR = 30
MAX_TOLD = 8
FACTS = ("task", "strategy", "gate", "device", "precision")

Row = tuple[str, str]


def performance_summary(record: RunRecord) -> str:
    """The text of performance_summary.txt; sections without data are left out."""
    sections: list[tuple[str, list[Row]]] = [
        ("Run", _run(record)),
        ("Quality", _quality(record)),
        ("Speed", _speed(record)),
        ("A step", _bars(phase_seconds(record))),
        ("The whole time", _bars(wall_seconds(record))),
        ("Memory", _memory(record)),
        ("Experts", _experts(record)),
        ("Hosts", _hosts(record)),
        (
            "Device use",
            [
                (
                    use.name,
                    _use_text(use.mean, use.unit) + " mean   " + _use_text(use.peak, use.unit) + " max",
                )
                for use in device_use(record)
            ],
        ),
        ("Course", _course(record)),
        ("Bound by", _bound(record)),
    ]
    title = f"Performance summary: {_line(record.name)}"[:WIDTH]
    body = [title, "=" * len(title)]
    for name, rows in sections:
        if rows:
            body += ["", name, "-" * len(name), *_aligned(rows)]
    return "\n".join(body) + "\n"


def status_text(record: RunRecord) -> str:
    """The outcome in words, with its reason where one was written."""
    if record.status == UNFINISHED:
        return "unfinished: no end was recorded; it was killed, or is still running"
    reason = (record.end or {}).get("reason")
    return record.status + (f" ({reason})" if reason else "")


def compile_text(record: RunRecord) -> str:
    compiles = record.of("compile")
    if not compiles:
        return "compiled" if compiled(record) else "not compiled"
    last = compiles[-1]
    took, detail = finite(last.get("seconds")), last.get("detail")
    return (
        str(last.get("status", "unknown"))
        + (f" in {seconds_text(took)}" if took else "")
        + (f" ({detail})" if detail else "")
    )


def score_text(value: object) -> str:
    """A loss or metric: four significant figures, nan and inf by their names."""
    figure = number(value)
    return "-" if figure is None else f"{figure:.4g}"


def _run(record: RunRecord) -> list[Row]:
    facts = [(name, device_name(record) if name == "device" else record.fact(name)) for name in FACTS]
    rows = [
        ("status", status_text(record)),
        *[(name, str(value)) for name, value in facts if value not in (None, "")],
    ]
    rows.append(("workers", workers_text(record)))
    total, done = record.fact("total_steps"), record.steps[-1]["step"] if record.steps else 0
    rows.append(("steps", f"{done}" + (f" of {total}" if isinstance(total, int) and total != done else "")))
    if record.epochs:
        rows.append(("epochs", str(record.epochs[-1]["epoch"] + 1)))
    if record.seconds is not None:
        rows.append(("time", seconds_text(record.seconds)))
    if size := finite(record.fact("parameters")):
        rows.append(("parameters", count_text(size)))
    return [(name, text) for name, text in rows if text]


def _quality(record: RunRecord) -> list[Row]:
    names = ["loss", *metric_names(record)]
    rows = []
    if record.steps:
        rows.append(("train, last step", _scores(record.steps[-1], names)))
    if record.evaluations:
        rows.append(("validation, last", _scores(record.evaluations[-1], names)))
    if (best := best_evaluation(record)) is not None:
        name = watched_metric(record)
        rows.append((f"best {name}", f"{score_text(metric(best, name))} at step {best['step']}"))
    if (bad := not_finite(record)) is not None:
        rows.append(("nan or infinite", bad))
    return rows


def _scores(event: Event, names: Iterable[str]) -> str:
    return "   ".join(
        f"{name} {score_text(score(event, name))}" for name in names if score(event, name) is not None
    )


def _speed(record: RunRecord) -> list[Row]:
    rate = throughput(record)
    if rate is None:
        return [("compilation", compile_text(record))]
    rows = [("samples per second", f"{rate.samples:,.1f}")]
    if rate.units is not None:
        rows.append((f"{unit_name(record)} per second", f"{rate.units:,.0f}"))
    rows.append(("median step", seconds_text(rate.step_s)))
    if (flops := flops_per_second(record)) is not None:
        rows.append(("arithmetic", f"{flops_text(flops)} by the plan's count"))
    return [*rows, ("compilation", compile_text(record))]


def _bars(parts: dict[str, float]) -> list[Row]:
    share = shares(parts)
    return [
        (name, f"{seconds_text(parts[name]):>9} {part:>6.1%}  {'#' * round(part * BAR)}".rstrip())
        for name, part in share.items()
    ]


def _memory(record: RunRecord) -> list[Row]:
    rows: list[Row] = []
    if (peak := memory(record)) is not None:
        rows.append(
            ("peak allocated" if record.on_gpu else "peak of the process", bytes_text(peak.allocated))
        )
        if peak.reserved:
            rows += [
                ("peak reserved", bytes_text(peak.reserved)),
                ("efficiency", f"{peak.efficiency:.1%} of the reserved memory was in use"),
            ]
    planned = section(record.plan, "memory")
    if (total := finite(planned.get("total"))) is not None:
        # A process holds the interpreter and its libraries too, so only a device's peak can be held against the estimate.
        error = (
            f", {total / peak.allocated - 1:+.0%} against the measured peak" if peak and record.on_gpu else ""
        )
        rows.append(("estimated", f"{bytes_text(total)}{error}"))
        parts = [(name, finite(size)) for name, size in planned.items() if name not in ("total", "limit")]
        rows.append(("", ", ".join(f"{name} {bytes_text(size)}" for name, size in parts if size)))
    if (limit := finite(planned.get("limit"))) is not None:
        rows.append(("limit", bytes_text(limit)))
    return rows


def _experts(record: RunRecord) -> list[Row]:
    layers = layer_loads(record)
    if (found := busiest(layers)) is None:
        return []
    recent = [ratio for layer in layers for ratio in layer.recent()]
    rows = [("layers × experts", f"{len(layers)} × {max(layer.experts for layer in layers)}")]
    rows.append(
        ("busiest", f"{found[1]:.2f} times its even share, in layer {found[0]} (mean of the second half)")
    )
    return [
        *rows,
        (
            "idle",
            f"{sum(ratio < IDLE for ratio in recent)} of {len(recent)} receive less than a twentieth of it",
        ),
    ]


def _hosts(record: RunRecord) -> list[Row]:
    """Where the experts live, how evenly their hosts are used, and what travels between them."""
    found, sent = host_load(record), exchange_cost(record)
    rows: list[Row] = []
    if found is not None:
        rows.append(("placement", found.placement.sentence or found.placement.method))
        told = slowest_text(found.imbalance, found.predicted_imbalance, "slowest host of each step")
        rows.append(("imbalance", f"{told} ({span_text(found)})"))
    if found is not None and found.work and len(found.hosts) <= MAX_TOLD:
        rows += [
            (found.label(place), _host_text(found, place, share)) for place, share in enumerate(found.work)
        ]
    if sent is not None:
        rows += _exchange(sent)
    return [(name, text) for name, text in rows if text]


def _host_text(found: HostLoad, place: int, share: float) -> str:
    time = f", time {found.measured[place]:.2f}× the mean" if found.measured else ""
    pace = f", {found.pace(place)}" if found.pace(place) else ""
    return f"{held_text(found, place)}{pace}, {share:.1%} of the work{time}"


def _exchange(sent: ExchangeCost) -> list[Row]:
    parts = [f"{bytes_text(sent.bytes)} per step to other hosts"] if sent.bytes is not None else []
    parts += [f"{sent.rows:,.0f} rows"] if sent.rows is not None else []
    waited = f"{seconds_text(sent.seconds)} per step" if sent.seconds is not None else ""
    share = f", {sent.share:.1%} of a step" if sent.share is not None else ""
    return [("exchange", ", ".join(parts)), ("waiting for it", waited + share)]


def _use_text(value: float, unit: str) -> str:
    return f"{bytes_text(value):>9}" if unit == "B" else f"{value:>6.1f} {unit:<2}"


def _course(record: RunRecord) -> list[Row]:
    """What happened on the way, and what it cost."""
    saves, ooms, resumes = record.of("checkpoint"), record.of("oom"), record.resumes
    rows: list[Row] = []
    if saves:
        took, size = values(saves, "seconds"), values(saves, "bytes")
        each = (f", {seconds_text(fmean(took))} each" if took else "") + (
            f", the last {bytes_text(size[-1])}" if size else ""
        )
        held = stalls(record) if any("stall" in save for save in saves) else []
        rows.append(
            (
                "checkpoints",
                f"{len(saves)}{each}"
                + (f"; training held up {seconds_text(fmean(held))} each" if held else ""),
            )
        )
    rows.append(
        (
            "out of memory",
            f"{plural(len(ooms), 'recovery', 'recoveries')}, micro-batch now {ooms[-1].get('next_micro_batch', '?')}"
            if ooms
            else "never",
        )
    )
    if resumes:
        steps = ", ".join(str(event.get("step", "?")) for event in resumes[-8:])
        rows.append(
            (
                "resumed",
                f"{plural(len(resumes), 'time', 'times')} (at step {steps}); {plural(record.replayed_steps, 'step', 'steps')} done again",
            )
        )
    return rows + _failures(record) + _warnings(record)


def _failures(record: RunRecord) -> list[Row]:
    """What failed, how the run came back, and what that cost."""
    told = [event for event in record.of("failure") if event.get("final") is False]
    rows = [("worker lost", failure_text(event)) for event in told[-MAX_TOLD:]]
    if record.recoveries:
        took = values(record.recoveries, "total_seconds")
        each = f" in {seconds_text(fmean(took))} on average" if took else ""
        rows.append(
            ("recovered", f"{plural(len(record.recoveries), 'time', 'times')}{each}; {repeated_text(record)}")
        )
        if (goodput := finite(record.summary.get("goodput"))) is not None:
            rows.append(
                ("goodput", f"{goodput:.1%} of the time in steps and recoveries went into steps that count")
            )
    final = [event for event in record.of("failure") if event.get("final") is not False]
    return rows + [("failure", f"{event.get('kind', '')}: {event.get('message', '')}") for event in final]


def repeated_text(record: RunRecord) -> str:
    lost = max(record.replayed_steps, round(sum(values(record.recoveries, "lost_steps"))))
    return f"{plural(lost, 'step', 'steps')} repeated"


def _warnings(record: RunRecord) -> list[Row]:
    """Each warning once, with how often it came."""
    told: dict[str, int] = {}
    for event in record.of("warning"):
        message = str(event.get("message", ""))
        told[message] = told.get(message, 0) + 1
    return [("warning", message + (f" (×{count})" if count > 1 else "")) for message, count in told.items()]


def _bound(record: RunRecord) -> list[Row]:
    found = verdict(record)
    return [
        ("verdict", found.bound_by),
        *[("because", line) for line in found.evidence],
        *[("try", line) for line in found.advice],
    ]


def _line(text: str) -> str:
    """One line of it: names and messages may hold anything."""
    return "".join(char if char.isprintable() else " " for char in text).rstrip()


def _aligned(rows: Iterable[Row]) -> list[str]:
    """Labels in a column of their own, a repeated one told once; long texts go on below."""
    lines: list[str] = []
    before = ""
    for label, text in rows:
        first, *more = textwrap.wrap(_line(text), WIDTH - LABEL - 2, break_on_hyphens=False) or [""]
        shown = "" if label == before else _line(label)[: LABEL - 1]
        lines += [f"  {shown:<{LABEL}}{first}".rstrip(), *[" " * (LABEL + 2) + line for line in more]]
        before = label
    return lines
