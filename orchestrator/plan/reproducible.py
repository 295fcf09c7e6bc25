"""Refuses models whose bits would depend on the workers of a run with --reproducible. Pure."""

from __future__ import annotations

from orchestrator.errors import UserError
from orchestrator.plan.estimate import ModelFacts
from orchestrator.plan.worker_setup import WorkerSetup
from orchestrator.strategies import STRATEGIES


def check_reproducible_model(facts: ModelFacts, setup: WorkerSetup) -> None:
    """Raise UserError for a model or a task that --reproducible cannot serve on these workers."""
    if facts.changed_buffer:
        raise UserError(
            f"--reproducible cannot serve {facts.changed_buffer} of the model: a forward pass changes this "
            "buffer, so its value follows the samples of one worker. Use a norm without running statistics "
            "(LayerNorm, GroupNorm, RMSNorm); register what is a cache only with persistent=False; or leave "
            "--reproducible out"
        )
    parts = _parts(setup)
    if facts.own_optimizer and parts:
        raise UserError(
            f"--reproducible cannot serve the optimizer of the task (build_optimizer) with {parts}: there it "
            "has parts of the model's tensors, and most optimizers round the last elements of a tensor in "
            "another way than the others. Use --parallel-strategy data_parallel --sharding none, return None "
            "to have --optimizer, or leave --reproducible out"
        )


def _parts(setup: WorkerSetup) -> str:
    """Return what divides tensors among the workers; empty if each has the whole model."""
    if setup.sharding.value != "none":
        return f"--sharding {setup.sharding.value}"
    if STRATEGIES[setup.strategy.value].divides_experts:
        return f"--parallel-strategy {setup.strategy.value}"
    return ""
