"""A run before it starts: settings, hardware, model and plan; and its start-up banner."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.checkpoint.saved_experts import SavedExperts
from orchestrator.config.reading.reader import Resolved
from orchestrator.config.settings import flat_names
from orchestrator.config.writer import to_json
from orchestrator.plan.estimate import ModelFacts
from orchestrator.plan.inventory.cluster import Cluster
from orchestrator.plan.inventory.hardware import Inventory, secret_values
from orchestrator.plan.planning import Plan
from orchestrator.plan.reasons import adapters_text, trained_text
from orchestrator.redaction import Secrets, longest_first, secrets_in
from orchestrator.tasks.task import Task
from orchestrator.types import count_text, counted


@dataclass(frozen=True)
class SettingChange:
    """A setting whose value differs from that of the earlier start."""

    name: str
    before: Any
    now: Any
    origin: str
    """Where the new value comes from: a flag, a file, a ``Config``, or the plan."""

    def text(self) -> str:
        return f"{self.name} from {_shown(self.before)} to {_shown(self.now)} ({self.origin})"


def _shown(value: Any) -> str:
    return "unset" if value in (None, []) else str(value)


@dataclass(frozen=True)
class Stretch:
    """A part of a run that is computed again, to be compared with the record."""

    last_step: int
    digest_steps: frozenset[int]
    """The steps of which the record has digests."""


@dataclass(frozen=True)
class PreparedRun:
    """A run before it starts."""

    resolved: Resolved
    task: Task
    inventory: Inventory
    facts: ModelFacts
    plan: Plan
    cluster: Cluster | None = None
    in_cluster: bool = False
    changes: tuple[SettingChange, ...] = ()
    """Differences from the earlier start of a resumed run."""
    earlier: Path | None = None
    """The run folder of that start."""
    stretch: Stretch | None = None
    """What is computed again of an earlier run: nothing is saved, and the steps end there."""
    secrets: Secrets = field(default=(), repr=False)
    """Secrets of the driver's environment, which a worker's node may not have in its own."""

    def with_secrets(self) -> PreparedRun:
        """Return the run as it is sent to workers, with the secrets that its own settings contain.

        Workers receive those values anyway, and have to mask them; other secrets stay here."""
        return replace(self, secrets=secrets_in(plan_json(self), secret_values()))

    @property
    def hidden(self) -> Secrets:
        """The secrets to mask in all output: the driver's, and those of this process."""
        return longest_first(self.secrets, secret_values())


def plan_json(prepared: PreparedRun) -> dict[str, Any]:
    """Return the plan with the settings, the hardware and the model that it was made for."""
    values = to_json(prepared.resolved.config)
    settings = []
    for name, section in flat_names().items():
        settings.append(
            {
                "name": f"{section}.{name}" if section else name,
                "value": values[section][name] if section else values[name],
                "origin": prepared.resolved.origin(name),
            }
        )
    facts = prepared.facts
    return {
        **prepared.plan.to_json(),
        "settings": settings,
        "hardware": prepared.inventory.to_json(),
        "model": {name: getattr(facts, name) for name in facts.__dataclass_fields__},
    }


def banner_rows(
    prepared: PreparedRun, run_dir: Path, remote: str | None = None, saved: SavedExperts | None = None
) -> list[tuple[str, str]]:
    """Return the rows of the start-up banner.

    ``remote`` is the address of the remote folder. ``saved`` are the experts of the checkpoint to start
    from, where they are not as the task builds them."""
    plan = prepared.plan
    facts = prepared.facts
    task = f"{prepared.resolved.config.task} ({_model_text(facts, saved)})"
    trained = trained_text(facts)
    adapters = adapters_text(facts)
    return [
        ("task", task),
        *([("trained parameters", trained)] if trained else []),
        *([("adapters", adapters)] if adapters else []),
        *([("evolution", _evolution_text(plan))] if plan.evolution_rules is not None else []),
        ("data", _data_text(facts)),
        ("processes", _processes_text(plan)),
        ("device", f"{plan.device.value}: {plan.device.reason}"),
        ("precision", f"{plan.precision.value}: {plan.precision.reason}"),
        ("batch", _batch_text(plan)),
        ("steps", _steps_text(plan)),
        ("folder", f"{run_dir}, uploaded to {remote}" if remote else str(run_dir)),
    ]


def _model_text(facts: ModelFacts, saved: SavedExperts | None) -> str:
    parameters = f"{count_text(facts.parameters)} parameters"
    layers = counted(facts.moe_layers, "layer")
    if saved is not None:
        # The parameters were counted in the model that the task builds.
        return f"{parameters} as built, {_saved_text(saved)} in {layers} as saved"
    return f"{parameters}, {counted(facts.experts, 'expert')} in {layers}" if facts.experts else parameters


def _evolution_text(plan: Plan) -> str:
    rules = plan.evolution_rules
    assert rules is not None
    return (
        f"{plan.evolution.value}: experts are born, merged and pruned in training, "
        f"{rules.min_experts} to {rules.max_experts} in a layer; --evolution off keeps their number"
    )


def _saved_text(saved: SavedExperts) -> str:
    """Return the number of experts in a layer; layers may differ."""
    counts = [len(layer.experts) for layer in saved.layers]
    fewest = min(counts)
    most = counted(max(counts), "expert")
    return most if fewest == max(counts) else f"{fewest} to {most}"


def _count_text(samples: int | None) -> str:
    return "streamed" if samples is None else str(samples)


def _steps_text(plan: Plan) -> str:
    steps = plan.total_steps
    return steps.reason if steps.value is None else f"{steps.value}: {steps.reason}"


def loss_note(facts: ModelFacts) -> str | None:
    """Return a note if the loss is probably a mean that is declared as a sum."""
    if not facts.counts_batches or facts.unit != "samples":
        return None
    return (
        "the count of the loss does not grow with the batch, so a short batch weighs as much as a whole one. "
        "If the loss is a mean over the batch, return the scalar alone, or Loss(sum, number of samples)"
    )


def _data_text(facts: ModelFacts) -> str:
    training = f"{_count_text(facts.samples)} training"
    if facts.validation_samples == 0:
        return f"{training} samples, no validation data: nothing is evaluated"
    return f"{training} and {_count_text(facts.validation_samples)} validation samples"


def _processes_text(plan: Plan) -> str:
    if plan.strategy_facts.in_process:
        return "1 (strategy: single device)"
    sharding = f", {plan.sharding.value}" if plan.sharding.value != "none" else ""
    strategy = f"{plan.strategy.value}, {plan.backend.value}{sharding}"
    return f"{plan.workers.value} (strategy: {strategy}): {plan.workers.reason}"


def _batch_text(plan: Plan) -> str:
    micro_batch = plan.batch_size.value
    accumulation = plan.accumulation_steps.value
    workers = plan.data_ranks
    global_batch = plan.global_batch_size.value
    # A global batch that does not divide is split as evenly as possible, into smaller micro-
    # batches.
    relation = "=" if micro_batch * accumulation * workers == global_batch else "at most, for"
    plural = "s" if workers > 1 else ""
    product = f"{micro_batch} × {accumulation} accumulation × {workers} worker{plural}"
    return f"{product} {relation} {global_batch}"
