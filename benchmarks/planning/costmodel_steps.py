"""Time real training steps of a configuration: on the CPU in processes of their own, on the GPU in
this process.

``benchmarks.planning.costmodel`` starts a worker for each process:

    python -m benchmarks.planning.costmodel_steps JOB
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.planning.costmodel_cases import Case
from experts.balance import moe_layers
from orchestrator.config.settings import Config
from orchestrator.measure.calibration.calibrate import others_seconds, share_of_others
from orchestrator.measure.timed_steps import StepRunner, build_step_runner, step_seconds, submit_seconds
from orchestrator.measure.tracing.model_facts import model_facts
from orchestrator.plan.estimate import ModelFacts
from orchestrator.plan.inventory.hardware import inventory
from orchestrator.plan.planning import Plan, plan
from orchestrator.tasks.load import load_task
from orchestrator.train.device.memory import free_cached, peak_memory, reset_peak
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.worker.torch_settings import torch_settings

QUIET = 0.04  # share of the processors that other processes may use during a measurement
ATTEMPTS = 3
LONGEST_S = 240.0
WARM_UP = {"single": 5, "expert_parallel": 5, "data_parallel": 26}  # DDP begins after 20 good steps
_FACTS: dict[str, ModelFacts] = {}


def choose_plan(case: Case, on_gpu: bool) -> tuple[Config, Plan, Any]:
    """Return config, plan and task of a case.

    The facts of a model are computed once for all its precisions.
    """
    config = case.config(on_gpu)
    task = load_task(config)
    model_settings = {name: value for name, value in case.settings.items() if name != "precision"}
    key = json.dumps(model_settings, sort_keys=True)
    if key not in _FACTS:
        _FACTS[key] = model_facts(task, "cuda:0" if on_gpu else "cpu", "bf16" if on_gpu else "fp32")
    return config, plan(config, inventory(), _FACTS[key]), task


def measure_quietly(case: Case, steps: int) -> tuple[float, float, float]:
    """Measure up to a few times, until no other process disturbs.

    Returns the least disturbed measurement.
    """
    best = None
    least = 1.0
    for _ in range(ATTEMPTS):
        begun = perf_counter()
        before = others_seconds()
        result = measure(case, steps)
        others = share_of_others(before, perf_counter() - begun)
        if best is None or others < least:
            best = result
            least = others
        if least < QUIET:
            break
        print(f"others used {others:.0%} of the processors meanwhile", flush=True)
    assert best is not None
    return best


def measure(case: Case, steps: int) -> tuple[float, float, float]:
    """Measure on the CPU, with workers as processes that have as many threads as the plan gives
    each.

    Returns the seconds of a step, the most bytes of a worker, and the imbalance of the hosts.
    """
    threads = max(1, inventory().cores // case.workers)
    with tempfile.TemporaryDirectory(prefix="costmodel-") as folder:
        job = {"case": vars(case), "steps": steps, "folder": folder}
        worker = [sys.executable, "-m", "benchmarks.planning.costmodel_steps"]
        command = ["env", f"OMP_NUM_THREADS={threads}", *worker]
        ranks = [
            subprocess.Popen([*command, json.dumps(job | {"rank": rank})]) for rank in range(case.workers)
        ]
        try:
            for process in ranks:
                if process.wait(LONGEST_S):
                    raise RuntimeError(f"{case.name} on {case.where} ended with code {process.returncode}")
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        results = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(case.workers)]
    # a step lasts as long as its slowest worker
    per_step = zip(*(result["seconds"] for result in results), strict=True)
    seconds = statistics.median(max(times) for times in per_step)
    return seconds, max(result["bytes"] for result in results), results[0]["imbalance"]


def work(job: dict[str, Any]) -> None:
    """Run one worker of a measurement."""
    case = Case(**job["case"])
    folder = Path(job["folder"])
    rank = job["rank"]
    config, chosen, task = choose_plan(case, on_gpu=False)
    cpu = torch.device("cpu")
    with torch_settings(config, chosen, cpu):
        if case.workers == 1:
            result = _steps(case, config, chosen, task, World.single_process(), job["steps"])
        else:
            store = file_store(str(folder / "store"), case.workers)
            with process_group_world(store, rank, case.workers, cpu, "gloo", LONGEST_S) as world:
                result = _steps(case, config, chosen, task, world, job["steps"])
    (folder / f"{rank}.json").write_text(json.dumps(result))


def _steps(case: Case, config: Config, chosen: Plan, task: Any, world: World, steps: int) -> dict[str, Any]:
    """Return the seconds of each step, the most memory, and the mean imbalance."""
    host_of = None
    if case.strategy == "expert_parallel":
        shape = task.shape
        host_of = [[expert % case.workers for expert in range(len(shape.expert_sizes))]] * shape.layers
    # The profiler slows the steps down, so memory is measured before the timed ones; the second
    # step has optimizer state
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run = build_step_runner(config, chosen, task, world, case.batch, host_of)
        run(0)
        run(1)
    imbalances: list[float] = []

    def run_and_record(step: int) -> None:
        run(step)
        if host_of is not None:
            imbalances.append(_imbalance(run, host_of))

    seconds = step_seconds(run_and_record, steps, WARM_UP[case.strategy])
    return {
        "bytes": peak_bytes(profiled),
        "seconds": seconds,
        "imbalance": statistics.mean(imbalances) if imbalances else 1.0,
    }


def _imbalance(run: StepRunner, host_of: list[list[int]]) -> float:
    """Return the rows of the busiest host as a multiple of the mean, in the last step, over the layers."""
    imbalances = []
    for (_, layer), hosts in zip(moe_layers(run.model), host_of, strict=True):
        loads = dict.fromkeys(hosts, 0.0)
        for load, host in zip(layer.load_E.tolist(), hosts, strict=True):
            loads[host] += load
        imbalances.append(max(loads.values()) * len(loads) / max(1, sum(loads.values())))
    return statistics.mean(imbalances)


def peak_bytes(profiled: Any) -> float:
    """Return the most bytes that torch's allocator had given out at once, by its profiler."""
    held = 0
    most = 0
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return float(most)


def measure_here(case: Case, steps: int) -> tuple[float, float, float]:
    """Measure on the GPU, in this process.

    Returns seconds of a step, seconds of the host, and peak bytes.
    """
    config, chosen, task = choose_plan(case, on_gpu=True)
    world = World.single_process("cuda:0")
    free_cached(world.device)
    reset_peak(world.device)
    with torch_settings(config, chosen, world.device):
        run = build_step_runner(config, chosen, task, world, case.batch)
        seconds = statistics.median(step_seconds(run, steps, 8, world.device))
        host = statistics.median(submit_seconds(run, 12, 0, world.device))
    peak = float(peak_memory(world.device)["allocated"])
    del run
    free_cached(world.device)
    return seconds, host, peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", type=json.loads, help="as JSON: a case, its steps, a folder and a rank")
    work(parser.parse_args().job)


if __name__ == "__main__":
    main()
