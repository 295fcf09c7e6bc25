"""Screens that write to a text, on a terminal or in a pipe, and events to show on them."""

import io
import re
from typing import Any

from rich.console import Console

from orchestrator.live.screen.screen import Screen

ESCAPE = "\x1b"


def piped(width: int = 80) -> tuple[Screen, io.StringIO]:
    out = io.StringIO()
    return Screen(Console(file=out, force_terminal=False, width=width)), out


def terminal(width: int = 80) -> tuple[Screen, io.StringIO]:
    out = io.StringIO()
    return Screen(Console(file=out, force_terminal=True, width=width, _environ={"TERM": "xterm"})), out


def step(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "event": "step",
        "step": number,
        "epoch": 0,
        "loss": 0.15234,
        "samples": 64,
        "units": 64,
        "seconds": 0.05,
        **fields,
    }


def start(total: int | None, first: int = 0) -> dict[str, Any]:
    return {"event": "start", "total_steps": total, "step": first}


END = {"event": "end", "status": "completed"}
EVALUATE = {
    "event": "evaluate",
    "epoch": 3,
    "step": 69,
    "loss": 0.15234,
    "metrics": {"accuracy": 0.9617},
    "best": True,
}


def without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def drawn_lines(text: str) -> list[str]:
    return [line for line in re.split(r"[\r\n]", without_escapes(text)) if line.strip()]
