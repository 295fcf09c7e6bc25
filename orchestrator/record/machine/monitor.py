"""Resource use of a run: a background thread samples the GPUs (NVML) and the host (psutil).

    with Monitor(gpu_indices=(0,)) as monitor:
        train()
    monitor.summary()["devices"][0]["memory_used"]["max"]

A quantity that cannot be read is ``None``. Neither a missing driver nor an error of the sampler
reaches the training. Both are reported, in ``info()["gpu_error"]`` and ``summary()["error"]``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from orchestrator.record.events.kinds import DeviceSample, HostSample
from orchestrator.record.machine.nvml import NvmlGpus
from orchestrator.types import bytes_text

REARM_BELOW = 0.05
"""Memory use must fall this far below the limit before a second warning."""

MIN_CPU_SECONDS = 0.1
"""Clock ticks are 10 ms, so the CPU use of a shorter span means nothing."""


@dataclass(frozen=True)
class Sample:
    """Host and GPUs at one moment."""

    time: float
    host: HostSample
    devices: tuple[DeviceSample, ...] = ()


class Gpus(Protocol):
    """Source of device samples: NVML, or a fake in tests."""

    error: str | None
    """The reason why some or all of the requested GPUs are not read; None if all are."""

    def driver(self) -> str | None: ...

    def read(self) -> tuple[DeviceSample, ...]: ...


class _HostReader:
    """Reads the host. Keeps its own CPU times: ``psutil.cpu_percent`` keeps them per thread and
    begins with 0."""

    def __init__(self) -> None:
        import psutil

        from orchestrator.plan.inventory.cpu import usable_memory

        self._psutil = psutil
        self._usable_memory = usable_memory
        self._process = psutil.Process()
        self._before = self._cpu_times()
        self._percent: float | None = None

    def read(self) -> HostSample:
        total, free = self._usable_memory()  # about 1 ms
        # Used is all that is not free: psutil's "used" leaves out shared memory, where Ray's object
        # store is.
        return HostSample(
            cpu_percent=self._cpu_percent(),
            memory_used=total - free,
            memory_total=total,
            process_memory=self._process.memory_info().rss,
        )

    def _cpu_percent(self) -> float | None:
        now = self._cpu_times()
        busy = now[0] - self._before[0]
        total = now[1] - self._before[1]
        if total >= MIN_CPU_SECONDS:
            self._percent = 100 * min(1.0, max(0.0, busy / total))
            self._before = now
        return self._percent

    def _cpu_times(self) -> tuple[float, float]:
        """Return the seconds that all cores were busy, and the seconds of all cores."""
        times = self._psutil.cpu_times()
        # Linux counts the time of guests within user and nice already.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return total - times.idle - getattr(times, "iowait", 0.0), total


class _Statistics:
    """Mean and maximum of each quantity of a GPU or the host, in constant memory."""

    def __init__(self, labels: Mapping[str, Any] | None = None) -> None:
        self._labels = dict(labels or {})
        self._totals: dict[str, tuple[int, float, float]] = {}  # count, sum, maximum

    def add(self, values: Mapping[str, float | None]) -> None:
        for name, value in values.items():
            if value is not None:
                count, total, largest = self._totals.get(name, (0, 0.0, value))
                self._totals[name] = (count + 1, total + value, max(largest, value))

    def summary(self) -> dict[str, Any]:
        return self._labels | {
            name: {"mean": total / count, "max": largest}
            for name, (count, total, largest) in self._totals.items()
        }


class Monitor:
    """Samples the machine every ``interval_s`` between ``start`` and ``stop``.

    ``on_warning`` is called from the sampling thread each time memory use rises above
    ``memory_warning``.
    """

    def __init__(
        self,
        gpu_indices: Sequence[int | str] = (),
        interval_s: float = 1.0,
        memory_warning: float = 0.95,
        on_warning: Callable[[str], None] | None = None,
        *,
        gpus: Gpus | None = None,
    ) -> None:
        self._interval_s = interval_s
        self._memory_warning = memory_warning
        self._on_warning = on_warning
        self._gpus = gpus or (NvmlGpus(gpu_indices) if gpu_indices else None)
        self._host_reader = _HostReader()
        self._lock = threading.Lock()
        self._latest: Sample | None = None
        self._num_samples = 0
        self._host = _Statistics()
        self._devices: dict[int, _Statistics] = {}
        self._warned: set[str] = set()
        self._error: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> Monitor:
        if self._thread is None:
            self._stop = threading.Event()
            self._thread = threading.Thread(
                target=self._sample_until, args=(self._stop,), name="monitor", daemon=True
            )
            self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            # A driver that hangs must not delay the end of a run. The thread is a daemon and may be
            # abandoned.
            self._thread.join(timeout=self._interval_s + 5)
            self._thread = None

    def __enter__(self) -> Monitor:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def record(self) -> Sample:
        """Take a sample now and add it to the summary."""
        # Read outside the lock: a driver that hangs then blocks the sampling thread, but not
        # ``summary``.
        devices = self._gpus.read() if self._gpus else ()
        sample = Sample(time.time(), self._host_reader.read(), devices)
        with self._lock:
            self._latest = sample
            self._num_samples += 1
            self._host.add(asdict(sample.host))
            for device in sample.devices:
                values: dict[str, Any] = asdict(device)
                labels = {name: values.pop(name) for name in ("index", "name")}
                self._devices.setdefault(device.index, _Statistics(labels)).add(values)
            warnings = self._new_warnings(sample)
        # Outside the lock: the receiver may call ``summary``.
        for warning in warnings:
            self._warn(warning)
        return sample

    def latest(self) -> Sample | None:
        return self._latest

    def info(self) -> dict[str, Any]:
        """Return the constants: names and memory of the GPUs, the driver, cores and RAM."""
        import psutil

        from orchestrator.plan.inventory.cpu import usable_memory

        devices = self._gpus.read() if self._gpus else ()
        return {
            "devices": [
                {"index": device.index, "name": device.name, "memory_total": device.memory_total}
                for device in devices
            ],
            "driver": self._gpus.driver() if self._gpus else None,
            "gpu_error": self._gpus.error if self._gpus else None,
            "cores": psutil.cpu_count(logical=False),
            "threads": psutil.cpu_count(),
            "memory_total": usable_memory()[0],
        }

    def summary(self) -> dict[str, Any]:
        """Return mean and maximum of each quantity over all samples, and the sampler's last error, if any."""
        with self._lock:
            return {
                "samples": self._num_samples,
                "host": self._host.summary(),
                "devices": [self._devices[index].summary() for index in sorted(self._devices)],
                "error": self._error,
            }

    def newest(self) -> Sample:
        """Return the latest sample, or a new one without a thread; an empty one if none can be taken."""
        if self._thread is None or self._latest is None:
            self._try_record()
        return self._latest or Sample(time.time(), HostSample())

    def _sample_until(self, stop: threading.Event) -> None:
        self._try_record()
        while not stop.wait(self._interval_s):
            self._try_record()

    def _try_record(self) -> None:
        try:
            self.record()
        except Exception as error:
            is_first = self._error is None
            self._error = f"{type(error).__name__}: {error}"
            if is_first:
                self._warn(
                    f"the monitor could not take a sample ({self._error}); "
                    "training continues, its figures may lack samples"
                )

    def _new_warnings(self, sample: Sample) -> list[str]:
        """Return warnings for memory that has just risen above the limit; memory that stays there
        gets no second."""
        levels = [("host memory", sample.host.memory_used, sample.host.memory_total)]
        levels += [
            (f"memory of GPU {device.index}", device.memory_used, device.memory_total)
            for device in sample.devices
        ]
        warnings: list[str] = []
        for name, used, total in levels:
            share = used / total if used is not None and total else 0.0
            if share >= self._memory_warning and name not in self._warned:
                self._warned.add(name)
                sizes = f"{bytes_text(used or 0)} of {bytes_text(total or 0)}"
                warnings.append(f"{name} is {share:.0%} full ({sizes}); a smaller batch needs less")
            elif share < self._memory_warning - REARM_BELOW:
                self._warned.discard(name)
        return warnings

    def _warn(self, message: str) -> None:
        if self._on_warning is None:
            return
        try:
            self._on_warning(message)
        except Exception as error:
            # The receiver's fault must neither end the sampling nor vanish.
            self._error = f"on_warning raised {type(error).__name__}: {error}"
