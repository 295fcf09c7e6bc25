"""``orchestrator plan``: show every choice with its reason, or predict the scaling of a cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.config.flags import read_flags
from orchestrator.config.reader import Resolved
from orchestrator.config.settings import Config
from orchestrator.config.writer import changed_settings
from orchestrator.types import bytes_text, count_text, value_text

if TYPE_CHECKING:
    from rich.table import Table

    from orchestrator.plan.estimate import MemoryEstimate
    from orchestrator.plan.planning import Plan
    from orchestrator.train.strategies.placement import PredictedPlacement
    from orchestrator.train.worker.prepared_run import PreparedRun

_MAX_HOSTS = 16
_MAX_LAYER_GROUPS = 6
"""Rows and columns of the table of experts on hosts; ``--json`` has all of them."""


@dataclass(frozen=True)
class PlanOptions:
    """Show every choice with its reason, before anything runs."""

    settings: Config
    config: Path | None = None
    """YAML file with settings; flags win over it."""
    cluster: str | None = None
    """Predict the scaling table of a cluster instead; it need not exist:
    nodes=16,gpus=8,gpu=h200,link=nvlink,net=400gbit (nics=8 for 8 network cards of that rate in
    each node)."""
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

        return show_cluster(resolved, options.cluster, options.calibration, options.json)
    from orchestrator.trainer import Trainer

    prepared = Trainer(config=resolved).prepare()
    if options.json:
        return _print_json(prepared, options.calibration)
    return _print_tables(prepared, resolved, options)


def _print_json(prepared: PreparedRun, calibration: Path | None) -> int:
    from rich.console import Console

    from orchestrator.cli.predict import step_prediction
    from orchestrator.train.strategies.placement import predict_placement
    from orchestrator.train.worker.prepared_run import plan_json

    placement = predict_placement(prepared.resolved.config, prepared.plan, prepared.facts)
    extra = {
        "experts_on_hosts": placement and placement.to_json(),
        "predicted": step_prediction(prepared, calibration)[1],
    }
    Console().print_json(json.dumps(plan_json(prepared) | extra, default=str))
    return 0


def _print_tables(prepared: PreparedRun, resolved: Resolved, options: PlanOptions) -> int:
    from rich.console import Console
    from rich.text import Text

    from orchestrator.cli.predict import step_prediction
    from orchestrator.train.strategies.placement import predict_placement

    console = Console()
    console.print(_choices_table(prepared.plan, options.all))
    console.print(_memory_table(prepared.plan.memory, prepared.facts.method))
    console.print(_model_text(prepared))
    console.print(Text(step_prediction(prepared, options.calibration)[0]))
    changed = [f"{name} ({resolved.origin(name)})" for name in changed_settings(resolved.config)]
    if changed:
        console.print(Text("given: " + ", ".join(changed)))
    # Last, because experts that do not fit are an error, and the plan above explains it.
    placement = predict_placement(prepared.resolved.config, prepared.plan, prepared.facts)
    if placement is not None:
        console.print(_hosts_table(placement), Text(f"placed {placement.assumes}"), sep="")
    return 0


def _choices_table(plan: Plan, show_all: bool) -> Table:
    from orchestrator.cli.tables import make_table

    table = make_table("choice", "value", "reason, and what was weighed against it", title="plan")
    hidden = []
    for name, choice in plan.choices().items():
        # A setting that was given and has no effect is worth a row.
        if show_all or choice.is_used or "instead of --" in choice.reason:
            rejected = [f"not {entry.option}: {entry.why}" for entry in choice.rejected]
            table.add_row(name, value_text(choice.value), "\n".join([choice.reason, *rejected]))
        else:
            hidden.append(name)
    if hidden:
        table.caption = f"not used here: {', '.join(hidden)}; 'plan --all' says why"
    return table


def _memory_table(memory: MemoryEstimate, method: str) -> Table:
    from orchestrator.cli.tables import make_table

    table = make_table("memory of a step", "estimate", title=f"estimate ({method})")
    for name in ("parameters", "gradients", "optimizer", "activations", "gate"):
        table.add_row(name, bytes_text(getattr(memory, name)))
    table.add_row("total", bytes_text(memory.total), style="bold")
    table.add_row("may be used", bytes_text(memory.limit) if memory.limit else "unknown")
    return table


def _model_text(prepared: PreparedRun) -> str:
    facts = prepared.facts
    in_experts = f" ({count_text(facts.expert_parameters)} of them in experts)" if facts.experts else ""
    flops = count_text(prepared.plan.flops_per_step)
    return f"parameters {count_text(facts.parameters)}{in_experts}, arithmetic {flops}FLOP per step"


def _hosts_table(placement: PredictedPlacement) -> Table:
    """Return a table of the experts that each host would hold.

    Layers with the same placement share a column.
    """
    from orchestrator.cli.tables import make_table
    from orchestrator.report.run.host_load import ids_text

    groups: dict[tuple[int, ...], list[int]] = {}
    for number, layer in enumerate(placement.layers):
        groups.setdefault(layer.host_of, []).append(number)
    shown = list(groups.items())[:_MAX_LAYER_GROUPS]
    num_hosts = len(placement.layers[0].seconds)
    columns = [f"layer{'s' * (len(layers) > 1)} {ids_text(layers)}" for _, layers in shown]
    table = make_table("host", *columns, title="experts on hosts")
    for host in range(min(num_hosts, _MAX_HOSTS)):
        cells = [_experts_text(host_of, host) for host_of, _ in shown]
        table.add_row(str(host), *cells)
    if num_hosts > _MAX_HOSTS or len(groups) > _MAX_LAYER_GROUPS:
        table.caption = (
            f"{num_hosts} hosts and {len(placement.layers)} layers in all; 'plan --json' has every one"
        )
    return table


def _experts_text(host_of: Sequence[int], host: int) -> str:
    from orchestrator.report.run.host_load import ids_text

    return ids_text([expert for expert, holder in enumerate(host_of) if holder == host]) or "none"
