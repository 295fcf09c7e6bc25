"""Output of an evaluation for people: the banner and the bar of a run, and a line with the result."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any

from orchestrator.live.screen.screen import Screen
from orchestrator.record.events.kinds import Start, Step
from orchestrator.redaction import Secrets
from orchestrator.types import counted

_WIDTH = 300
"""Most letters of a prompt or generation that are shown."""
_LINE_SECONDS = 10.0
"""Time between two lines of progress if the output is no terminal."""


class EvaluationScreen(Screen):
    """Shows an evaluation. ``quiet`` shows nothing at all; ``secrets`` are never shown."""

    def __init__(self, quiet: bool = False, secrets: Secrets = ()) -> None:
        super().__init__(quiet=quiet, secrets=secrets)
        self._has_bar = False
        self._next_line_s = monotonic() + _LINE_SECONDS

    def progress(self, done: int, total: int | None) -> None:
        """Show how many batches are done; ``total`` is None if the data does not tell."""
        if not self._has_bar:
            self._has_bar = True
            self(Start(total_steps=total))
        self._state(Step(step=done))
        if not self._display.is_live and monotonic() >= self._next_line_s:
            self._next_line_s = monotonic() + _LINE_SECONDS
            self.note(f"{done} of {total or '?'} batches")

    def result(self, fields: Mapping[str, Any], path: str) -> None:
        """Show the fields of a result, and where it was written."""
        self.close()
        values = {f"{fields['split']} loss": fields["loss"], **fields["metrics"]}
        parts = [f"step {fields['step']}", *(f"{name} {value:.4g}" for name, value in values.items())]
        parts.append(f"({counted(fields['samples'], 'sample')} in {fields['seconds']:.1f} s)")
        self.note("  ".join(parts))
        for generation in fields.get("generations", ()):
            for line in _generation_lines(generation):
                self.note(line)
        self.note(f"written: {path}")


def _generation_lines(generation: Mapping[str, str | None]) -> list[str]:
    """Return a prompt, its continuation and that of the data, a line each."""
    lines = [f"prompt     {_shown(generation['prompt'])}", f"generated  {_shown(generation['text'])}"]
    if generation.get("reference") is not None:
        lines.append(f"reference  {_shown(generation['reference'])}")
    return lines


def _shown(text: str | None) -> str:
    """Return a text on one line, without control characters; the end of a long one."""
    line = " ".join((text or "").split())
    line = "".join(letter if letter.isprintable() else "?" for letter in line)
    return line if len(line) <= _WIDTH else f"… {line[-_WIDTH:]}"
