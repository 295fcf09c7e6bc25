"""Predicted against measured: seconds of a step and memory, over configurations that the calibration has not seen.

First the machine is calibrated, as by ``orchestrator bench --calibrate``. Then each configuration is traced and predicted, and its
real training steps are timed in processes of their own: one, or several workers over gloo. On a GPU (``--gpu``) all in this process.

    python -m benchmarks.costmodel [--gpu] [--only NUMBER ...] [--calibration FILE] [--out FILE]
    python -m benchmarks.costmodel --scaling [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.support import header, markdown_table, write_result
from experts.load import moe_layers
from orchestrator.config.settings import Config
from orchestrator.plan.calibration import Calibration, read_calibration, write_calibration
from orchestrator.plan.costmodel import Predicted, Team, predict
from orchestrator.plan.devices import catalogue
from orchestrator.plan.estimate import ModelFacts
from orchestrator.plan.hardware import inventory
from orchestrator.plan.planning import Plan, plan
from orchestrator.plan.scaling import IMBALANCE, by_kind, parse_cluster
from orchestrator.predicting import COLUMNS, cluster_rows, scaling_cells
from orchestrator.tasks.load import load_task
from orchestrator.train.assemble import machine_settings
from orchestrator.train.calibrate import Asked, calibrate, others_seconds, share_of_others
from orchestrator.train.facts import model_facts
from orchestrator.train.memory import free_cached, peak_memory, reset_peak
from orchestrator.train.stepping import Steps, build_steps, step_seconds
from orchestrator.train.tracing import Setting, trace_step
from orchestrator.train.world import World, file_store, joined
from orchestrator.types import MIB, seconds_text

MEDIAN_BAR, WORST_BAR = 0.10, 0.25
QUIET, TRIES = 0.04, 3  # share of the processors that others may use meanwhile; attempts
SECONDS = 2.0  # of steps for each configuration
LONGEST_S = 240.0
WARM_UP = {"single": 5, "expert_parallel": 5, "data_parallel": 26}  # DDP begins after 20 good steps


@dataclass(frozen=True)
class Case:
    settings: dict[str, Any]
    batch: int
    workers: int = 1
    strategy: str = "single"
    bar: bool = True

    @property
    def name(self) -> str:
        shown = {k: v for k, v in self.settings.items() if k not in ("task", "samples")}
        words = " ".join(f"{k.replace('_', '-')} {v}" for k, v in shown.items())
        return f"{self.settings['task']} {words}, batch {self.batch}".replace(" ,", ",")

    @property
    def where(self) -> str:
        return {"single": "1 process", "data_parallel": f"{self.workers} workers", "expert_parallel": f"{self.workers} hosts"}[
            self.strategy
        ]

    def config(self, on_gpu: bool) -> Config:
        more: dict[str, Any] = {"gpu_mode": "single_gpu" if on_gpu else "cpu", "batch_size": self.batch}
        if self.workers > 1:
            more |= {"parallel_strategy": self.strategy, "workers": self.workers}
        return Config.of(**self.settings, **more)


def text(**settings: Any) -> dict[str, Any]:
    return {"task": "text", **settings}


def digits(**settings: Any) -> dict[str, Any]:
    return {"task": "digits", **settings}


def vectors(**settings: Any) -> dict[str, Any]:
    return {"task": "synthetic", "context_length": 0, "samples": 4096, **settings}


def tokens(**settings: Any) -> dict[str, Any]:
    return {"task": "synthetic", "samples": 512, **settings}


ON_CPU = (
    Case(digits(), 64),
    Case(digits(experts=0, width=256, layers=4), 128),
    Case(digits(experts=16, width=128, expert_hidden_size=256), 256),
    Case(text(experts=0), 8),
    Case(text(), 8),
    Case(text(width=256, layers=4, expert_hidden_size=256), 4),
    Case(text(experts=0, width=384, layers=3, context_length=256), 2),
    Case(vectors(width=256, experts=8, expert_hidden_size=512, layers=1), 1024),
    Case(tokens(experts=0, width=192, context_length=64, vocabulary=8192), 16),
    Case(digits(width=128, expert_hidden_size=256), 256, 2, "expert_parallel"),
    Case(text(), 8, 2, "expert_parallel"),
    Case(vectors(width=256, experts=8, expert_hidden_size=512, layers=1), 1024, 2, "expert_parallel"),
    Case(digits(), 64, 2, "data_parallel"),
    Case(text(experts=0), 8, 2, "data_parallel"),
    Case(text(width=192), 4, 2, "data_parallel"),
    Case(text(), 8, 3, "expert_parallel", bar=False),
)


def _gpt(**settings: Any) -> dict[str, Any]:
    return tokens(width=768, layers=12, context_length=1024, vocabulary=50257, experts=0, **settings)


ON_GPU = (
    Case(_gpt(precision="bf16"), 16),
    Case(_gpt(precision="bf16"), 3),
    Case(_gpt(precision="fp32"), 8),
    Case(tokens(width=1024, layers=6, context_length=512, vocabulary=8192, experts=0, precision="bf16"), 32),
    Case(tokens(width=1024, layers=4, context_length=512, vocabulary=8192, experts=16, expert_hidden_size=1024, precision="bf16"), 32),
    Case(tokens(width=512, layers=8, context_length=256, vocabulary=8192, experts=32, expert_hidden_size=512, precision="bf16"), 64),
    Case(vectors(width=1024, layers=2, experts=8, expert_hidden_size=4096, precision="bf16"), 4096),
    Case(vectors(width=2048, layers=4, experts=0, precision="fp32"), 4096),
    Case(text(precision="bf16"), 64),
)


@dataclass(frozen=True)
class Row:
    case: Case
    predicted: Predicted
    seconds: float
    bytes: float | None

    @property
    def error(self) -> float:
        return self.predicted.step_seconds / self.seconds - 1

    @property
    def memory_error(self) -> float | None:
        return None if self.bytes is None else self.predicted.memory.total / self.bytes - 1


def chosen_plan(case: Case, on_gpu: bool) -> tuple[Config, Plan, Any]:
    config = case.config(on_gpu)
    task = load_task(config)
    named = json.dumps({name: value for name, value in case.settings.items() if name != "precision"}, sort_keys=True)
    if named not in _FACTS:
        _FACTS[named] = model_facts(task, "cuda:0" if on_gpu else "cpu", "bf16" if on_gpu else "fp32")
    return config, plan(config, inventory(), _FACTS[named]), task


_FACTS: dict[str, ModelFacts] = {}


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


def quietly_measured(case: Case, steps: int) -> tuple[float, float, float]:
    """The measurement that others disturbed least, of a few where they did."""
    kept, least = None, 1.0
    for _ in range(TRIES):
        begun, before = perf_counter(), others_seconds()
        found = measured(case, steps)
        others = share_of_others(before, perf_counter() - begun)
        kept, least = (found, others) if kept is None or others < least else (kept, least)
        if least < QUIET:
            break
        print(f"others used {others:.0%} of the processors meanwhile", flush=True)
    assert kept is not None
    return kept


def measured(case: Case, steps: int) -> tuple[float, float, float]:
    """On the CPU: workers as processes with their own threads, as many as the plan gives each."""
    threads = max(1, inventory().cores // case.workers)
    with tempfile.TemporaryDirectory(prefix="costmodel-") as folder:
        job = {"case": vars(case), "steps": steps, "folder": folder}
        command = ["env", f"OMP_NUM_THREADS={threads}", sys.executable, "-m", "benchmarks.costmodel", "--work"]
        ranks = [subprocess.Popen([*command, json.dumps(job | {"rank": rank})]) for rank in range(case.workers)]
        try:
            for process in ranks:
                if process.wait(LONGEST_S):
                    raise RuntimeError(f"{case.name} on {case.where} ended with code {process.returncode}")
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(case.workers)]
    seconds = statistics.median(max(times) for times in zip(*(entry["seconds"] for entry in found), strict=True))
    return seconds, max(entry["bytes"] for entry in found), found[0]["imbalance"]


def work(job: dict[str, Any]) -> None:
    """One worker of a measurement."""
    case, rank, folder = Case(**job["case"]), job["rank"], Path(job["folder"])
    config, chosen, task = chosen_plan(case, on_gpu=False)
    with machine_settings(config, chosen, torch.device("cpu")):
        if case.workers == 1:
            found = _steps(case, config, chosen, task, World.alone(), job["steps"])
        else:
            store = file_store(str(folder / "store"), case.workers)
            with joined(store, rank, case.workers, torch.device("cpu"), "gloo", LONGEST_S) as world:
                found = _steps(case, config, chosen, task, world, job["steps"])
    (folder / f"{rank}.json").write_text(json.dumps(found))


def _steps(case: Case, config: Config, chosen: Plan, task: Any, world: World, steps: int) -> dict[str, Any]:
    host_of = None
    if case.strategy == "expert_parallel":
        shape = task.shape
        host_of = [[expert % case.workers for expert in range(len(shape.sizes))]] * shape.layers
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        run = build_steps(config, chosen, task, world, case.batch, host_of)
        run(0)
        run(1)
    seen: list[float] = []

    def watched_run(step: int) -> None:
        run(step)
        if host_of is not None:
            seen.append(_imbalance(run, host_of))

    seconds = step_seconds(watched_run, steps, WARM_UP[case.strategy])
    return {"bytes": _most_handed_out(watched), "seconds": seconds, "imbalance": statistics.mean(seen) if seen else 1.0}


def _imbalance(run: Steps, host_of: list[list[int]]) -> float:
    """Rows of the busiest host as a multiple of the mean, in the last step, over the layers."""
    found = []
    for (_, layer), hosts in zip(moe_layers(run.model), host_of, strict=True):
        loads = [sum(load for load, at in zip(layer.load_E.tolist(), hosts, strict=True) if at == host) for host in set(hosts)]
        found.append(max(loads) * len(loads) / max(1, sum(loads)))
    return statistics.mean(found)


def _most_handed_out(watched: Any) -> float:
    """The most that torch's allocator had handed out at once, by its profiler."""
    held = most = 0
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return float(most)


def measured_here(case: Case) -> tuple[float, float]:
    """On the GPU, in this process."""
    config, chosen, task = chosen_plan(case, on_gpu=True)
    world = World.alone("cuda:0")
    free_cached(world.device)
    reset_peak(world.device)
    with machine_settings(config, chosen, world.device):
        run = build_steps(config, chosen, task, world, case.batch)
        seconds = statistics.median(step_seconds(run, 20, 8, world.device))
    peak = float(peak_memory(world.device)["allocated"])
    del run
    free_cached(world.device)
    return seconds, peak


def compare(cases: list[Case], found: Calibration, on_gpu: bool) -> list[Row]:
    rows = []
    for case in cases:
        predicted = prediction(case, found, on_gpu)
        if on_gpu:
            seconds, size = measured_here(case)
        else:
            seconds, size, imbalance = quietly_measured(case, max(12, min(80, int(SECONDS / predicted.step_seconds))))
            predicted = prediction(case, found, on_gpu, imbalance)
        rows.append(Row(case, predicted, seconds, size))
        print(f"{case.where}, {case.name}: {_cells(rows[-1])}", flush=True)
        print("    ", {name: round(1000 * value, 3) for name, value in predicted.parts.items() if value}, flush=True)
    return rows


def _cells(row: Row) -> list[str]:
    memory = ["–", "–"] if row.bytes is None else [f"{row.bytes / MIB:,.0f}", f"{row.memory_error:+.0%}"]
    parts = ", ".join(
        f"{name} {value / row.predicted.step_seconds:.0%}" for name, value in row.predicted.parts.items() if abs(value) > 0.02 * row.seconds
    )
    times = [f"{1000 * row.predicted.step_seconds:.2f}", f"{1000 * row.seconds:.2f}", f"{row.error:+.1%}"]
    return [*times, f"{row.predicted.memory.total / MIB:,.0f}", *memory, parts]


def table(rows: list[Row]) -> str:
    columns = ["on", "configuration", "predicted ms", "measured ms", "error", "predicted MiB", "measured MiB", "error", "predicted parts"]
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


SEED = {1: 1.0, 2: 0.95, 4: 0.87, 8: 0.81}
DECODER: dict[str, Any] = {"task": "synthetic", "width": 768, "layers": 12, "context_length": 1024, "vocabulary": 50304, "samples": 64}
MODELS: dict[str, dict[str, Any]] = {
    "transformer, 124M": DECODER | {"experts": 0},
    "MoE, 8 experts of 2,048, 2 a token": DECODER | {"experts": 8, "expert_hidden_size": 2048, "top_k": 2},
}
CLUSTERS = {"8 × L4": ("nodes=1,gpus=8,gpu=l4,link=pcie", 4), "8 × H200": ("nodes=1,gpus=8,gpu=h200,link=nvlink", 16)}


def scaling(given: argparse.Namespace) -> str:
    """The efficiency that a guide for four L4 promises, beside the model's prediction: weak scaling, a micro-batch on each device."""
    columns, rows = ["devices", "promised"], {count: [f"{count}", f"{share:.0%}"] for count, share in SEED.items()}
    details: list[list[str]] = []
    for cluster, (text, batch) in CLUSTERS.items():
        spec = parse_cluster(text)
        for model, settings in MODELS.items():
            found, _ = cluster_rows(Config.of(**settings, batch_size=batch, precision="bf16"), spec)
            for (kind, strategy), group in by_kind(found).items():
                if kind == "weak":
                    columns.append(f"{cluster}, {model}, {strategy.replace('_', ' ')}")
                    for row in group:
                        rows[row.devices].append(f"{row.efficiency:.0%}")
                        details.append([columns[-1], *scaling_cells(row, spec)])
    text = header("Scaling: promised and predicted", given) + markdown_table(columns, [list(row) for row in rows.values()])
    text += "\nWeak scaling, one micro-batch of 1,024-token samples a device (4 on an L4, 16 on an H200), bf16, no accumulation.\n"
    text += f"{catalogue().about}\n{catalogue().links.about}\n"
    text += f"Assumed in expert parallel: the busiest device has {IMBALANCE - 1:.0%} more rows than the mean.\n\n"
    return text + markdown_table(["on", *COLUMNS], details)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the GPU's configurations, in this process")
    parser.add_argument("--only", nargs="+", type=int, help="only the configurations with these numbers, from 0")
    parser.add_argument("--calibration", type=Path, default=Path(tempfile.gettempdir()) / "calibration.json", help="where it is written")
    parser.add_argument("--known", action="store_true", help="take the calibration that is there already")
    parser.add_argument("--scaling", action="store_true", help="the scaling table of known devices instead; measures nothing")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.work:
        work(given.work)
        return
    if given.scaling:
        result = scaling(given)
        print(result)
        write_result(given.out, result)
        return
    begun = perf_counter()
    if not given.known:
        write_calibration(quiet_calibration(given.gpu), given.calibration)
    found = read_calibration(given.calibration)
    every = ON_GPU if given.gpu else ON_CPU
    rows = compare([case for number, case in enumerate(every) if not given.only or number in given.only], found, given.gpu)
    took = f"Calibrated in {found.seconds:.0f} s, with others on {found.others:.0%} of the processors; "
    took += f"all in {seconds_text(perf_counter() - begun)}."
    result = header("Predicted against measured", given) + table(rows) + "\n" + verdict(rows) + took + "\n"
    print(result)
    write_result(given.out, result)


if __name__ == "__main__":
    main()
