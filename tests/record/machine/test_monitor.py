"""Tests of the monitor: it samples, summarises and warns, and its errors never reach the training."""

import json
import sys
import threading
import time
from typing import Any

import psutil
import pytest

from harness.fakes.fake_nvml import fake_nvml
from orchestrator.plan.inventory import cpu
from orchestrator.record.events import kinds
from orchestrator.record.events.kinds import HostSample
from orchestrator.record.files.event_log import encode_event
from orchestrator.record.machine.monitor import Monitor, Sample
from orchestrator.record.machine.nvml import DeviceSample
from orchestrator.types import GIB


class FakeGpus:
    """One GPU whose used memory at each reading the test gives."""

    def __init__(self, *used: int | None, total: int = 100) -> None:
        self.error: str | None = None
        self.used = list(used)
        self.total = total
        self.readings = 0

    def driver(self) -> str | None:
        return "555.1"

    def read(self) -> tuple[DeviceSample, ...]:
        used = self.used[min(self.readings, len(self.used) - 1)]
        self.readings += 1
        return (DeviceSample(0, "Fake 1", memory_used=used, memory_total=self.total, utilization=50.0),)


class BrokenGpus(FakeGpus):
    def read(self) -> tuple[DeviceSample, ...]:
        raise OSError("the driver went away")


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold within 30 s"
        time.sleep(0.005)


def test_a_sample_of_the_host_is_plausible() -> None:
    sample = Monitor().record()
    assert isinstance(sample, Sample)
    host = sample.host
    assert 0 < (host.process_memory or 0) < (host.memory_total or 0)
    assert 0 < (host.memory_used or 0) < (host.memory_total or 0)
    assert sample.devices == ()


def test_memory_is_limited_by_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "usable_memory", lambda: (8 * GIB, 5 * GIB))
    monitor = Monitor()
    sample = monitor.record().host
    assert (sample.memory_used, sample.memory_total) == (3 * GIB, 8 * GIB)
    assert monitor.info()["memory_total"] == 8 * GIB


def test_the_cpu_share_is_measured_from_any_thread() -> None:
    monitor = Monitor()
    before = sum(psutil.cpu_times())
    until = time.monotonic() + 0.5
    while time.monotonic() < until:  # keep a core busy
        pass
    if sum(psutil.cpu_times()) == before:
        pytest.skip("this kernel keeps no CPU times")
    readings: list[float | None] = []
    thread = threading.Thread(target=lambda: readings.append(monitor.record().host.cpu_percent))
    thread.start()
    thread.join()
    assert readings[0] is not None
    assert 0 < readings[0] <= 100


def test_the_thread_samples_until_it_is_stopped() -> None:
    gpus = FakeGpus(10)
    monitor = Monitor(interval_s=0.001, gpus=gpus)
    with monitor:
        wait_for(lambda: gpus.readings >= 3)
    readings = gpus.readings
    assert not [thread for thread in threading.enumerate() if thread.name == "monitor"]
    time.sleep(0.02)
    assert gpus.readings == readings
    monitor.stop()  # idempotent
    assert monitor.latest() is not None
    assert monitor.summary()["samples"] == readings


def test_the_monitor_can_be_started_twice_and_restarted() -> None:
    gpus = FakeGpus(10)
    monitor = Monitor(interval_s=0.001, gpus=gpus)
    assert monitor.start() is monitor.start()
    assert len([thread for thread in threading.enumerate() if thread.name == "monitor"]) == 1
    monitor.stop()
    readings = gpus.readings
    monitor.start()
    wait_for(lambda: gpus.readings > readings)
    monitor.stop()


def test_the_summary_has_mean_and_maximum() -> None:
    monitor = Monitor(gpus=FakeGpus(10, 30, 20))
    for _ in range(3):
        monitor.record()
    summary = monitor.summary()
    assert summary["samples"] == 3
    assert summary["devices"] == [
        {
            "index": 0,
            "name": "Fake 1",
            "memory_used": {"mean": 20.0, "max": 30},
            "memory_total": {"mean": 100.0, "max": 100},
            "utilization": {"mean": 50.0, "max": 50.0},
        }
    ]
    assert summary["host"]["process_memory"]["max"] >= summary["host"]["process_memory"]["mean"] > 0
    assert summary["error"] is None
    json.dumps(summary)


def test_the_fields_of_a_monitor_event() -> None:
    sample = Monitor(gpus=FakeGpus(10)).newest()
    event = kinds.Monitor(step=1, host=sample.host, devices=sample.devices)
    fields = json.loads(encode_event(event))
    assert set(fields["host"]) == {"cpu_percent", "memory_used", "memory_total", "process_memory"}
    device = {
        "index",
        "name",
        "memory_used",
        "memory_total",
        "process_memory",
        "utilization",
        "memory_utilization",
        "temperature",
        "power",
    }
    assert set(fields["devices"][0]) == device
    assert fields["devices"][0]["temperature"] is None


def test_the_newest_readings_take_a_sample_only_without_a_thread() -> None:
    gpus = FakeGpus(10)
    monitor = Monitor(interval_s=60, gpus=gpus)
    monitor.newest()
    monitor.newest()
    assert gpus.readings == 2
    monitor.start()
    wait_for(lambda: gpus.readings == 3)
    monitor.newest()
    assert gpus.readings == 3
    monitor.stop()


def test_memory_above_the_limit_is_warned_of_once() -> None:
    warnings: list[str] = []
    # 93 is below the limit, but not far enough to arm the warning again.
    used = (50, 95, 99, 93, 96, 80, 97, 97)
    monitor = Monitor(gpus=FakeGpus(*used, total=100), memory_warning=0.95, on_warning=warnings.append)
    num_warnings = []
    for _ in used:
        monitor.record()
        num_warnings.append(len([warning for warning in warnings if "GPU 0" in warning]))
    assert num_warnings == [0, 1, 1, 1, 1, 1, 2, 2]
    assert "95% full" in warnings[0]


def test_host_memory_is_warned_of_too() -> None:
    warnings: list[str] = []
    monitor = Monitor(memory_warning=1e-9, on_warning=warnings.append)
    monitor.record()
    monitor.record()
    assert len(warnings) == 1
    assert "host memory" in warnings[0]


def test_a_gpu_without_values_is_no_error() -> None:
    monitor = Monitor(gpus=FakeGpus(None))
    monitor.record()
    assert "memory_used" not in monitor.summary()["devices"][0]


def test_an_error_of_the_sampler_is_reported_and_does_not_end_it() -> None:
    warnings: list[str] = []
    gpus = FakeGpus(10)
    broken = BrokenGpus()
    monitor = Monitor(interval_s=0.001, gpus=broken, on_warning=warnings.append).start()
    wait_for(lambda: monitor.summary()["error"])
    broken.read = gpus.read  # the driver returns
    wait_for(lambda: monitor.summary()["samples"])
    monitor.stop()
    assert monitor.summary()["error"] == "OSError: the driver went away"
    assert len([warning for warning in warnings if "driver went away" in warning]) == 1


def test_an_error_of_a_reading_does_not_reach_the_training() -> None:
    sample = Monitor(gpus=BrokenGpus()).newest()
    assert (sample.host, sample.devices) == (HostSample(), ())


def test_an_error_of_the_warning_receiver_is_reported() -> None:
    def refuse(message: str) -> None:
        raise RuntimeError("no mail today")

    monitor = Monitor(memory_warning=1e-9, on_warning=refuse)
    monitor.record()
    assert monitor.summary()["error"] == "on_warning raised RuntimeError: no mail today"


def test_a_driver_that_hangs_does_not_block_the_summary() -> None:
    entered = threading.Event()
    release = threading.Event()

    class HangingGpus(FakeGpus):
        def read(self) -> tuple[DeviceSample, ...]:
            entered.set()
            release.wait(60)
            return ()

    monitor = Monitor(gpus=HangingGpus()).start()
    entered.wait(30)
    assert monitor.summary()["samples"] == 0
    release.set()
    monitor.stop()


def test_info_describes_the_machine() -> None:
    info = Monitor(gpus=FakeGpus(10, total=80 * GIB)).info()
    assert info["devices"] == [{"index": 0, "name": "Fake 1", "memory_total": 80 * GIB}]
    assert info["driver"] == "555.1"
    assert info["gpu_error"] is None
    assert info["threads"] >= 1
    assert info["memory_total"] > 0


def test_a_missing_gpu_is_named_and_the_others_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    monitor = Monitor(gpu_indices=(7, 1, "GPU-cccc"))
    assert [device.index for device in monitor.record().devices] == [1]
    assert "GPU 7" in monitor.info()["gpu_error"]
    assert "GPU-cccc" in monitor.info()["gpu_error"]
    assert "2 GPUs" in monitor.info()["gpu_error"]


def test_without_a_driver_there_are_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(("nvmlInit",)))
    with Monitor(gpu_indices=(0,), interval_s=0.001) as monitor:
        wait_for(monitor.latest)
    info = monitor.info()
    assert info["devices"] == []
    assert info["driver"] is None
    assert "driver" in info["gpu_error"]
    assert monitor.summary()["error"] is None


def test_without_the_package_there_are_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Monitor(gpu_indices=(0,)).record().devices == ()
