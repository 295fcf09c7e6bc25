"""``orchestrator train``: train a task and write a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config.reading.flags import read_flags
from orchestrator.config.reading.reader import Resolved
from orchestrator.config.settings import Config
from orchestrator.errors import Interrupted, ResourceError, UserError
from orchestrator.plan.inventory.hardware import launched_by


@dataclass(frozen=True)
class TrainOptions:
    """Train a task and write a report into the run folder."""

    settings: Config
    config: Path | None = None
    """YAML file with settings; flags win over it."""
    tuned: Path | None = None
    """Folder of a sweep: train with the settings of its best trial that fits the devices here;
    flags win over them."""


def run(argv: Sequence[str]) -> int:
    options, resolved = read_flags(TrainOptions, argv, "orchestrator train")
    refuse_launchers()
    if options.tuned is not None:
        resolved = _take_tuned_settings(options.tuned, resolved)
    return fit(resolved)


def fit(resolved: Resolved) -> int:
    """Train to the end, or until the user interrupts the run."""
    from orchestrator.trainer import Trainer

    result = Trainer(config=resolved).fit()
    if result.not_written:
        raise ResourceError(f"the run is {result.status}, but {result.not_written}")
    if result.status == "stopped":
        from orchestrator.run.run_dir import how_to_resume

        command = how_to_resume(resolved.config, result.run_dir)
        raise Interrupted(
            f"interrupted; a checkpoint is in {result.run_dir / 'checkpoints'}; continue with: {command}"
        )
    return 0


def refuse_launchers() -> None:
    """Raise UserError under torchrun and its kind: each of its processes would start workers of its own."""
    launcher = launched_by()
    if launcher:
        raise UserError(
            f"started by {launcher}, which starts one process per GPU; here Ray starts the workers. "
            "Start it plainly: orchestrator train --workers N …; "
            "or send it to a cluster: ray job submit --working-dir . -- python -m orchestrator train …"
        )


def _take_tuned_settings(folder: Path, resolved: Resolved) -> Resolved:
    from orchestrator.cli.tables import print_line
    from orchestrator.cli.tuned import tuned
    from orchestrator.trainer import Trainer

    resolved, message = tuned(folder, resolved, lambda config: Trainer(config=config).devices())
    print_line(message)
    return resolved
