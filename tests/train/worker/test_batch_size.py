"""The search for a batch size on simulated devices.

Their memory has a base, a slope, blocks and fragments; their throughput saturates, falls or
varies."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import ResourceError
from orchestrator.train.worker.batch_size import (
    MAX_PROBES,
    SAFE,
    BatchProbe,
    BatchSizeResult,
    corrected_batch,
    fastest_batch,
    largest_batch,
)
from orchestrator.types import GIB, MIB

BLOCK = 2 * MIB
PLENTY = 10**9


@dataclass
class Device:
    """A device on which a batch needs base + slope × batch bytes, rounded up to whole blocks.

    The activations take up to ``fragments`` more, which differs by batch size but is the same at
    each try. Hidden fragments count against the capacity but not in the peak: an allocator
    reserves more than it hands out."""

    capacity: float
    base: float
    slope: float
    fragments: float = 0.0
    hidden: bool = False
    salt: int = 0
    tried: list[int] = field(default_factory=list)

    def need(self, batch: int) -> float:
        extra = random.Random(f"{self.salt} {batch}").random() * self.fragments
        return math.ceil((self.base + self.slope * batch * (1 + extra)) / BLOCK) * BLOCK

    def fits(self, batch: int) -> bool:
        return self.need(batch) <= self.capacity

    def probe(self, batch: int) -> BatchProbe:
        assert isinstance(batch, int)
        assert batch >= 1
        assert batch not in self.tried, f"{batch} was tried before: {self.tried}"
        self.tried.append(batch)
        peak = self.need(batch)
        if self.hidden:
            peak = math.ceil((self.base + self.slope * batch) / BLOCK) * BLOCK
        return BatchProbe(batch, float(peak) if self.fits(batch) else None, 1.0)

    def largest(self, max_useful: int = PLENTY) -> int:
        top = min(max_useful, int((self.capacity - self.base) / self.slope) + 1)
        return next((batch for batch in range(top, 0, -1) if self.fits(batch)), 0)

    @property
    def failures(self) -> int:
        return sum(not self.fits(batch) for batch in self.tried)


@st.composite
def devices(draw: st.DrawFn, largest: st.SearchStrategy[int]) -> Device:
    """Draw a device on which about ``largest`` samples fit.

    It has 1 to 128 GiB, and up to 0.7 of it is in use before the first sample."""
    capacity = 2 ** draw(st.floats(30, 37))
    base = capacity * draw(st.floats(0.02, 0.7))
    slope = (capacity - base) / (draw(largest) + draw(st.floats(0.1, 0.9)))
    return Device(
        capacity,
        base,
        slope,
        draw(st.sampled_from([0, 0.01, 0.02])),
        draw(st.booleans()),
        draw(st.integers(0, 10**6)),
    )


sizes = st.one_of(st.integers(1, 40), st.integers(1, 5000))


def search(device: Device, factor: float, max_useful: int = PLENTY) -> BatchSizeResult:
    estimate = max(1, min(max_useful, round(device.largest() * factor)))
    return largest_batch(device.probe, device.capacity, estimate, max_useful)


def check(device: Device, result: BatchSizeResult, max_useful: int = PLENTY) -> None:
    """Check what holds for any estimate."""
    assert len(device.tried) <= MAX_PROBES == 4
    assert [p.batch for p in result.probes] == device.tried
    assert device.fits(result.batch_size)
    assert result.batch_size in device.tried
    assert max(device.tried) <= max_useful
    assert f"{len(device.tried)} probes, {device.failures} out of memory" in result.reason


@settings(max_examples=500, deadline=None)
@given(device=devices(sizes), factor=st.floats(-1, 1).map(lambda power: 2**power))
def test_an_estimate_within_a_factor_of_two_finds_the_largest(device: Device, factor: float):
    if not device.largest():
        return
    result = search(device, factor)
    check(device, result)
    assert device.failures <= 1
    assert result.batch_size >= 0.95 * device.largest()


@settings(max_examples=500, deadline=None)
@given(device=devices(sizes), factor=st.floats(-1, 1).map(lambda power: 10**power))
def test_an_estimate_off_by_ten_still_gives_an_answer_in_four_probes(device: Device, factor: float):
    if not device.largest():
        return
    result = search(device, factor)
    check(device, result)
    assert result.batch_size >= 0.3 * device.largest()


def test_estimates_off_by_ten_mostly_find_the_largest_too():
    shares = []
    for seed in range(400):
        draw = random.Random(seed)
        capacity = 2 ** draw.uniform(30, 37)
        base = capacity * draw.uniform(0.02, 0.7)
        slope = (capacity - base) / 2 ** draw.uniform(0.1, 12.3)
        device = Device(capacity, base, slope, 0.02, seed % 2 == 0, seed)
        if device.largest():
            shares.append(search(device, 10 ** draw.uniform(-1, 1)).batch_size / device.largest())
    good = sum(share >= 0.95 for share in shares)
    assert good >= 0.95 * len(shares)


@settings(max_examples=300, deadline=None)
@given(
    device=devices(sizes),
    max_useful=st.integers(1, 6000),
    factor=st.floats(-1, 1).map(lambda power: 2**power),
)
def test_no_batch_beyond_the_largest_useful_one_is_tried(device: Device, max_useful: int, factor: float):
    if not device.largest(max_useful):
        return
    result = search(device, factor, max_useful)
    check(device, result, max_useful)
    assert result.batch_size >= 0.95 * device.largest(max_useful)
    assert ("the largest useful batch" in result.reason) == (result.batch_size == max_useful)


@pytest.mark.parametrize("largest", range(1, 41))
@pytest.mark.parametrize("estimate", [1, 2, 3, 5, 9, 17, 33, 65, 129])
def test_small_batches_on_a_device_without_fragments(largest: int, estimate: int):
    device = Device(GIB + largest * 64 * MIB + 32 * MIB, GIB, 64 * MIB)
    assert device.largest() == largest
    result = largest_batch(device.probe, device.capacity, estimate, PLENTY)
    check(device, result)
    if largest / 2 <= estimate <= 2 * largest:
        assert result.batch_size >= 0.95 * largest
        assert device.failures <= 1


def test_an_exact_estimate_without_fragments_needs_three_probes_and_none_fails():
    device = Device(80 * GIB, 8 * GIB, 72 * GIB / 1000.5)
    result = largest_batch(device.probe, device.capacity, 1000, PLENTY)
    assert (device.failures, len(device.tried)) == (0, 3)
    assert result.batch_size >= 980


def test_a_peak_over_the_limit_is_a_failure_even_if_the_device_has_more():
    """Another process may use a part of the device."""
    device = Device(80 * GIB, 8 * GIB, 0.1 * GIB)
    result = largest_batch(device.probe, 40.0 * GIB, 700, PLENTY)
    peak = next(p.peak for p in result.probes if p.batch == result.batch_size)
    assert peak is not None
    assert peak <= 40 * GIB
    assert result.batch_size >= 0.95 * 320


def test_without_a_limit_the_largest_useful_batch_is_chosen():
    device = Device(80 * GIB, 8 * GIB, 0.1 * GIB)
    assert largest_batch(device.probe, math.inf, 100, 500).batch_size == 500


def test_a_device_without_memory_for_one_sample_is_refused():
    device = Device(GIB, 2 * GIB, MIB)
    with pytest.raises(ResourceError, match="not even a batch of one sample fits") as caught:
        largest_batch(device.probe, device.capacity, 8, PLENTY)
    assert caught.value.exit_code == 3
    assert len(device.tried) <= MAX_PROBES


def test_an_estimate_far_too_high_ends_with_advice():
    device = Device(GIB, GIB / 2, GIB / 4)
    with pytest.raises(ResourceError, match=r"no batch down to .* samples fits .* --batch-size 1"):
        largest_batch(device.probe, device.capacity, 10**7, PLENTY)
    assert len(device.tried) == MAX_PROBES


# The fastest batch, on a CPU


def simulated_cpu(
    speed: Callable[[int], float], capacity: int = PLENTY
) -> tuple[Callable[[int], BatchProbe], list[int]]:
    """Return a probe of a device with this throughput, and the list of probed batches."""
    tried: list[int] = []

    def probe(batch: int) -> BatchProbe:
        assert batch >= 1
        assert batch not in tried
        tried.append(batch)
        if batch > capacity:
            return BatchProbe(batch, None, 0.0)
        return BatchProbe(batch, float(batch), speed(batch))

    return probe, tried


CURVES: dict[str, Callable[[int], float]] = {
    "saturates early": lambda batch: 1000 * batch / (batch + 10),
    "saturates late": lambda batch: 1000 * batch / (batch + 2000),
    "flat": lambda batch: 500.0,
    "falls": lambda batch: 1000 / (1 + batch / 50),
    "rises, then falls out of cache": lambda batch: min(batch, 256) * (1.0 if batch <= 256 else 0.6),
    "linear": lambda batch: float(batch),
}


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("start", [1, 8])
@pytest.mark.parametrize("max_useful", [1, 5, 64, 1000, 8192])
def test_the_choice_is_the_smallest_batch_near_the_best_speed(name: str, start: int, max_useful: int):
    speed = CURVES[name]
    probe, tried = simulated_cpu(speed)
    result = fastest_batch(probe, start, max_useful, math.inf)
    best = max(speed(batch) for batch in tried)
    assert max(tried) <= max_useful
    assert speed(result.batch_size) >= 0.97 * best
    assert [batch for batch in tried if batch < result.batch_size and speed(batch) >= 0.97 * best] == []
    assert len(tried) <= 2 + math.log2(max_useful)
    assert all(f"{batch}: " in result.reason for batch in tried)


@pytest.mark.parametrize(
    ("name", "least", "largest"),
    [
        ("saturates early", 64, 512),
        ("flat", 8, 8),
        ("falls", 8, 8),
        ("linear", 8192, 8192),
    ],
)
def test_doubling_goes_on_as_long_as_it_pays(name: str, least: int, largest: int):
    probe, _ = simulated_cpu(CURVES[name])
    assert least <= fastest_batch(probe, 8, 8192, math.inf).batch_size <= largest


def test_doubling_stops_where_it_no_longer_pays():
    probe, tried = simulated_cpu(CURVES["rises, then falls out of cache"])
    assert fastest_batch(probe, 8, 8192, math.inf).batch_size == 256
    assert max(tried) == 512


@pytest.mark.parametrize("capacity", [1, 3, 8, 20, 100])
@pytest.mark.parametrize("start", [1, 8, 64])
def test_the_fastest_batch_fits(start: int, capacity: int):
    probe, _ = simulated_cpu(CURVES["linear"], capacity)
    assert fastest_batch(probe, start, PLENTY, math.inf).batch_size <= capacity
    probe, _ = simulated_cpu(CURVES["linear"])
    assert fastest_batch(probe, start, PLENTY, float(capacity)).batch_size <= capacity


def test_no_fitting_batch_is_an_error():
    probe, tried = simulated_cpu(CURVES["linear"], capacity=0)
    with pytest.raises(ResourceError, match="not even a batch of one sample"):
        fastest_batch(probe, 8, 64, math.inf)
    assert tried == [8, 4, 2, 1]


@settings(max_examples=200, deadline=None)
@given(
    noise=st.lists(st.floats(0.9, 1.1), min_size=20, max_size=20),
    half=st.integers(1, 500),
    max_useful=st.integers(1, 10_000),
)
def test_noisy_measurements_still_end_the_search(noise: list[float], half: int, max_useful: int):
    probe, tried = simulated_cpu(lambda batch: 1000 * batch / (batch + half) * noise[batch.bit_length()])
    result = fastest_batch(probe, 8, max_useful, math.inf)
    assert result.batch_size in tried
    assert len(tried) <= 2 + math.log2(max(1, max_useful))


@settings(max_examples=300, deadline=None)
@given(device=devices(st.integers(1, 5000)), error=st.floats(-0.06, 0.06), most=st.integers(1, 6000))
def test_one_probe_corrects_an_estimate_that_is_off_by_six_percent(
    device: Device, error: float, most: int
) -> None:
    """Workers that divide a model cannot survive a probe that runs out of memory."""
    device = Device(device.capacity, device.base, device.slope)
    slope = device.slope + error * device.capacity / device.largest()
    estimate = lambda batch: device.base + max(slope, device.slope / 4) * batch  # noqa: E731
    start = max(1, min(most, int((SAFE * device.capacity - device.base) / max(slope, device.slope / 4))))
    result = corrected_batch(device.probe, estimate, device.capacity, start, most)
    assert device.tried == [start]
    assert device.fits(result.batch_size)
    assert result.batch_size <= most
    assert "one probe of all workers together" in result.reason
    left = device.capacity - device.need(result.batch_size)
    assert result.batch_size == most or left <= 0.12 * device.capacity + device.slope


def test_a_joint_probe_above_the_limit_goes_down() -> None:
    device = Device(40.0 * GIB, 4.0 * GIB, 0.5 * GIB)
    limit = 20.0 * GIB
    result = corrected_batch(device.probe, lambda batch: 0.3 * GIB * batch, limit, 50, PLENTY)
    assert device.tried[0] == 50
    assert 2 <= len(device.tried) <= 3
    assert device.need(result.batch_size) <= limit
    assert result.batch_size >= 20
    with pytest.raises(ResourceError, match="not even a batch of one sample"):
        corrected_batch(device.probe, lambda batch: 0.3 * GIB * batch, 4.0 * GIB, 2, PLENTY)
