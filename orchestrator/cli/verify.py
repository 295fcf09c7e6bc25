"""``orchestrator verify``: recompute steps of a reproducible run, and compare them with its record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.cli.resume import read_run_flags
from orchestrator.config.settings import Config

DIFFERS = 4
"""The exit code where a recomputed step differs."""


@dataclass(frozen=True)
class VerifyOptions:
    """Recompute steps of a run with --reproducible from a checkpoint, on any number of workers, and compare
    them with its record: exit code 0 if losses, norms and digests are equal, 4 if not.

    The run is only read, and may be running. It names the first step, tensor and expert that differ. Settings
    are those of the run; flags may divide the work in another way: --workers 3, --parallel-strategy.
    """

    settings: Config
    run: Path | None = None
    """The folder of the run."""
    steps: str | None = None
    """The steps, A..B: from the newest checkpoint at or before A until step B; 0..B begins without a
    checkpoint. Default: from the oldest checkpoint that is kept to the last step."""
    other_machine: bool = False
    """Compare on another kind of device, or with other versions, than the run had."""
    json: bool = False
    """Print the result as JSON."""
    config: Path | None = None
    """YAML file with settings that divide the work in another way; flags win."""


def run(argv: Sequence[str]) -> int:
    options, resolved = read_run_flags(VerifyOptions, argv, "verify", "run")
    assert options.run is not None
    from orchestrator.trainer import Trainer

    trainer = Trainer(config=resolved, quiet=options.json)
    result = trainer.verify(options.run, options.steps, options.other_machine)
    if options.json:
        from orchestrator.cli.tables import print_json

        print_json(result.to_json())
    return 0 if result.equal else DIFFERS
