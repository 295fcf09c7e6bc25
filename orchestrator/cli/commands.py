"""The verbs of the command line. Each does one thing and returns the exit code; errors are told by ``cli``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.config.reader import Resolved, dump, to_json
from orchestrator.config.settings import Config, flat_names, section_types
from orchestrator.errors import Interrupted, UserError
from orchestrator.plan.inventory.hardware import launched_by
from orchestrator.types import bytes_text, count_text, seconds_text

if TYPE_CHECKING:
    from orchestrator.measure.bench import BenchResult
    from orchestrator.train.strategies.placement import PredictedPlacement

_MOST_ROWS, _MOST_COLUMNS = 16, 6  # hosts and layers of the table of experts on hosts
_TIMED = ("forward", "backward", "optimizer", "total")


def train(resolved: Resolved, tuned: Path | None = None) -> int:
    """Train, and leave a report. ``tuned`` is the folder of a sweep whose best settings are used."""
    from orchestrator.trainer import Trainer

    launcher = launched_by()
    if launcher:
        raise UserError(
            f"started by {launcher}, which starts one process per GPU; here Ray starts the workers. "
            "Start it plainly: orchestrator train --workers N …; "
            "or send it to a cluster: ray job submit --working-dir . -- python -m orchestrator train …"
        )
    if tuned is not None:
        from orchestrator.cli import sweep as tuning

        resolved, taken = tuning.tuned(tuned, resolved, lambda config: Trainer(config=config).devices())
        Console().print(Text(taken), soft_wrap=True)
    result = Trainer(config=resolved).fit()
    if result.status == "stopped":
        raise Interrupted(
            f"interrupted; a checkpoint is in {result.run_dir / 'checkpoints'}: continue with --resume auto"
        )
    return 0


def show_plan(
    resolved: Resolved, as_json: bool, cluster: str | None = None, calibration: Path | None = None
) -> int:
    """Every choice with its reason, before anything runs; or the scaling table of ``cluster``."""
    from orchestrator.cli import predict as predicting

    if cluster is not None:
        return predicting.show_cluster(resolved, cluster, calibration, as_json)
    from orchestrator.train.strategies.placement import predict_placement
    from orchestrator.train.worker.run_dir import plan_json
    from orchestrator.trainer import Trainer

    prepared = Trainer(config=resolved).prepare()
    console = Console()
    if as_json:
        placed = predict_placement(prepared.resolved.config, prepared.plan, prepared.facts)
        more = {
            "experts_on_hosts": placed and placed.to_json(),
            "predicted": predicting.step_prediction(prepared, calibration)[1],
        }
        console.print_json(json.dumps(plan_json(prepared) | more, default=str))
        return 0
    table = make_table("choice", "value", "reason, and what was weighed against it", title="plan")
    for name, choice in prepared.plan.choices().items():
        lines = [choice.reason, *(f"not {entry.option}: {entry.why}" for entry in choice.rejected)]
        table.add_row(name, _value_text(choice.value), "\n".join(lines))
    console.print(table)
    console.print(_memorymake_table(prepared.plan.memory, prepared.facts.method))
    facts = prepared.facts
    active = f" ({count_text(facts.expert_parameters)} of them in experts)" if facts.experts else ""
    console.print(
        f"parameters {count_text(facts.parameters)}{active}, arithmetic {count_text(prepared.plan.flops_per_step)}FLOP per step"
    )
    console.print(Text(predicting.step_prediction(prepared, calibration)[0]))
    defaults, values = to_json(Config()), to_json(resolved.config)
    changed = [
        n
        for n, section in flat_names().items()
        if (values[section][n] != defaults[section][n] if section else values[n] != defaults[n])
    ]
    given = [(name, resolved.origin(name)) for name in changed]
    if given:
        console.print(Text("given: " + ", ".join(f"{name} ({origin})" for name, origin in given)))
    # last: experts that do not fit are an error, and the plan above says why
    placed = predict_placement(prepared.resolved.config, prepared.plan, prepared.facts)
    if placed is not None:
        console.print(_hosts_table(placed), Text(f"placed {placed.assumes}"), sep="")
    return 0


def _hosts_table(placed: PredictedPlacement) -> Table:
    """Which experts each host would hold; layers placed alike share a column."""
    from orchestrator.report.run.host_load import ids_text

    alike: dict[tuple[int, ...], list[int]] = {}
    for number, layer in enumerate(placed.layers):
        alike.setdefault(layer.host_of, []).append(number)
    shown, hosts = list(alike.items())[:_MOST_COLUMNS], len(placed.layers[0].seconds)
    columns = [f"layer{'s' * (len(numbers) > 1)} {ids_text(numbers)}" for _, numbers in shown]
    table = make_table("host", *columns, title="experts on hosts")
    for host in range(min(hosts, _MOST_ROWS)):
        held = [[expert for expert, holder in enumerate(host_of) if holder == host] for host_of, _ in shown]
        table.add_row(str(host), *(ids_text(experts) or "none" for experts in held))
    if hosts > _MOST_ROWS or len(alike) > _MOST_COLUMNS:
        table.caption = f"{hosts} hosts and {len(placed.layers)} layers in all; 'plan --json' has every one"
    return table


def _memorymake_table(memory: Any, method: str) -> Table:
    table = make_table("memory of a step", "estimate", title=f"estimate ({method})")
    for name in ("parameters", "gradients", "optimizer", "activations", "gate"):
        table.add_row(name, bytes_text(getattr(memory, name)))
    table.add_row("total", bytes_text(memory.total), style="bold")
    table.add_row("may be used", bytes_text(memory.limit) if memory.limit else "unknown")
    return table


def _value_text(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def make_table(*columns: str, title: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", border_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def bench(resolved: Resolved, iterations: int, precisions: bool, as_json: bool) -> int:
    """Forward and backward time of a task."""
    from orchestrator.trainer import Trainer

    if iterations < 2:
        raise UserError(f"--iterations is {iterations}; a median and a spread need at least 2")
    with Console(stderr=True).status("measuring …"):
        rows = Trainer(config=resolved).bench(iterations, precisions)
    if as_json:
        Console().print_json(json.dumps([asdict(row) for row in rows]))
    else:
        Console().print(_bench_table(rows, resolved.config.task))
    return 0


def _bench_table(rows: list[BenchResult], task: str) -> Table:
    title = f"{task} on {rows[0].device}, batch {rows[0].batch_size}, {rows[0].iterations} steps; median ± half the quartiles' distance"
    table = make_table("precision", *_TIMED, "samples/s", "of fp32", "memory", "loss", title=title)
    base = next((row.samples_per_second for row in rows if row.precision == "fp32"), None)
    for row in rows:
        table.add_row(*_cells(row, base))
    return table


def _cells(row: BenchResult, base: float | None) -> list[str]:
    def timed(name: str) -> str:
        return seconds_text(row.median.get(name, 0.0))

    spread = f" ±{row.spread['total'] / row.median['total']:.0%}"
    against: Any = f"{row.samples_per_second / base:.2f}×" if base else ""
    cells = [row.precision, *(timed(name) for name in _TIMED[:-1]), timed("total") + spread]
    return [
        *cells,
        f"{row.samples_per_second:,.0f}",
        against,
        bytes_text(row.peak_memory_bytes),
        f"{row.loss:.4f}",
    ]


def init(path: Path, force: bool) -> int:
    """A config for this machine, each setting with its meaning, in a file to be changed at will."""
    from orchestrator.trainer import Trainer

    if path.exists() and not force:
        raise UserError(f"{path} exists already; choose another name, or overwrite it with --force")
    prepared = Trainer(config=Config()).prepare()
    chosen = prepared.plan.choices()
    comments = {name: _comment(name, text, chosen) for name, text in setting_texts().items()}
    head = f"# expert-orchestrator settings, written for this machine ({prepared.plan.device.value}, {prepared.inventory.cores} cores).\n"
    head += "# null and auto are left to the plan; 'here' says what it would choose now. Use: orchestrator train --config FILE\n"
    try:
        path.write_text(head + dump(Resolved(Config(), {}), comments), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    Console().print(f"wrote {path}; start with: orchestrator train --config {path}", soft_wrap=True)
    return 0


def _comment(name: str, text: str, chosen: dict[str, Any]) -> str:
    here = f" (here: {_value_text(chosen[name].value)})" if name in chosen else ""
    return " ".join(text.split()) + here


def setting_texts() -> dict[str, str]:
    """The text under each setting, read from the source it is declared in."""
    import ast
    import inspect

    texts: dict[str, str] = {}
    for kind in [Config, *section_types().values()]:
        body = ast.parse(inspect.getsource(kind)).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, following in zip(body.body, body.body[1:], strict=False):
            documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and documented:
                texts[field.target.id] = str(following.value.value)  # pyright: ignore[reportAttributeAccessIssue]
    return texts


def show_report(folder: Path) -> int:
    """Draw everything again from the folder of a run or a sweep alone."""
    from orchestrator.record.ledger import holds_sweep
    from orchestrator.report.run.page import draw_report
    from orchestrator.report.sweep.page import draw_sweep

    for path in draw_sweep(folder) if holds_sweep(folder) else draw_report(folder):
        Console().print(Text(f"wrote {path}"), soft_wrap=True)
    return 0
