"""The results of ``bench --calibrate`` on a machine, as a file that is validated when it is read.
Pure.

The fields of the classes are the keys of the file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from orchestrator.errors import UserError
from orchestrator.plan.cost.machine import DeviceCosts, Interconnect, Machine
from orchestrator.plan.cost.ops import MicroBatchOps

VERSION = 2
FILE = "calibration.json"
AGAIN = "measure again with: orchestrator bench --calibrate"


@dataclass(frozen=True)
class Reference:
    """A measured step that costs were fitted to: its time, the fitted time, and its counts of
    operations."""

    name: str
    measured_s: float
    fitted_s: float
    operations: int
    launches: int
    sorts: int
    views: int
    tensors: int

    @classmethod
    def of(cls, name: str, ops: MicroBatchOps, measured_s: float, fitted_s: float) -> Reference:
        counts = (ops.operations, ops.launches, ops.sorts, ops.views, ops.tensors)
        return cls(name, measured_s, fitted_s, *counts)


@dataclass(frozen=True)
class Profile:
    """A device while ``workers`` of them are busy on a node, and the links between them."""

    workers: int
    threads: int
    device: DeviceCosts
    links: Interconnect | None = None
    references: tuple[Reference, ...] = ()
    yardstick_s: tuple[float, ...] = ()
    """Host seconds of steps that can be timed again later, to tell how fast a GPU's host was."""


@dataclass(frozen=True)
class Calibration:
    """The measured costs of one machine."""

    version: int
    made: str
    machine: str
    cores: int
    seconds: float
    others: float
    """Share of the processors that other programs used meanwhile: above a few percent the costs
    are too high."""
    profiles: tuple[Profile, ...]

    def profile(self, workers: int) -> Profile:
        """Return the profile with the nearest number of workers; one worker and several are never
        mixed."""
        same_kind = [profile for profile in self.profiles if (profile.workers > 1) == (workers > 1)]
        return min(same_kind or self.profiles, key=lambda profile: abs(profile.workers - workers))

    def machine_for(self, workers: int) -> tuple[Machine, float]:
        """Return this machine with so many workers, and how many of them share one set of
        processors."""
        profile = self.profile(workers)
        crowding = 1.0
        if not profile.device.asynchronous:
            crowding = max(1.0, workers * profile.threads / max(1, self.cores))
        links = profile.links or Machine(profile.device).inner
        return Machine(profile.device, 1, max(1, workers), links, links), crowding


def write_calibration(calibration: Calibration, path: Path) -> None:
    text = json.dumps(asdict(calibration), indent=None, separators=(",", ":")) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; choose another file with --calibration FILE"
        ) from None


def read_calibration(path: Path) -> Calibration:
    """Read a calibration file; one that is missing, damaged or of another version is refused."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"the calibration {path} cannot be read: {reason}; {AGAIN}") from None
    return parse_calibration(text, str(path))


def parse_calibration(text: str, name: str) -> Calibration:
    try:
        # The version first: a file of another version would fail validation at a confusing place.
        data: Any = json.loads(text)
        version = data.get("version") if isinstance(data, dict) else None
        if version != VERSION:
            raise UserError(
                f"the calibration {name} has version {version}; version {VERSION} is needed: {AGAIN}"
            )
        return TypeAdapter(Calibration).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(str(part) for part in first["loc"]) or "its top"
        raise UserError(f"the calibration {name} is damaged at {location}: {first['msg']}; {AGAIN}") from None
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise UserError(f"the calibration {name} is damaged: {error}; {AGAIN}") from None
