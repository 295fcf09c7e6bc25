"""What a person sees of a sweep: a table that keeps up with it (a line for each trial where the output is no terminal).

Text from outside (reasons, names, values) is shown as it is: never as markup, never as control characters.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from orchestrator.config.space import plain_point
from orchestrator.record.ledger import STATUSES, TrialRow, SweepRecord
from orchestrator.record.scalars import to_float
from orchestrator.redaction import Secrets, mask, mask_tree
from orchestrator.types import bytes_text, seconds_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

BEST = 10  # rows of the table
RUNNING = 6  # trials under way that are shown
LONGEST = 300  # characters of a line; the whole of it is in sweep.jsonl
_STYLES = {
    "completed": "green",
    "stopped": "dim",
    "failed": "red",
    "out_of_memory": "red",
    "infeasible": "yellow",
}

_logger = logging.getLogger("orchestrator")


@dataclass(frozen=True)
class RunningTrial:
    """A trial under way."""

    trial: int
    point: Mapping[str, Any]
    since: float = field(default_factory=time.monotonic)


def live_table(
    record_or_rows: SweepRecord | Sequence[TrialRow],
    running: Sequence[RunningTrial],
    total: int,
    *,
    objective: str = "throughput",
    done: int | None = None,
    encoding: str = "utf-8",
) -> Table:
    """The best trials so far, those under way, how the others ended and how long it will take. ``done`` counts finished trials
    where the rows are not all of them."""
    from rich.table import Table

    rows = record_or_rows.rows if isinstance(record_or_rows, SweepRecord) else record_or_rows
    objective = record_or_rows.objective if isinstance(record_or_rows, SweepRecord) else objective
    told = headline(rows, len(running), total, len(rows) if done is None else done)
    table = Table(
        title=_text(told, encoding),
        title_justify="left",
        title_style="bold",
        header_style="bold",
        border_style="dim",
    )
    loss = ["loss"] if objective == "validation_loss" else []
    for name in ("trial", "settings", *loss, "samples/s", "memory", "took"):
        table.add_column(
            name,
            justify="left" if name == "settings" else "right",
            overflow="fold" if name == "settings" else "ellipsis",
        )
    best = ranked(rows, objective)[:BEST]
    names = differing([one.point for one in (*best, *running[:RUNNING])])
    for place, row in enumerate(best):
        cells = [
            f"{row.trial}",
            point_text(row.point, names),
            *([_loss(row)] if loss else []),
            speed_text(row),
            _memory(row),
            _took(row.seconds),
        ]
        table.add_row(*(_text(cell, encoding) for cell in cells), style="bold green" if place == 0 else "")
    if running and table.row_count:
        table.add_section()
    for one in running[:RUNNING]:
        cells = [
            f"{one.trial}",
            point_text(one.point, names),
            *([""] * len(loss)),
            "running",
            "",
            f"{time.monotonic() - one.since:.0f} s",
        ]
        table.add_row(*(_text(cell, encoding) for cell in cells), style="cyan")
    return table


def headline(rows: Sequence[TrialRow], running: int, total: int, done: int) -> str:
    """'17 of 24 trials: 12 completed, 4 infeasible, 1 failed; 2 running; about 1m 10s left'."""
    counts = [
        f"{count} {status.replace('_', ' ')}"
        for status in STATUSES
        if (count := sum(row.status == status for row in rows))
    ]
    earlier = [f"{done - len(rows)} before"] if done > len(rows) else []
    parts = [
        f"{done} of {total} trials" + (f": {', '.join([*counts, *earlier])}" if counts or earlier else "")
    ]
    parts += [f"{running} running"] if running else []
    left = seconds_left(rows, running, total - done)
    return "; ".join([*parts, *([f"about {seconds_text(left)} left"] if left else [])])


def seconds_left(rows: Iterable[TrialRow], together: int, left: int) -> float | None:
    """Seconds until the last trial ends, from the mean of those that ran and how many run together; None where none has."""
    took = [row.seconds for row in rows if row.status != "infeasible" and (to_float(row.seconds) or 0) > 0]
    return sum(took) / len(took) * left / max(1, together) if took and left > 0 else None


def ranked(rows: Iterable[TrialRow], objective: str) -> list[TrialRow]:
    """Completed trials, the best first."""
    scores = [(row.score(objective), -row.trial, row) for row in rows if row.status == "completed"]
    known = [entry for entry in scores if entry[0] is not None and math.isfinite(entry[0])]
    return [row for *_, row in sorted(known, key=lambda entry: entry[:2], reverse=True)]


def trial_line(row: TrialRow, total: int) -> str:
    """A trial in one line: 'trial 3 of 24  completed  batch_size 64  1,234 samples/s ± 2.1%  3.4 GiB  6.4 s'."""
    brief = " (measured too briefly for an interval)" if _is_brief(row) else ""
    speed = f"{speed_text(row)} samples/s{brief}" if row.measured else ""
    figures = [speed, f"validation loss {_loss(row)}" if _loss(row) else "", _memory(row)]
    parts = [
        f"trial {row.trial} of {total}",
        row.status.replace("_", " "),
        point_text(row.point),
        *figures,
        _took(row.seconds),
        row.reason,
    ]
    return "  ".join(part for part in parts if part)


def differing(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that tell the points apart; all of them where none does."""
    names = list(dict.fromkeys(name for point in points for name in point))
    return [name for name in names if len({value_text(point.get(name)) for point in points}) > 1] or names


def point_text(point: Mapping[str, Any], names: Iterable[str] | None = None) -> str:
    return ", ".join(
        f"{name} {value_text(point[name])}" for name in (point if names is None else names) if name in point
    )


def value_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    return (
        f"{value:.4g}"
        if isinstance(value, float)
        else ",".join(map(str, value))
        if isinstance(value, list | tuple)
        else str(value)
    )


def speed_text(row: TrialRow) -> str:
    """'1,234 ± 2.1%'; '1,234 ± ?' where it was measured too briefly for an interval."""
    if not row.measured or row.samples_per_second is None:
        return ""
    speed = (
        f"{row.samples_per_second:,.0f}" if row.samples_per_second >= 100 else f"{row.samples_per_second:.3g}"
    )
    return speed + (" ± ?" if _is_brief(row) else f" ± {100 * (row.interval or 0):.1f}%")


def _is_brief(row: TrialRow) -> bool:
    """Whether a trial was measured too briefly for an interval."""
    return row.interval is None or not math.isfinite(row.interval)


def _loss(row: TrialRow) -> str:
    return "" if row.validation_loss is None else f"{row.validation_loss:.4g}"


def _memory(row: TrialRow) -> str:
    return bytes_text(row.peak_memory_bytes) if row.peak_memory_bytes else ""


def _took(seconds: float) -> str:
    return seconds_text(seconds) if seconds > 0 else ""


def _text(text: str, encoding: str) -> Text:
    from rich.text import Text

    return Text(_clean(text, encoding))


def _clean(text: str, encoding: str) -> str:
    """One printable line, of what the output can encode."""
    line = "".join(character if character.isprintable() else " " for character in text).rstrip()
    short = line if len(line) <= LONGEST else line[: LONGEST - 4] + " ..."
    return short.encode(encoding, "replace").decode(encoding)


class SweepScreen:
    """Shows a sweep as it goes, without ``secrets``. ``rows`` are trials of an earlier start of it; ``quiet`` shows nothing at all."""

    def __init__(
        self,
        console: Console | None = None,
        quiet: bool = False,
        objective: str = "throughput",
        rows: Sequence[TrialRow] = (),
        secrets: Secrets = (),
    ) -> None:
        from rich.console import Console

        self._console = console or Console()
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._quiet, self._objective, self._secrets = quiet, objective, secrets
        self._rows = {row.trial: row for row in rows}
        self._running: dict[int, RunningTrial] = {}
        self._total, self._earlier = 0, 0
        self._live: Live | None = None
        self._lock = threading.Lock()

    def begin(self, total: int, done: int) -> None:
        """``done`` trials of ``total`` are there already."""
        self._total, self._earlier = total, max(0, done - len(self._rows))
        if self._quiet:
            return
        if self._is_live:
            self._guarded(self._start)
        elif done:
            self.note(f"{done} of {total} trials are done already")

    def trial_started(self, number: int, point: Mapping[str, Any]) -> None:
        point = self._shown(point)
        with self._lock:
            self._running[number] = RunningTrial(number, point)
        if not self._is_live:  # who reads along in a pipe or a log is not left without a word
            self._say(f"trial {number} of {self._total}  started  {point_text(point)}")

    def trial_done(self, row: TrialRow) -> None:
        row = replace(row, point=self._shown(row.point), reason=mask(row.reason, self._secrets))
        with self._lock:
            self._running.pop(row.trial, None)
            self._rows[row.trial] = row
        if self._is_live and row.status in ("failed", "out_of_memory"):
            self._say(f"trial {row.trial} {row.status.replace('_', ' ')}: {row.reason}", _STYLES[row.status])
        elif not self._is_live:
            self._say(trial_line(row, self._total))

    def note(self, text: str) -> None:
        """A line about something that takes a while."""
        self._say(mask(text, self._secrets))

    def _shown(self, point: Mapping[str, Any]) -> dict[str, Any]:
        return mask_tree(plain_point(point), self._secrets, keys=False)

    def close(self) -> None:
        """Leaves the table as it stands and gives the terminal back. May be called again."""
        live, self._live = self._live, None
        if live is not None:
            with self._lock:
                self._running.clear()
            live.stop()

    def table(self) -> Table:
        """The table as it stands."""
        with self._lock:
            rows, running = tuple(self._rows.values()), tuple(self._running.values())
        done = len(rows) + self._earlier
        return live_table(
            rows, running, self._total, objective=self._objective, done=done, encoding=self._console.encoding
        )

    def _start(self) -> None:
        from rich.live import Live

        self.close()
        # rich's own thread fetches the table when it draws, so that the sweep neither draws nor waits for the drawing.
        self._live = Live(console=self._console, get_renderable=self.table, refresh_per_second=4)
        self._live.start()

    def _say(self, text: str, style: str = "") -> None:
        if not self._quiet:
            self._guarded(lambda: self._line(text, style))

    def _line(self, text: str, style: str) -> None:
        from rich.text import Text

        self._console.print(
            Text(_clean(text, self._console.encoding), style=style), soft_wrap=not self._is_live
        )

    def _guarded(self, show: Callable[[], None]) -> None:
        """A closed terminal or a fault of the display ends the display, not the sweep (rich exits on a broken pipe)."""
        try:
            show()
        except (Exception, SystemExit) as error:
            self._quiet = True
            with suppress(Exception, SystemExit):
                self.close()
            _logger.warning(
                "the display stopped (%s: %s); the sweep goes on, see its sweep.jsonl",
                type(error).__name__,
                error,
            )
