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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.costmodel_cases import FRESH, ON_CPU, ON_GPU, Case
from benchmarks.costmodel_steps import QUIET, TRIES, chosen_plan, measured_here, quietly_measured
from benchmarks.scaling_table import scaling
from benchmarks.support import header, markdown_table, write_result
from orchestrator.measure import calibrate
from orchestrator.measure.host_overhead import yardstick
from orchestrator.measure.step_trace import TraceOptions, trace_step
from orchestrator.plan.cost.calibration import FILE, Calibration, read_calibration, write_calibration
from orchestrator.plan.cost.model import DeviceCosts, StepPrediction, Parallelism, predict
from orchestrator.plan.cost.ops import MicroBatchOps
from orchestrator.plan.inventory.hardware import inventory
from orchestrator.plan.planning import Plan
from orchestrator.types import MIB, seconds_text

MEDIAN_BAR, WORST_BAR = 0.10, 0.25
SECONDS = 2.0  # of steps for each configuration
DRIFTED = "With the host's figures times the drift"


@dataclass(frozen=True)
class Row:
    case: Case
    predicted: StepPrediction
    seconds: float
    bytes: float | None
    host: float | None = None
    """Seconds of the host, where it goes on while the device computes."""
    drift: float | None = None
    """How many times as long as at the calibration the host took for its yardstick, beside this measurement."""
    drifted: StepPrediction | None = None
    """Predicted with figures of the host that are as much slower."""

    @property
    def error(self) -> float:
        return self.predicted.step_seconds / self.seconds - 1

    @property
    def drifted_error(self) -> float | None:
        return None if self.drifted is None else self.drifted.step_seconds / self.seconds - 1

    @property
    def memory_error(self) -> float | None:
        return None if self.bytes is None else self.predicted.memory.total / self.bytes - 1


@dataclass(frozen=True)
class Asked:
    """A configuration with what it does and how it is planned."""

    case: Case
    work: MicroBatchOps
    plan: Plan

    @classmethod
    def of(cls, case: Case, on_gpu: bool) -> Asked:
        _, chosen, task = chosen_plan(case, on_gpu)
        precision = chosen.precision.value
        hosts = case.workers if case.strategy == "expert_parallel" else 1
        fused = on_gpu and precision == "bf16"
        setting = TraceOptions(on_gpu, precision, fused or not on_gpu, hosts, chosen.exchange_chunks.value)
        return cls(case, trace_step(task, case.batch, setting), chosen)

    def predicted(self, found: Calibration, imbalance: float = 1.0, drift: float = 1.0) -> StepPrediction:
        case, chosen = self.case, self.plan
        machine, crowding = found.machine_for(case.workers)
        rounds, tf32 = chosen.accumulation_steps.value, chosen.tf32.value
        team = Parallelism(
            case.workers,
            chosen.strategy.value,
            rounds,
            imbalance,
            chosen.exchange_chunks.value,
            tf32,
            crowding,
        )
        return predict(self.work, replace(machine, device=slower_host(machine.device, drift)), team)


def slower_host(device: DeviceCosts, times: float) -> DeviceCosts:
    names = ("operation_s", "launch_s", "sort_s", "view_s", "tensor_s", "step_s")
    return replace(device, **{name: times * getattr(device, name) for name in names})


def compare(cases: list[Case], found: Calibration, on_gpu: bool) -> list[Row]:
    made = _on_gpu(cases, found) if on_gpu else _on_cpu(cases, found)
    rows = []
    for row in made:
        rows.append(row)
        print(f"{row.case.where}, {row.case.name}: {_cells(row)}", flush=True)
        print(
            "    ",
            {name: round(1000 * value, 3) for name, value in row.predicted.parts.items() if value},
            flush=True,
        )
    return rows


def _on_cpu(cases: list[Case], found: Calibration) -> Iterator[Row]:
    for case in cases:
        asked = Asked.of(case, on_gpu=False)
        steps = max(12, min(80, int(SECONDS / asked.predicted(found).step_seconds)))
        seconds, size, imbalance = quietly_measured(case, steps)
        yield Row(case, asked.predicted(found, imbalance), seconds, size)


def _on_gpu(cases: list[Case], found: Calibration) -> Iterator[Row]:
    """Between the configurations the host's yardstick is read: what a configuration has for its drift is the mean before and after it."""
    profile = found.profile(1)
    read = yardstick(profile.device, inventory(), torch.device("cuda", 0))
    before = read()
    for case in cases:
        asked = Asked.of(case, on_gpu=True)
        predicted = asked.predicted(found)
        seconds, host, size = measured_here(case, max(20, min(100, int(SECONDS / predicted.step_seconds))))
        after = read()
        drifts = [
            (one + other) / 2 / then
            for one, other, then in zip(before, after, profile.yardstick_s, strict=True)
        ]
        print(
            f"the host against its calibration: dense {drifts[0]:.2f}, with experts {drifts[1]:.2f}",
            flush=True,
        )
        drift = drifts[asked.work.launches > 0]
        yield Row(case, predicted, seconds, size, host, drift, asked.predicted(found, drift=drift))
        before = after


def _cells(row: Row) -> list[str]:
    error, size = row.memory_error, row.bytes
    memory = ["–", "–"] if error is None or size is None else [f"{size / MIB:,.0f}", f"{error:+.0%}"]
    parts = ", ".join(
        f"{name} {value / row.predicted.step_seconds:.0%}"
        for name, value in row.predicted.parts.items()
        if abs(value) > 0.02 * row.seconds
    )
    times = [f"{1000 * row.predicted.step_seconds:.2f}", f"{1000 * row.seconds:.2f}", f"{row.error:+.1%}"]
    if row.drift is not None and row.drifted is not None:
        times += [f"{row.drift:.2f}", f"{1000 * row.drifted.step_seconds:.2f}", f"{row.drifted_error:+.1%}"]
    if row.host is not None:
        times += [f"{1000 * row.predicted.host_seconds:.2f}", f"{1000 * row.host:.2f}"]
    return [*times, f"{row.predicted.memory.total / MIB:,.0f}", *memory, parts]


def table(rows: list[Row]) -> str:
    columns = ["on", "configuration", "predicted ms", "measured ms", "error"]
    columns += ["drift of the host", "with it ms", "error"] * any(row.drift is not None for row in rows)
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
    line += (
        f" Memory: median error {statistics.median(memory):.0%}, worst {max(memory):.0%}." if memory else ""
    )
    return line + "\n" + _with_drift(rows)


def _with_drift(rows: list[Row]) -> str:
    errors = [abs(row.drifted_error) for row in rows if row.drifted_error is not None and row.case.bar]
    if not errors:
        return ""
    return (
        "\nA calibration is of the machine as it was. The drift is how many times as long as then the host took, beside each measurement, "
        f"for a small step that is no part of the table. {DRIFTED}: median error {statistics.median(errors):.1%}, worst {max(errors):.1%} "
        "(for comparison: the bars are for the errors without it).\n"
    )


def reference_table(found: Calibration) -> str:
    """How well the figures explain the steps that they were found from."""
    profile = found.profile(1)
    names = ["step", "measured ms", "by the figures ms", "error"]
    rows = [
        [
            entry.name,
            f"{1000 * entry.measured_s:.2f}",
            f"{1000 * entry.fitted_s:.2f}",
            f"{entry.fitted_s / entry.measured_s - 1:+.1%}",
        ]
        for entry in profile.references
    ]
    said = "\nThe calibration's own steps, and what its figures say of them:\n\n" + markdown_table(
        names, rows
    )
    if not profile.device.asynchronous:
        return said
    factor = f"{profile.device.sustained:.2f} times as long as the sum of their operations by themselves"
    return (
        said
        + f"\nOf small steps the host's time is meant, of large ones all of it. Large ones took {factor}, as all are predicted to.\n"
    )


def quiet_calibration(on_gpu: bool) -> Calibration:
    """One that nobody disturbed, if there is any among a few."""
    found = inventory()
    found = found if on_gpu else replace(found, gpus=())
    kept: Calibration | None = None
    for _ in range(1 if on_gpu else TRIES):
        made = calibrate.calibrate(
            found, calibrate.CalibrationScope.of(found), lambda text: print(f"calibrating: {text}", flush=True)
        )
        kept = made if kept is None or made.others < kept.others else kept
        if kept.others < QUIET:
            break
    assert kept is not None
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true", help="the GPU's configurations, in this process")
    parser.add_argument(
        "--fresh", action="store_true", help="the configurations that were kept back while the model was made"
    )
    parser.add_argument(
        "--only", nargs="+", type=int, help="only the configurations with these numbers, from 0"
    )
    parser.add_argument("--calibration", type=Path, help="where it is written")
    parser.add_argument("--known", action="store_true", help="take the calibration that is there already")
    parser.add_argument(
        "--scaling", action="store_true", help="the scaling table of known devices instead; measures nothing"
    )
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
    rows = compare(
        [case for number, case in enumerate(every) if not given.only or number in given.only],
        found,
        given.gpu,
    )
    took = f"Calibrated in {found.seconds:.0f} s, with others on {found.others:.0%} of the processors; "
    took += f"all in {seconds_text(perf_counter() - begun)}."
    result = (
        header("Predicted against measured", given)
        + table(rows)
        + "\n"
        + verdict(rows)
        + took
        + "\n"
        + reference_table(found)
    )
    print(result)
    write_result(given.out, result)


if __name__ == "__main__":
    main()
