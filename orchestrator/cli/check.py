"""``orchestrator check``: inspect the machine and test what training needs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.config.reading.flags import read_options
from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError
from orchestrator.plan.checks.probes import CheckResult, MachineProbe, probes_for, run_guarded
from orchestrator.plan.inventory.hardware import Inventory, inventory, nccl_may_share_gpus
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.types import VERSION, bytes_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_MARKS = {"pass": ("✔", "green"), "fail": ("✘", "red"), "warn": ("!", "yellow"), "skip": ("–", "dim")}


@dataclass(frozen=True)
class CheckOptions:
    """Inspect the machine and test what training needs."""

    full: bool = False
    """Also train two steps and check each part of the way."""
    json: bool = False
    """Print JSON for machines."""


def run(argv: Sequence[str]) -> int:
    """Run the checks and show each result as it comes. The exit code is 3 if a check fails."""
    options = read_options(CheckOptions, argv, "orchestrator check")
    machine = inventory(Path.cwd())
    results = _print_json(machine, options) if options.json else _print_results(machine, options)
    failed = any(result.status == "fail" for result in results)
    return ResourceError.exit_code if failed else 0


def check(full: bool = False) -> list[CheckResult]:
    """Inspect the machine and test what training needs, from Python."""
    return [run_guarded(probe) for probe in _all_probes(inventory(Path.cwd()), full)]


def _print_json(machine: Inventory, options: CheckOptions) -> list[CheckResult]:
    from orchestrator.cli.tables import print_json

    results = [run_guarded(probe) for probe in _all_probes(machine, options.full)]
    print_json({"hardware": machine.to_json(), "checks": [asdict(result) for result in results]})
    return results


def _print_results(machine: Inventory, options: CheckOptions) -> list[CheckResult]:
    from rich.console import Console

    console = Console()
    console.print(_hardware_table(machine))
    results: list[CheckResult] = []
    for probe in _all_probes(machine, options.full):
        with console.status(f"checking {probe.name} …"):
            results.append(run_guarded(probe))
        _print_result(console, results[-1])
    num_passed = sum(result.status != "fail" for result in results)
    console.print(f"{num_passed} of {len(results)} checks without failure", style="bold")
    return results


def _hardware_table(machine: Inventory) -> Table:
    from orchestrator.cli.tables import make_table

    table = make_table("hardware", "", title="this machine")
    for gpu in machine.gpus:
        memory = f"{bytes_text(gpu.memory_free)} of {bytes_text(gpu.memory_total)} free"
        capability = f"capability {gpu.capability[0]}.{gpu.capability[1]}"
        table.add_row(f"GPU {gpu.index}", f"{gpu.name}, {memory}, {capability}")
    if machine.gpus:
        models = "all of one model" if machine.same_model else "different models"
        smallest = f"smallest {bytes_text(machine.min_gpu_memory)}"
        table.add_row("GPUs", f"{len(machine.gpus)}, {models}, {smallest}; driver {machine.driver}")
    else:
        table.add_row("GPU", machine.gpu_error or "none")
    bf16 = ", bf16 units" if machine.cpu_bf16 else ""
    cores = f"{machine.cores} usable cores, {machine.architecture}{bf16}"
    table.add_row("CPU", f"{machine.cpu_name}, {cores}")
    table.add_row("RAM", f"{bytes_text(machine.ram_free)} of {bytes_text(machine.ram_total)} free")
    table.add_row("disk", f"{bytes_text(machine.disk_free)} free here")
    versions = {"expert-orchestrator": VERSION, **machine.versions}
    table.add_row("versions", ", ".join(f"{name} {version}" for name, version in versions.items()))
    if machine.commit is not None:
        table.add_row("this folder", f"{Path.cwd()}, commit {machine.commit}")
    return table


def _print_result(console: Console, result: CheckResult) -> None:
    from rich.text import Text

    mark, style = _MARKS[result.status]
    if not console.encoding.startswith("utf"):
        mark = result.status
    console.print(Text.assemble((mark, style), f" {result.name}: ", result.found), soft_wrap=True)
    if result.status in ("fail", "warn"):
        advice = f"    needed: {result.needed}\n    to do: {result.fix}"
        console.print(Text(advice, style=style), soft_wrap=True)


# --- probes


def _all_probes(machine: Inventory, full: bool) -> Iterator[MachineProbe]:
    yield from probes_for(machine, Path.cwd())
    advice = "see 'workers hang' in docs/troubleshooting.md"
    yield MachineProbe("collective", partial(_probe_collective, "collective", "gloo", 2), advice)
    if machine.gpus:
        size = _nccl_ranks(len(machine.gpus), nccl_may_share_gpus())
        yield MachineProbe("NCCL", partial(_probe_collective, "NCCL", "nccl", size), advice)
    if full:
        yield MachineProbe(
            "training", _probe_training, "run 'orchestrator train --debug' and see its message"
        )


def _nccl_ranks(num_gpus: int, may_share: bool) -> int:
    """Return how many processes can form a group over NCCL: one for each GPU."""
    return max(num_gpus, 2 if may_share else 1)


def _probe_collective(name: str, backend: str, size: int) -> CheckResult:
    """Sum and exchange a tensor between processes."""
    from orchestrator.plan.checks.collective import probe_collective

    problem = probe_collective(backend, size)
    processes = f"{size} processes" if size > 1 else "one process"
    if problem is None:
        found = f"{processes} summed and exchanged a tensor over {backend}"
        if size == 1:
            found += "; between GPUs it is tested where there are two"
        return CheckResult(name, "pass", found)
    fix = (
        "look at the firewall and at the network interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); "
        "NCCL_DEBUG=INFO tells more"
    )
    return CheckResult(name, "fail", problem, f"a sum and an exchange between {processes}", fix)


def _probe_training() -> CheckResult:
    """Train two steps of the default task; --debug checks the device of the model and of every batch."""
    from orchestrator.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder:
        config = Config.of(
            debug=True, max_steps=2, run_dir=Path(folder) / "run", trackers=(), gpu_log_interval=1
        )
        result = Trainer(config=config, quiet=True).fit()
        events = read_events(result.run_dir / "events.jsonl")
    start = of_kind(events, "start")[-1]
    readings = of_kind(events, "monitor")
    devices = [device for event in readings for device in event.get("devices", ())]
    used = [device["utilization"] for device in devices if device.get("utilization") is not None]
    monitored = f"GPU use {max(used):.0f}%" if used else f"{len(readings)} monitor readings"
    steps = result.summary["steps"]
    found = (
        f"{steps} steps on {start['device']} in {start['precision']}, model and batches in place, {monitored}"
    )
    passed = result.status == "completed" and steps == 2 and bool(readings)
    return CheckResult(
        "training",
        "pass" if passed else "fail",
        found,
        "two steps, completed and monitored",
        "run 'orchestrator train --debug'",
    )
