"""``--batch-size auto``: the largest batch that fits a GPU, or the fastest on a CPU, by few and short probes.

Memory is an affine function of the batch: two probes give it, a third checks the answer, a fourth may mend it. Each probe
runs two whole optimizer steps, because the second is the first that has the optimizer's state beside its activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.errors import ResourceError

MOST_PROBES = 4
_FIRST = 0.45  # of the estimate: the larger batch of the first pair
_AIM = 0.985  # of the prediction: what the allocator loses to rounding and fragments
_HOPE = 1.025  # of the prediction: what may just fit
_GOOD_ENOUGH = 0.95
_BACK_OFF = 0.975  # of a batch that failed where the line foretold it would fit
_TRUSTED = 6  # times the largest good batch: how far the line is believed
_APART = 1.5  # times: batches nearer to each other than this do not tell a slope
_WORTHWHILE = 1.05  # a doubled batch must be this much faster to be looked beyond
_NEAR_BEST = 0.97


@dataclass(frozen=True)
class BatchTrial:
    """What two steps at a batch size took. ``peak`` is None when they ran out of memory."""

    batch: int
    peak: float | None
    samples_per_second: float


@dataclass(frozen=True)
class BatchSizeResult:
    batch_size: int
    reason: str
    probes: tuple[BatchTrial, ...]


def largest_batch(probe: Callable[[int], BatchTrial], limit: float, guess: int, most: int) -> BatchSizeResult:
    """The largest batch whose peak stays within ``limit``. ``guess`` is the estimate's answer, ``most`` the largest of use."""
    most = max(1, most)
    probes: list[BatchTrial] = []
    for batch in _first_pair(guess, most):
        probes.append(probe(batch))
        if not _fits(probes[-1], limit):
            break
    while len(probes) < MOST_PROBES and (target := _next(probes, limit, most)) is not None:
        probes.append(probe(target))
    return _answer(probes, limit, most)


def _first_pair(guess: int, most: int) -> tuple[int, ...]:
    """Two small batches, far enough apart to tell the slope, the larger one safe even where the estimate is twice too high."""
    high = min(most, max(2, int(guess * _FIRST)))
    low = max(1, high // 4)
    return (low, high) if low < high else (high,)


def _fits(probe: BatchTrial, limit: float) -> bool:
    return probe.peak is not None and probe.peak <= limit


def _next(probes: list[BatchTrial], limit: float, most: int) -> int | None:
    """The batch to try next; None when the largest good one will do, or nothing fits."""
    good = [p for p in probes if _fits(p, limit)]
    failed = min((p.batch for p in probes if not _fits(p, limit)), default=None)
    if not good:  # the estimate was far too high: down by powers of four until something fits
        return None if failed == 1 else max(1, (failed or 4) // 4)
    best = max(p.batch for p in good)
    top = most if failed is None else min(most, failed - 1)
    predicted = _predict(good, limit)
    hoped = int(min(top, predicted * _HOPE)) if len(good) > 1 else top
    if best >= _GOOD_ENOUGH * hoped:
        return None
    last = len(probes) == MOST_PROBES - 1
    target = int(min(top, predicted * (_BACK_OFF if last else _AIM)))
    if (
        len(good) == 1 and target < _APART * best
    ):  # too near to tell a slope: a smaller one tells it, and surely fits
        return best // 4 or best + 1
    if failed is not None:
        target = min(target, max(best + 1, int(failed * _BACK_OFF)))
    elif (
        target <= best
    ):  # batches are whole: with few samples the last one counts, and it is the first that may fail
        target = hoped
    elif not last and target > _TRUSTED * best:  # a long way for a short line: half of it first
        target //= 2
    return target if best < target <= top else None


def _predict(good: list[BatchTrial], limit: float) -> float:
    """The batch at which the line through the two largest good probes meets the limit. A single one gives the line
    through nothing, which errs on the safe side: some memory is needed for no sample at all."""
    points = sorted(((p.batch, p.peak or 0.0) for p in good), reverse=True)[:2]
    (x1, y1), (x0, y0) = (points[0], points[1]) if len(points) == 2 else (points[0], (0, 0.0))
    slope = max((y1 - y0) / (x1 - x0), 1.0)
    return x1 + (limit - y1) / slope


def _answer(probes: list[BatchTrial], limit: float, most: int) -> BatchSizeResult:
    good = [p for p in probes if _fits(p, limit)]
    if not good:
        least = min(p.batch for p in probes)
        found = (
            "not even a batch of one sample fits the device"
            if least == 1
            else f"no batch down to {least} samples fits the device"
        )
        raise ResourceError(
            f"{found}; try --activation-checkpointing on or a smaller model"
            + (", or give --batch-size 1" if least > 1 else "")
        )
    best = max(good, key=lambda p: p.batch)
    failed = len(probes) - len(good)
    why = f"peak {(best.peak or 0.0) / 2**30:.2f} of {limit / 2**30:.2f} GiB"
    why += f", the most of use is {most}" if best.batch >= most else ""
    return BatchSizeResult(
        best.batch,
        f"the largest that fits: {why} ({len(probes)} probes, {failed} out of memory)",
        tuple(probes),
    )


def fastest_batch(probe: Callable[[int], BatchTrial], start: int, most: int, limit: float) -> BatchSizeResult:
    """Double the batch while samples per second grow; take the smallest that is nearly as fast as the best."""
    probes: list[BatchTrial] = []
    good: list[BatchTrial] = []
    batch = max(1, min(start, most))
    while True:
        last = probe(batch)
        before = max((p.samples_per_second for p in good), default=0.0)
        probes.append(last)
        if _fits(last, limit):
            good.append(last)
            if len(good) < len(probes) or batch >= most or last.samples_per_second < _WORTHWHILE * before:
                break
            batch = min(most, batch * 2)
        elif good or batch == 1:
            break
        else:  # not even the first fits: down until one does
            batch //= 2
    if not good:
        raise ResourceError(
            "not even a batch of one sample fits the memory; try --activation-checkpointing on or a smaller model"
        )
    best = max(p.samples_per_second for p in good)
    chosen = min((p for p in good if p.samples_per_second >= _NEAR_BEST * best), key=lambda p: p.batch)
    table = ", ".join(f"{p.batch}: {p.samples_per_second:.0f}/s" for p in probes)
    return BatchSizeResult(
        chosen.batch, f"the smallest batch near the best measured throughput ({table})", tuple(probes)
    )
