"""The manifest of a reproducible run: all that decides on its bits, beside the record of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.config.settings import Config, section_types
from orchestrator.config.writer import to_json
from orchestrator.errors import UserError
from orchestrator.record.summary.summary import write_json
from orchestrator.storage.local_files import read_regular

MANIFEST = "manifest.json"
FORMAT = 1
_MAX_BYTES = 2**24
_ELSEWHERE = frozenset({"watch", "checkpoint", "parallel"})
"""Sections without a setting that changes a bit: records, places, and the division of the work."""
_NOT_OF_BITS = frozenset(
    {
        *("name", "run_dir", "deterministic", "auto"),
        *("early_stopping_patience", "early_stopping_metric"),
        # The fingerprint says which data it is, wherever it lies.
        *("data_dir", "data", "validation_data", "model", "chat_template", "loader_workers"),
        # The sizes that follow from these are in the manifest.
        *("batch_size", "accumulation_steps", "global_batch_size"),
        *("eval_batch_size", "gpu_memory_fraction", "gpu_mode", "empty_cache_every"),
        *("rebalance", "expert_replicas"),
    }
)


@dataclass(frozen=True)
class Environment:
    """The devices and the programs of a run, from a step on."""

    step: int
    devices: tuple[str, ...]
    """The kinds of the workers' devices."""
    versions: Mapping[str, str]

    @property
    def text(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{' and '.join(self.devices)} with {versions}"

    def same_as(self, other: Environment) -> bool:
        return (self.devices, dict(self.versions)) == (other.devices, dict(other.versions))


@dataclass(frozen=True)
class Manifest:
    """All that decides on the bits of a run. The number of workers and the places of experts do not."""

    settings: Mapping[str, Any]
    seed: int
    micro_batch_size: int
    global_batch_size: int
    threads: int
    data: Mapping[str, Any]
    """Number of training samples, and a hash with what it covers."""
    environments: tuple[Environment, ...] = field(default=())
    """In order of steps; several where the run has moved to other devices or versions."""
    format: int = FORMAT

    def environments_of(self, first_step: int, last_step: int) -> list[Environment]:
        """Return those of the steps after ``first_step`` until ``last_step``."""
        ends = [later.step for later in self.environments[1:]] + [last_step]
        pairs = zip(self.environments, ends, strict=True)
        return [each for each, end in pairs if end > first_step and each.step < last_step]

    def differences(self, other: Manifest, with_settings: bool = True) -> list[str]:
        """Return what another manifest has in another way, except for the environment."""
        names = sorted({*self.settings, *other.settings}) if with_settings else []
        before = {f"setting {name}": self.settings.get(name) for name in names}
        now = {f"setting {name}": other.settings.get(name) for name in names}
        for name in ("seed", "micro_batch_size", "global_batch_size", "threads"):
            text = name.replace("_", " ")
            before[text], now[text] = getattr(self, name), getattr(other, name)
        for name in sorted({*self.data, *other.data}):
            before[f"data: {name}"], now[f"data: {name}"] = self.data.get(name), other.data.get(name)
        return [
            f"{name}: {before[name]} then, {now[name]} now" for name in before if before[name] != now[name]
        ]


def bit_settings(config: Config) -> dict[str, Any]:
    """Return the settings that decide on the bits of a run, by their flat names."""
    values = to_json(config)
    named = {"task": values["task"]}
    for section in section_types():
        if section not in _ELSEWHERE:
            named |= {name: value for name, value in values[section].items() if name not in _NOT_OF_BITS}
    return named


def write_manifest(manifest: Manifest, run_dir: Path) -> None:
    write_json(run_dir / MANIFEST, asdict(manifest))


def read_manifest(run_dir: Path) -> Manifest:
    """Return the manifest of a run. Raises ``UserError`` if there is none, or none that a run has written."""
    path = run_dir / MANIFEST
    try:
        content = json.loads(read_regular(path, _MAX_BYTES))
        environments = tuple(
            Environment(int(each["step"]), tuple(map(str, each["devices"])), dict(each["versions"]))
            for each in content["environments"]
        )
        if content["format"] != FORMAT or not environments:
            raise ValueError(f"format {content['format']}, {len(environments)} environments")
        numbers = {
            name: int(content[name]) for name in ("seed", "micro_batch_size", "global_batch_size", "threads")
        }
        return Manifest(
            dict(content["settings"]), **numbers, data=dict(content["data"]), environments=environments
        )
    except FileNotFoundError:
        raise UserError(
            f"{run_dir} has no {MANIFEST}: it is not a run with --reproducible, or did not start"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}: {str(error)[:200]}); it is needed to know which "
            "devices and settings the bits of the run are of. Restore it from a copy of the run folder"
        ) from None
