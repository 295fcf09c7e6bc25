"""Benchmarks run in this process with small arguments, and the tables that they publish."""

from __future__ import annotations

import math
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch

from harness.docs.source_trees import ROOT

BENCHMARKS = ROOT / "benchmarks"
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?|\bnan\b|\binf\b", flags=re.IGNORECASE)


@dataclass(frozen=True)
class Table:
    """A Markdown table: its columns, and the cells of each row."""

    columns: list[str]
    rows: list[list[str]]

    @property
    def names(self) -> list[str]:
        """The first cells of the rows."""
        return [row[0] for row in self.rows]

    def cells(self, column: str) -> list[str]:
        index = self.columns.index(column)
        return [row[index] for row in self.rows]


def programs() -> list[str]:
    """Return the modules below ``benchmarks`` that have a ``main``, as ``group.name``."""
    files = sorted(path for path in BENCHMARKS.rglob("*.py") if "\ndef main(" in path.read_text("utf-8"))
    return [".".join(path.relative_to(BENCHMARKS).with_suffix("").parts) for path in files]


def run_benchmark(name: str, flags: str, folder: Path) -> list[Table]:
    """Run a benchmark's ``main`` with these flags, and return the tables of its result file."""
    out = folder / "result.md"
    run_main(import_module(f"benchmarks.{name}"), *flags.split(), "--out", str(out))
    return tables_in(out.read_text(encoding="utf-8"))


def run_main(module: ModuleType, *flags: str) -> None:
    """Call ``main`` as ``python -m`` does, and undo what it sets for the whole process."""
    argv = [str(module.__file__), *flags]
    with patch.object(sys, "argv", argv), _process_settings(), warnings.catch_warnings():
        module.main()


@contextmanager
def _process_settings() -> Iterator[None]:
    threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    cores = os.sched_getaffinity(0)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        os.sched_setaffinity(0, cores)


def tables_in(text: str) -> list[Table]:
    """Return the tables of a Markdown text."""
    blocks = re.findall(r"(?:^\|.*\|$\n?)+", text, flags=re.MULTILINE)
    found = []
    for block in blocks:
        head, line, *body = [_cells(row) for row in block.splitlines()]
        assert set("".join(line)) == {"-"}, block
        assert all(len(row) == len(head) for row in body), block
        found.append(Table(head, body))
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def wrong_figures(table: Table, may_be_zero: tuple[str, ...] = ()) -> list[str]:
    """Return the figures that are not finite, or not positive in a column where they must be.

    The first column names the row."""
    wrong = []
    for row in table.rows:
        for column, cell in list(zip(table.columns, row, strict=True))[1:]:
            values = [float(text.replace(",", "")) for text in _NUMBER.findall(cell)]
            # A sign may be a change, and any figure of such a column is right that is a number.
            is_wrong = any(not math.isfinite(value) for value in values)
            is_wrong |= column not in may_be_zero and any(value <= 0 for value in values)
            if is_wrong:
                wrong.append(f"{row[0]}, {column}: {cell}")
    return wrong
