"""Shared by all benchmarks: the command line, a header with place and versions, Markdown tables,
and the result file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from orchestrator.plan.inventory.hardware import inventory

_SHOWN_VERSIONS = ("python", "torch", "cuda", "ray")
_FOLDER = Path(__file__).resolve().parent


def benchmark_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the module's docstring, with ``--out FILE``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the result to this file too")
    return parser


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add ``--set NAME=VALUE ...``, of which ``further_settings`` are the values."""
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="further settings of our run"
    )


def further_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return dict(pair.split("=", 1) for pair in arguments.set)


def header(title: str, arguments: argparse.Namespace) -> str:
    """Return the head of a result: title, date, device, versions, commit and command."""
    hardware = inventory()
    device = hardware.gpus[0].name if hardware.gpus else f"{hardware.cpu_name}, {hardware.cores} cores"
    versions = ", ".join(
        f"{name} {version}" for name, version in hardware.versions.items() if name in _SHOWN_VERSIONS
    )
    flags = " ".join(
        _flag(name, value)
        for name, value in vars(arguments).items()
        if value not in (None, False) and name != "out"
    )
    command = f"python -m {_module_name()} {flags}"
    commit = hardware.commit[:7] if hardware.commit else "unknown: no git repository"
    return f"# {title}\n\n{date.today()}, {device}, {versions}.\nCommit {commit}.\nCommand: `{command}`\n\n"


def _module_name() -> str:
    """Return the name by which ``python -m`` starts this program again."""
    program = Path(sys.argv[0]).resolve()
    # A test may give a bare name, which is in none of the folders.
    inside = program.relative_to(_FOLDER) if program.is_relative_to(_FOLDER) else Path(program.name)
    return ".".join([_FOLDER.name, *inside.with_suffix("").parts])


def _flag(name: str, value: object) -> str:
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return flag
    values = value if isinstance(value, list) else [value]
    return " ".join([flag, *map(str, values)])


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table with a line feed at the end."""
    head = [f"| {' | '.join(columns)} |", f"|{'|'.join('---' for _ in columns)}|"]
    body = [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]
    return "\n".join([*head, *body]) + "\n"


def publish(text: str, path: Path | None) -> None:
    """Print a result, and write it to the file that ``--out`` names."""
    print(text)
    write_result(path, text)


def write_result(path: Path | None, text: str) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
