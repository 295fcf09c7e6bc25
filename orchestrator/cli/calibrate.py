"""``bench --calibrate``: measure this machine for the cost model, and show the measurements."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from orchestrator.cli.tables import make_table, print_line
from orchestrator.plan.cost.calibration import (
    FILE,
    Calibration,
    Profile,
    write_calibration,
)
from orchestrator.plan.cost.machine import DeviceCosts, Link
from orchestrator.plan.inventory.hardware import inventory, results_folder
from orchestrator.types import seconds_text

_MAX_OTHER_LOAD = 0.05
"""Share of the processors that other programs may use during the measurement, without a warning."""


def calibrate_machine(path: Path | None, as_json: bool) -> int:
    """Measure this machine for the cost model, and write the measurements to a file."""
    from orchestrator.measure.calibration.calibrate import calibrate
    from orchestrator.measure.calibration.device_costs import CalibrationScope

    target = path or results_folder() / FILE
    machine = inventory()
    with Console(stderr=True).status("calibrating …") as status:
        calibration = calibrate(
            machine, CalibrationScope.of(machine), lambda part: status.update(f"calibrating: {part} …")
        )
    write_calibration(calibration, target)
    console = Console()
    if as_json:
        console.print_json(target.read_text(encoding="utf-8"))
        return 0
    console.print(_calibration_table(calibration))
    if calibration.others > _MAX_OTHER_LOAD:
        print_line(
            f"other programs used {calibration.others:.0%} of the processors meanwhile: "
            "the figures may be too slow; repeat it when the machine is idle"
        )
    print_line(
        f"measured in {calibration.seconds:.0f} s, kept in {target}; "
        "'orchestrator plan' now predicts the step time"
    )
    return 0


def _calibration_table(calibration: Calibration) -> Table:
    profiles = calibration.profiles
    table = make_table(
        "figure",
        *(_profile_name(profile) for profile in profiles),
        title=f"calibration of {calibration.machine}",
    )
    columns = [_device_figures(profile.device) | _fit_quality(profile) for profile in profiles]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    for name in ("sums", "exchange"):
        links = [getattr(profile.links, name, None) for profile in profiles]
        if any(links):
            table.add_row(f"link, {name}", *(_link_text(link) for link in links))
    return table


def _profile_name(profile: Profile) -> str:
    workers = f"{profile.workers} worker{'s' * (profile.workers > 1)}"
    return f"{workers}, {profile.threads} thread{'s' * (profile.threads > 1)}"


def _device_figures(device: DeviceCosts) -> dict[str, str]:
    figures: dict[str, str] = {}
    for precision, grids in device.products.items():
        grid = grids["nn"]
        large = (grid.m[-1], grid.k[-1], grid.n[-1])
        small = (grid.m[1], grid.k[1], grid.n[1])
        for name, (m, k, n), digits in (("large", large, 0), ("small", small, 1)):
            gflops = 2 * m * k * n / grid.at(m, k, n) / 1e9
            figures[f"products in {precision}, {name}"] = f"{gflops:,.{digits}f} GFLOP/s"
    plain = device.moves["plain"]
    bandwidths = [size / seconds for size, seconds in zip(plain.sizes, plain.values, strict=True)]
    figures["memory"] = f"{max(bandwidths) / 1e9:,.0f} GB/s"
    optimizer = device.optimizer
    optimizer_bandwidth = optimizer.sizes[-1] / optimizer.values[-1]
    figures["optimizer"] = f"{optimizer_bandwidth / 1e9:,.1f} GB/s of parameters"
    overheads = {
        "operation": device.operation_s,
        "kernel from Python": device.launch_s,
        "view": device.view_s,
        "parameter": device.tensor_s,
        "step": device.step_s,
    }
    return figures | {f"overhead per {name}": seconds_text(value) for name, value in overheads.items()}


def _fit_quality(profile: Profile) -> dict[str, str]:
    """Return how well the overheads explain the steps that they were fitted to."""
    references = [reference for reference in profile.references if reference.measured_s > 0]
    errors = [abs(reference.fitted_s / reference.measured_s - 1) for reference in references]
    return {"reference steps": f"explained to {max(errors):.0%}" if errors else ""}


def _link_text(link: Link | None) -> str:
    if link is None:
        return ""
    return f"{link.kind}: {seconds_text(link.latency_s)}, {link.bytes_per_s / 1e9:.2f} GB/s"
