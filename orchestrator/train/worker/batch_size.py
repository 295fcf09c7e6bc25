"""The search behind ``--batch-size auto``: the largest batch on GPUs, the fastest on CPUs.

Peak memory is an affine function of the batch size: two probes give the line, a third checks the
answer, and a fourth may correct it. Each probe runs two whole optimizer steps, because only the
second has the optimizer's state in memory together with its activations.

Workers that divide a model measure together. There a worker that runs out of memory leaves the others
waiting, so that the estimate of the plan leads, and one probe below it corrects it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.errors import ResourceError
from orchestrator.types import GIB

MAX_PROBES = 4
# Factors of the batch that the estimate or the line predicts.
_FIRST = 0.45  # of the estimate: the larger batch of the first pair
_AIM = 0.985  # leaves what the allocator loses to rounding and fragments
_HOPE = 1.025  # may just fit
_GOOD_ENOUGH = 0.95  # of the hoped batch: end the search
_BACK_OFF = 0.975  # of a batch that failed although the line predicted that it fits
# Factors of batches that were probed.
_TRUSTED = 6  # times the largest good batch: the line is not trusted beyond
_APART = 1.5  # two batches nearer to each other than this give no reliable slope
# Factors of memory.
SAFE = 0.92  # of the limit, that the first joint probe may take by the estimate, which may be too low
_STEEPER = 1.2  # than the estimate: the memory of a further sample
# Factors of throughput.
_WORTHWHILE = 1.05  # go on doubling only if the last doubling gained this much
_NEAR_BEST = 0.97


@dataclass(frozen=True)
class BatchProbe:
    """The result of two steps at a batch size.

    ``peak`` is in bytes, and None if they ran out of memory."""

    batch: int
    peak: float | None
    samples_per_second: float


@dataclass(frozen=True)
class BatchSizeResult:
    """The batch size that was found, why, and all probes."""

    batch_size: int
    reason: str
    probes: tuple[BatchProbe, ...]


def largest_batch(
    probe: Callable[[int], BatchProbe], limit: float, estimate: int, max_useful: int
) -> BatchSizeResult:
    """Find the largest batch whose peak memory stays within ``limit`` bytes.

    ``estimate`` is the memory model's answer; batches beyond ``max_useful`` are not tried."""
    max_useful = max(1, max_useful)
    probes: list[BatchProbe] = []
    for batch in _first_pair(estimate, max_useful):
        probes.append(probe(batch))
        if not _fits(probes[-1], limit):
            break
    while len(probes) < MAX_PROBES:
        batch = _next_batch(probes, limit, max_useful)
        if batch is None:
            break
        probes.append(probe(batch))
    return _result(probes, limit, max_useful)


def _first_pair(estimate: int, max_useful: int) -> tuple[int, ...]:
    """Return two small batches, far enough apart to give a slope.

    The larger one is safe even where the estimate is twice too high."""
    high = min(max_useful, max(2, int(estimate * _FIRST)))
    low = max(1, high // 4)
    return (low, high) if low < high else (high,)


def _fits(probe: BatchProbe, limit: float) -> bool:
    return probe.peak is not None and probe.peak <= limit


def _next_batch(probes: list[BatchProbe], limit: float, max_useful: int) -> int | None:
    """Return the batch to try next, or None if the search has ended."""
    good = [p for p in probes if _fits(p, limit)]
    smallest_failed = min((p.batch for p in probes if not _fits(p, limit)), default=None)
    if not good:
        # The estimate was far too high: divide by four until a batch fits.
        return None if smallest_failed == 1 else max(1, (smallest_failed or 4) // 4)
    best = max(p.batch for p in good)
    top = max_useful if smallest_failed is None else min(max_useful, smallest_failed - 1)
    predicted = _predict(good, limit)
    hoped = int(min(top, predicted * _HOPE)) if len(good) > 1 else top
    if best >= _GOOD_ENOUGH * hoped:
        return None
    is_last = len(probes) == MAX_PROBES - 1
    target = int(min(top, predicted * (_BACK_OFF if is_last else _AIM)))
    if len(good) == 1 and target < _APART * best:
        # Too near to give a slope. A smaller batch gives one, and surely fits.
        return best // 4 or best + 1
    if smallest_failed is not None:
        target = min(target, max(best + 1, int(smallest_failed * _BACK_OFF)))
    elif target <= best:
        # Batches are whole numbers: among small ones a single sample counts, and only this probe
        # may fail.
        target = hoped
    elif not is_last and target > _TRUSTED * best:
        # A long way for a short line: go half of it first.
        target //= 2
    return target if best < target <= top else None


def _predict(good: list[BatchProbe], limit: float) -> float:
    """Return the batch at which the line through the two largest good probes meets the limit.

    A single probe gives a line through the origin. It errs on the safe side: some memory is
    needed without a sample."""
    points = sorted(((p.batch, p.peak or 0.0) for p in good), reverse=True)[:2]
    high_batch, high_peak = points[0]
    low_batch, low_peak = points[1] if len(points) == 2 else (0, 0.0)
    slope = max((high_peak - low_peak) / (high_batch - low_batch), 1.0)
    return high_batch + (limit - high_peak) / slope


def _result(probes: list[BatchProbe], limit: float, max_useful: int) -> BatchSizeResult:
    good = [p for p in probes if _fits(p, limit)]
    if not good:
        raise ResourceError(_nothing_fits(min(p.batch for p in probes)))
    best = max(good, key=lambda p: p.batch)
    num_failed = len(probes) - len(good)
    detail = f"peak {(best.peak or 0.0) / GIB:.2f} of {limit / GIB:.2f} GiB"
    if best.batch >= max_useful:
        detail += f", the largest useful batch is {max_useful}"
    reason = f"the largest that fits: {detail} ({len(probes)} probes, {num_failed} out of memory)"
    return BatchSizeResult(best.batch, reason, tuple(probes))


def corrected_batch(
    probe: Callable[[int], BatchProbe],
    estimate: Callable[[int], float],
    limit: float,
    start: int,
    most: int,
) -> BatchSizeResult:
    """Find the largest batch up to ``most`` whose peak memory stays within ``limit``, by one probe.

    ``estimate`` returns the bytes of a batch. The probe, with ``start`` samples, shows how far it is off. A
    further one is made only where the first took more than the limit."""
    batch = start
    probes: list[BatchProbe] = []
    while True:
        probes.append(probe(batch))
        peak = probes[-1].peak
        assert peak is not None, "a worker that runs out of memory ends a probe of several workers"
        slope = (estimate(2 * batch) - estimate(batch)) / batch * _STEEPER
        slope = max(1.0, slope * max(1.0, peak / estimate(batch)))
        fitting = batch + int((limit * _AIM - peak) // slope)
        if peak <= limit:
            return _corrected(probes, limit, min(most, max(batch, fitting)))
        if batch == 1:
            raise ResourceError(_nothing_fits(1))
        batch = max(1, min(batch - 1, fitting))


def _corrected(probes: list[BatchProbe], limit: float, batch: int) -> BatchSizeResult:
    peak, last = (probes[-1].peak or 0.0) / GIB, probes[-1].batch
    count = "one probe" if len(probes) == 1 else f"{len(probes)} probes"
    reason = (
        f"by the estimate and {count} of all workers together: {last} samples had a peak of {peak:.2f} of "
        f"{limit / GIB:.2f} GiB on the fullest device"
    )
    return BatchSizeResult(batch, reason, tuple(probes))


def _nothing_fits(smallest: int) -> str:
    if smallest == 1:
        return (
            "not even a batch of one sample fits the device; "
            "try --activation-checkpointing on or a smaller model"
        )
    return (
        f"no batch down to {smallest} samples fits the device; "
        "try --activation-checkpointing on or a smaller model, or give --batch-size 1"
    )


def fastest_batch(
    probe: Callable[[int], BatchProbe], start: int, max_useful: int, limit: float
) -> BatchSizeResult:
    """Double the batch as long as samples per second grow.

    Choose the smallest that is nearly as fast as the best."""
    probes: list[BatchProbe] = []
    good: list[BatchProbe] = []
    batch = max(1, min(start, max_useful))
    while True:
        last = probe(batch)
        best_so_far = max((p.samples_per_second for p in good), default=0.0)
        probes.append(last)
        if _fits(last, limit):
            good.append(last)
            came_down = len(good) < len(probes)
            gained = last.samples_per_second >= _WORTHWHILE * best_so_far
            if came_down or batch >= max_useful or not gained:
                break
            batch = min(max_useful, batch * 2)
        elif good or batch == 1:
            break
        else:
            # Not even the first batch fits: halve it until one does.
            batch //= 2
    if not good:
        raise ResourceError(
            "not even a batch of one sample fits the memory; "
            "try --activation-checkpointing on or a smaller model"
        )
    best_speed = max(p.samples_per_second for p in good)
    near_best = [p.batch for p in good if p.samples_per_second >= _NEAR_BEST * best_speed]
    table = ", ".join(f"{p.batch}: {p.samples_per_second:.0f}/s" for p in probes)
    reason = f"the smallest batch near the best measured throughput ({table})"
    return BatchSizeResult(min(near_best), reason, tuple(probes))
