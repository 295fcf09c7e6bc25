"""Measures this machine for the cost model, in under a minute: what a device does alone and with all others busy, what the host
needs for each operation, and what the links between workers carry.

Workers are processes of their own, started with the number of threads that a run would give them: set later, not every product
keeps to it."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import psutil
import torch
from pydantic import TypeAdapter

from experts.group import Group
from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError
from orchestrator.plan.calibration import VERSION, Calibration, Profile
from orchestrator.plan.costmodel import Device, Link, LinkKind, Machine, Wiring, predict
from orchestrator.plan.curves import Curve
from orchestrator.plan.hardware import Inventory
from orchestrator.plan.planning import Arithmetic, plan
from orchestrator.tasks.load import load_task
from orchestrator.train.assemble import machine_settings
from orchestrator.train.facts import model_facts
from orchestrator.train.measuring import (
    ON_CPU,
    ON_GPU,
    TINY,
    Sizes,
    Timer,
    attention_curves,
    group_seconds,
    grouped_curve,
    move_curves,
    product_grids,
    unaligned_factors,
    update_curve,
)
from orchestrator.train.memory import free_cached
from orchestrator.train.stepping import build_steps, step_seconds
from orchestrator.train.tracing import Setting, trace_step
from orchestrator.train.world import World, file_store, joined

Tell = Callable[[str], None]
_LONGEST_S = 120.0
_MESSAGES = (2**10, 2**14, 2**17, 2**20, 2**23)
_REFERENCE_STEPS, _REFERENCE_BATCH, _TURNS = 12, 2, 4
REFERENCES: tuple[dict[str, Any], ...] = (
    {"task": "digits", "experts": 0, "layers": 1, "width": 16},
    {"task": "digits", "experts": 0, "layers": 6, "width": 16},
    {"task": "digits", "experts": 4, "layers": 1, "width": 16, "expert_hidden_size": 16},
    {"task": "digits", "experts": 4, "layers": 4, "width": 16, "expert_hidden_size": 16},
    {"task": "synthetic", "experts": 0, "layers": 1, "width": 16, "context_length": 4, "samples": 64},
    {"task": "synthetic", "experts": 0, "layers": 5, "width": 16, "context_length": 4, "samples": 64},
    {"task": "synthetic", "experts": 4, "layers": 3, "width": 16, "context_length": 4, "samples": 64, "expert_hidden_size": 16},
)
"""Steps so small that the host's overhead is all they cost."""


@dataclass(frozen=True)
class Asked:
    """What is calibrated: the CPU or a GPU, with the given sizes, for one worker and for several."""

    on_gpu: bool
    sizes: Sizes
    workers: tuple[int, ...]
    references: int = len(REFERENCES)

    @classmethod
    def of(cls, found: Inventory, tiny: bool = False) -> Asked:
        on_gpu = bool(found.gpus)
        several = (len(found.gpus) > 1) if on_gpu else found.cores > 1
        sizes = TINY if tiny else ON_GPU if on_gpu else ON_CPU
        return cls(on_gpu, sizes, (1, 2) if several else (1,), 4 if tiny else len(REFERENCES))


def calibrate(found: Inventory, asked: Asked, tell: Tell = lambda _: None) -> Calibration:
    """Measure all that is asked for. ``tell`` hears what is being measured."""
    begun, before = perf_counter(), others_seconds()
    profiles = [_together(found, asked, workers, tell) if workers > 1 else _alone(found, asked, tell) for workers in asked.workers]
    name = found.gpus[0].name if asked.on_gpu else f"{found.cpu_name}, {found.cores} cores"
    made = datetime.now(UTC).isoformat(timespec="seconds")
    seconds = perf_counter() - begun
    others = share_of_others(before, seconds)
    return Calibration(VERSION, made, name, found.cores, seconds, others, tuple(profiles))


def share_of_others(before: float, seconds: float) -> float:
    """Of all processors, since ``others_seconds`` was ``before``, so many seconds ago."""
    return max(0.0, others_seconds() - before) / seconds / (psutil.cpu_count() or 1)


def others_seconds() -> float:
    """Processor time that others than this process and its workers have used."""
    everyone, own = psutil.cpu_times(), os.times()
    idle = everyone.idle + getattr(everyone, "iowait", 0.0)
    return sum(everyone[:7]) - idle - (own.user + own.system + own.children_user + own.children_system)


def _alone(found: Inventory, asked: Asked, tell: Tell) -> Profile:
    device = torch.device("cuda", 0) if asked.on_gpu else torch.device("cpu")
    if not asked.on_gpu:
        torch.set_num_threads(found.cores)
    return Profile(1, found.cores, measured_device(found, asked, device, tell))


def measured_device(found: Inventory, asked: Asked, device: torch.device, tell: Tell) -> Device:
    """The device's figures; last of all the host's overhead, as what the reference steps take beyond what these explain."""
    timer, sizes = Timer(device, asked.sizes.seconds), asked.sizes
    precisions = precisions_of(found, asked.on_gpu)
    products = {}
    for precision in precisions:
        tell(f"products in {precision}")
        products[precision] = product_grids(timer, sizes, precision)
    tell("other operations and the optimizer")
    gpu = found.gpus[0] if asked.on_gpu else None
    fused = gpu is not None and gpu.capability >= (9, 0)
    made = Device(
        name=gpu.name if gpu else found.cpu_name,
        memory_bytes=float(gpu.memory_total if gpu else found.ram_total),
        asynchronous=gpu is not None,
        products=products,
        moves=move_curves(timer, sizes),
        attention=attention_curves(timer, sizes, [p for p in precisions if p != "tf32"]),
        optimizer=update_curve(timer, sizes),
        grouped=grouped_curve(timer) if fused else Curve((1.0,), (1.0,)) if gpu else None,
        group_s=0.0 if gpu else group_seconds(timer),
        unaligned={precision: unaligned_factors(timer, precision) for precision in precisions} if gpu and sizes != TINY else {},
    )
    tell("the host's overhead per operation")
    made = with_overhead(made, found, asked, device)
    if gpu is None:
        return made
    del timer  # and what it has measured with
    free_cached(device)
    return replace(made, reserved_bytes=float(torch.cuda.memory_allocated(device)))  # what is left are workspaces of libraries


def precisions_of(found: Inventory, on_gpu: bool) -> list[str]:
    """Those that the device really has."""
    if not on_gpu:
        return ["fp32", "bf16"] if found.cpu_bf16 else ["fp32"]
    newer = found.gpus[0].capability >= (8, 0)
    return ["fp32", "tf32", "bf16", "fp16"] if newer else ["fp32", "fp16"]


def with_overhead(made: Device, found: Inventory, asked: Asked, device: torch.device) -> Device:
    """Seconds of the host for each operation, view and parameter, and for a step as such: fitted to the reference steps. These
    are taken in turn, several times, and of each the fastest turn: what disturbs one is over by the next."""
    precision: Arithmetic = "bf16" if "bf16" in made.products and asked.on_gpu else "fp32"
    grouped = made.grouped is None or len(made.grouped.sizes) > 1
    rows, explained, runs = [], [], []
    for settings in REFERENCES[: asked.references]:
        config = Config.of(**settings, precision=precision, gpu_mode="single_gpu" if asked.on_gpu else "cpu")
        task = load_task(config)
        chosen = plan(config, found, model_facts(task, str(device), precision))
        work = trace_step(task, _REFERENCE_BATCH, Setting(asked.on_gpu, precision, grouped))
        rows.append([work.operations, work.views, work.tensors, 1.0])
        explained.append(0.0 if asked.on_gpu else predict(work, Machine(made)).step_seconds)
        with machine_settings(config, chosen, device):
            runs.append(build_steps(config, chosen, task, World.alone(device), _REFERENCE_BATCH))
    turns = [[statistics.median(step_seconds(run, _REFERENCE_STEPS, device=device)) for run in runs] for _ in range(_TURNS)]
    left = [max(0.0, min(times) - known) for times, known in zip(zip(*turns, strict=True), explained, strict=True)]
    operation, view, tensor, step = not_negative(np.array(rows, float), np.array(left))
    return replace(made, operation_s=operation, view_s=view, tensor_s=tensor, step_s=step)


def not_negative(rows: np.ndarray, values: np.ndarray) -> list[float]:
    """Least squares of relative errors, with no figure below zero: those that would be are left out, one after another."""
    scale = 1.0 / np.maximum(values, 1e-9)
    kept = list(range(rows.shape[1]))
    found = [0.0] * rows.shape[1]
    while kept:
        solved = np.linalg.lstsq(rows[:, kept] * scale[:, None], values * scale, rcond=None)[0]
        if solved.min() >= 0:
            for place, value in zip(kept, solved, strict=True):
                found[place] = float(value)
            break
        del kept[int(solved.argmin())]
    return found


def _together(found: Inventory, asked: Asked, workers: int, tell: Tell) -> Profile:
    """The same in several processes at once, and what they say to each other."""
    threads = max(1, found.cores // workers)
    tell(f"{workers} workers at once, and the link between them")
    with tempfile.TemporaryDirectory(prefix="calibrate-") as folder:
        job = {"workers": workers, "tiny": asked.sizes == TINY, "folder": folder, "threads": threads}
        command = ["env", f"OMP_NUM_THREADS={threads}", sys.executable, "-m", "orchestrator.train.calibrate"]
        ranks = [
            subprocess.Popen([*command, json.dumps(job | {"rank": rank})], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for rank in range(workers)
        ]
        try:
            for rank, process in enumerate(ranks):
                _, errors = process.communicate(timeout=_LONGEST_S)
                if process.returncode:
                    last = (errors.strip().splitlines() or ["no message"])[-1]
                    raise ResourceError(f"worker {rank} of the calibration ended with code {process.returncode}: {last}")
        except subprocess.TimeoutExpired:
            raise ResourceError(f"the workers of the calibration did not end within {_LONGEST_S:g} s") from None
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return TypeAdapter(Profile).validate_json(Path(folder, "profile.json").read_text(encoding="utf-8"))


def work_beside(job: dict[str, Any]) -> None:
    """One of the workers: measures as the others do, and the first writes down what it found."""
    from orchestrator.plan.hardware import inventory

    found = inventory()
    asked = Asked.of(found, job["tiny"])
    rank, size, folder = job["rank"], job["workers"], Path(job["folder"])
    device = torch.device("cuda", rank) if asked.on_gpu else torch.device("cpu")
    torch.set_num_threads(job["threads"])
    store = file_store(str(folder / "store"), size)
    with joined(store, rank, size, device, "nccl" if asked.on_gpu else "gloo", _LONGEST_S) as world:
        kind: LinkKind = "nvlink" if asked.on_gpu else "shared memory"
        wiring = Wiring(_sums(world, kind), _exchange(world, kind))
        world.barrier()
        made = measured_device(replace(found, cores=job["threads"]), asked, device, lambda _: world.barrier())
        if rank == 0:
            profile = Profile(size, job["threads"], made, wiring)
            (folder / "profile.json").write_text(json.dumps(asdict(profile)), encoding="utf-8")


def _sums(world: World, kind: LinkKind) -> Link:
    return fitted_link(kind, {size: _message_seconds(world, lambda t: world.sum_(t), size) for size in _MESSAGES})


def _exchange(world: World, kind: LinkKind) -> Link:
    """By bytes that leave a device: of a tensor for two, half."""
    group = Group(world.rank, world.size, world.process_group)

    def swap(tensor: torch.Tensor) -> None:
        group.all_to_all(torch.empty_like(tensor), tensor, [], []).wait()

    return fitted_link(kind, {size: _message_seconds(world, swap, size * world.size // (world.size - 1)) for size in _MESSAGES})


def _message_seconds(world: World, send: Callable[[torch.Tensor], Any], size: int) -> float:
    """The mean, over messages and workers, with something to compute before each: in a step nobody waits at the door, and on a
    CPU the thread that carries a message must first get hold of a core."""
    tensor, square = torch.zeros(size // 4, device=world.device), torch.randn(192, 192, device=world.device)
    seconds = []
    for _ in range(40 if size < 2**20 else 12):
        for _ in range(4):
            square = (square @ square).clamp(-1, 1)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        begun = perf_counter()
        send(tensor)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        seconds.append(perf_counter() - begun)
    return statistics.mean(row[0] for row in world.gather([statistics.mean(seconds[4:])]))


def fitted_link(kind: LinkKind, seconds: dict[int, float]) -> Link:
    """Latency and bandwidth that explain the times best, each error in proportion."""
    sizes, values = np.array(list(seconds), float), np.array(list(seconds.values()))
    latency, per_byte = not_negative(np.stack([np.ones_like(sizes), sizes], 1), values)
    return Link(kind, latency, 1.0 / max(per_byte, 1e-13))


if __name__ == "__main__":
    work_beside(json.loads(sys.argv[1]))
