"""Output of a sweep for people: a live table, or a line per trial if the output is no terminal."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestrator.config.sweep.space import plain_point
from orchestrator.record.files.ledger import TrialRow
from orchestrator.redaction import Secrets, mask, mask_tree
from orchestrator.report.draw.display import Display
from orchestrator.report.sweep.sweep_table import (
    RunningTrial,
    SweepState,
    live_table,
    point_text,
    trial_line,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table


class SweepScreen:
    """Shows a running sweep, without ``secrets``.

    ``rows`` are trials of an earlier session of the sweep; ``quiet`` shows nothing at all.
    """

    def __init__(
        self,
        console: Console | None = None,
        quiet: bool = False,
        objective: str = "throughput",
        rows: Sequence[TrialRow] = (),
        secrets: Secrets = (),
    ) -> None:
        self._display = Display(console, quiet, self.close, "the sweep continues, see its sweep.jsonl")
        self._objective = objective
        self._secrets = secrets
        self._rows = {row.trial: row for row in rows}
        self._running: dict[int, RunningTrial] = {}
        self._total = 0
        self._num_earlier = 0
        self._live: Live | None = None
        self._lock = threading.Lock()

    def begin(self, total: int, done: int) -> None:
        """Start the display of a sweep; ``done`` of its ``total`` trials are finished already."""
        self._total = total
        self._num_earlier = max(0, done - len(self._rows))
        if self._display.is_live:
            self._display.guard(self._start)
        elif done:
            self.note(f"{done} of {total} trials are done already")

    def trial_started(self, number: int, point: Mapping[str, Any]) -> None:
        point = self._masked_point(point)
        with self._lock:
            self._running[number] = RunningTrial(number, point)
        if not self._display.is_live:  # a trial takes minutes, and a log should show that something runs
            self._display.line(f"trial {number} of {self._total}  started  {point_text(point)}")

    def trial_done(self, row: TrialRow) -> None:
        row = replace(row, point=self._masked_point(row.point), reason=mask(row.reason, self._secrets))
        with self._lock:
            self._running.pop(row.trial, None)
            self._rows[row.trial] = row
        if not self._display.is_live:
            self._display.line(trial_line(row, self._total))
        elif row.status in ("failed", "out_of_memory"):
            status = row.status.replace("_", " ")
            self._display.line(f"trial {row.trial} {status}: {row.reason}", style="red")

    def note(self, text: str) -> None:
        """Show a line about an operation that takes a while."""
        self._display.line(mask(text, self._secrets))

    def close(self) -> None:
        """Leave the table as it is and release the terminal. May be called again."""
        live = self._live
        self._live = None
        if live is not None:
            with self._lock:
                self._running.clear()
            live.stop()

    def table(self) -> Table:
        """Return the table as of now."""
        with self._lock:
            rows = tuple(self._rows.values())
            running = tuple(self._running.values())
        done = len(rows) + self._num_earlier
        state = SweepState(rows, running, self._total, done, self._objective)
        return live_table(state, self._display.encoding)

    def _masked_point(self, point: Mapping[str, Any]) -> dict[str, Any]:
        return mask_tree(plain_point(point), self._secrets, keys=False)

    def _start(self) -> None:
        from rich.live import Live

        self.close()
        # rich's own thread fetches the table when it draws, so that the sweep neither draws nor
        # waits for it.
        self._live = Live(console=self._display.console, get_renderable=self.table, refresh_per_second=4)
        self._live.start()
