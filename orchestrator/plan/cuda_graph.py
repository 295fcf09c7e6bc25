"""Whether steps are captured in a CUDA graph: one launch in place of the hundreds that Python makes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.plan.compute import flops_per_second
from orchestrator.plan.inventory.gpus import Gpu
from orchestrator.plan.reasons import NO_AUTO
from orchestrator.types import NOT_USED, Choice, Rejected, flops_text, seconds_text

_LONGEST_STEP_S = 0.010
"""Work of a step up to which the launches may take longer: Python makes about a hundred in a millisecond."""


@dataclass(frozen=True)
class StepForm:
    """Properties of a step that the plan knows."""

    gpu: Gpu | None
    workers: int
    flops: float
    fused_optimizer: bool
    compiled: bool
    recomputes: bool
    evolves: bool
    experts_in_loop: bool
    """Whether a loop computes the experts one after another, for which the host counts their rows."""


def choose_cuda_graph(config: Config, step: StepForm) -> Choice[bool]:
    """Choose a graph for short steps in one process. UserError where it is asked for and cannot work."""
    setting = config.device.cuda_graph
    obstacle = _obstacle(config, step)
    if setting == "on" and obstacle:
        raise UserError(f"--cuda-graph on cannot work: {obstacle}; leave it out, or change that")
    if step.gpu is None:
        return Choice(False, f"{NOT_USED}the device is the CPU")
    if setting != "auto":
        return Choice(setting == "on", f"set by --cuda-graph {setting}")
    if not config.run.auto:
        return Choice(False, NO_AUTO)
    if obstacle:
        return Choice(False, obstacle, (Rejected("on", "cannot work"),))
    rate = flops_per_second(step.gpu)
    work_s = step.flops / rate
    work = f"a step is about {seconds_text(work_s)} of work for the GPU at {flops_text(rate)}/s"
    if work_s > _LONGEST_STEP_S:
        return Choice(False, f"{work}, longer than its launches", (Rejected("on", "would save little"),))
    slower = Rejected("off", "the GPU would wait for Python")
    return Choice(True, f"{work}, and some hundred launches take longer", (slower,))


def _obstacle(config: Config, step: StepForm) -> str | None:
    """Return why steps cannot be captured, as far as the plan knows; None if they can."""
    if step.gpu is None:
        return "the device is the CPU"
    if config.run.reproducible:
        return "the host looks at the exact sums of each step (--reproducible)"
    if config.device.short_weights:
        return "a graph would repeat the random numbers of one step (--weight-precision bf16)"
    if step.workers > 1:
        return f"{step.workers} workers wait for each other in a step"
    if not step.fused_optimizer or config.optim.optimizer in ("muon", "adamw8bit"):
        return "the optimizer does not run in one kernel; fused adamw and sgd do"
    if step.recomputes or config.device.recompute_experts:
        flags = "--activation-checkpointing off, no --recompute-experts"
        return f"recomputation restores random numbers in Python ({flags})"
    if step.compiled and config.device.compile_mode != "default":
        return f"--compile-mode {config.device.compile_mode} captures graphs of its own"
    if step.evolves:
        return "the experts may change in training (--evolution off)"
    if step.experts_in_loop or config.model.frozen_weights != "auto":
        return "the host counts the rows of each expert for the loop kernel"
    if config.model.lora_dropout:
        return "the dropout of adapters depends on the step"
    if config.moe.gate_jitter or config.moe.capacity_factor is not None:
        return "the gate's noise depends on the step, and a capacity on counts of the host"
    return None
