"""Shares of the global batch in proportion to the measured speeds of the workers' devices."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from orchestrator.config.settings import Config
from orchestrator.plan.planning import Plan
from orchestrator.train.device.precision import autocast
from orchestrator.train.group.world import World

_NOISE = 0.05  # devices whose speeds differ by less share evenly: the difference is noise
_MEASURE_S = 0.2
_MATRIX_SIZES = {"cuda": 4096, "cpu": 384}


@dataclass(frozen=True)
class MeasuredDevice:
    """The device of a worker. Devices of one name have one speed, the mean of their measurements."""

    name: str
    speed: float
    """FLOP/s of matrix products in the precision of the run."""


def assign_shares(
    config: Config, plan: Plan, world: World, known: Mapping[str, Any]
) -> tuple[World, dict[str, float]]:
    """Return the world with each worker's share of the batch, and the speed of each kind of device."""
    if config.run.reproducible:
        return replace(world, whole_micro_batches=True), {}
    if plan.data_ranks < world.size:
        # With --gate primary the main host has the whole batch, and there is nothing to share.
        return world.with_data_on_main(), {}
    requested = config.parallel.share_by_speed
    if world.size == 1 or requested == "off" or config.run.repeats:
        return world, {}
    if requested == "auto" and len(set(world.gather_values(device_name(world.device)))) == 1:
        return world, {}
    devices = measure_devices(plan, world, known)
    shares = shares_from_speeds([device.speed for device in devices])
    if len(set(shares)) > 1:
        world = world.with_shares(shares)
    return world, {device.name: device.speed for device in devices}


def measure_devices(plan: Plan, world: World, known: Mapping[str, Any]) -> list[MeasuredDevice]:
    """Return the devices of all workers, by rank. All workers must call, once per generation of the group.

    Speeds that the run measured before (in ``known``, the fields of its plan) are kept, so that a resumed
    run gives the same workers the same shares.
    """
    own = own_device(plan, world, known)
    rows = world.gather_values([own.name, own.speed])
    return with_mean_speeds([MeasuredDevice(name, speed) for name, speed in rows])


def own_device(plan: Plan, world: World, known: Mapping[str, Any]) -> MeasuredDevice:
    """Return this worker's device with the speed that the run has measured before, or measures now."""
    name = device_name(world.device)
    speed = known.get("device_speeds", {}).get(name) or measure_speed(world.device, plan)
    return MeasuredDevice(name, speed)


def with_mean_speeds(devices: Sequence[MeasuredDevice]) -> list[MeasuredDevice]:
    """Return the devices, each with the mean of the speeds measured for its name."""
    speeds: dict[str, list[float]] = {}
    for device in devices:
        speeds.setdefault(device.name, []).append(device.speed)
    means = {name: sum(values) / len(values) for name, values in speeds.items()}
    return [MeasuredDevice(device.name, means[device.name]) for device in devices]


def shares_from_speeds(speeds: Sequence[float]) -> list[float]:
    """Return shares in whole percents of the fastest device, or equal ones if all speeds are alike."""
    fastest = max(speeds)
    if min(speeds) >= fastest * (1 - _NOISE):
        return [1.0] * len(speeds)
    return [max(0.01, round(speed / fastest, 2)) for speed in speeds]


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}"


def measure_speed(device: torch.device, plan: Plan) -> float:
    """Measure FLOP/s of matrix products in the precision of the run."""
    size = _MATRIX_SIZES[device.type]
    matrix = torch.randn(size, size, device=device, generator=torch.Generator(device).manual_seed(0))
    products = 0
    with torch.no_grad(), autocast(plan.precision.value, device):
        _ = matrix @ matrix  # the first product loads kernels
        _wait_for_device(device)
        start = perf_counter()
        while perf_counter() - start < _MEASURE_S:
            _ = matrix @ matrix
            _wait_for_device(device)
            products += 1
    return 2.0 * size**3 * products / (perf_counter() - start)


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
