"""``--batch-size auto``: the largest batch that fits a GPU, or the fastest on a CPU, by few and short probes.

Memory is an affine function of the batch: two probes give it, a third checks the answer, a fourth may mend it. Each probe
runs two whole optimizer steps, because the second is the first that has the optimizer's state beside its activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.errors import ResourceError

MOST_PROBES = 4
_AIM = 0.985  # of the limit: what the allocator loses to rounding and fragments
_GOOD_ENOUGH = 0.95
_WORTHWHILE = 1.05  # a doubled batch must be this much faster to be looked beyond
_NEAR_BEST = 0.97


@dataclass(frozen=True)
class Probe:
    """What two steps at a batch size took. ``peak`` is None when they ran out of memory."""

    batch: int
    peak: float | None
    samples_per_second: float


@dataclass(frozen=True)
class Found:
    batch_size: int
    reason: str
    probes: tuple[Probe, ...]


def largest_batch(probe: Callable[[int], Probe], limit: float, guess: int, most: int) -> Found:
    """The largest batch whose peak stays within ``limit``. ``guess`` is the estimate's answer, ``most`` the largest of use."""
    probes: list[Probe] = []
    for batch in _first_pair(guess, most):
        probes.append(probe(batch))
        if probes[-1].peak is None:
            return _after_early_failure(probe, probes, limit)
    while len(probes) < MOST_PROBES:
        target = min(most, _predict(probes, limit))
        if target <= _largest_good(probes):
            break
        probes.append(probe(target))
        good = _largest_good(probes)
        if good >= most or good >= _GOOD_ENOUGH * _predict(probes, limit):
            break
    return _answer(probes, limit, most)


def _first_pair(guess: int, most: int) -> tuple[int, ...]:
    """Two small batches, far enough apart to tell the slope: an eighth and a half of what the estimate expects."""
    high = max(2, min(most, guess // 2))
    low = max(1, min(high // 4, guess // 8))
    return (low, high) if low < high else (high,)


def _after_early_failure(probe: Callable[[int], Probe], probes: list[Probe], limit: float) -> Found:
    """The estimate was far too high: down by powers of four until something fits, then up by the fit."""
    while len(probes) < MOST_PROBES and not any(p.peak is not None for p in probes):
        failed = min(p.batch for p in probes)
        if failed == 1:
            raise ResourceError("not even a batch of one sample fits the device; try --activation-checkpointing on or a smaller model")
        probes.append(probe(max(1, failed // 4)))
    if len(probes) < MOST_PROBES and len([p for p in probes if p.peak is not None]) >= 2:
        target = _predict(probes, limit)
        if target > _largest_good(probes):
            probes.append(probe(target))
    if not any(p.peak is not None for p in probes):
        raise ResourceError(
            f"no batch down to {min(p.batch for p in probes)} samples fits the device; give --batch-size 1, or a smaller model"
        )
    return _answer(probes, limit, min(p.batch for p in probes if p.peak is None) - 1)


def _predict(probes: list[Probe], limit: float) -> int:
    """The largest batch that the line through the two largest good probes puts within the limit, below any that failed."""
    good = sorted(((p.batch, p.peak) for p in probes if p.peak is not None), reverse=True)[:2]
    ceiling = min((p.batch for p in probes if p.peak is None), default=None)
    (x1, y1), (x0, y0) = (good[0], good[1]) if len(good) == 2 else (good[0], (0, 0.0))
    slope = max((y1 - y0) / max(1, x1 - x0), 1.0)
    predicted = int(x1 + (limit * _AIM - y1) / slope)
    if ceiling is not None:
        predicted = min(predicted, int(ceiling * _AIM), ceiling - 1)
    return max(1, predicted)


def _largest_good(probes: list[Probe]) -> int:
    return max((p.batch for p in probes if p.peak is not None), default=0)


def _answer(probes: list[Probe], limit: float, most: int) -> Found:
    best = _largest_good(probes)
    peak = next(p.peak for p in probes if p.batch == best and p.peak is not None)
    failed = sum(p.peak is None for p in probes)
    why = f"peak {peak / 2**30:.2f} of {limit / 2**30:.2f} GiB" + (f", the most of use is {most}" if best >= most else "")
    return Found(best, f"the largest that fits: {why} ({len(probes)} probes, {failed} out of memory)", tuple(probes))


def fastest_batch(probe: Callable[[int], Probe], start: int, most: int, limit: float) -> Found:
    """Double the batch while samples per second grow; take the smallest that is nearly as fast as the best."""
    probes: list[Probe] = []
    batch = min(start, most)
    while True:
        probes.append(probe(batch))
        last = probes[-1]
        before = max((p.samples_per_second for p in probes[:-1]), default=0.0)
        full = last.peak is None or last.peak > limit
        if full or batch >= most or last.samples_per_second < _WORTHWHILE * before:
            break
        batch = min(most, batch * 2)
    good = [p for p in probes if p.peak is not None and p.peak <= limit] or probes[:1]
    best = max(p.samples_per_second for p in good)
    chosen = min((p for p in good if p.samples_per_second >= _NEAR_BEST * best), key=lambda p: p.batch)
    table = ", ".join(f"{p.batch}: {p.samples_per_second:.0f}/s" for p in probes)
    return Found(chosen.batch, f"the smallest batch near the best measured throughput ({table})", tuple(probes))
