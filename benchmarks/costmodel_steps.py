"""Real training steps of a configuration, timed: on the CPU as processes of their own, on the GPU in this one."""

from __future__ import annotations

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

from benchmarks.costmodel_cases import Case
from experts.balance import moe_layers
from orchestrator.config.settings import Config
from orchestrator.measure.calibrate import others_seconds, share_of_others
from orchestrator.measure.model_facts import model_facts
from orchestrator.measure.timed_steps import StepRunner, build_steps, submit_seconds, step_seconds
from orchestrator.plan.estimate import ModelFacts
from orchestrator.plan.inventory.hardware import inventory
from orchestrator.plan.planning import Plan, plan
from orchestrator.tasks.load import load_task
from orchestrator.train.parts.memory import free_cached, peak_memory, reset_peak
from orchestrator.train.parts.stores import file_store
from orchestrator.train.parts.world import World, process_group_world
from orchestrator.train.worker.build import machine_settings

QUIET, TRIES = 0.04, 3  # share of the processors that others may use meanwhile; attempts
LONGEST_S = 240.0
WARM_UP = {"single": 5, "expert_parallel": 5, "data_parallel": 26}  # DDP begins after 20 good steps
_FACTS: dict[str, ModelFacts] = {}


def chosen_plan(case: Case, on_gpu: bool) -> tuple[Config, Plan, Any]:
    config = case.config(on_gpu)
    task = load_task(config)
    named = json.dumps(
        {name: value for name, value in case.settings.items() if name != "precision"}, sort_keys=True
    )
    if named not in _FACTS:
        _FACTS[named] = model_facts(task, "cuda:0" if on_gpu else "cpu", "bf16" if on_gpu else "fp32")
    return config, plan(config, inventory(), _FACTS[named]), task


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
        command = ["env", f"OMP_NUM_THREADS={threads}", sys.executable, "-m", "benchmarks.costmodel_steps"]
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
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(case.workers)]
    seconds = statistics.median(
        max(times) for times in zip(*(entry["seconds"] for entry in found), strict=True)
    )
    return seconds, max(entry["bytes"] for entry in found), found[0]["imbalance"]


def work(job: dict[str, Any]) -> None:
    """One worker of a measurement."""
    case, rank, folder = Case(**job["case"]), job["rank"], Path(job["folder"])
    config, chosen, task = chosen_plan(case, on_gpu=False)
    with machine_settings(config, chosen, torch.device("cpu")):
        if case.workers == 1:
            found = _steps(case, config, chosen, task, World.single_process(), job["steps"])
        else:
            store = file_store(str(folder / "store"), case.workers)
            with process_group_world(
                store, rank, case.workers, torch.device("cpu"), "gloo", LONGEST_S
            ) as world:
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
    return {
        "bytes": _most_handed_out(watched),
        "seconds": seconds,
        "imbalance": statistics.mean(seen) if seen else 1.0,
    }


def _imbalance(run: StepRunner, host_of: list[list[int]]) -> float:
    """Rows of the busiest host as a multiple of the mean, in the last step, over the layers."""
    found = []
    for (_, layer), hosts in zip(moe_layers(run.model), host_of, strict=True):
        loads = [
            sum(load for load, at in zip(layer.load_E.tolist(), hosts, strict=True) if at == host)
            for host in set(hosts)
        ]
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


def measured_here(case: Case, steps: int) -> tuple[float, float, float]:
    """On the GPU, in this process: a step, the host's part of it, and the most memory."""
    config, chosen, task = chosen_plan(case, on_gpu=True)
    world = World.single_process("cuda:0")
    free_cached(world.device)
    reset_peak(world.device)
    with machine_settings(config, chosen, world.device):
        run = build_steps(config, chosen, task, world, case.batch)
        seconds = statistics.median(step_seconds(run, steps, 8, world.device))
        host = statistics.median(submit_seconds(run, 12, 0, world.device))
    peak = float(peak_memory(world.device)["allocated"])
    del run
    free_cached(world.device)
    return seconds, host, peak


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
