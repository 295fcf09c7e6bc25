"""Data loading, steps, learning rate, warm-up and logging interval of a run. Pure."""

from __future__ import annotations

from orchestrator.config.sections.optim import LEARNING_RATE
from orchestrator.config.settings import Config
from orchestrator.plan.batching import Batching
from orchestrator.plan.estimate import ModelFacts
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.reasons import NO_AUTO
from orchestrator.types import GIB, NOT_USED, Choice, Rejected, bytes_text, counted

_PLAIN_LOG_EVERY = 10
_DEBUG_STEPS = 4
_FINE_TUNING_RATE = 2e-5
_ADAPTER_RATE = 2e-4
_MAX_LOADER_WORKERS = 8
_ON_DEVICE_SHARE = 0.05  # of the GPU's memory: larger data stays on the host


def choose_loader_workers(config: Config, facts: ModelFacts, device: str, cores: Choice[int]) -> Choice[int]:
    """Choose a loader process for each core except the one that trains; none if batches come from
    memory."""
    if config.data.loader_workers >= 0:
        return Choice(config.data.loader_workers, f"set by --loader-workers {config.data.loader_workers}")
    if facts.loader_processes is not None:
        return Choice(facts.loader_processes, "num_workers of the DataLoader; --loader-workers replaces it")
    if not config.run.auto:
        return Choice(0, NO_AUTO)
    if facts.gathered_bytes is not None:
        unneeded = Rejected("loader processes", "nothing to load")
        return Choice(0, "the data gathers whole batches from memory", (unneeded,))
    if device == "cpu":
        competing = Rejected("loader processes", "try --loader-workers 1")
        return Choice(0, "the CPU trains: loader processes would take its cores", (competing,))
    count = max(0, min(_MAX_LOADER_WORKERS, cores.value - 1))
    reason = (
        f"one process for each core except the one that trains, at most {_MAX_LOADER_WORKERS}; {cores.reason}"
    )
    return Choice(count, reason)


def choose_prefetch(config: Config, inventory: Inventory, loaders: int, workers_on_node: int) -> Choice[int]:
    if not loaders:
        return Choice(2, f"{NOT_USED}there are no loader processes")
    if not config.run.auto:
        return Choice(2, NO_AUTO)
    # The prefetched batches of all workers on a node share its RAM.
    plenty = inventory.ram_free > 8 * GIB * loaders * workers_on_node
    reason = (
        f"each loader process prefetches this many batches; {bytes_text(inventory.ram_free)} of RAM is free"
    )
    return Choice(4 if plenty else 2, reason)


def choose_data_on_device(config: Config, facts: ModelFacts, gpu_memory: int | None) -> Choice[bool]:
    """Choose whether the training data is copied to the GPU; ``gpu_memory`` is None if the CPU
    trains."""
    if gpu_memory is None:
        return Choice(False, f"{NOT_USED}the device is the CPU")
    if facts.gathered_bytes is None:
        return Choice(False, "the data is read sample by sample")
    if not facts.gathered_bytes:
        return Choice(False, f"{NOT_USED}the samples are made when they are read")
    if not config.run.auto:
        return Choice(False, NO_AUTO)
    share = facts.gathered_bytes / gpu_memory
    reason = f"the training data is {bytes_text(facts.gathered_bytes)}, {share:.1%} of the GPU's memory"
    if share <= _ON_DEVICE_SHARE:
        return Choice(True, reason)
    return Choice(
        False, f"{reason}: more than {_ON_DEVICE_SHARE:.0%}", (Rejected("on the device", "too large"),)
    )


def choose_total_steps(config: Config, facts: ModelFacts, batching: Batching) -> Choice[int | None]:
    """Choose the number of steps; None if only reading the data would tell."""
    if facts.samples is None:
        return _steps_of_stream(config)
    global_batch = batching.global_batch.value
    steps_per_epoch = -(-facts.samples // global_batch)
    steps = steps_per_epoch * config.run.epochs
    reason = (
        f"{counted(config.run.epochs, 'epoch')} of {counted(steps_per_epoch, 'step')} each "
        f"({counted(facts.samples, 'sample')} in batches of {global_batch})"
    )
    max_steps = config.run.max_steps
    if config.run.debug:
        return Choice(min(steps, _DEBUG_STEPS, max_steps or _DEBUG_STEPS), "set by --debug")
    if max_steps is not None and max_steps < steps:
        return Choice(max_steps, f"set by --max-steps; {reason} would be {steps}")
    if max_steps is not None and max_steps > steps:
        reason += f", less than --max-steps {max_steps}: raise --epochs for more"
    return Choice(steps, reason)


def _steps_of_stream(config: Config) -> Choice[int | None]:
    """Choose the number of steps where the data is read in order, to an end that is not known."""
    max_steps = config.run.max_steps
    if config.run.debug:
        return Choice(min(_DEBUG_STEPS, max_steps or _DEBUG_STEPS), "set by --debug")
    epochs = f"{counted(config.run.epochs, 'epoch')}, each to the end of the data"
    if max_steps is not None:
        return Choice(max_steps, f"set by --max-steps, at most {epochs}")
    if config.optim.schedule == "constant":
        return Choice(None, epochs)
    return Choice(
        None, f"{epochs}; --schedule {config.optim.schedule} needs --max-steps: the learning rate is constant"
    )


def choose_learning_rate(config: Config) -> Choice[float]:
    """Choose the peak. Weights that are trained already keep what they know at small rates alone."""
    optim = config.optim
    if optim.learning_rate is not None:
        return Choice(optim.learning_rate, "set by --learning-rate")
    model = config.model
    if config.task != "lm" or model.from_scratch:
        return Choice(LEARNING_RATE, "the default for weights that begin at random")
    if model.lora is not None:
        return Choice(_ADAPTER_RATE, "adapters on the weights of --model")
    return Choice(_FINE_TUNING_RATE, "the weights of --model are trained already")


def choose_warmup(config: Config, steps: int | None) -> Choice[int]:
    if config.optim.warmup_steps is not None:
        return Choice(config.optim.warmup_steps, "set by --warmup-steps")
    if not config.run.auto:
        return Choice(0, NO_AUTO)
    if steps is None:
        return Choice(0, "the number of steps is unknown")
    return Choice(min(1000, steps // 20), "it is a twentieth of the run, at most 1000 steps")


def choose_log_every(config: Config, steps: int | None, device: str) -> Choice[int]:
    if config.watch.log_every is not None:
        return Choice(config.watch.log_every, "set by --log-every")
    if config.run.debug:
        return Choice(1, "set by --debug")
    if not config.run.auto:
        return Choice(_PLAIN_LOG_EVERY, NO_AUTO)
    if steps is None:
        return Choice(_PLAIN_LOG_EVERY, "the number of steps is unknown")
    if device == "cpu":
        return Choice(
            max(1, min(10, steps // 20)),
            "the loss is logged about 20 times in a run, at least every 10 steps",
        )
    reason = "the loss is logged every 10 to 50 steps, because reading it makes the host wait for the device"
    return Choice(max(10, min(50, steps // 20)), reason)
