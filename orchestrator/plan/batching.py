"""How many samples meet in a step, and in which portions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.plan.estimate import (
    MemoryEstimate,
    ModelFacts,
    ModelSharding,
    estimate_memory,
    largest_fitting,
)
from orchestrator.plan.workers import PLAIN
from orchestrator.types import Choice, Rejected, bytes_text

# GPU memory from which a class begins, batch and accumulation to start from: about 64 samples per device and step
MEMORY_CLASSES = ((20, 16, 4), (14, 12, 5), (10, 8, 8), (6, 4, 16), (0, 2, 32))
_GB = 10**9  # as memory is sold: a card of "10 GB" shows torch some 9.8 GiB
_CPU_START = (64, 1)
_DEBUG_BATCH = 4
_PLAIN_BATCH = 32


@dataclass(frozen=True)
class Batching:
    """The sizes of a step, decided."""

    starting: Choice[str]
    batch_size: Choice[int]
    accumulation: Choice[int]
    global_batch: Choice[int]
    evaluation: Choice[int]
    recompute: Choice[bool]


@dataclass(frozen=True)
class _MemoryBudget:
    """What the model's state leaves for a micro-batch on each worker's device."""

    facts: ModelFacts
    limit: float
    spread: ModelSharding

    def need(self, micro_batch: int, recompute: bool) -> MemoryEstimate:
        return estimate_memory(self.facts, micro_batch, recompute, self.limit, self.spread)

    def largest(self, most: int, recompute: bool) -> int:
        return largest_fitting(self.facts, most, recompute, self.limit, self.spread)


@dataclass(frozen=True)
class _StepSamples:
    """The samples of a step before they are cut, and what fixes their number: a flag, the run's beginning, or nothing.
    ``workers`` are those that hold a share of them."""

    samples: int
    workers: int
    fixed: str | None

    @property
    def share(self) -> int:
        """Samples that one worker has in a step."""
        return -(-self.samples // self.workers)


def plan_batches(
    config: Config,
    facts: ModelFacts,
    gpu_memory: int | None,
    limit: float,
    measured: Mapping[str, int] | None,
    spread: ModelSharding | None = None,
) -> Batching:
    """Start from the memory class's table for each worker that holds a share, then let the estimate (or a measurement) cut the
    same effective batch into the largest portions that fit. ``limit`` is that of one worker. The global batch need not
    divide evenly."""
    known, spread = measured or {}, spread or ModelSharding()
    workers = spread.data_ranks
    starting, per_device = _starting(gpu_memory)
    whole = _effective(config, facts, per_device, workers, known)
    room = _MemoryBudget(facts, limit, spread)
    recompute = _recompute(config, room)
    batch = _batch_size(config, room, whole, recompute.value, known)
    global_batch, accumulation = _product(config, facts, batch.value, whole)
    if global_batch.value < workers:
        raise UserError(
            f"{workers} workers need a global batch of {workers} samples at least; it has {global_batch.value} ({global_batch.reason}). "
            f"Lower --workers" + (", or raise --global-batch-size" if facts.samples >= workers else "")
        )
    return Batching(
        starting,
        batch,
        accumulation,
        global_batch,
        _evaluation(config, facts, batch.value, workers),
        recompute,
    )


def _starting(gpu_memory: int | None) -> tuple[Choice[str], int]:
    if gpu_memory is None:
        batch, accumulation = _CPU_START
        return Choice(f"{batch} × {accumulation}", "starting value for a CPU"), batch * accumulation
    floor, batch, accumulation = next(row for row in MEMORY_CLASSES if gpu_memory >= row[0] * _GB)
    reason = (
        f"starting value for GPUs of {floor} GB and more" if floor else "starting value for GPUs below 6 GB"
    )
    return Choice(f"{batch} × {accumulation}", reason), batch * accumulation


def _effective(
    config: Config, facts: ModelFacts, per_device: int, workers: int, known: Mapping[str, int]
) -> _StepSamples:
    """Samples per step that were asked for, in one way or another."""
    settings, parts = config.batch, config.batch.accumulation_steps or 1
    fixed: str | None = None
    if settings.global_batch_size and not config.run.debug:
        samples, fixed = (
            settings.global_batch_size,
            f"asked for by --global-batch-size {settings.global_batch_size}",
        )
    elif "global_batch_size" in known:
        samples, fixed = known["global_batch_size"], "the run began with it"
    elif config.run.debug:
        samples, fixed = _DEBUG_BATCH * workers, "--debug"
    elif isinstance(settings.batch_size, int):
        samples = settings.batch_size * parts * workers
    else:
        samples = (per_device if config.run.auto else _PLAIN_BATCH * parts) * workers
    return _StepSamples(min(samples, facts.samples), workers, fixed and fixed + _capped(samples, facts))


def _recompute(config: Config, room: _MemoryBudget) -> Choice[bool]:
    asked = config.device.activation_checkpointing
    if asked != "auto":
        return Choice(asked == "on", f"asked for by --activation-checkpointing {asked}")
    if not config.run.auto:
        return Choice(False, PLAIN)
    if not room.facts.blocks:
        return Choice(False, "the model has no blocks that could be recomputed")
    one = room.need(1, recompute=False)
    if one.fits:
        return Choice(False, "activations fit without it", (Rejected("on", "a third more compute"),))
    need = f"one sample needs {bytes_text(one.total)} and {bytes_text(room.limit)} may be used"
    if room.need(1, recompute=True).total >= one.total:
        return Choice(False, f"{need}, but recomputing would not lessen it")
    return Choice(True, need)


def _batch_size(
    config: Config, room: _MemoryBudget, whole: _StepSamples, recompute: bool, known: Mapping[str, int]
) -> Choice[int]:
    asked, parts = config.batch.batch_size, config.batch.accumulation_steps
    if "batch_size" in known:
        most = whole.share if whole.fixed else room.facts.samples
        return Choice(min(known["batch_size"], most), "measured (--batch-size auto)")
    if config.run.debug:
        return Choice(min(_DEBUG_BATCH, whole.share), "--debug")
    if isinstance(asked, int):
        return Choice(
            min(asked, whole.share),
            f"asked for by --batch-size {asked}" + _cut_to_share(asked, whole, room.facts),
        )
    share = -(-whole.share // parts) if parts else whole.share
    if parts and config.batch.global_batch_size:
        among = f" on each of {whole.workers} workers" if whole.workers > 1 else ""
        return Choice(
            share, f"{whole.samples} samples per step in {parts} micro-batches{among}, as asked for"
        )
    if not config.run.auto:
        return Choice(min(_PLAIN_BATCH, whole.share), PLAIN)
    if asked == "auto":
        largest = room.largest(max(1, room.facts.samples), recompute)
        return Choice(
            max(1, min(share, largest)), f"to be measured; by the estimate up to {largest} samples fit"
        )
    return _by_estimate(room, share, recompute)


def _capped(asked: int, facts: ModelFacts) -> str:
    return f", cut to the {facts.samples} samples there are" if asked > facts.samples else ""


def _cut_to_share(asked: int, whole: _StepSamples, facts: ModelFacts) -> str:
    if asked <= whole.share or whole.workers == 1:
        return _capped(asked, facts)
    return f", cut to {whole.share}: a worker's share of {whole.samples} samples"


def _by_estimate(room: _MemoryBudget, share: int, recompute: bool) -> Choice[int]:
    """All samples of a worker at once where they fit, else in the largest equal portions that do."""
    fitting = max(1, room.largest(share, recompute))
    size = next(
        share // parts for parts in range(1, share + 1) if share % parts == 0 and share // parts <= fitting
    )
    if 2 * size <= fitting:  # no equal portions of a decent size: nearly equal ones
        size = -(-share // -(-share // fitting))
    need, may = room.need(size, recompute), bytes_text(room.limit)
    if not need.fits:
        return Choice(
            size,
            f"one sample needs {bytes_text(need.total)}, more than the {may} that may be used, by the estimate",
        )
    reason = f"needs {bytes_text(need.total)} of the {may} that may be used, by the estimate"
    if size == share:
        return Choice(size, f"all {share} samples at once: {reason}")
    more = min(share, size * 2)
    return Choice(
        size, reason, (Rejected(str(more), f"would need {bytes_text(room.need(more, recompute).total)}"),)
    )


def _product(
    config: Config, facts: ModelFacts, batch: int, whole: _StepSamples
) -> tuple[Choice[int], Choice[int]]:
    """The global batch and the micro-batches it takes."""
    samples = _global_batch(config, facts, batch, whole)
    parts, asked = -(-samples.value // (batch * whole.workers)), config.batch.accumulation_steps
    each = f"{batch}" if whole.workers == 1 else f"{batch} × {whole.workers} workers"
    reason = (
        "one micro-batch holds them all"
        if parts == 1
        else f"{samples.value} samples in micro-batches of {each}"
    )
    if asked:
        reason = (
            f"asked for by --accumulation-steps {asked}"
            if parts == asked
            else f"{reason}, in place of --accumulation-steps {asked}"
        )
    return samples, Choice(parts, reason)


def _global_batch(config: Config, facts: ModelFacts, batch: int, whole: _StepSamples) -> Choice[int]:
    settings, workers = config.batch, whole.workers
    if whole.fixed:
        return Choice(whole.samples, whole.fixed)
    among = f" × {workers} workers" if workers > 1 else ""
    if settings.accumulation_steps:
        product = batch * settings.accumulation_steps * workers
        reason = f"batch {batch} × accumulation {settings.accumulation_steps}{among}"
        return Choice(min(product, facts.samples), reason + _capped(product, facts))
    if settings.batch_size == "auto":
        return Choice(
            min(batch * workers, facts.samples),
            f"one measured batch{among}" + _capped(batch * workers, facts),
        )
    return Choice(
        whole.samples, "samples per optimizer step" + (f", over {workers} workers" if workers > 1 else "")
    )


def _evaluation(config: Config, facts: ModelFacts, batch: int, workers: int) -> Choice[int]:
    if config.batch.eval_batch_size is not None:
        return Choice(config.batch.eval_batch_size, "asked for by --eval-batch-size")
    if config.run.debug or not config.run.auto:
        return Choice(batch, "as in training")
    if not facts.validation_samples:
        return Choice(1, "not used: there are no validation samples")
    share, twice = -(-facts.validation_samples // workers), 2 * batch
    if share > twice:
        return Choice(twice, "twice the training batch: nothing is kept for a backward pass")
    among = f", a worker's share of {facts.validation_samples}" if workers > 1 else ""
    return Choice(
        share,
        f"all validation samples at once{among}: nothing is kept for a backward pass, so twice {batch} would fit",
    )
