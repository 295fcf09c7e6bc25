"""What every benchmark prints: where and with what it was measured, and tables that can be read as they are."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from orchestrator.plan.inventory.hardware import inventory


def header(title: str, arguments: argparse.Namespace) -> str:
    found = inventory()
    device = found.gpus[0].name if found.gpus else f"{found.cpu_name}, {found.cores} cores"
    versions = ", ".join(
        f"{name} {version}"
        for name, version in found.versions.items()
        if name in ("python", "torch", "cuda", "ray")
    )
    module = Path(sys.argv[0]).stem
    given = " ".join(_flag(k, v) for k, v in vars(arguments).items() if v not in (None, False) and k != "out")
    return f"# {title}\n\n{date.today()}, {device}, {versions}.\nCommand: `python -m benchmarks.{module} {given}`\n\n"


def _flag(name: str, value: object) -> str:
    words = (
        [] if value is True else [str(item) for item in value] if isinstance(value, list) else [str(value)]
    )
    return " ".join([f"--{name.replace('_', '-')}", *words])


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{'|'.join('---' for _ in columns)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(str(cell) for cell in row)} |" for row in rows)]) + "\n"


def write_result(path: Path | None, text: str) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
