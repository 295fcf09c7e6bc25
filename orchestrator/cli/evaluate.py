"""``orchestrator evaluate``: the metrics of a checkpoint, written beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.cli.resume import read_run_flags
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.types import flag_of


@dataclass(frozen=True)
class EvaluateOptions:
    """Evaluate a checkpoint with the settings of its run, and write the result beside it as JSON.

    Flags win over those settings: --workers 3, --data-dir FOLDER, --evaluate-ema.
    """

    settings: Config
    checkpoint: Path | None = None
    """A checkpoint, or a run: its best checkpoint, else the newest. A folder or an address
    (s3://bucket/run1)."""
    split: str = "validation"
    """The data to evaluate on: validation, train, or NAME of a task with a method NAME_data."""
    prompts: tuple[str, ...] = ()
    """Prompts that a language model continues, greedily: texts, or files with one a line. Default: the
    first three of the data."""
    max_new_tokens: int = 64
    """Most tokens of a continuation; 0: none."""
    tasks: tuple[str, ...] = ()
    """Evaluate a language model on tasks of lm-eval (hellaswag,arc_easy) in place of a split; lm_eval must be
    installed, and downloads their data."""
    tasks_dir: Path | None = None
    """Folder with YAML definitions of tasks of your own, beside those of lm-eval."""
    config: Path | None = None
    """YAML file with settings that win over those of the run; flags win over both."""


def run(argv: Sequence[str]) -> int:
    options, resolved = read_run_flags(EvaluateOptions, argv, "evaluate", "checkpoint", noun="checkpoint")
    assert options.checkpoint is not None
    if options.tasks:
        from orchestrator.cli.benchmark_tasks import evaluate_tasks

        for name in ("split", "prompts", "max_new_tokens"):
            if getattr(options, name) != getattr(EvaluateOptions, name):
                raise UserError(
                    f"{flag_of(name)} has no effect with --tasks, which brings its own data; leave it out"
                )
        evaluate_tasks(options.checkpoint, options.tasks, options.tasks_dir, resolved)
        return 0
    if options.tasks_dir is not None:
        raise UserError(f"--tasks-dir {options.tasks_dir} defines tasks; name those to evaluate with --tasks")
    from orchestrator.trainer import Trainer

    Trainer(config=resolved).evaluate(
        options.checkpoint, options.split, options.prompts, options.max_new_tokens
    )
    return 0
