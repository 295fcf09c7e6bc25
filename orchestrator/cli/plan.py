"""``orchestrator plan``: show every choice with its reason, or predict the scaling of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.config.reading.flags import read_flags
from orchestrator.config.settings import Config
from orchestrator.config.writer import changed_settings
from orchestrator.errors import ResourceError

if TYPE_CHECKING:
    from typing import Any

    from orchestrator.cli.planning.scaling import Scaling
    from orchestrator.run.prepared_run import PreparedRun


@dataclass(frozen=True)
class PlanOptions:
    """Show every choice with its reason, before anything runs."""

    settings: Config
    config: Path | None = None
    """YAML file with settings; flags win over it."""
    cluster: str | None = None
    """Plan for this cluster, and predict its scaling table; it need not exist: 8xH100, 2x8xH100 for two
    nodes, nodes=16,node=p5.48xlarge, or nodes=16,gpus=8,gpu=h200,link=nvlink,net=400gbit (nics=8 for 8
    network cards of that rate in each node)."""
    calibration: Path | None = None
    """Measurements to predict from. Default: calibration.json in the results folder, if it exists."""
    all: bool = False
    """Show the choices without an effect in this run too."""
    what_fits: bool = False
    """Show what fits: configurations that need less and less memory, with the peak, the longest sequence
    and the largest micro-batch of each, and the nearest one that fits as flags to copy."""
    json: bool = False
    """Print JSON for machines, with all choices."""


def run(argv: Sequence[str]) -> int:
    options, resolved = read_flags(PlanOptions, argv, "orchestrator plan")
    from rich.console import Console

    from orchestrator.cli.planning.prediction import (
        cluster_figures,
        machine_figures,
        predict_step,
        prepare_on_cluster,
    )
    from orchestrator.cli.planning.scaling import predict_scaling
    from orchestrator.measure.tracing.fake_batches import TrainingData
    from orchestrator.plan.cost.cluster_spec import parse_cluster
    from orchestrator.tasks.load import load_task
    from orchestrator.trainer import Trainer

    spec = parse_cluster(options.cluster) if options.cluster is not None else None
    # On a terminal alone, and closed before the plan is printed: it would redirect stdout.
    with Console(stderr=True).status("tracing the model …") as status:
        if spec is None:
            prepared = Trainer(config=resolved).prepare()
            data = TrainingData(prepared.task)
            figures = machine_figures(prepared, options.calibration)
        else:
            figures = cluster_figures(spec, options.calibration)
            task = load_task(resolved.config)
            data = TrainingData(task)
            prepared = prepare_on_cluster(resolved, task, spec, data)
        if options.what_fits:
            from orchestrator.cli.planning.what_fits import show_what_fits

            status.stop()
            return show_what_fits(prepared, lambda each: predict_step(each, figures)[1], options.json)
        status.update("predicting the step …" if spec is None else "predicting the scaling …")
        line, predicted = predict_step(prepared, figures, data)
        scaling = None
        if spec is not None and figures is not None:
            scaling = predict_scaling(prepared, spec, figures, data)
    if options.json:
        return _print_json(prepared, predicted, scaling)
    if scaling is not None:
        return _print_cluster_tables(prepared, line, scaling, options.all)
    return _print_tables(prepared, line, options.all)


def _print_json(prepared: PreparedRun, predicted: dict[str, Any] | None, scaling: Scaling | None) -> int:
    from orchestrator.cli.tables import print_json
    from orchestrator.run.prepared_run import plan_json
    from orchestrator.train.strategies.placement import predict_placement

    content = plan_json(prepared) | {"predicted": predicted}
    if scaling is not None:
        content |= scaling.to_json()
    else:
        placement = predict_placement(prepared.resolved.config, prepared.plan, prepared.facts)
        content["experts_on_hosts"] = placement and placement.to_json()
    print_json(content)
    return ResourceError.exit_code if scaling is not None and scaling.shortage else 0


def _print_tables(prepared: PreparedRun, step_line: str, show_all: bool) -> int:
    from rich.console import Console
    from rich.text import Text

    from orchestrator.cli.planning.plan_tables import hosts_table, print_plan
    from orchestrator.train.strategies.placement import predict_placement

    console = Console()
    print_plan(console, prepared, step_line, show_all)
    given = prepared.resolved
    changed = [f"{name} ({given.origin(name)})" for name in changed_settings(given.config)]
    if changed:
        console.print(Text("given: " + ", ".join(changed)))
    # Last, because experts that do not fit are an error, and the plan above explains it.
    placement = predict_placement(prepared.resolved.config, prepared.plan, prepared.facts)
    if placement is not None:
        console.print(hosts_table(placement), Text(f"placed {placement.assumes}"), sep="")
    return 0


def _print_cluster_tables(prepared: PreparedRun, step_line: str, scaling: Scaling, show_all: bool) -> int:
    from orchestrator.cli.planning.plan_tables import print_plan
    from orchestrator.cli.tables import print_line, wide_console

    console = wide_console()
    print_line(scaling.headline)
    print_plan(console, prepared, step_line, show_all)
    console.print(*scaling.tables, sep="")
    print_line("\n".join([f"predicted from {scaling.source}", *scaling.notes]))
    if scaling.shortage is not None:  # last, because the plan above explains it
        raise ResourceError(scaling.shortage)
    return 0
