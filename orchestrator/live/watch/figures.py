"""The head of a frame: state of the run, progress, loss, speed, machine and time of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from orchestrator.live.watch.lines import LABEL_WIDTH, bar, curve, label_line, line, spread
from orchestrator.record.events.kinds import DeviceSample, Evaluation, HostSample, Monitor, Phases, Start
from orchestrator.record.live.state import RunState
from orchestrator.record.summary.speed import RECENT_STEPS
from orchestrator.types import PHASES, bytes_text, count_text, counted, seconds_text, speed_text

if TYPE_CHECKING:
    from rich.text import Text


_MAX_CURVE = 60
_MIN_BAR = 5
_MAX_BAR = 60
_PHASE_FACTS = 16  # columns of percent and time
_MAX_GPUS = 8
_STYLES = {"running": "cyan", "completed": "green", "failed": "bold red", "recovering": "bold yellow"}


def head(state: RunState, name: str, width: int, now: float) -> list[Text]:
    """Return the name of the run, its status, and its constants."""
    status = state.status
    silence = state.silence(now)
    text = status if silence is None else f"{status}, no event for {seconds_text(silence)}"
    style = _STYLES.get(status, "yellow") if silence is None else "yellow"
    lines = [spread((name, "bold"), (text, style), width)]
    if state.start is not None:
        lines.append(line((" · ".join(_constants(state, state.start)), "dim")))
    if state.end is not None:
        lines.append(line((state.end.reason, style)))
    return lines


def _constants(state: RunState, start: Start) -> Iterator[str]:
    yield str(start.task)
    yield str(start.strategy).replace("_", " ")
    if state.workers is not None:
        yield counted(state.workers, "worker")
    yield from (fact for fact in (start.device, start.precision) if fact)
    if start.global_batch_size is not None:
        yield f"batch {start.global_batch_size:g}"
    if start.parameters is not None:
        yield f"{count_text(start.parameters)} parameters"


def progress(state: RunState, width: int, now: float) -> Text:
    """Return how far the run is, and the time that it takes."""
    total = state.total_steps
    steps = f"step {state.step:,}" if total is None else f"step {state.step:,} of {total:,}"
    left = state.seconds_left()
    elapsed = state.elapsed(now)
    times = [
        "" if state.epoch is None else f"epoch {state.epoch}",
        "" if elapsed is None else f"{seconds_text(elapsed)} elapsed",
        f"{seconds_text(left)} left" if left else "",
    ]
    facts = ", ".join([steps, *(text for text in times if text)])
    share = state.step / total if total else 0.0
    percent = f"{share:.0%}  " if total else ""
    bar_width = min(_MAX_BAR, width - LABEL_WIDTH - len(percent) - len(facts) - 1)
    shown_bar = bar(share, bar_width) + " " if total and bar_width >= _MIN_BAR else ""
    return label_line("progress", (shown_bar, "cyan"), (percent, "bold"), facts)


def losses(state: RunState, width: int) -> Text:
    """Return the loss of the last step, its curve, and the last validation."""
    shown = "–" if state.loss is None else f"{state.loss:.4g}"
    evaluation = state.newest(Evaluation)
    validation = ""
    if evaluation is not None:
        best = " ★" if evaluation.best else ""
        loss = "–" if evaluation.loss is None else f"{evaluation.loss:.4g}"
        validation = f"  validation {loss} at step {evaluation.step:,}{best}"
    num_points = min(_MAX_CURVE, width - LABEL_WIDTH - len(shown) - len(validation) - 2)
    points = curve(state.loss_means(max(0, num_points)))
    return label_line("loss", (shown, "bold"), "  ", (points, "cyan"), validation)


def speed(state: RunState) -> Text | None:
    """Return throughput and step time; None before the first step."""
    measured = state.speed()
    if measured is None:
        return None
    unit = (state.start.unit if state.start is not None else None) or "tokens"
    rates = [f"{speed_text(measured.samples)} samples/s"]
    if measured.units != measured.samples:
        rates.insert(0, f"{speed_text(measured.units)} {unit}/s")
    basis = f"mean of {measured.num_steps}" if measured.num_steps < RECENT_STEPS else f"last {RECENT_STEPS}"
    time = f"{seconds_text(measured.mean_step_s)} per step ({basis})"
    return label_line("speed", (rates[0], "bold"), *(f", {rate}" for rate in rates[1:]), f", {time}")


def counts(state: RunState) -> Text | None:
    """Return the number of failures and of changes of experts; None if there were none."""
    names = {
        "failures": ("failure", "failures"),
        "recoveries": ("recovery", "recoveries"),
        "lost_steps": ("step repeated", "steps repeated"),
    }
    numbers = state.counts
    texts = [counted(numbers[key], *nouns) for key, nouns in names.items() if numbers[key]]
    changes = state.changes()
    if changes:
        texts.append("experts " + ", ".join(f"{count} {name}" for name, count in changes.items()))
    if not texts:
        return None
    return label_line("so far", (", ".join(texts), "yellow" if numbers["failures"] else ""))


def machine(state: RunState, width: int) -> list[Text]:
    """Return the load of the main worker's node and of its GPUs."""
    reading = state.newest(Monitor)
    if reading is None:
        return []
    host = reading.host
    texts = [
        "" if host.cpu_percent is None else f"CPU {host.cpu_percent:.0f}%",
        _memory_text(host),
        "" if host.process_memory is None else f"this process {bytes_text(host.process_memory)}",
    ]
    lines = [label_line("node", ", ".join(text for text in texts if text))]
    devices = reading.devices
    lines += [_gpu(device, width) for device in devices[:_MAX_GPUS]]
    if len(devices) > _MAX_GPUS:
        lines.append(label_line("", (f"{len(devices) - _MAX_GPUS} more GPUs", "dim")))
    return lines


def _gpu(device: DeviceSample, width: int) -> Text:
    used = device.utilization
    texts = [
        "" if used is None else f"{used:.0f}% busy",
        _memory_text(device),
        "" if device.power is None else f"{device.power:.0f} W",
        "" if device.temperature is None else f"{device.temperature:.0f} °C",
    ]
    facts = ", ".join(text for text in texts if text)
    bar_width = min(_MAX_BAR // 3, width - LABEL_WIDTH - len(facts) - 1)
    shown_bar = "" if used is None or bar_width < _MIN_BAR else bar(used / 100, bar_width) + " "
    return label_line(f"gpu {device.index}", (shown_bar, "cyan"), facts)


def _memory_text(sample: HostSample | DeviceSample) -> str:
    if sample.memory_used is None:
        return ""
    total = "" if sample.memory_total is None else f" of {bytes_text(sample.memory_total)}"
    return f"memory {bytes_text(sample.memory_used)}{total}"


def step_phases(state: RunState, width: int) -> list[Text]:
    """Return the share of each phase in the time of a step, as bars."""
    phases = state.newest(Phases)
    if phases is None or not phases.total:
        return []
    total = phases.total
    seconds = {name: value for name in PHASES if (value := getattr(phases, name)) is not None}
    lines = [label_line("a step", f"{seconds_text(total)} at step {phases.step:,}")]
    bar_width = max(_MIN_BAR, min(_MAX_BAR, width - LABEL_WIDTH - _PHASE_FACTS))
    for name, value in seconds.items():
        figures = f" {value / total:4.0%}  {seconds_text(value)}"
        lines.append(label_line(f"  {name}", (bar(value / total, bar_width), "cyan"), figures))
    return lines
