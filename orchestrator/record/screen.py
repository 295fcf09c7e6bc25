"""What a person sees of a run: a banner, a progress bar (plain lines where the output is no terminal), evaluations, trouble.

A listener of the event log, or of a follower of it in a process that does not train. A step event only updates numbers;
rich's own thread draws them, some eight times a second.
Text from outside (messages, paths, names of metrics) is shown as it is: never as markup, never as control characters.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from orchestrator.record.events import Event
from orchestrator.record.scalars import to_float
from orchestrator.record.text import failure_text, recovery_text
from orchestrator.redaction import Secrets, mask
from orchestrator.types import bytes_text, count_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

WINDOW = 50  # steps that the shown speed is a mean of
PLAIN_LINES = 10  # progress lines of a whole run where the output is no terminal
LONGEST = 300  # characters of a message that are shown; the whole of it is in events.jsonl
REST_OF_BAR = 68  # columns the bar line needs beside the bar itself, at worst

_logger = logging.getLogger("orchestrator")


class _Speed:
    """Samples or tokens per second over the last steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)

    def add(self, event: Event) -> None:
        samples, seconds = to_float(event.get("samples")), to_float(event.get("seconds"))
        if samples and seconds and not event.get("warm_up"):
            self._steps.append((samples, to_float(event.get("units")) or samples, seconds))

    def text(self) -> str:
        if not self._steps:
            return ""
        samples, units, seconds = (sum(column) for column in zip(*tuple(self._steps), strict=True))
        return (
            f"{count_text(round(samples / seconds, 1))} samples/s"
            if units == samples
            else f"{count_text(round(units / seconds))} tokens/s"
        )


@dataclass
class _BarState:
    """The numbers of the bar, as of the last events."""

    step: int = 0
    total: int | None = None
    loss: float | None = None
    memory_bytes: float | None = None
    speed: _Speed = field(default_factory=_Speed)

    def text(self) -> str:
        loss = "" if self.loss is None else f"loss {self.loss:.4g}"
        memory = "" if self.memory_bytes is None else bytes_text(self.memory_bytes)
        return "  ".join(part for part in (loss, self.speed.text(), memory) if part)


class Screen:
    """Shows events as they come. ``quiet`` shows nothing at all; ``secrets`` are never shown."""

    def __init__(self, console: Console | None = None, quiet: bool = False, secrets: Secrets = ()) -> None:
        from rich.console import Console

        self._console = console or Console()
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._quiet, self._secrets = quiet, secrets
        self._state = _BarState()
        self._bar: Progress | None = None
        self._next_line = 0
        self._recovering = False
        self._handlers: dict[str, Callable[[Event], None]] = {
            "start": self._start,
            "step": self._step,
            "monitor": self._monitor,
            "evaluate": self._evaluate,
            "resume": self._resume,
            "placement": self._placement,
            "notice": lambda event: self._line(str(event["message"])),
            "warning": lambda event: self._trouble(f"warning: {event.get('message')}"),
            "failure": self._failure,
            "recovery": self._recovery,
            "compile": self._compile,
            "oom": lambda event: self._trouble(_oom_text(event)),
            "end": lambda event: self.close(),  # noqa: ARG005
        }

    def banner(self, rows: Sequence[tuple[str, str]], title: str = "") -> None:
        """What is about to run, as (label, value) rows."""
        if not self._quiet:
            self._guarded(lambda: self._panel(rows, title) if self._live else self._plain_banner(rows, title))

    def note(self, text: str) -> None:
        """A line about something that takes a while."""
        if not self._quiet:
            self._guarded(lambda: self._line(text))

    def __call__(self, event: Event) -> None:
        handler = None if self._quiet else self._handlers.get(event["event"])
        if handler is not None:
            self._guarded(lambda: handler(event))

    def close(self) -> None:
        """Leaves the bar as it stands and gives the terminal back. May be called again."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()

    def _guarded(self, show: Callable[[], None]) -> None:
        """A closed terminal or a fault of the display ends the display, not the training (rich exits on a broken pipe)."""
        try:
            show()
        except (Exception, SystemExit) as error:
            self._quiet = True
            with suppress(Exception, SystemExit):
                self.close()
            _logger.warning(
                "the display stopped (%s: %s); the run goes on, see its events.jsonl",
                type(error).__name__,
                error,
            )

    def _start(self, event: Event) -> None:
        self.close()  # a run that starts again in this process gets a fresh bar
        total = event.get("total_steps")
        self._state = _BarState(step=int(event.get("step") or 0), total=int(total) if total else None)
        self._next_line = self._state.step + 1
        if self._live:
            self._bar = _make_bar(self._console, self._state)
            self._bar.start()

    def _step(self, event: Event) -> None:
        state = self._state
        state.step = int(event.get("step") or 0)
        state.loss = to_float(event.get("loss"))
        state.speed.add(event)
        if not self._live and (state.step >= self._next_line or state.step == state.total):
            every = max(1, (state.total or 1000) // PLAIN_LINES)
            self._next_line = (state.step // every + 1) * every
            self._line(
                f"epoch {_from_one(event.get('epoch'))}  step {state.step}/{state.total or '?'}  {state.text()}"
            )

    def _monitor(self, event: Event) -> None:
        devices = [device.get("memory_used") for device in event.get("devices") or ()]
        used = [memory for memory in devices if memory is not None]  # a GPU that does not tell its memory
        self._state.memory_bytes = max(used) if used else (event.get("host") or {}).get("process_memory")

    def _evaluate(self, event: Event) -> None:
        numbers = {"validation loss": event.get("loss"), **(event.get("metrics") or {})}
        parts = [f"epoch {_from_one(event.get('epoch'))}", f"step {event.get('step')}"]
        parts += [
            f"{name} {found:.4g}" for name, value in numbers.items() if (found := to_float(value)) is not None
        ]
        star = "★" if self._console.encoding.startswith("utf") else "*"
        self._line("  ".join([*parts, f"{star} best"] if event.get("best") is True else parts))

    def _resume(self, event: Event) -> None:
        for skipped in event.get("skipped") or ():
            self._trouble(
                f"skipped checkpoint {PurePath(str(skipped.get('path'))).name}: {skipped.get('reason')}"
            )
        if event.get("weights_only"):
            self._line(f"began with the weights of {event.get('path')}")
        elif not self._recovering:  # the recovery tells it better
            self._trouble(f"resumed at step {event.get('step')} from {event.get('path')}")

    def _placement(self, event: Event) -> None:
        same = self._recovering and "(as before)" in str(event.get("sentence"))
        if event.get("sentence") and not same:
            self._line(str(event["sentence"]), style="dim")

    def _failure(self, event: Event) -> None:
        if event.get("final"):  # the last one is told by whoever called
            return
        self._recovering = True
        self._trouble(f"{failure_text(event)} ...")

    def _recovery(self, event: Event) -> None:
        self._recovering = False
        self._trouble(recovery_text(event))

    def _compile(self, event: Event) -> None:
        if event.get("status") == "failed":
            self._trouble(f"could not compile, going on without: {event.get('detail')}")
        else:
            self._line(f"compiled in {to_float(event.get('seconds')) or 0.0:.1f} s ({event.get('detail')})")

    def _trouble(self, text: str) -> None:
        self._line(text, style="yellow")

    def _line(self, text: str, style: str = "") -> None:
        """One line above the bar. Where the output is no terminal it is not wrapped, so that it can be searched."""
        from rich.text import Text

        clean = _clean(mask(text, self._secrets), self._console.encoding)
        self._console.print(Text(clean, style=style), soft_wrap=not self._live)

    def _panel(self, rows: Sequence[tuple[str, str]], title: str) -> None:
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        encoding = self._console.encoding
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for label, value in rows:
            table.add_row(
                Text(_clean(label, encoding), style="cyan"),
                Text(_clean(mask(value, self._secrets), encoding)),
            )
        heading = Text(_clean(title, encoding), style="bold") if title else None
        self._console.print(Panel(table, title=heading, title_align="left", expand=False, border_style="dim"))

    def _plain_banner(self, rows: Sequence[tuple[str, str]], title: str) -> None:
        if title:
            self._line(title)
        widest = max((len(label) for label, _ in rows), default=0)
        for label, value in rows:
            self._line(f"  {label:<{widest}}  {value}")


def _make_bar(console: Console, state: _BarState) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    class Bar(Progress):
        """Fetches its numbers when it is drawn, so that the training thread neither draws nor waits for the drawing."""

        def get_renderables(self) -> Any:
            for task in self.task_ids:
                self.update(task, completed=state.step, numbers=state.text())
            yield from super().get_renderables()

    columns = (
        MofNCompleteColumn(),
        BarColumn(
            max(5, min(40, console.width - REST_OF_BAR)), complete_style="cyan", finished_style="green"
        ),
        TextColumn("{task.fields[numbers]}", markup=False),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )
    bar = Bar(*columns, console=console, refresh_per_second=8)
    bar.add_task("", total=state.total, completed=state.step, numbers="")
    return bar


def _from_one(epoch: object) -> object:
    """Epochs are counted from 0 in events and from 1 by people."""
    return epoch + 1 if isinstance(epoch, int) else epoch


def _oom_text(event: Event) -> str:
    micro_batch, smaller = event.get("micro_batch"), event.get("next_micro_batch")
    then = f"going on with {smaller}" if smaller else "no smaller one is left to try"
    return f"out of memory at step {event.get('step')} ({event.get('where')}) with a micro-batch of {micro_batch}; {then}"


def _clean(text: str, encoding: str) -> str:
    """One printable line: no line breaks, no escape sequences, nothing that the output cannot encode."""
    line = "".join(character if character.isprintable() else " " for character in text).rstrip()
    short = line if len(line) <= LONGEST else line[: LONGEST - 4] + " ..."
    return short.encode(encoding, "replace").decode(encoding)
