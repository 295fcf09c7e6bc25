"""``orchestrator check``: look at the machine, and try what training needs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.cli.commands import make_table
from orchestrator.config.settings import Config
from orchestrator.plan.checks.probes import CheckResult, MachineProbe, probes_for, run_guarded
from orchestrator.plan.inventory.hardware import Inventory, inventory
from orchestrator.record.events import of_kind, read_events
from orchestrator.types import bytes_text

_MARKS = {"pass": ("✔", "green"), "fail": ("✘", "red"), "skip": ("–", "dim")}


def check(full: bool = False) -> list[CheckResult]:
    """Look at the machine and try what training needs, from Python."""
    return [run_guarded(probe) for probe in _all_probes(inventory(Path.cwd()), full)]


def show_check(full: bool, as_json: bool) -> int:
    """The same on the screen, as it goes. Ends with exit code 3 when something needed does not work."""
    console, found = Console(), inventory(Path.cwd())
    if not as_json:
        console.print(_hardware_table(found))
    checks: list[CheckResult] = []
    for probe in _all_probes(found, full):
        with nullcontext() if as_json else console.status(f"checking {probe.name} …"):
            checks.append(run_guarded(probe))
        if not as_json:
            _print_check(console, checks[-1])
    failed = [entry for entry in checks if entry.status == "fail"]
    if as_json:
        console.print_json(
            json.dumps(
                {"hardware": found.to_json(), "checks": [asdict(entry) for entry in checks]}, default=str
            )
        )
    else:
        console.print(f"{len(checks) - len(failed)} of {len(checks)} checks without failure", style="bold")
    return 3 if failed else 0


def _hardware_table(found: Inventory) -> Table:
    table = make_table("hardware", "", title="this machine")
    for gpu in found.gpus:
        memory = f"{bytes_text(gpu.memory_free)} of {bytes_text(gpu.memory_total)} free"
        table.add_row(
            f"GPU {gpu.index}", f"{gpu.name}, {memory}, capability {gpu.capability[0]}.{gpu.capability[1]}"
        )
    if not found.gpus:
        table.add_row("GPU", found.gpu_error or "none")
    else:
        same = "all of one model" if found.same_model else "different models"
        table.add_row(
            "GPUs",
            f"{len(found.gpus)}, {same}, smallest {bytes_text(found.min_gpu_memory)}; driver {found.driver}",
        )
    table.add_row(
        "CPU",
        f"{found.cpu_name}, {found.cores} usable cores, {found.architecture}{', bf16 units' if found.cpu_bf16 else ''}",
    )
    table.add_row("RAM", f"{bytes_text(found.ram_free)} of {bytes_text(found.ram_total)} free")
    table.add_row("disk", f"{bytes_text(found.disk_free)} free here")
    table.add_row("versions", ", ".join(f"{name} {version}" for name, version in found.versions.items()))
    return table


def _all_probes(found: Inventory, full: bool) -> Iterator[MachineProbe]:
    yield from probes_for(found, Path.cwd())
    yield MachineProbe(
        "collective", lambda: _collective(len(found.gpus)), "see 'hang' in the README's troubleshooting"
    )
    if full:
        yield MachineProbe("training", _two_steps, "run 'orchestrator train --debug' and see its message")


def _collective(gpus: int) -> CheckResult:
    """Two processes sum a tensor: NCCL where there are two GPUs, gloo otherwise."""
    from orchestrator.plan.checks.collective import probe_collective

    backend = "nccl" if gpus >= 2 else "gloo"
    problem = probe_collective(backend)
    fix = "look at the firewall and at the network interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); NCCL_DEBUG=INFO tells more"
    if problem is None:
        return CheckResult("collective", "pass", f"two processes summed a tensor over {backend}")
    return CheckResult("collective", "fail", problem, "a sum over two processes", fix)


def _print_check(console: Console, entry: CheckResult) -> None:
    mark, style = _MARKS[entry.status]
    if not console.encoding.startswith("utf"):
        mark = entry.status
    console.print(Text.assemble((mark, style), f" {entry.name}: ", entry.found), soft_wrap=True)
    if entry.status == "fail":
        console.print(
            Text(f"    needed: {entry.needed}\n    to do: {entry.fix}", style=style), soft_wrap=True
        )


def _two_steps() -> CheckResult:
    """A short run of the default task: model and every batch are checked for their device on the way."""
    from orchestrator.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder:
        config = Config.of(
            debug=True, max_steps=2, run_dir=Path(folder) / "run", trackers=(), gpu_log_interval=1
        )
        result = Trainer(config=config, quiet=True).fit()
        events = read_events(result.run_dir / "events.jsonl")
    start, monitored = of_kind(events, "start")[-1], of_kind(events, "monitor")
    use = [
        device["utilization"]
        for event in monitored
        for device in event["devices"]
        if device.get("utilization") is not None
    ]
    seen = f"GPU use {max(use):.0f}%" if use else f"{len(monitored)} monitor readings"
    found = f"{result.summary['steps']} steps on {start['device']} in {start['precision']}, model and batches in place, {seen}"
    passed = result.status == "completed" and result.summary["steps"] == 2 and bool(monitored)
    return CheckResult(
        "training",
        "pass" if passed else "fail",
        found,
        "two steps, completed and monitored",
        "run 'orchestrator train --debug'",
    )
