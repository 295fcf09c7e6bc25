"""Events in one line each, in the same words on the screen, in ``watch`` and in the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from pathlib import PurePath

from orchestrator.record.events import kinds
from orchestrator.record.events.kinds import Event
from orchestrator.types import bytes_text, counted, first_line, seconds_text

MAX_CAUSE_CHARS = 160  # events.jsonl has the whole message
_SOURCES = {"memory": ", from snapshots in memory", "disk": ", from a checkpoint"}


def failure_text(failure: kinds.Failure) -> str:
    """Return a failure as text: 'step 40: host 1 was lost'."""
    cause = failure.message.strip() or failure.kind or "failure"
    prefix = "" if failure.step is None else f"step {failure.step}: "
    return prefix + first_line(cause, MAX_CAUSE_CHARS)


def recovery_text(recovery: kinds.Recovery) -> str:
    """Return a recovery as text.

    Example: 'recovered in 12.3 s on 2 workers at step 35, from snapshots in memory, 5 steps
    repeated'.
    """
    parts = [
        "recovered",
        "" if recovery.total_seconds is None else f"in {recovery.total_seconds:.1f} s",
        _workers_text(recovery),
        _groups_text(recovery),
        "" if recovery.step is None else f"at step {recovery.step}",
    ]
    lost = recovery.lost_steps
    repeated = f", {counted(lost, 'step')} repeated" if lost else ""
    source = _SOURCES.get(recovery.source or "", "")
    return " ".join(part for part in parts if part) + source + repeated


def compile_text(event: kinds.Compile) -> str:
    if event.status == "failed":
        return f"compilation failed, continuing without it: {event.detail}"
    detail = f" ({event.detail})" if event.detail else ""
    return f"{event.status or 'compiled'} in {event.seconds or 0.0:.1f} s{detail}"


def oom_text(event: kinds.OutOfMemory) -> str:
    """Return an out-of-memory error and its consequence as text."""
    smaller = event.next_micro_batch
    consequence = f"continuing with {smaller}" if smaller else "no smaller one is left to try"
    where = f" ({event.where})" if event.where else ""
    size = "?" if event.micro_batch is None else event.micro_batch
    return f"out of memory at step {event.step}{where} with a micro-batch of {size}; {consequence}"


def cuda_graph_text(event: kinds.CudaGraph) -> str:
    """Return whether steps are captured in a CUDA graph, and why not."""
    if event.status == "captured":
        return f"captured a CUDA graph in {event.seconds or 0.0:.1f} s: {event.detail}"
    return f"no CUDA graph: {event.detail}"


def score_texts(evaluation: kinds.Evaluation) -> list[str]:
    """Return the loss and the metrics of an evaluation with their names."""
    numbers = {"validation loss": evaluation.loss, **evaluation.metrics}
    return [f"{name} {value:.4g}" for name, value in numbers.items() if value is not None]


def change_text(change: kinds.ExpertChange) -> str:
    """Return what changed: 'expert 4 born from 1', 'expert 2 moved to host 1'."""
    experts = _named("expert", change.ids)
    match change.change:
        case "born":
            return f"{experts} born {f'from {_numbers(change.parents)}' if change.parents else 'afresh'}"
        case "merged":
            return f"{experts} merged from {_numbers(change.parents)}"
        case "warmed":
            return f"{experts} ended the warm-up"
        case "moved":
            return _with_hosts(change, " moved to ", " to ")
        case "copied":
            return _with_hosts(change, " now on ", " on ")
        case "undone":
            return f"change of {experts} undone"
        case _:
            return f"{experts} {change.change}"


def effect_text(change: kinds.ExpertChange) -> str:
    """Return the measured effect of a change; empty if nobody measured it."""
    parts = []
    if change.loss_before is not None and change.loss_after is not None:
        parts.append(f"loss {change.loss_before:.4g} → {change.loss_after:.4g}")
    if change.output_change is not None:
        parts.append(f"output changed by {change.output_change:.2g}")
    return ", ".join(parts)


def change_line(change: kinds.ExpertChange) -> str:
    """Return a change with its layer, its reason and its effect."""
    changes_number = change.change in ("born", "merged", "pruned", "undone")
    number = f", {change.experts} experts now" if changes_number and change.experts else ""
    reason = f": {first_line(change.reason, MAX_CAUSE_CHARS)}" if change.reason else ""
    effect = effect_text(change)
    return f"layer {change.layer}: {change_text(change)}{number}{reason}{f' ({effect})' if effect else ''}"


def _with_hosts(change: kinds.ExpertChange, first_verb: str, verb: str) -> str:
    """Return the experts of each host: 'expert 6 moved to host 0, experts 4 and 7 to hosts 1 and 2'."""
    experts_of: dict[tuple[int, ...], list[int]] = {}
    # A damaged event may have fewer hosts.
    for expert, hosts in zip(change.ids, chain(change.hosts, repeat(())), strict=False):
        experts_of.setdefault(hosts, []).append(expert)
    groups = [
        (_named("expert", experts), _named("host", hosts) if hosts else "unknown hosts")
        for hosts, experts in experts_of.items()
    ]
    verbs = [first_verb] + [verb] * (len(groups) - 1)
    return ", ".join(experts + verb + hosts for (experts, hosts), verb in zip(groups, verbs, strict=True))


def _named(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun if len(numbers) == 1 else f'{noun}s'} {_numbers(numbers)}"


def _numbers(numbers: Sequence[int]) -> str:
    first = ", ".join(map(str, numbers[:-1]))
    last = str(numbers[-1]) if numbers else "unknown"
    return f"{first} and {last}" if first else last


def _workers_text(recovery: kinds.Recovery) -> str:
    if recovery.workers is None:
        return ""
    before = recovery.workers_before
    fewer = f" instead of {before}" if before not in (None, recovery.workers) else ""
    return f"on {counted(recovery.workers, 'worker')}{fewer}"


def _groups_text(recovery: kinds.Recovery) -> str:
    """Return the groups of hosts that hold every expert, where their number has changed."""
    groups = recovery.expert_replicas
    before = recovery.expert_replicas_before
    if groups == before:
        return ""
    return f"in {groups} expert {'group' if groups == 1 else 'groups'} instead of {before}"


def _start_text(event: kinds.Start) -> str:
    return f"started at step {event.step or 0} on {counted(event.workers or 1, 'worker')}"


def _resume_text(event: kinds.Resume) -> str:
    if event.weights_only:
        return f"started from the weights of {event.path}"
    source = "snapshots in memory" if event.source == "memory" else event.path or "no checkpoint"
    skipped = [f"skipped {each.path}: {each.reason}" for each in event.skipped]
    return "; ".join([f"resumed at step {event.step} from {source}", *skipped])


def _settings_text(event: kinds.Settings) -> str:
    """Return the changed settings of a resumed run: 'learning_rate from 0.0001 to 0.003 (flag …)'."""
    changes = [f"{each.name} from {each.before} to {each.now} ({each.origin})" for each in event.changes]
    return f"settings: {'; '.join(changes)}"


def _evaluation_text(event: kinds.Evaluation) -> str:
    return ", ".join(score_texts(event)) + (" ★ best" if event.best else "")


def _saved_text(event: kinds.Checkpoint | kinds.Upload) -> str:
    details = []
    if event.bytes is not None:
        details.append(bytes_text(event.bytes))
    if event.seconds is not None:
        details.append(seconds_text(event.seconds))
        if isinstance(event, kinds.Checkpoint) and event.stall is not None and event.stall < event.seconds:
            details.append(f"training blocked for {seconds_text(event.stall)}")
    verb = "saved" if isinstance(event, kinds.Checkpoint) else "uploaded"
    name = PurePath(event.path or "a checkpoint").name
    return f"{verb} {name}" + (f" ({', '.join(details)})" if details else "")


def _snapshot_interval_text(event: kinds.SnapshotInterval) -> str:
    return f"snapshots every {'?' if event.every is None else event.every} steps: {event.reason}"


def _warning_text(event: kinds.Warned) -> str:
    return f"{event.kind} warning: {event.message}".lstrip()


def _long_recovery_text(event: kinds.Recovery) -> str:
    """Return the outcome of a recovery, its parts, and the reason of the decision."""
    names = ("detect", "regroup", "restore", "replay")
    seconds = {name: getattr(event, f"{name}_seconds") for name in names}
    parts = [f"{name} {seconds_text(value)}" for name, value in seconds.items() if value is not None]
    reason = f"; {event.reason}" if event.reason else ""
    return recovery_text(event) + (f" ({', '.join(parts)})" if parts else "") + reason


def _end_text(event: kinds.End) -> str:
    return event.status + (f": {event.reason}" if event.reason else "")


_TEXTS: Mapping[type[Event], tuple[str, Callable[..., str]]] = {
    kinds.Start: ("calm", _start_text),
    kinds.Resume: ("info", _resume_text),
    kinds.Settings: ("warn", _settings_text),
    kinds.Placement: ("calm", lambda event: event.sentence or event.method),
    kinds.ExpertChange: ("info", change_line),
    kinds.Compile: ("calm", compile_text),
    kinds.CudaGraph: ("calm", cuda_graph_text),
    kinds.SnapshotInterval: ("calm", _snapshot_interval_text),
    kinds.Evaluation: ("", _evaluation_text),
    kinds.Checkpoint: ("calm", _saved_text),
    kinds.Upload: ("calm", _saved_text),
    kinds.OutOfMemory: ("bad", oom_text),
    kinds.Warned: ("warn", _warning_text),
    kinds.Failure: ("bad", failure_text),
    kinds.Recovery: ("good", _long_recovery_text),
    kinds.End: ("info", _end_text),
}
"""Tone and text of each kind of event that people want to read one by one."""
_END_TONES = {"completed": "good", "failed": "bad"}


def event_text(event: Event) -> str:
    return _TEXTS[type(event)][1](event)


def event_tone(event: Event) -> str:
    """Return whether an event is good, calm, info, warn or bad; empty for one that is neither."""
    match event:
        case kinds.End():
            return _END_TONES.get(event.status, "info")
        case kinds.Failure(final=False) | kinds.ExpertChange(change="undone"):
            return "warn"
        case _:
            return _TEXTS[type(event)][0]
