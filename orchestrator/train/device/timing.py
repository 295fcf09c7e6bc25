"""Wall-clock seconds of work on a device: the primitive of everything that times steps."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch


def synchronize(device: torch.device | None) -> None:
    """Wait until the device has finished its work. A CPU has finished when a call returns."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_seconds(run: Callable[[], Any], device: torch.device | None) -> float:
    """Run work and return the seconds until the device has finished it.

    The device should be idle before: earlier work would count too.
    """
    start = perf_counter()
    run()
    synchronize(device)
    return perf_counter() - start
