"""Shares of the global batch in proportion to what the workers' devices can do."""

from __future__ import annotations

import platform
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from orchestrator.config.settings import Config
from orchestrator.plan.planning import Plan
from orchestrator.train.parts.precision import autocast
from orchestrator.train.parts.world import World

_ALIKE = 0.05  # devices nearer than this share evenly: the difference is noise
_SECONDS = 0.2
_SIZES = {"cuda": 4096, "cpu": 384}


@dataclass(frozen=True)
class MeasuredDevice:
    """What a worker computes on, as measured: alike devices have one speed, the mean of theirs."""

    name: str
    speed: float
    """FLOP/s of matrix products in the precision of the run."""


def assign_shares(
    config: Config, plan: Plan, world: World, known: Mapping[str, Any]
) -> tuple[World, dict[str, float]]:
    """The world with its shares, and the speed of each kind of device."""
    asked = config.parallel.share_by_speed
    if world.size == 1 or asked == "off" or config.run.deterministic:
        return world, {}
    names = [row[0] for row in world.gather([float(zlib.crc32(device_name(world.device).encode()))])]
    if asked == "auto" and len(set(names)) == 1:
        return world, {}
    devices = measure_devices(plan, world, known)
    shares = shares_from_speeds([device.speed for device in devices])
    return (world.with_shares(shares) if len(set(shares)) > 1 else world), {
        device.name: device.speed for device in devices
    }


def measure_devices(plan: Plan, world: World, known: Mapping[str, Any]) -> list[MeasuredDevice]:
    """The devices of all workers, by rank. Speeds that an earlier start of the run measured are taken as they are, so that
    the same workers get the same again. All workers must ask, once in the life of the group."""
    name = device_name(world.device)
    speed = known.get("device_speeds", {}).get(name) or measure_speed(world.device, plan)
    names = [
        world.broadcast_value(f"device/{rank}", name if rank == world.rank else None)
        for rank in range(world.size)
    ]
    speeds = [row[0] for row in world.gather([speed])]
    means = {kind: _mean([s for n, s in zip(names, speeds, strict=True) if n == kind]) for kind in set(names)}
    return [MeasuredDevice(kind, means[kind]) for kind in names]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def shares_from_speeds(speeds: Sequence[float]) -> list[float]:
    """Shares from speeds: whole percents of the fastest, and none where all are alike."""
    fastest = max(speeds)
    if min(speeds) >= fastest * (1 - _ALIKE):
        return [1.0] * len(speeds)
    return [max(0.01, round(speed / fastest, 2)) for speed in speeds]


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}"


def measure_speed(device: torch.device, plan: Plan) -> float:
    """FLOP/s of matrix products in the precision of the run."""
    size = _SIZES[device.type]
    a = torch.randn(size, size, device=device, generator=torch.Generator(device).manual_seed(0))
    done = 0
    with torch.no_grad(), autocast(plan.precision.value, device):
        _ = a @ a
        _wait(device)
        begun = perf_counter()
        while perf_counter() - begun < _SECONDS:
            _ = a @ a
            _wait(device)
            done += 1
    return 2.0 * size**3 * done / (perf_counter() - begun)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
