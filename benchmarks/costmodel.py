"""Predicted against measured: seconds of a step and memory, over configurations that the calibration has not seen.

First the machine is calibrated, as by ``orchestrator bench --calibrate``. Then each configuration is traced and predicted, and its
real training steps are timed in processes of their own: one, or several workers over gloo. On a GPU (``--gpu``) all in this process.

    python -m benchmarks.costmodel [--gpu] [--only NUMBER ...] [--calibration FILE] [--out FILE]
    python -m benchmarks.costmodel --scaling [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from benchmarks.costmodel_cases import FRESH, ON_CPU, ON_GPU, Case
from benchmarks.costmodel_steps import QUIET, TRIES, chosen_plan, measured_here, quietly_measured
from benchmarks.scaling_table import scaling
from benchmarks.support import header, markdown_table, write_result
from orchestrator.plan.calibration import FILE, Calibration, read_calibration, write_calibration
from orchestrator.plan.costmodel import Predicted, Team, predict
from orchestrator.plan.hardware import inventory
from orchestrator.train.calibrate import Asked, calibrate
from orchestrator.train.tracing import Setting, trace_step
from orchestrator.types import MIB, seconds_text

MEDIAN_BAR, WORST_BAR = 0.10, 0.25
SECONDS = 2.0  # of steps for each configuration


@dataclass(frozen=True)
class Row:
    case: Case
    predicted: Predicted
    seconds: float
    bytes: float | None
    host: float | None = None
    """Seconds of the host, where it goes on while the device computes."""

    @property
    def error(self) -> float:
        return self.predicted.step_seconds / self.seconds - 1

    @property
    def memory_error(self) -> float | None:
        return None if self.bytes is None else self.predicted.memory.total / self.bytes - 1


def prediction(case: Case, found: Calibration, on_gpu: bool, imbalance: float = 1.0) -> Predicted:
    _, chosen, task = chosen_plan(case, on_gpu)
    precision = chosen.precision.value
    hosts = case.workers if case.strategy == "expert_parallel" else 1
    fused = on_gpu and precision == "bf16"
    work = trace_step(task, case.batch, Setting(on_gpu, precision, fused or not on_gpu, hosts, chosen.exchange_chunks.value))
    machine, crowding = found.machine_for(case.workers)
    rounds, tf32 = chosen.accumulation_steps.value, chosen.tf32.value
    team = Team(case.workers, chosen.strategy.value, rounds, imbalance, chosen.exchange_chunks.value, tf32, crowding)
    return predict(work, machine, team)


def compare(cases: list[Case], found: Calibration, on_gpu: bool) -> list[Row]:
    rows = []
    for case in cases:
        predicted = prediction(case, found, on_gpu)
        host = None
        if on_gpu:
            seconds, host, size = measured_here(case)
        else:
            seconds, size, imbalance = quietly_measured(case, max(12, min(80, int(SECONDS / predicted.step_seconds))))
            predicted = prediction(case, found, on_gpu, imbalance)
        rows.append(Row(case, predicted, seconds, size, host))
        print(f"{case.where}, {case.name}: {_cells(rows[-1])}", flush=True)
        print("    ", {name: round(1000 * value, 3) for name, value in predicted.parts.items() if value}, flush=True)
    return rows


def _cells(row: Row) -> list[str]:
    memory = ["–", "–"] if row.bytes is None else [f"{row.bytes / MIB:,.0f}", f"{row.memory_error:+.0%}"]
    parts = ", ".join(
        f"{name} {value / row.predicted.step_seconds:.0%}" for name, value in row.predicted.parts.items() if abs(value) > 0.02 * row.seconds
    )
    times = [f"{1000 * row.predicted.step_seconds:.2f}", f"{1000 * row.seconds:.2f}", f"{row.error:+.1%}"]
    if row.host is not None:
        times += [f"{1000 * row.predicted.host_seconds:.2f}", f"{1000 * row.host:.2f}"]
    return [*times, f"{row.predicted.memory.total / MIB:,.0f}", *memory, parts]


def table(rows: list[Row]) -> str:
    columns = ["on", "configuration", "predicted ms", "measured ms", "error"]
    columns += ["host predicted ms", "host measured ms"] * any(row.host is not None for row in rows)
    columns += ["predicted MiB", "measured MiB", "error", "predicted parts"]
    return markdown_table(columns, [[row.case.where, row.case.name, *_cells(row)] for row in rows])


def verdict(rows: list[Row]) -> str:
    errors = [abs(row.error) for row in rows if row.case.bar]
    if not errors:
        return ""
    median, worst = statistics.median(errors), max(errors)
    met = "met" if median <= MEDIAN_BAR and worst <= WORST_BAR else "missed"
    line = f"Time, {len(errors)} configurations: median error {median:.1%}, worst {worst:.1%}"
    line += f" (bars: {MEDIAN_BAR:.0%}, {WORST_BAR:.0%}; {met})."
    memory = [abs(row.memory_error) for row in rows if row.memory_error is not None and row.case.bar]
    return line + (f" Memory: median error {statistics.median(memory):.0%}, worst {max(memory):.0%}." if memory else "") + "\n"


def quiet_calibration(on_gpu: bool) -> Calibration:
    """One that nobody disturbed, if there is any among a few."""
    found = inventory()
    found = found if on_gpu else replace(found, gpus=())
    kept: Calibration | None = None
    for _ in range(1 if on_gpu else TRIES):
        made = calibrate(found, Asked.of(found), lambda text: print(f"calibrating: {text}", flush=True))
        kept = made if kept is None or made.others < kept.others else kept
        if kept.others < QUIET:
            break
    assert kept is not None
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the GPU's configurations, in this process")
    parser.add_argument("--fresh", action="store_true", help="the configurations that were kept back while the model was made")
    parser.add_argument("--only", nargs="+", type=int, help="only the configurations with these numbers, from 0")
    parser.add_argument("--calibration", type=Path, help="where it is written")
    parser.add_argument("--known", action="store_true", help="take the calibration that is there already")
    parser.add_argument("--scaling", action="store_true", help="the scaling table of known devices instead; measures nothing")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.scaling:
        result = scaling(given)
        print(result)
        write_result(given.out, result)
        return
    begun = perf_counter()
    kept = given.calibration or Path(tempfile.gettempdir()) / FILE
    if not given.known:
        write_calibration(quiet_calibration(given.gpu), kept)
    found = read_calibration(kept)
    every = ON_GPU if given.gpu else FRESH if given.fresh else ON_CPU
    rows = compare([case for number, case in enumerate(every) if not given.only or number in given.only], found, given.gpu)
    took = f"Calibrated in {found.seconds:.0f} s, with others on {found.others:.0%} of the processors; "
    took += f"all in {seconds_text(perf_counter() - begun)}."
    result = header("Predicted against measured", given) + table(rows) + "\n" + verdict(rows) + took + "\n"
    print(result)
    write_result(given.out, result)


if __name__ == "__main__":
    main()
