"""Sizes of a step: the global batch, the micro-batches it is cut into, and whether activations are
recomputed. Pure."""

from __future__ import annotations

import math
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
from orchestrator.plan.reasons import NO_AUTO
from orchestrator.types import NOT_USED, Choice, Rejected, bytes_text

# Rows of (lowest GPU memory in GB, batch, accumulation): about 64 samples per device and step.
MEMORY_CLASSES = ((20, 16, 4), (14, 12, 5), (10, 8, 8), (6, 4, 16), (0, 2, 32))
_GB = 10**9  # decimal, as memory is sold: torch reports some 9.8 GiB for a card of "10 GB"
_CPU_START = (64, 1)
_DEBUG_BATCH = 4
_PLAIN_BATCH = 32
_MAX_EXACT_PARTS = 4096
"""The most micro-batches of a reproducible step: the integers of its sums have 64 bits."""
_REPRODUCIBLE_PARTS = 8
"""Micro-batches of a reproducible step by default: up to eight workers have some."""


@dataclass(frozen=True)
class Batching:
    """The chosen sizes of a step."""

    starting: Choice[str]
    batch_size: Choice[int]
    accumulation: Choice[int]
    global_batch: Choice[int]
    evaluation: Choice[int]
    recompute: Choice[bool]


@dataclass(frozen=True)
class _MemoryBudget:
    """The memory of each worker's device, and the model that must fit in it."""

    facts: ModelFacts
    limit_bytes: float
    sharding: ModelSharding
    single_pass_from: float
    """Samples of a micro-batch from which on a step is one pass."""

    def needed(self, micro_batch: int, recompute: bool) -> MemoryEstimate:
        single_pass = micro_batch >= self.single_pass_from
        return estimate_memory(
            self.facts, micro_batch, recompute, self.limit_bytes, self.sharding, single_pass
        )

    def largest(self, max_micro_batch: int, recompute: bool) -> int:
        return largest_fitting(lambda size: self.needed(size, recompute).fits, max_micro_batch)


@dataclass(frozen=True)
class _StepSamples:
    """The samples of a step before they are cut into micro-batches.

    ``workers`` are the data ranks. ``fixed_by`` is the reason for a number that the plan may not
    change; None if the plan is free to change it. ``cut`` says that the data has no more samples.
    """

    samples: int
    workers: int
    fixed_by: str | None
    cut: str

    @property
    def share(self) -> int:
        """Samples of one worker in a step."""
        return -(-self.samples // self.workers)


def plan_batches(
    config: Config,
    facts: ModelFacts,
    gpu_memory: int | None,
    limit_bytes: float,
    measured: Mapping[str, int] | None,
    sharding: ModelSharding | None = None,
) -> Batching:
    """Choose the sizes of a step.

    The table of memory classes gives the samples per data rank. The estimate, or a measurement,
    then cuts the same number into the largest micro-batches that fit ``limit_bytes``, the memory
    of one worker. The global batch need not divide evenly.
    """
    known = measured or {}
    sharding = sharding or ModelSharding()
    # The sizes of a reproducible run do not depend on its workers.
    workers = 1 if config.run.reproducible else sharding.data_ranks
    starting, per_device = _starting(gpu_memory)
    step = _step_samples(config, facts, per_device, workers, known)
    budget = _MemoryBudget(facts, limit_bytes, sharding, _single_pass_from(config, step))
    recompute = _recompute(config, budget)
    batch = _batch_size(config, budget, step, recompute.value, known)
    global_batch = _global_batch(config, facts, batch.value, step)
    if global_batch.value < workers:
        raise UserError(_too_few_samples(workers, global_batch, facts))
    _check_exact_parts(config, batch.value, global_batch.value)
    accumulation = _accumulation(config, batch.value, global_batch.value, sharding.data_ranks)
    single_pass = accumulation.value == 1
    memory = estimate_memory(facts, batch.value, recompute.value, limit_bytes, sharding, single_pass)
    if not memory.fits:
        recompute = _recompute(config, budget, too_large=batch.value)
    return Batching(
        starting,
        batch,
        accumulation,
        global_batch,
        _evaluation(config, facts, batch.value, workers, memory.fits),
        recompute,
    )


def _parts(config: Config) -> int | None:
    """Return the micro-batches of a step; None if the plan is free to choose them."""
    if config.batch.accumulation_steps or not config.run.reproducible:
        return config.batch.accumulation_steps
    sizes = (config.batch.batch_size, config.batch.global_batch_size)
    return None if all(sizes) else _REPRODUCIBLE_PARTS


def _check_exact_parts(config: Config, batch: int, global_batch: int) -> None:
    """Raise UserError if the exact sums of a reproducible step could overflow."""
    parts = -(-global_batch // batch)
    if config.run.reproducible and parts > _MAX_EXACT_PARTS:
        raise UserError(
            f"{global_batch} samples in micro-batches of {batch} are {parts} micro-batches; the exact sums "
            f"of --reproducible take at most {_MAX_EXACT_PARTS}. Raise --batch-size, or lower "
            "--global-batch-size"
        )


def _too_few_samples(workers: int, global_batch: Choice[int], facts: ModelFacts) -> str:
    instead = ", or raise --global-batch-size" if facts.at_most(workers) == workers else ""
    return (
        f"{workers} workers need a global batch of at least {workers} samples; it has {global_batch.value} "
        f"({global_batch.reason}). Lower --workers{instead}"
    )


def _starting(gpu_memory: int | None) -> tuple[Choice[str], int]:
    """Return the starting batch and accumulation as a choice, and their product: samples per
    device and step."""
    if gpu_memory is None:
        batch, accumulation = _CPU_START
        return Choice(
            f"{batch} × {accumulation}", "CPUs start from this batch × accumulation"
        ), batch * accumulation
    lowest_gb, batch, accumulation = next(row for row in MEMORY_CLASSES if gpu_memory >= row[0] * _GB)
    if lowest_gb:
        reason = f"GPUs of {lowest_gb} GB and more start from this batch × accumulation"
    else:
        reason = "GPUs below 6 GB start from this batch × accumulation"
    return Choice(f"{batch} × {accumulation}", reason), batch * accumulation


def _step_samples(
    config: Config, facts: ModelFacts, per_device: int, workers: int, known: Mapping[str, int]
) -> _StepSamples:
    """Return the samples of a step: set by a flag, by the run that is resumed, or by the starting
    values."""
    settings = config.batch
    accumulation = _parts(config) or 1
    fixed_by: str | None = None
    if settings.global_batch_size and not config.run.debug:
        samples = settings.global_batch_size
        fixed_by = f"set by --global-batch-size {settings.global_batch_size}"
    # Before --debug: a resumed run keeps the global batch of its earlier steps.
    elif "global_batch_size" in known:
        samples = known["global_batch_size"]
        fixed_by = "the run was started with it"
    elif config.run.debug:
        samples = _DEBUG_BATCH * workers
        fixed_by = "set by --debug"
    elif isinstance(settings.batch_size, int):
        samples = settings.batch_size * accumulation * workers
    elif settings.batch_size is None and facts.loader_batch is not None:
        samples = facts.loader_batch * accumulation * workers
    elif config.run.auto:
        samples = per_device * workers
    else:
        samples = _PLAIN_BATCH * accumulation * workers
    return _StepSamples(facts.at_most(samples), workers, fixed_by, _capped(samples, facts))


def _single_pass_from(config: Config, step: _StepSamples) -> float:
    """Return the samples of a micro-batch from which on a step is one pass."""
    if (_parts(config) or 1) > 1:
        return math.inf
    if config.batch.batch_size == "auto" and not step.fixed_by:
        return 1  # a step is one measured batch
    return step.share


def _recompute(config: Config, budget: _MemoryBudget, too_large: int | None = None) -> Choice[bool]:
    """Choose recomputation only if one sample does not fit without it.

    ``too_large`` are the samples of a micro-batch that does not fit. They change the reason, not the
    choice.
    """
    setting = config.device.activation_checkpointing
    if setting != "auto":
        return Choice(setting == "on", f"set by --activation-checkpointing {setting}")
    if not config.run.auto:
        return Choice(False, NO_AUTO)
    if not budget.facts.blocks:
        return Choice(False, "the model has no blocks that could be recomputed")
    one_sample = budget.needed(1, recompute=False)
    if one_sample.fits:
        reason = "the activations fit without it"
        if too_large is not None:
            reason = f"one sample does not need it; a micro-batch of {too_large} is too large for the memory"
        return Choice(False, reason, (Rejected("on", "costs a third more compute"),))
    reason = f"one sample needs {bytes_text(one_sample.total)}; {bytes_text(budget.limit_bytes)} is usable"
    if budget.needed(1, recompute=True).total >= one_sample.total:
        return Choice(False, f"{reason}, but recomputation would not reduce it")
    return Choice(True, reason)


def _batch_size(
    config: Config, budget: _MemoryBudget, step: _StepSamples, recompute: bool, known: Mapping[str, int]
) -> Choice[int]:
    """Choose the samples of a micro-batch on one worker."""
    setting = config.batch.batch_size
    accumulation = _parts(config)
    if "batch_size" in known:
        # The global batch follows a measured batch, unless something fixes it.
        measured = known["batch_size"]
        most = step.share if step.fixed_by else budget.facts.at_most(measured)
        return Choice(min(measured, most), "measured (--batch-size auto)")
    if config.run.debug:
        return Choice(min(_DEBUG_BATCH, step.share), "set by --debug")
    if isinstance(setting, int):
        reason = f"set by --batch-size {setting}" + _cut_to_share(setting, step, budget.facts)
        return Choice(min(setting, step.share), reason)
    if setting is None and budget.facts.loader_batch is not None and not config.batch.global_batch_size:
        reason = "batch_size of the DataLoader; --batch-size and --global-batch-size replace it"
        return Choice(min(budget.facts.loader_batch, step.share), reason)
    share = -(-step.share // accumulation) if accumulation else step.share
    if config.run.reproducible and accumulation:
        # Not by the memory: what fits depends on the experts of a worker, and so on the workers.
        reason = f"{step.samples} samples are cut into {accumulation} micro-batches, on any number of workers"
        return Choice(share, reason)
    if accumulation and config.batch.global_batch_size:
        among = f" on each of {step.workers} workers" if step.workers > 1 else ""
        reason = (
            f"--global-batch-size and --accumulation-steps cut {step.samples} samples "
            f"into {accumulation} micro-batches{among}"
        )
        return Choice(share, reason)
    if not config.run.auto:
        return Choice(min(_PLAIN_BATCH, step.share), NO_AUTO)
    if setting == "auto":
        most = step.share if budget.facts.samples is None else budget.facts.samples
        largest = budget.largest(max(1, most), recompute)
        reason = f"will be measured; the estimate says that up to {largest} samples fit"
        return Choice(max(1, min(share, largest)), reason)
    return _estimated_batch(budget, share, recompute)


def _capped(samples: int, facts: ModelFacts) -> str:
    cut = facts.at_most(samples)
    return f", cut to the {cut} samples of the data" if samples > cut else ""


def _cut_to_share(batch_size: int, step: _StepSamples, facts: ModelFacts) -> str:
    if batch_size <= step.share or step.workers == 1:
        return _capped(batch_size, facts)
    return f", cut to {step.share}: a worker's share of {step.samples} samples"


def _estimated_batch(budget: _MemoryBudget, share: int, recompute: bool) -> Choice[int]:
    """Choose all of a worker's samples if they fit, or else the largest equal micro-batches that
    fit."""
    fitting = max(1, budget.largest(share, recompute))
    divisors = (parts for parts in range(1, share + 1) if share % parts == 0)
    size = next(share // parts for parts in divisors if share // parts <= fitting)
    if 2 * size <= fitting:
        # Equal micro-batches would use less than half of the memory: nearly equal ones are better.
        size = -(-share // -(-share // fitting))
    needed = budget.needed(size, recompute)
    usable = bytes_text(budget.limit_bytes)
    if not needed.fits:
        reason = (
            f"one sample needs {bytes_text(needed.total)}, more than the usable {usable}, by the estimate"
        )
        return Choice(size, reason)
    reason = f"it needs {bytes_text(needed.total)} of the usable {usable}, by the estimate"
    if size == share:
        return Choice(size, f"all {share} samples fit at once: {reason}")
    twice = min(share, size * 2)
    too_much = bytes_text(budget.needed(twice, recompute).total)
    return Choice(size, reason, (Rejected(str(twice), f"would need {too_much}"),))


def _accumulation(config: Config, batch: int, global_batch: int, workers: int) -> Choice[int]:
    """Return the number of micro-batches that the global batch takes."""
    micro_batches = -(-global_batch // (batch * workers))
    size = f"{batch}" if workers == 1 else f"{batch} × {workers} workers"
    if micro_batches == 1:
        reason = "one micro-batch holds all samples"
    else:
        reason = f"{global_batch} samples take {micro_batches} micro-batches of {size}"
    setting = config.batch.accumulation_steps
    if config.run.reproducible:
        reason = f"{-(-global_batch // batch)} micro-batches of {batch}, each computed whole by one worker"
    elif setting == micro_batches:
        reason = f"set by --accumulation-steps {setting}"
    elif setting:
        reason = f"{reason}, instead of --accumulation-steps {setting}"
    return Choice(micro_batches, reason)


def _global_batch(config: Config, facts: ModelFacts, batch: int, step: _StepSamples) -> Choice[int]:
    if step.fixed_by:
        return Choice(step.samples, step.fixed_by + step.cut)
    workers = step.workers
    times_workers = f" × {workers} workers" if workers > 1 else ""
    accumulation = _parts(config) if config.batch.batch_size else config.batch.accumulation_steps
    if accumulation:
        samples = batch * accumulation * workers
        reason = f"it is batch {batch} × accumulation {accumulation}{times_workers}"
        return Choice(facts.at_most(samples), reason + _capped(samples, facts))
    if config.batch.batch_size == "auto":
        samples = batch * workers
        reason = f"it is one measured batch{times_workers}"
        return Choice(facts.at_most(samples), reason + _capped(samples, facts))
    over_workers = f", over {workers} workers" if workers > 1 else ""
    return Choice(step.samples, f"an optimizer step has this many samples{over_workers}{step.cut}")


def _evaluation(config: Config, facts: ModelFacts, batch: int, workers: int, fits: bool) -> Choice[int]:
    """Choose the samples of a batch in evaluation; ``fits`` says whether a training batch fits."""
    if config.batch.eval_batch_size is not None:
        return Choice(config.batch.eval_batch_size, "set by --eval-batch-size")
    if config.run.debug or config.run.reproducible or not config.run.auto:
        return Choice(batch, "it is the training batch")
    if facts.validation_samples == 0:
        return Choice(1, f"{NOT_USED}there are no validation samples")
    twice = 2 * batch
    share = None if facts.validation_samples is None else -(-facts.validation_samples // workers)
    if share is None or share > twice:
        return Choice(
            twice, "it is twice the training batch: evaluation saves no activations for a backward pass"
        )
    among = f", a worker's share of {facts.validation_samples}" if workers > 1 else ""
    reason = f"one batch holds all validation samples{among}"
    if fits:
        reason += f": without a backward pass twice {batch} would fit"
    return Choice(share, reason)
