"""The outcome of a run, as the Python API returns it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame
    from torch import nn


@dataclass(frozen=True)
class Result:
    """The outcome of a run: its status, its folder, its summary, and the trained model."""

    status: str
    run_dir: Path
    summary: dict[str, Any]
    model: nn.Module
    not_written: str = ""
    """The parts of the record or report that could not be written, as on a full disk, and what to do."""

    @property
    def step(self) -> int:
        """The step that the model's weights are of: the best one, or the last with ``--keep-last``."""
        return self.summary["final"]["step"]

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint with the best validation result; ``--init-from`` starts from its weights."""
        step = self.summary["best"].get("step")
        path = self.run_dir / "checkpoints" / f"step_{step or 0:08d}"
        return path if step and path.is_dir() else None

    @property
    def history(self) -> DataFrame:
        """One row per training step, with metrics and evaluations; see ``orchestrator.read_run``."""
        from orchestrator.report.run.figures.frames import read_run

        return read_run(self.run_dir)

    def performance_summary(self) -> str:
        return (self.run_dir / "performance_summary.txt").read_text(encoding="utf-8")
