"""Predicted against measured: time and memory of a step, over configurations that the calibration
has not seen.

First the machine is calibrated, as by ``orchestrator bench --calibrate``. Then each configuration
is traced and predicted, and its real training steps are timed in processes of their own: one, or
several workers over gloo. On a GPU (``--gpu``) everything runs in this process.

    python -m benchmarks.planning.costmodel [--gpu] [--only NUMBER ...] [--calibration FILE] [--out FILE]
    python -m benchmarks.planning.costmodel --scaling [--out FILE]
    python -m benchmarks.planning.costmodel --memory COUNT [--seed SEED] [--out FILE]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.planning.costmodel_cases import FRESH, ON_CPU, ON_GPU, Case
from benchmarks.planning.costmodel_memory import memory_table, random_cases, rows
from benchmarks.planning.costmodel_steps import ATTEMPTS, QUIET, choose_plan, measure_here, measure_quietly
from benchmarks.planning.costmodel_table import Row, reference_table, table, verdict
from benchmarks.planning.scaling_table import scaling
from benchmarks.support import benchmark_parser, header, publish
from orchestrator.measure.calibration.calibrate import calibrate
from orchestrator.measure.calibration.device_costs import CalibrationScope
from orchestrator.measure.calibration.whole_steps import make_yardstick
from orchestrator.measure.tracing.step_trace import TraceOptions, trace_micro_batch
from orchestrator.plan.cost.calibration import FILE, Calibration, read_calibration, write_calibration
from orchestrator.plan.cost.machine import DeviceCosts, Parallelism
from orchestrator.plan.cost.model import StepPrediction, predict
from orchestrator.plan.cost.ops import MicroBatchOps
from orchestrator.plan.inventory.hardware import inventory
from orchestrator.plan.planning import Plan
from orchestrator.types import seconds_text

SECONDS = 2.0  # of steps for each configuration
HOST_FIGURES = ("operation_s", "launch_s", "sort_s", "view_s", "tensor_s", "step_s")


@dataclass(frozen=True)
class TracedCase:
    """A configuration with its operations and its plan."""

    case: Case
    work: MicroBatchOps
    plan: Plan

    @classmethod
    def of(cls, case: Case, on_gpu: bool) -> TracedCase:
        _, chosen, task = choose_plan(case, on_gpu)
        precision = chosen.precision.value
        hosts = case.workers if case.strategy == "expert_parallel" else 1
        is_fused = not on_gpu or precision == "bf16"
        keeps_copies = chosen.memory.weight_copies > 0
        chunks = chosen.exchange_chunks.value
        options = TraceOptions(on_gpu, precision, is_fused, hosts, chunks, keeps_copies=keeps_copies)
        return cls(case, trace_micro_batch(task, case.batch, options), chosen)

    def predict(self, calibration: Calibration, imbalance: float = 1.0, drift: float = 1.0) -> StepPrediction:
        machine, crowding = calibration.machine_for(self.case.workers)
        parallelism = Parallelism(
            self.case.workers,
            self.plan.strategy.value,
            self.plan.accumulation_steps.value,
            imbalance,
            self.plan.exchange_chunks.value,
            self.plan.tf32.value,
            crowding,
        )
        device = slower_host(machine.device, drift)
        return predict(self.work, replace(machine, device=device), parallelism)


def slower_host(device: DeviceCosts, factor: float) -> DeviceCosts:
    """Return the same device with a host that takes so many times as long."""
    return replace(device, **{name: factor * getattr(device, name) for name in HOST_FIGURES})


def compare(cases: list[Case], calibration: Calibration, on_gpu: bool) -> list[Row]:
    """Predict and measure every case, and print each row when it is done."""
    measured = _compare_on_gpu(cases, calibration) if on_gpu else _compare_on_cpu(cases, calibration)
    compared = []
    for row in measured:
        compared.append(row)
        parts_ms = {name: round(1000 * value, 3) for name, value in row.predicted.parts.items() if value}
        print(f"{row.case.where}, {row.case.name}: {row.cells()}", flush=True)
        print("    ", parts_ms, flush=True)
    return compared


def _compare_on_cpu(cases: list[Case], calibration: Calibration) -> Iterator[Row]:
    for case in cases:
        traced = TracedCase.of(case, on_gpu=False)
        steps = max(12, min(80, int(SECONDS / traced.predict(calibration).step_seconds)))
        seconds, size, imbalance = measure_quietly(case, steps)
        yield Row(case, traced.predict(calibration, imbalance), traced.plan.memory.total, seconds, size)


def _compare_on_gpu(cases: list[Case], calibration: Calibration) -> Iterator[Row]:
    """Read the host's yardstick between the cases: a case's drift is the mean before and after it."""
    profile = calibration.profile(1)
    read_yardstick = make_yardstick(profile.device, inventory(), torch.device("cuda", 0))
    before = read_yardstick()
    for case in cases:
        traced = TracedCase.of(case, on_gpu=True)
        predicted = traced.predict(calibration)
        steps = max(20, min(100, int(SECONDS / predicted.step_seconds)))
        seconds, host_s, size = measure_here(case, steps)
        after = read_yardstick()
        drifts = [
            (first + second) / 2 / calibrated
            for first, second, calibrated in zip(before, after, profile.yardstick_s, strict=True)
        ]
        print(
            f"the host against its calibration: dense {drifts[0]:.2f}, with experts {drifts[1]:.2f}",
            flush=True,
        )
        # a model with experts launches kernels of its own; its host work is another
        drift = drifts[traced.work.launches > 0]
        with_drift = traced.predict(calibration, drift=drift)
        planned = traced.plan.memory.total
        yield Row(case, predicted, planned, seconds, size, host_s, drift, with_drift)
        before = after


def quiet_calibration(on_gpu: bool) -> Calibration:
    """Calibrate up to a few times, until no other process disturbs.

    Returns the least disturbed calibration.
    """
    hardware = inventory()
    if not on_gpu:
        hardware = replace(hardware, gpus=())
    best: Calibration | None = None
    for _ in range(1 if on_gpu else ATTEMPTS):
        result = calibrate(
            hardware,
            CalibrationScope.of(hardware),
            lambda text: print(f"calibrating: {text}", flush=True),
        )
        if best is None or result.others < best.others:
            best = result
        if best.others < QUIET:
            break
    assert best is not None
    return best


def parse() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
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
    parser.add_argument(
        "--memory",
        type=int,
        metavar="COUNT",
        help="the memory of so many random configurations on CPUs instead",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random configurations")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.memory:
        found = list(rows(random_cases(arguments.memory, arguments.seed)))
        publish(header("Planned against measured memory", arguments) + memory_table(found), arguments.out)
        return
    if arguments.scaling:
        publish(scaling(arguments), arguments.out)
        return
    begun = perf_counter()
    path = arguments.calibration or Path(tempfile.gettempdir()) / FILE
    if not arguments.known:
        write_calibration(quiet_calibration(arguments.gpu), path)
    calibration = read_calibration(path)
    every = FRESH if arguments.fresh else ON_CPU
    if arguments.gpu:
        every = ON_GPU
    cases = [case for number, case in enumerate(every) if not arguments.only or number in arguments.only]
    compared = compare(cases, calibration, arguments.gpu)
    times = (
        f"Calibrated in {calibration.seconds:.0f} s, with others on {calibration.others:.0%} of "
        f"the processors; "
        f"all in {seconds_text(perf_counter() - begun)}.\n"
    )
    head = header("Predicted against measured", arguments)
    publish(
        head + table(compared) + "\n" + verdict(compared) + times + reference_table(calibration),
        arguments.out,
    )


if __name__ == "__main__":
    main()
