"""How many samples meet in a step, and in which portions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.config.settings import Config
from orchestrator.plan.estimate import ModelFacts, largest_fitting, memory
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


def plan_batches(config: Config, facts: ModelFacts, gpu_memory: int | None, limit: float, measured: Mapping[str, int] | None) -> Batching:
    """Start from the memory class's table, then let the estimate (or a measurement) cut the same effective batch into
    the largest portions that fit."""
    starting, effective = _starting(gpu_memory)
    effective = min(_effective(config, effective), facts.samples)
    recompute = _recompute(config, facts, limit)
    batch = _batch_size(config, facts, effective, recompute.value, limit, measured)
    global_batch, accumulation = _product(config, facts, batch.value, effective)
    return Batching(starting, batch, accumulation, global_batch, _evaluation(config, facts, batch.value), recompute)


def _starting(gpu_memory: int | None) -> tuple[Choice[str], int]:
    if gpu_memory is None:
        batch, accumulation = _CPU_START
        return Choice(f"{batch} × {accumulation}", "starting value for a CPU"), batch * accumulation
    floor, batch, accumulation = next(row for row in MEMORY_CLASSES if gpu_memory >= row[0] * _GB)
    reason = f"starting value for GPUs of {floor} GB and more" if floor else "starting value for GPUs below 6 GB"
    return Choice(f"{batch} × {accumulation}", reason), batch * accumulation


def _effective(config: Config, starting: int) -> int:
    """Samples per step that were asked for, in one way or another."""
    settings = config.batch
    if config.run.debug:
        return _DEBUG_BATCH
    if settings.global_batch_size:
        return settings.global_batch_size
    if isinstance(settings.batch_size, int):
        return settings.batch_size * (settings.accumulation_steps or 1)
    return starting if config.run.auto else _PLAIN_BATCH * (settings.accumulation_steps or 1)


def _recompute(config: Config, facts: ModelFacts, limit: float) -> Choice[bool]:
    asked = config.device.activation_checkpointing
    if asked != "auto":
        return Choice(asked == "on", f"asked for by --activation-checkpointing {asked}")
    if not config.run.auto:
        return Choice(False, "plain default, because of --no-auto")
    if not facts.blocks:
        return Choice(False, "the model has no blocks that could be recomputed")
    one = memory(facts, 1, recompute=False, limit=limit)
    if one.fits:
        return Choice(False, "activations fit without it", (Rejected("on", "a third more compute"),))
    need = f"one sample needs {bytes_text(one.total)} and {bytes_text(limit)} may be used"
    if memory(facts, 1, recompute=True, limit=limit).total >= one.total:
        return Choice(False, f"{need}, but recomputing would not lessen it")
    return Choice(True, need)


def _batch_size(
    config: Config, facts: ModelFacts, effective: int, recompute: bool, limit: float, measured: Mapping[str, int] | None
) -> Choice[int]:
    asked = config.batch.batch_size
    if measured is not None and "batch_size" in measured:
        return Choice(measured["batch_size"], "measured (--batch-size auto)")
    if config.run.debug:
        return Choice(effective, "--debug")
    if isinstance(asked, int):
        return Choice(min(asked, facts.samples), f"asked for by --batch-size {asked}" + _capped(asked, facts))
    parts = config.batch.accumulation_steps
    share = -(-effective // parts) if parts else effective
    if parts and config.batch.global_batch_size:
        return Choice(share, f"{effective} samples per step in {parts} micro-batches, as asked for")
    if not config.run.auto:
        return Choice(min(_PLAIN_BATCH, effective), "plain default, because of --no-auto")
    if asked == "auto":
        largest = largest_fitting(facts, max(1, facts.samples), recompute, limit)
        return Choice(max(1, min(share, largest)), f"to be measured; by the estimate up to {largest} samples fit")
    return _by_estimate(facts, share, recompute, limit)


def _capped(asked: int, facts: ModelFacts) -> str:
    return f", cut to the {facts.samples} samples there are" if asked > facts.samples else ""


def _by_estimate(facts: ModelFacts, whole: int, recompute: bool, limit: float) -> Choice[int]:
    """All samples at once where they fit, else in the largest equal portions that do."""
    fitting = max(1, largest_fitting(facts, whole, recompute, limit))
    size = next(whole // parts for parts in range(1, whole + 1) if whole % parts == 0 and whole // parts <= fitting)
    if 2 * size <= fitting:  # no equal portions of a decent size: nearly equal ones
        size = -(-whole // -(-whole // fitting))
    need = memory(facts, size, recompute, limit)
    if not need.fits:
        return Choice(
            size, f"one sample needs {bytes_text(need.total)}, more than the {bytes_text(limit)} that may be used, by the estimate"
        )
    reason = f"needs {bytes_text(need.total)} of the {bytes_text(limit)} that may be used, by the estimate"
    if size == whole:
        return Choice(size, f"all {whole} samples at once: {reason}")
    more = memory(facts, min(whole, size * 2), recompute, limit)
    return Choice(size, reason, (Rejected(str(min(whole, size * 2)), f"would need {bytes_text(more.total)}"),))


def _product(config: Config, facts: ModelFacts, batch: int, effective: int) -> tuple[Choice[int], Choice[int]]:
    """The global batch and the micro-batches it takes."""
    whole = _whole(config, facts, batch, effective)
    parts, asked = -(-whole.value // batch), config.batch.accumulation_steps
    reason = "one micro-batch holds them all" if parts == 1 else f"{whole.value} samples in micro-batches of {batch}"
    if asked:
        reason = f"asked for by --accumulation-steps {asked}" if parts == asked else f"{reason}, in place of --accumulation-steps {asked}"
    return whole, Choice(parts, reason)


def _whole(config: Config, facts: ModelFacts, batch: int, effective: int) -> Choice[int]:
    settings = config.batch
    if config.run.debug:
        return Choice(effective, "--debug")
    if settings.global_batch_size:
        asked = settings.global_batch_size
        return Choice(min(asked, facts.samples), f"asked for by --global-batch-size {asked}" + _capped(asked, facts))
    if settings.accumulation_steps:
        product = batch * settings.accumulation_steps
        reason = f"batch {batch} × accumulation {settings.accumulation_steps}"
        return Choice(min(product, facts.samples), reason + _capped(product, facts))
    if settings.batch_size == "auto":
        return Choice(batch, "one measured batch")
    return Choice(effective, "samples per optimizer step")


def _evaluation(config: Config, facts: ModelFacts, batch: int) -> Choice[int]:
    if config.batch.eval_batch_size is not None:
        return Choice(config.batch.eval_batch_size, "asked for by --eval-batch-size")
    if config.run.debug or not config.run.auto:
        return Choice(batch, "as in training")
    return Choice(min(max(1, facts.validation_samples), 2 * batch), "twice the training batch: nothing is kept for a backward pass")
