"""Preparation of a run: the model is traced, and the plan is made from it, the settings and the hardware."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from orchestrator.config.metric import split_metric
from orchestrator.config.reading.reader import Resolved
from orchestrator.config.settings import Config
from orchestrator.plan.compute import choose_precision
from orchestrator.plan.device import choose_device, choose_worker_device
from orchestrator.plan.inventory.cluster import Cluster, chosen_gpus
from orchestrator.plan.inventory.hardware import Inventory, in_cluster
from orchestrator.plan.ladder import PlanRequest, Site, facts_between
from orchestrator.plan.planning import plan
from orchestrator.plan.workers import trains_in_process

if TYPE_CHECKING:
    from orchestrator.measure.tracing.fake_batches import TrainingData
    from orchestrator.plan.estimate import ModelFacts
    from orchestrator.run.prepared_run import PreparedRun
    from orchestrator.run.run_settings import ResumedSettings
    from orchestrator.tasks.task import Task

_FEW_SAMPLES = 8
"""Of generated data, where other lengths of sequences are traced."""


def prepare_run(
    resolved: Resolved,
    task: Task,
    hardware: Inventory,
    cluster: Cluster | None,
    resumed: ResumedSettings | None,
    data: TrainingData | None = None,
) -> PreparedRun:
    """Trace the task's model and plan its run on the hardware, or on a cluster. Write nothing.

    Further traces of the task may share ``data``."""
    from orchestrator.measure.tracing.metric_names import check_validation_metrics
    from orchestrator.measure.tracing.model_facts import model_facts
    from orchestrator.run.plan_file import earlier_global_batch, read_earlier_plan
    from orchestrator.run.prepared_run import PreparedRun
    from orchestrator.run.run_settings import all_changes
    from orchestrator.tasks.read_settings import check_settings_taken
    from orchestrator.train.worker.build import watched_metric

    config = resolved.config
    # Refuses a metric without a direction, of another task or without values, before anything is written.
    # The name first: the direction of a metric that the task does not have is of no use.
    check_validation_metrics(task, split_metric(config.run.early_stopping_metric)[0])
    watched_metric(config, task)
    device = _traced_device(config, hardware, cluster)
    precision = choose_precision(config, hardware, device).value
    facts = model_facts(task, device, precision, data, config.device.short_weights)
    check_settings_taken(config, task, facts.settings)
    earlier_plan = read_earlier_plan(resumed.folder) if resumed else {}
    global_batch = earlier_global_batch(config, earlier_plan)
    chosen = plan(config, hardware, facts, global_batch, cluster, in_cluster())
    changes = all_changes(resumed, facts, chosen.global_batch_size.value)
    earlier = resumed.folder if resumed else None
    return PreparedRun(resolved, task, hardware, facts, chosen, cluster, in_cluster(), changes, earlier)


def _traced_device(config: Config, hardware: Inventory, cluster: Cluster | None) -> str:
    """Return the device for which the model is traced."""
    joined = cluster is not None and cluster.joined
    if trains_in_process(config, hardware, joined or in_cluster()):
        return choose_device(config, hardware).value
    if not joined:
        hardware = replace(hardware, gpus=chosen_gpus(hardware, config.parallel.devices))
    num_gpus = cluster.gpus if cluster else len(hardware.gpus)
    return choose_worker_device(config, hardware, num_gpus).value


@dataclass(frozen=True)
class ModelTraces:
    """The task and facts of a prepared run, and of models that differ from its own, each traced once."""

    prepared: PreparedRun
    data: TrainingData
    """Of the prepared run: read once for its models of other types."""
    _traced: dict[object, tuple[Task, ModelFacts]] = field(default_factory=dict)

    def facts(self, config: Config) -> ModelFacts:
        """Return the facts of a model. Lengths that are twice each other are traced, others interpolated."""
        length = config.model.sequence_length
        given = self.prepared.facts.units_per_sample
        if length is None or length in (given, self.prepared.resolved.config.model.sequence_length):
            return self.trace(config)[1]
        power = math.floor(math.log2(length / given))
        begin, end = (max(1, round(given * 2.0**each)) for each in (power, power + 1))
        samples = {"samples": _FEW_SAMPLES} if "samples" in self.prepared.facts.settings else {}
        short = self.trace(config.but(**samples, sequence_length=begin))[1]
        if length > begin:
            long = self.trace(config.but(**samples, sequence_length=end))[1]
            short = facts_between(short, long, length)
        return replace(short, samples=self.prepared.facts.samples)

    def trace(self, config: Config) -> tuple[Task, ModelFacts]:
        """Return the task of settings, and its facts."""
        from orchestrator.measure.tracing.model_facts import model_facts
        from orchestrator.tasks.load import load_task

        given = self.prepared.resolved.config
        sizes = (config.model.lora, config.model.frozen_weights, config.model.sequence_length)
        given_sizes = (given.model.lora, given.model.frozen_weights, given.model.sequence_length)
        is_given = sizes == given_sizes
        stored = config.device.weight_precision
        if is_given and stored == given.device.weight_precision:
            return self.prepared.task, self.prepared.facts
        key = (*sizes, stored)
        if key not in self._traced:
            plan = self.prepared.plan
            task = self.prepared.task if is_given else load_task(config)
            data = self.data if is_given else None
            device, precision = plan.device.value, plan.precision.value
            facts = model_facts(task, device, precision, data, config.device.short_weights)
            self._traced[key] = task, facts
        return self._traced[key]


def model_traces(prepared: PreparedRun, data: TrainingData | None = None) -> ModelTraces:
    """Return the models that differ from a prepared run's own. Its traces may share ``data``."""
    from orchestrator.measure.tracing.fake_batches import TrainingData

    return ModelTraces(prepared, data or TrainingData(prepared.task))


def plan_request(prepared: PreparedRun, models: ModelTraces | None = None) -> PlanRequest:
    """Return the request of a plan, for the ladder."""
    site = Site(prepared.inventory, prepared.cluster, prepared.in_cluster)
    models = models or model_traces(prepared)
    return PlanRequest(prepared.resolved.config, prepared.facts, site, prepared.plan, models.facts)
