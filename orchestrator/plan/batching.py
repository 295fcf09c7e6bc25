"""How many samples meet in a step, and in which portions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.config.settings import Config
from orchestrator.plan.estimate import ModelFacts, largest_fitting, memory
from orchestrator.types import GIB, Choice, Rejected, bytes_text

# GPU memory from which a class begins, batch and accumulation to start from: about 64 samples per device and step
MEMORY_CLASSES = ((20, 16, 4), (14, 12, 5), (10, 8, 8), (6, 4, 16), (0, 2, 32))
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
    floor, batch, accumulation = next(row for row in MEMORY_CLASSES if gpu_memory / GIB >= row[0])
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
    one = memory(facts, 1, recompute=False, limit=limit)
    if one.fits or not facts.blocks:
        return Choice(False, "activations fit without it", (Rejected("on", "a third more compute"),) if facts.blocks else ())
    return Choice(True, f"one sample needs {bytes_text(one.total)} and {bytes_text(limit)} may be used")


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
    if config.batch.accumulation_steps and (config.batch.global_batch_size or config.run.auto):
        size = -(-effective // config.batch.accumulation_steps)
        return Choice(size, f"{effective} samples per step in {config.batch.accumulation_steps} micro-batches, as asked for")
    if not config.run.auto:
        return Choice(min(_PLAIN_BATCH, facts.samples), "plain default, because of --no-auto")
    if asked == "auto":
        largest = largest_fitting(facts, max(1, facts.samples), recompute, limit)
        return Choice(max(1, min(effective, largest)), f"to be measured; by the estimate up to {largest} samples fit")
    return _by_estimate(facts, effective, recompute, limit)


def _capped(asked: int, facts: ModelFacts) -> str:
    return f", cut to the {facts.samples} samples there are" if asked > facts.samples else ""


def _by_estimate(facts: ModelFacts, effective: int, recompute: bool, limit: float) -> Choice[int]:
    fitting = largest_fitting(facts, effective, recompute, limit)
    size = next((effective // parts for parts in range(1, effective + 1) if effective % parts == 0 and effective // parts <= fitting), 1)
    need = memory(facts, size, recompute, limit)
    reason = f"needs {bytes_text(need.total)} of the {bytes_text(limit)} that may be used, by the estimate"
    if size == effective:
        return Choice(size, f"all {effective} samples of a step at once: {reason}")
    more = memory(facts, min(effective, size * 2), recompute, limit)
    return Choice(size, reason, (Rejected(str(min(effective, size * 2)), f"would need {bytes_text(more.total)}"),))


def _product(config: Config, facts: ModelFacts, batch: int, effective: int) -> tuple[Choice[int], Choice[int]]:
    """The global batch and the micro-batches it takes."""
    settings = config.batch
    if settings.global_batch_size and not config.run.debug:
        whole = Choice(min(settings.global_batch_size, facts.samples), f"asked for by --global-batch-size {settings.global_batch_size}")
    elif settings.accumulation_steps and not config.run.debug:
        whole = Choice(
            min(batch * settings.accumulation_steps, facts.samples), f"batch {batch} × accumulation {settings.accumulation_steps}"
        )
    elif settings.batch_size == "auto":
        whole = Choice(batch, "one measured batch")
    else:
        whole = Choice(effective, "samples per optimizer step")
    parts = -(-whole.value // batch)
    reason = "asked for by --accumulation-steps" if settings.accumulation_steps else "one micro-batch holds them all"
    return whole, Choice(
        parts, reason if parts == 1 or settings.accumulation_steps else f"{whole.value} samples in micro-batches of {batch}"
    )


def _evaluation(config: Config, facts: ModelFacts, batch: int) -> Choice[int]:
    if config.batch.eval_batch_size is not None:
        return Choice(config.batch.eval_batch_size, "asked for by --eval-batch-size")
    if config.run.debug or not config.run.auto:
        return Choice(batch, "as in training")
    return Choice(min(max(1, facts.validation_samples), 2 * batch), "twice the training batch: nothing is kept for a backward pass")
