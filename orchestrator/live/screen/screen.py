"""Output of a run for people: a banner, a progress bar (plain lines if the output is no terminal),
evaluations, warnings.

``Screen`` is a listener of the event log, or of a follower of it in a process that does not train.
A step event only updates numbers; rich's own thread draws them, about eight times per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from orchestrator.record.events import kinds
from orchestrator.record.events.kinds import Event
from orchestrator.record.live.state import RunState
from orchestrator.record.summary.speed import speed_of
from orchestrator.redaction import Secrets, mask
from orchestrator.report.draw.display import Display
from orchestrator.report.draw.text import (
    change_line,
    compile_text,
    cuda_graph_text,
    failure_text,
    oom_text,
    recovery_text,
    score_texts,
)
from orchestrator.types import bytes_text, count_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

NUM_PLAIN_LINES = 10  # progress lines of a whole run if the output is no terminal
MAX_METRICS = 3  # of a task, on a line of progress; an evaluation shows all
REST_OF_BAR = 68  # columns of the bar line without the bar itself, at most


def _bar_text(state: RunState) -> str:
    """Return loss, metrics, speed and memory as of the last events."""
    steps = state.steps
    loss = steps[-1].loss if steps else None
    metrics = list(steps[-1].metrics.items())[:MAX_METRICS] if steps else []
    parts = [
        "" if loss is None else f"loss {loss:.4g}",
        *(f"{name} {value:.4g}" for name, value in metrics),
        _speed_text(steps, state.start),
        _memory_text(state.newest(kinds.Monitor)),
    ]
    return "  ".join(part for part in parts if part)


def _speed_text(steps: Sequence[kinds.Step], start: kinds.Start | None) -> str:
    """Return samples, or the units that a task counts, per second over the last steps."""
    speed = speed_of(step for step in steps if not step.warm_up)
    if speed is None or not speed.samples:
        return ""
    unit = (start.unit if start is not None else None) or "tokens"
    if unit == "samples" or speed.units == speed.samples:
        return f"{_rate_text(speed.samples)} samples/s"
    return f"{_rate_text(speed.units)} {unit}/s"


def _rate_text(rate: float) -> str:
    """Return a rate for people, with two digits or more: 0.0234 -> '0.023', 12.34 -> '12.3'."""
    if rate < 1:
        return f"{rate:.2g}"
    return count_text(round(rate, 1 if rate < 100 else None))


def _memory_text(reading: kinds.Monitor | None) -> str:
    if reading is None:
        return ""
    known = [device.memory_used for device in reading.devices if device.memory_used is not None]
    used = max(known, default=reading.host.process_memory)
    return "" if used is None else bytes_text(used)


class Screen:
    """Shows events as they come. ``quiet`` shows nothing at all; ``secrets`` are never shown."""

    def __init__(self, console: Console | None = None, quiet: bool = False, secrets: Secrets = ()) -> None:
        self._display = Display(console, quiet, self.close, "the run continues, see its events.jsonl")
        self._secrets = secrets
        self._state = RunState()
        self._bar: Progress | None = None
        self._next_line = 0
        self.log_every: int | None = None
        """Steps between lines if the output is no terminal, as the user has set them."""
        self._has_trained = False

    def banner(self, rows: Sequence[tuple[str, str]], title: str = "") -> None:
        """Show the run that is about to start, as (label, value) rows."""
        show = self._panel if self._display.is_live else self._plain_banner
        self._display.guard(lambda: show(rows, title))

    def note(self, text: str) -> None:
        """Show a line about an operation that takes a while."""
        self._line(text)

    def __call__(self, event: Event) -> None:
        self._display.guard(lambda: self._show(event))

    def _show(self, event: Event) -> None:
        if isinstance(event, kinds.Start):
            # The bar of a run that starts again in this process keeps its last step.
            self.close()
        self._state(event)
        match event:
            case kinds.Step():
                self._step(event)
            case kinds.Start():
                self._start()
            case kinds.Evaluation():
                self._evaluate(event)
            case kinds.Resume():
                self._resume(event)
            case kinds.Placement():
                self._placement(event)
            case kinds.ExpertChange():
                style = "yellow" if event.change == "undone" else "dim"
                self._line(f"step {event.step}  {change_line(event)}", style)
            case kinds.Notice():
                self._line(event.message)
            case kinds.Warned():
                self._warning(f"warning: {event.message}")
            case kinds.Failure() if not event.final:  # the caller reports the final failure
                self._warning(f"{failure_text(event)} ...")
            case kinds.Recovery():
                self._warning(recovery_text(event))
            case kinds.Compile():
                self._line(compile_text(event), style="yellow" if event.status == "failed" else "")
            case kinds.CudaGraph():
                self._line(cuda_graph_text(event), style="yellow" if event.status == "failed" else "")
            case kinds.OutOfMemory():
                self._warning(oom_text(event))
            case kinds.End():
                self._end(event)
            case _:
                pass

    def close(self) -> None:
        """Leave the bar as it is and release the terminal. May be called again."""
        bar = self._bar
        self._bar = None
        if bar is not None:
            bar.stop()

    def _start(self) -> None:
        self._next_line = self._state.step + 1
        if self._display.is_live:
            self._bar = _make_bar(self._display.console, self._state)
            self._bar.start()

    def _step(self, step: kinds.Step) -> None:
        self._has_trained = True
        total = self._state.total_steps
        is_due = step.step >= self._next_line or step.step == total
        if is_due and not self._display.is_live:
            interval = self.log_every or max(1, (total or 1000) // NUM_PLAIN_LINES)
            self._next_line = (step.step // interval + 1) * interval
            epoch = _from_one(step.epoch)
            self._line(f"epoch {epoch}  step {step.step}/{total or '?'}  {_bar_text(self._state)}")

    def _evaluate(self, evaluation: kinds.Evaluation) -> None:
        parts = [f"epoch {_from_one(evaluation.epoch)}", f"step {evaluation.step}", *score_texts(evaluation)]
        if evaluation.best:
            star = "★" if self._display.encoding.startswith("utf") else "*"
            parts.append(f"{star} best")
        self._line("  ".join(parts))

    def _resume(self, resume: kinds.Resume) -> None:
        for skipped in resume.skipped:
            name = PurePath(str(skipped.path)).name
            self._warning(f"skipped checkpoint {name}: {skipped.reason}")
        if resume.weights_only:
            self._line(f"started from the weights of {resume.path}")
        # The recovery event says more; a group that grows has one without a failure before it. Without a
        # path there was no checkpoint: --resume auto has begun a new run.
        elif not self._state.is_recovering and resume.source != "memory" and resume.path:
            self._warning(f"resumed at step {resume.step} from {resume.path}")

    def _placement(self, placement: kinds.Placement) -> None:
        is_unchanged = self._state.is_recovering and placement.method == "as before"
        if placement.sentence and not is_unchanged:
            self._line(placement.sentence, style="dim")

    def _end(self, end: kinds.End) -> None:
        self.close()
        # A resumed run had nothing left to do. Else the summary of the whole run says how it ended.
        if end.status == "completed" and not self._has_trained and end.reason:
            self._line(end.reason)

    def _warning(self, text: str) -> None:
        self._line(text, style="yellow")

    def _line(self, text: str, style: str = "") -> None:
        """Show a line above the bar."""
        self._display.line(mask(text, self._secrets), style)

    def _panel(self, rows: Sequence[tuple[str, str]], title: str) -> None:
        from rich.panel import Panel
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for label, value in rows:
            label_text = self._display.text(label, style="cyan")
            table.add_row(label_text, self._display.text(mask(value, self._secrets)))
        heading = self._display.text(title, style="bold") if title else None
        self._display.console.print(
            Panel(table, title=heading, title_align="left", expand=False, border_style="dim")
        )

    def _plain_banner(self, rows: Sequence[tuple[str, str]], title: str) -> None:
        if title:
            self._line(title)
        width = max((len(label) for label, _ in rows), default=0)
        for label, value in rows:
            self._line(f"  {label:<{width}}  {value}")


def _make_bar(console: Console, state: RunState) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    class Bar(Progress):
        """Fetches its numbers when it is drawn, so that the training thread neither draws nor
        waits for it."""

        def get_renderables(self) -> Any:
            for task in self.task_ids:
                self.update(task, completed=state.step, numbers=_bar_text(state))
            yield from super().get_renderables()

    bar_width = max(5, min(40, console.width - REST_OF_BAR))
    columns = (
        MofNCompleteColumn(),
        BarColumn(bar_width, complete_style="cyan", finished_style="green"),
        TextColumn("{task.fields[numbers]}", markup=False),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )
    bar = Bar(*columns, console=console, refresh_per_second=8)
    bar.add_task("", total=state.total_steps, completed=state.step, numbers="")
    return bar


def _from_one(epoch: int | None) -> int | None:
    """Return an epoch as people count it: events count from 0, people from 1."""
    return None if epoch is None else epoch + 1
