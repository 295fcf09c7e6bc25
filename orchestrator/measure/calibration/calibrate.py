"""Calibration of this machine for the cost model, in under a minute.

It measures a device alone and with all others busy, the host's overhead per operation, and the
links between workers. Workers are processes of their own, started with the number of threads that
a run would give them: a later change of that number does not affect every product.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import psutil
import torch
from pydantic import TypeAdapter

from orchestrator.errors import ResourceError
from orchestrator.measure.calibration.device_costs import CalibrationScope, ProgressCallback, measure_device
from orchestrator.measure.calibration.link_bandwidth import measured_links
from orchestrator.measure.calibration.timer import TINY
from orchestrator.plan.cost.calibration import VERSION, Calibration, Profile
from orchestrator.plan.cost.machine import LinkKind
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import process_group_world

_MODULE = "orchestrator.measure.calibration.calibrate"
_STUCK_S = 120.0
"""The time without progress after which workers are ended."""
_PROGRESS_S = 1.0
"""Processor seconds of all workers together that count as progress; a worker that hangs uses hardly any."""
_POLL_S = 0.2
_GROUP_TIMEOUT_S = {"gloo": 3600.0, "nccl": 600.0}
"""A worker may wait long for a slow one: ``_STUCK_S`` ends both where neither computes. One that waits in
NCCL keeps its processor busy, which looks like progress, so that its group must end it."""


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


def _profile_of_workers(
    inventory: Inventory, scope: CalibrationScope, workers: int, progress: ProgressCallback
) -> Profile:
    """Measure several workers at once, each in a process of its own, and the links between
    them."""
    threads = max(1, inventory.cores // workers)
    progress(f"{workers} workers at once, and the link between them")
    with tempfile.TemporaryDirectory(prefix="calibrate-") as folder:
        job = {"workers": workers, "tiny": scope.sizes == TINY, "folder": folder, "threads": threads}
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            ranks += [_start_worker(job | {"rank": rank}) for rank in range(workers)]
            _wait_for_workers(ranks, Path(folder))
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        text = Path(folder, "profile.json").read_text(encoding="utf-8")
    return TypeAdapter(Profile).validate_json(text)


def _start_worker(job: dict[str, Any]) -> subprocess.Popen[bytes]:
    # OMP reads the number of threads when it starts, so it is set before Python.
    command = ["env", f"OMP_NUM_THREADS={job['threads']}", sys.executable, "-m", _MODULE]
    with _errors_of(job["rank"], Path(job["folder"])).open("wb") as errors:
        return subprocess.Popen([*command, json.dumps(job)], stdout=subprocess.DEVNULL, stderr=errors)


def _errors_of(rank: int, folder: Path) -> Path:
    return folder / f"errors_{rank}.txt"


class _Progress:
    """Tells workers that hang from those that are slow because other programs use the processors."""

    def __init__(self, now_s: float) -> None:
        self._last_used_s = 0.0
        self._last_time_s = now_s

    def is_stuck(self, used_s: float, now_s: float) -> bool:
        """Whether workers that have used ``used_s`` seconds of processors so far do not progress."""
        # Less than before: a worker has ended.
        if abs(used_s - self._last_used_s) >= _PROGRESS_S:
            self._last_used_s = used_s
            self._last_time_s = now_s
        return now_s - self._last_time_s > _STUCK_S


def _wait_for_workers(ranks: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait until all workers have ended, or one has failed: the others would wait for it."""
    progress = _Progress(perf_counter())
    while running := [process for process in ranks if process.poll() is None]:
        if any(process.returncode for process in ranks):
            break
        if progress.is_stuck(sum(map(_used_seconds, running)), perf_counter()):
            raise ResourceError(
                f"the workers of the calibration made no progress for {_STUCK_S:g} s; "
                "'orchestrator check' tries collectives"
            )
        sleep(_POLL_S)
    for rank, process in enumerate(ranks):
        if process.returncode:
            errors = _errors_of(rank, folder).read_text(encoding="utf-8", errors="replace")
            last_line = (errors.strip().splitlines() or ["no message"])[-1]
            raise ResourceError(
                f"worker {rank} of the calibration ended with code {process.returncode}: {last_line}"
            )


def _used_seconds(process: subprocess.Popen[bytes]) -> float:
    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


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
    with process_group_world(store, rank, size, device, backend, _GROUP_TIMEOUT_S[backend]) as world:
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
