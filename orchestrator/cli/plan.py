"""``orchestrator plan``: show every choice with its reason, or predict the scaling of a cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.config.reading.flags import read_flags
from orchestrator.config.reading.reader import Resolved
from orchestrator.config.settings import Config
from orchestrator.config.writer import changed_settings

if TYPE_CHECKING:
    from typing import Any

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
    json: bool = False
    """Print JSON for machines, with all choices."""


def run(argv: Sequence[str]) -> int:
    options, resolved = read_flags(PlanOptions, argv, "orchestrator plan")
    if options.cluster is not None:
        from orchestrator.cli.scaling import show_cluster

        return show_cluster(resolved, options.cluster, options.calibration, options.json, options.all)
    from rich.console import Console

    from orchestrator.cli.predict import step_prediction
    from orchestrator.trainer import Trainer

    # On a terminal alone, and closed before the plan is printed: it would redirect stdout.
    with Console(stderr=True).status("tracing the model …") as status:
        prepared = Trainer(config=resolved).prepare()
        status.update("predicting the step …")
        line, predicted = step_prediction(prepared, options.calibration)
    if options.json:
        return _print_json(prepared, predicted)
    return _print_tables(prepared, resolved, line, options.all)


def _print_json(prepared: PreparedRun, predicted: dict[str, Any] | None) -> int:
    from rich.console import Console

    from orchestrator.run.prepared_run import plan_json
    from orchestrator.train.strategies.placement import predict_placement

    placement = predict_placement(prepared.resolved.config, prepared.plan, prepared.facts)
    extra = {
        "experts_on_hosts": placement and placement.to_json(),
        "predicted": predicted,
    }
    Console().print_json(json.dumps(plan_json(prepared) | extra, default=str))
    return 0


def _print_tables(prepared: PreparedRun, resolved: Resolved, step_line: str, show_all: bool) -> int:
    from rich.console import Console
    from rich.text import Text

    from orchestrator.cli.plan_tables import hosts_table, print_plan
    from orchestrator.train.strategies.placement import predict_placement

    console = Console()
    print_plan(console, prepared, step_line, show_all)
    changed = [f"{name} ({resolved.origin(name)})" for name in changed_settings(resolved.config)]
    if changed:
        console.print(Text("given: " + ", ".join(changed)))
    # Last, because experts that do not fit are an error, and the plan above explains it.
    placement = predict_placement(prepared.resolved.config, prepared.plan, prepared.facts)
    if placement is not None:
        console.print(hosts_table(placement), Text(f"placed {placement.assumes}"), sep="")
    return 0
