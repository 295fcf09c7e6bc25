"""Tables of a plan on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.cli.tables import make_table
from orchestrator.plan.estimate import MemoryEstimate
from orchestrator.plan.planning import Plan
from orchestrator.plan.reasons import trained_text
from orchestrator.report.run.figures.host_load import ids_text
from orchestrator.types import bytes_text, count_text, flops_text, memory_part_text, value_text

if TYPE_CHECKING:
    from orchestrator.run.prepared_run import PreparedRun
    from orchestrator.train.strategies.placement import PredictedPlacement

_MAX_HOSTS = 16
_MAX_LAYER_GROUPS = 6
"""Rows and columns of the table of experts on hosts; ``--json`` has all of them."""


def print_plan(console: Console, prepared: PreparedRun, step_line: str, show_all: bool) -> None:
    """Print the choices of a plan, its memory, its model, and a line about the step's time."""
    console.print(_choices_table(prepared.plan, show_all))
    console.print(_memory_table(prepared.plan.memory, prepared.facts.method))
    console.print(_model_text(prepared))
    console.print(Text(step_line))


def _choices_table(plan: Plan, show_all: bool) -> Table:
    table = make_table("choice", "value", "reason, and what was weighed against it", title="plan")
    hidden = []
    for name, choice in plan.choices().items():
        if show_all or choice.is_worth_a_row:
            rejected = [f"not {entry.option}: {entry.why}" for entry in choice.rejected]
            table.add_row(name, value_text(choice.value), "\n".join([choice.reason, *rejected]))
        else:
            hidden.append(name)
    if hidden:
        table.caption = f"not used here: {', '.join(hidden)}; 'plan --all' says why"
    return table


def _memory_table(memory: MemoryEstimate, method: str) -> Table:
    table = make_table("memory of a step", "estimate", title=f"estimate ({method})")
    for name, size in memory.parts.items():
        if size or name not in ("weight_copies", "average"):
            table.add_row(memory_part_text(name), bytes_text(size))
    table.add_row("total", bytes_text(memory.total), style="bold")
    table.add_row("may be used", bytes_text(memory.limit) if memory.limit else "unknown")
    return table


def _model_text(prepared: PreparedRun) -> str:
    facts = prepared.facts
    in_experts = f" ({count_text(facts.expert_parameters)} of them in experts)" if facts.experts else ""
    trained = trained_text(facts)
    adapters = f", trained {trained}" if trained else ""
    flops = flops_text(prepared.plan.flops_per_step)
    return f"parameters {count_text(facts.parameters)}{in_experts}{adapters}, arithmetic {flops} per step"


def hosts_table(placement: PredictedPlacement) -> Table:
    """Return a table of the experts that each host would hold.

    Layers with the same placement share a column.
    """
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
    return ids_text([expert for expert, holder in enumerate(host_of) if holder == host]) or "none"
