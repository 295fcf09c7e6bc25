"""``orchestrator bench``: measure forward and backward time of a task, or calibrate the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.config.reading.flags import read_flags
from orchestrator.config.reading.reader import Resolved
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.types import bytes_text, seconds_text

if TYPE_CHECKING:
    from rich.table import Table

    from orchestrator.measure.bench import BenchResult

_PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class BenchOptions:
    """Measure forward and backward time of a task, warm-up excluded."""

    settings: Config
    config: Path | None = None
    """YAML file with settings; flags win over it."""
    iterations: int = 20
    """Steps to measure."""
    precisions: bool = False
    """Compare fp32, tf32, bf16 and fp16, with --precision fp8 that too: speed, memory and loss."""
    calibrate: bool = False
    """Measure the machine itself instead, for predictions of the step time (plan); takes less
    than a minute."""
    calibration: Path | None = None
    """File of the calibration. Default: calibration.json in the results folder."""
    json: bool = False
    """Print JSON for machines."""


def run(argv: Sequence[str]) -> int:
    options, resolved = read_flags(BenchOptions, argv, "orchestrator bench")
    if options.calibrate:
        from orchestrator.cli.calibrate import calibrate_machine

        return calibrate_machine(options.calibration, options.json)
    return _measure_task(resolved, options)


def _measure_task(resolved: Resolved, options: BenchOptions) -> int:
    from rich.console import Console

    from orchestrator.cli.tables import print_json
    from orchestrator.trainer import Trainer

    if options.iterations < 2:
        raise UserError(f"--iterations is {options.iterations}; a median and a spread need at least 2")
    with Console(stderr=True).status("measuring …"):
        results = Trainer(config=resolved).bench(options.iterations, options.precisions)
    if options.json:
        print_json([asdict(result) for result in results])
    else:
        Console().print(bench_table(results, resolved.config.task))
    return 0


def bench_table(results: list[BenchResult], task: str) -> Table:
    """Return the figures as rows and the precisions as columns."""
    from orchestrator.cli.tables import make_table

    first = results[0]
    title = f"{task} on {first.device}, batch {first.batch_size}, {first.iterations} steps"
    # A column for each precision: there are five at most, which fit a terminal of 80 columns.
    table = make_table("median", *(result.precision for result in results), title=title)
    fp32_speed = next((result.samples_per_second for result in results if result.precision == "fp32"), None)
    columns = [_figures(result, fp32_speed) for result in results]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    table.caption = "±: half the interquartile range of the total"
    table.caption_justify = "left"
    return table


def _figures(result: BenchResult, fp32_speed: float | None) -> dict[str, str]:
    """Return the text of each row of the table."""
    median = result.median
    figures = {phase: seconds_text(median.get(phase, 0.0)) for phase in _PHASES}
    figures["total"] = seconds_text(median["total"])
    figures["±"] = f"{result.spread['total'] / median['total']:.0%}"
    figures["samples/s"] = f"{result.samples_per_second:,.0f}"
    if fp32_speed:
        figures["against fp32"] = f"{result.samples_per_second / fp32_speed:.2f}×"
    figures["memory"] = bytes_text(result.peak_memory_bytes)
    figures["loss"] = f"{result.loss:.4f}"
    return figures
