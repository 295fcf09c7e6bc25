"""What ``bench --calibrate`` measured on a machine, as a file of figures that is read back
checked. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from orchestrator.errors import UserError
from orchestrator.plan.cost.model import DeviceCosts, Interconnect, Machine

VERSION = 2
FILE = "calibration.json"
AGAIN = "measure again with: orchestrator bench --calibrate"


@dataclass(frozen=True)
class Reference:
    """A step that figures were found from: those of the host, or how long the device takes for
    whole steps. What was measured, what the figures say, and what it is made of."""

    name: str
    measured_s: float
    fitted_s: float
    operations: int
    launches: int
    sorts: int
    views: int
    tensors: int


@dataclass(frozen=True)
class Profile:
    """A device as it is while ``workers`` of them are busy on a node, and what joins these."""

    workers: int
    threads: int
    device: DeviceCosts
    links: Interconnect | None = None
    references: tuple[Reference, ...] = ()
    yardstick_s: tuple[float, ...] = ()
    """Of the host of a GPU, for steps that can be timed again later: how fast it was."""


@dataclass(frozen=True)
class Calibration:
    """The figures of one machine."""

    version: int
    made: str
    machine: str
    cores: int
    seconds: float
    others: float
    """Share of the processors that others used meanwhile: above a few percent the figures are too
    slow."""
    profiles: tuple[Profile, ...]

    def profile(self, workers: int) -> Profile:
        """The one with as many workers, or the nearest with more than one."""
        several = [entry for entry in self.profiles if (entry.workers > 1) == (workers > 1)] or list(
            self.profiles
        )
        return min(several, key=lambda entry: abs(entry.workers - workers))

    def machine_for(self, workers: int) -> tuple[Machine, float]:
        """This machine with so many workers on it, and how many of them share one's processors."""
        found = self.profile(workers)
        crowding = (
            1.0 if found.device.asynchronous else max(1.0, workers * found.threads / max(1, self.cores))
        )
        wiring = found.links or Machine(found.device).inner
        return Machine(found.device, 1, max(1, workers), wiring, wiring), crowding


def write_calibration(found: Calibration, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps(asdict(found), indent=None, separators=(",", ":")) + "\n", encoding="utf-8"
        )
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; give another place with --calibration FILE"
        ) from None


def read_calibration(path: Path) -> Calibration:
    """The file's figures. One that is damaged, or of another version, is told as such."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"the calibration {path} cannot be read: {reason}; {AGAIN}") from None
    return parse_calibration(text, str(path))


def parse_calibration(text: str, name: str) -> Calibration:
    try:
        data: Any = json.loads(text)
        version = data.get("version") if isinstance(data, dict) else None
        if version != VERSION:
            raise UserError(
                f"the calibration {name} is of version {version}; version {VERSION} was needed: {AGAIN}"
            )
        return TypeAdapter(Calibration).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"the calibration {name} is damaged at {place or 'its top'}: {first['msg']}; {AGAIN}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"the calibration {name} is damaged: {error}; {AGAIN}") from None
