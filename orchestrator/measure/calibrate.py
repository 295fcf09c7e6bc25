"""Calibration of this machine for the cost model, in under a minute.

It measures a device alone and with all others busy, the host's overhead per operation, and the
links between workers. Workers are processes of their own, started with the number of threads that
a run would give them: a later change of that number does not affect every product.
"""

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
from orchestrator.measure.host_overhead import make_yardstick, with_overhead
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
"""Receives the name of what is measured next."""

_MODULE = "orchestrator.measure.calibrate"
_TIMEOUT_S = 120.0
_GROUPED_CAPABILITY = (9, 0)  # from which on torch fuses grouped products
_BF16_CAPABILITY = (8, 0)
_TINY_REFERENCES = 5


@dataclass(frozen=True)
class CalibrationScope:
    """The extent of a calibration: the CPU or a GPU, the sizes of operations, and the numbers of
    workers."""

    on_gpu: bool
    sizes: MeasuredSizes
    workers: tuple[int, ...]
    references: int | None = None
    """Number of reference steps; None for all."""

    @classmethod
    def of(cls, inventory: Inventory, tiny: bool = False) -> CalibrationScope:
        on_gpu = bool(inventory.gpus)
        devices = len(inventory.gpus) if on_gpu else inventory.cores
        sizes = ON_GPU if on_gpu else ON_CPU
        return cls(
            on_gpu=on_gpu,
            sizes=TINY if tiny else sizes,
            workers=(1, 2) if devices > 1 else (1,),
            references=_TINY_REFERENCES if tiny else None,
        )


@dataclass(frozen=True)
class DeviceMeasurement:
    """The costs of a device, the reference steps they were fitted to, and the speed of the host
    meanwhile."""

    costs: DeviceCosts
    references: tuple[Reference, ...]
    yardstick_s: tuple[float, ...] = ()


def calibrate(
    inventory: Inventory, scope: CalibrationScope, progress: ProgressCallback = lambda _: None
) -> Calibration:
    """Measure everything in the scope."""
    start_s = perf_counter()
    others_before_s = others_seconds()
    profiles = [_profile(inventory, scope, workers, progress) for workers in scope.workers]
    seconds = perf_counter() - start_s
    machine = f"{inventory.cpu_name}, {inventory.cores} cores"
    return Calibration(
        version=VERSION,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=inventory.gpus[0].name if scope.on_gpu else machine,
        cores=inventory.cores,
        seconds=seconds,
        others=share_of_others(others_before_s, seconds),
        profiles=tuple(profiles),
    )


def share_of_others(others_before_s: float, seconds: float) -> float:
    """Return the share of all processors that other programs used in the last ``seconds``."""
    return max(0.0, others_seconds() - others_before_s) / seconds / (psutil.cpu_count() or 1)


def others_seconds() -> float:
    """Return the processor seconds of all programs except this process and its workers."""
    all_times = psutil.cpu_times()
    own = os.times()
    idle = all_times.idle + getattr(all_times, "iowait", 0.0)
    # The first seven fields are the disjoint ones: guest time is part of user time.
    busy = sum(all_times[:7]) - idle
    return busy - (own.user + own.system + own.children_user + own.children_system)


def _profile(
    inventory: Inventory, scope: CalibrationScope, workers: int, progress: ProgressCallback
) -> Profile:
    if workers > 1:
        return _profile_of_workers(inventory, scope, workers, progress)
    device = torch.device("cuda", 0) if scope.on_gpu else torch.device("cpu")
    if not scope.on_gpu:
        torch.set_num_threads(inventory.cores)
    measured = measure_device(inventory, scope, device, progress)
    return Profile(
        workers=1,
        threads=inventory.cores,
        device=measured.costs,
        references=measured.references,
        yardstick_s=measured.yardstick_s,
    )


def measure_device(
    inventory: Inventory, scope: CalibrationScope, device: torch.device, progress: ProgressCallback
) -> DeviceMeasurement:
    """Measure one device and its host."""
    timer = Timer(device, scope.sizes.seconds)
    costs = _operation_costs(inventory, scope, timer, progress)
    progress("the host's overhead per operation")
    if not scope.on_gpu:
        return DeviceMeasurement(*with_overhead(costs, inventory, device, timer, scope.references))
    measured = _with_whole_steps(costs, inventory, scope, timer, progress)
    del timer  # with its pools of operands
    free_cached(device)
    # The libraries' workspaces are all that is still allocated.
    reserved_bytes = float(torch.cuda.memory_allocated(device))
    return replace(measured, costs=replace(measured.costs, reserved_bytes=reserved_bytes))


def _operation_costs(
    inventory: Inventory, scope: CalibrationScope, timer: Timer, progress: ProgressCallback
) -> DeviceCosts:
    """Measure the device's seconds of single operations."""
    sizes = scope.sizes
    precisions = precisions_of(inventory, scope.on_gpu)
    products = {}
    for precision in precisions:
        progress(f"products in {precision}")
        products[precision] = product_grids(timer, sizes, precision)
    progress("other operations and the optimizer")
    gpu = inventory.gpus[0] if scope.on_gpu else None
    moves = move_curves(timer, sizes)
    attention = attention_curves(timer, sizes, [name for name in precisions if name != "tf32"])
    optimizer = update_curve(timer, sizes)
    grouped = None
    if gpu is not None:
        fused = gpu.capability >= _GROUPED_CAPABILITY
        grouped = grouped_curve(timer) if fused else PiecewiseCurve((1.0,), (1.0,))
    unaligned = {}
    group_s = 0.0
    if gpu is None:
        group_s = group_seconds(timer)
    elif sizes != TINY:
        unaligned = {precision: unaligned_factors(timer, precision) for precision in precisions}
    return DeviceCosts(
        name=gpu.name if gpu else inventory.cpu_name,
        memory_bytes=float(gpu.memory_total if gpu else inventory.ram_total),
        asynchronous=gpu is not None,
        products=products,
        moves=moves,
        attention=attention,
        optimizer=optimizer,
        grouped=grouped,
        group_s=group_s,
        unaligned=unaligned,
    )


def _with_whole_steps(
    costs: DeviceCosts,
    inventory: Inventory,
    scope: CalibrationScope,
    timer: Timer,
    progress: ProgressCallback,
) -> DeviceMeasurement:
    """Measure the costs of a GPU that need whole steps, and the host's speed before and after
    them."""
    device = timer.device
    measure_yardstick = make_yardstick(costs, inventory, device)
    before = measure_yardstick()
    costs, references = with_overhead(costs, inventory, device, timer, scope.references)
    after = measure_yardstick()
    if scope.sizes != TINY:
        progress("large steps")
        costs, large = with_sustained(costs, inventory, device)
        references += large
    yardstick_s = tuple(map(statistics.mean, zip(before, after, strict=True)))
    return DeviceMeasurement(costs, references, yardstick_s)


def precisions_of(inventory: Inventory, on_gpu: bool) -> list[str]:
    """Return the precisions that the device has units for."""
    if not on_gpu:
        return ["fp32", "bf16"] if inventory.cpu_bf16 else ["fp32"]
    if inventory.gpus[0].capability >= _BF16_CAPABILITY:
        return ["fp32", "tf32", "bf16", "fp16"]
    return ["fp32", "fp16"]


def _profile_of_workers(
    inventory: Inventory, scope: CalibrationScope, workers: int, progress: ProgressCallback
) -> Profile:
    """Measure several workers at once, each in a process of its own, and the links between
    them."""
    threads = max(1, inventory.cores // workers)
    progress(f"{workers} workers at once, and the link between them")
    with tempfile.TemporaryDirectory(prefix="calibrate-") as folder:
        job = {"workers": workers, "tiny": scope.sizes == TINY, "folder": folder, "threads": threads}
        ranks = [_start_worker(job | {"rank": rank}) for rank in range(workers)]
        try:
            for rank, process in enumerate(ranks):
                _wait_for_worker(rank, process)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        text = Path(folder, "profile.json").read_text(encoding="utf-8")
    return TypeAdapter(Profile).validate_json(text)


def _start_worker(job: dict[str, Any]) -> subprocess.Popen[str]:
    # OMP reads the number of threads when it starts, so it is set before Python.
    command = ["env", f"OMP_NUM_THREADS={job['threads']}", sys.executable, "-m", _MODULE]
    return subprocess.Popen(
        [*command, json.dumps(job)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def _wait_for_worker(rank: int, process: subprocess.Popen[str]) -> None:
    try:
        _, errors = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ResourceError(f"the workers of the calibration did not end within {_TIMEOUT_S:g} s") from None
    if process.returncode:
        last_line = (errors.strip().splitlines() or ["no message"])[-1]
        raise ResourceError(
            f"worker {rank} of the calibration ended with code {process.returncode}: {last_line}"
        )


def run_worker(job: dict[str, Any]) -> None:
    """Measure as one of several workers; the first of them writes the profile."""
    from orchestrator.plan.inventory.hardware import inventory

    machine = inventory()
    scope = CalibrationScope.of(machine, job["tiny"])
    rank = job["rank"]
    size = job["workers"]
    threads = job["threads"]
    folder = Path(job["folder"])
    device = torch.device("cuda", rank) if scope.on_gpu else torch.device("cpu")
    backend = "nccl" if scope.on_gpu else "gloo"
    torch.set_num_threads(threads)
    store = file_store(str(folder / "store"), size)
    with process_group_world(store, rank, size, device, backend, _TIMEOUT_S) as world:
        kind: LinkKind = "nvlink" if scope.on_gpu else "shared memory"
        links = measured_links(world, kind)
        world.barrier()
        # A barrier before each measurement: all workers must be busy with the same one.
        measured = measure_device(replace(machine, cores=threads), scope, device, lambda _: world.barrier())
        if rank == 0:
            profile = Profile(size, threads, measured.costs, links, measured.references, measured.yardstick_s)
            (folder / "profile.json").write_text(json.dumps(asdict(profile)), encoding="utf-8")


if __name__ == "__main__":
    run_worker(json.loads(sys.argv[1]))
