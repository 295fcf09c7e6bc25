"""Preparation of a run: the model is traced, and the plan is made from it, the settings and the hardware."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.config.metric import split_metric
from orchestrator.config.reading.reader import Resolved
from orchestrator.config.settings import Config
from orchestrator.plan.compute import choose_precision
from orchestrator.plan.device import choose_device, choose_worker_device
from orchestrator.plan.inventory.cluster import Cluster, chosen_gpus
from orchestrator.plan.inventory.hardware import Inventory, in_cluster
from orchestrator.plan.planning import plan
from orchestrator.plan.workers import trains_in_process

if TYPE_CHECKING:
    from orchestrator.measure.tracing.fake_batches import TrainingData
    from orchestrator.run.prepared_run import PreparedRun
    from orchestrator.run.run_settings import ResumedSettings
    from orchestrator.tasks.task import Task


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
    facts = model_facts(task, device, precision, data)
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
