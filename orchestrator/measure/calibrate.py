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

import psutil
import torch
from pydantic import TypeAdapter

from orchestrator.errors import ResourceError
from orchestrator.measure.host_overhead import with_overhead, yardstick
from orchestrator.measure.link_bandwidth import measured_links
from orchestrator.measure.op_times import (
    ON_CPU,
    ON_GPU,
    TINY,
    MeasuredSizes,
    attention_curves,
    group_seconds,
    grouped_curve,
    move_curves,
    product_grids,
    unaligned_factors,
    update_curve,
)
from orchestrator.measure.sustained_load import with_sustained
from orchestrator.measure.timer import Timer
from orchestrator.plan.cost.calibration import VERSION, Calibration, Profile, Reference
from orchestrator.plan.cost.interpolate import PiecewiseCurve
from orchestrator.plan.cost.machine import DeviceCosts, LinkKind
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.train.parts.memory import free_cached
from orchestrator.train.parts.stores import file_store
from orchestrator.train.parts.world import process_group_world

ProgressCallback = Callable[[str], None]
_LONGEST_S = 120.0


@dataclass(frozen=True)
class CalibrationScope:
    """What is calibrated: the CPU or a GPU, with the given sizes, for one worker and for several."""

    on_gpu: bool
    sizes: MeasuredSizes
    workers: tuple[int, ...]
    references: int | None = None
    """How many of the reference steps are taken; None for all."""

    @classmethod
    def of(cls, found: Inventory, tiny: bool = False) -> CalibrationScope:
        on_gpu = bool(found.gpus)
        several = (len(found.gpus) > 1) if on_gpu else found.cores > 1
        sizes = TINY if tiny else ON_GPU if on_gpu else ON_CPU
        return cls(on_gpu, sizes, (1, 2) if several else (1,), 5 if tiny else None)


def calibrate(
    found: Inventory, asked: CalibrationScope, tell: ProgressCallback = lambda _: None
) -> Calibration:
    """Measure all that is asked for. ``tell`` hears what is being measured."""
    begun, before = perf_counter(), others_seconds()
    profiles = [
        _together(found, asked, workers, tell) if workers > 1 else _alone(found, asked, tell)
        for workers in asked.workers
    ]
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


def _alone(found: Inventory, asked: CalibrationScope, tell: ProgressCallback) -> Profile:
    device = torch.device("cuda", 0) if asked.on_gpu else torch.device("cpu")
    if not asked.on_gpu:
        torch.set_num_threads(found.cores)
    measured = measured_device(found, asked, device, tell)
    return Profile(1, found.cores, measured.device, None, measured.references, measured.yardstick_s)


@dataclass(frozen=True)
class DeviceMeasurement:
    """The device's figures, the reference steps that some of them were found from, and how fast the host was meanwhile."""

    device: DeviceCosts
    references: tuple[Reference, ...]
    yardstick_s: tuple[float, ...] = ()


def measured_device(
    found: Inventory, asked: CalibrationScope, device: torch.device, tell: ProgressCallback
) -> DeviceMeasurement:
    timer, sizes = Timer(device, asked.sizes.seconds), asked.sizes
    precisions = precisions_of(found, asked.on_gpu)
    products = {}
    for precision in precisions:
        tell(f"products in {precision}")
        products[precision] = product_grids(timer, sizes, precision)
    tell("other operations and the optimizer")
    gpu = found.gpus[0] if asked.on_gpu else None
    fused = gpu is not None and gpu.capability >= (9, 0)
    made = DeviceCosts(
        name=gpu.name if gpu else found.cpu_name,
        memory_bytes=float(gpu.memory_total if gpu else found.ram_total),
        asynchronous=gpu is not None,
        products=products,
        moves=move_curves(timer, sizes),
        attention=attention_curves(timer, sizes, [p for p in precisions if p != "tf32"]),
        optimizer=update_curve(timer, sizes),
        grouped=grouped_curve(timer) if fused else PiecewiseCurve((1.0,), (1.0,)) if gpu else None,
        group_s=0.0 if gpu else group_seconds(timer),
        unaligned={precision: unaligned_factors(timer, precision) for precision in precisions}
        if gpu and sizes != TINY
        else {},
    )
    tell("the host's overhead per operation")
    if gpu is None:
        return DeviceMeasurement(*with_overhead(made, found, device, timer, asked.references))
    measured = _with_whole_steps(made, found, asked, device, timer, tell)
    del timer  # and what it has measured with
    free_cached(device)
    reserved = float(torch.cuda.memory_allocated(device))  # what is left are workspaces of libraries
    return replace(measured, device=replace(measured.device, reserved_bytes=reserved))


def _with_whole_steps(
    made: DeviceCosts,
    found: Inventory,
    asked: CalibrationScope,
    device: torch.device,
    timer: Timer,
    tell: ProgressCallback,
) -> DeviceMeasurement:
    """The figures of a GPU that need whole steps, with the host's speed before these and after."""
    read = yardstick(made, found, device)
    before = read()
    made, references = with_overhead(made, found, device, timer, asked.references)
    after = read()
    if asked.sizes != TINY:
        tell("large steps")
        made, large = with_sustained(made, found, device)
        references += large
    return DeviceMeasurement(made, references, tuple(map(statistics.mean, zip(before, after, strict=True))))


def precisions_of(found: Inventory, on_gpu: bool) -> list[str]:
    """Those that the device really has."""
    if not on_gpu:
        return ["fp32", "bf16"] if found.cpu_bf16 else ["fp32"]
    newer = found.gpus[0].capability >= (8, 0)
    return ["fp32", "tf32", "bf16", "fp16"] if newer else ["fp32", "fp16"]


def _together(found: Inventory, asked: CalibrationScope, workers: int, tell: ProgressCallback) -> Profile:
    """The same in several processes at once, and what they say to each other."""
    threads = max(1, found.cores // workers)
    tell(f"{workers} workers at once, and the link between them")
    with tempfile.TemporaryDirectory(prefix="calibrate-") as folder:
        job = {"workers": workers, "tiny": asked.sizes == TINY, "folder": folder, "threads": threads}
        command = [
            "env",
            f"OMP_NUM_THREADS={threads}",
            sys.executable,
            "-m",
            "orchestrator.measure.calibrate",
        ]
        ranks = [
            subprocess.Popen(
                [*command, json.dumps(job | {"rank": rank})],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(workers)
        ]
        try:
            for rank, process in enumerate(ranks):
                _, errors = process.communicate(timeout=_LONGEST_S)
                if process.returncode:
                    last = (errors.strip().splitlines() or ["no message"])[-1]
                    raise ResourceError(
                        f"worker {rank} of the calibration ended with code {process.returncode}: {last}"
                    )
        except subprocess.TimeoutExpired:
            raise ResourceError(
                f"the workers of the calibration did not end within {_LONGEST_S:g} s"
            ) from None
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return TypeAdapter(Profile).validate_json(Path(folder, "profile.json").read_text(encoding="utf-8"))


def work_beside(job: dict[str, Any]) -> None:
    """One of the workers: measures as the others do, and the first writes down what it found."""
    from orchestrator.plan.inventory.hardware import inventory

    found = inventory()
    asked = CalibrationScope.of(found, job["tiny"])
    rank, size, folder = job["rank"], job["workers"], Path(job["folder"])
    device = torch.device("cuda", rank) if asked.on_gpu else torch.device("cpu")
    torch.set_num_threads(job["threads"])
    store = file_store(str(folder / "store"), size)
    with process_group_world(
        store, rank, size, device, "nccl" if asked.on_gpu else "gloo", _LONGEST_S
    ) as world:
        kind: LinkKind = "nvlink" if asked.on_gpu else "shared memory"
        wiring = measured_links(world, kind)
        world.barrier()
        measured = measured_device(
            replace(found, cores=job["threads"]), asked, device, lambda _: world.barrier()
        )
        if rank == 0:
            profile = Profile(
                size, job["threads"], measured.device, wiring, measured.references, measured.yardstick_s
            )
            (folder / "profile.json").write_text(json.dumps(asdict(profile)), encoding="utf-8")


if __name__ == "__main__":
    work_beside(json.loads(sys.argv[1]))
