"""``orchestrator evaluate --tasks``: a language model on the tasks of EleutherAI's ``lm_eval``."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from orchestrator.config.names.nearest import did_you_mean
from orchestrator.config.reading.reader import Resolved
from orchestrator.config.settings import Config
from orchestrator.errors import TaskFailed, UserError
from orchestrator.types import VERSION, first_line, flag_of, printable

if TYPE_CHECKING:
    from orchestrator.train.remote.opened_checkpoint import OpenedCheckpoint

_MAX_NAME_CHARACTERS = 100
_USED = frozenset({"evaluate_ema", "eval_batch_size", "model"})
"""Settings that have a meaning here."""
_BATCH_SIZE = 8


def evaluate_tasks(
    checkpoint: Path, names: Sequence[str], tasks_dir: Path | None, given: Resolved
) -> Mapping[str, Any]:
    """Evaluate a checkpoint on tasks, show a table, and write the result beside it. Return the result.

    Raises ``UserError`` if ``lm_eval`` is not installed, for an unknown task, and for other models."""
    _check_installed()
    names = [name.strip() for text in names for name in text.split(",") if name.strip()]
    if not names:
        raise UserError("--tasks names no task; give some, as in --tasks hellaswag,arc_easy")
    unused = sorted(given.origins.keys() - _USED)
    if unused:
        raise UserError(
            f"{flag_of(unused[0])} has no effect with --tasks, which evaluates in one process on "
            "the data of lm-eval; leave it out"
        )
    from orchestrator.plan.inventory.hardware import results_folder
    from orchestrator.run.run_settings import read_run_settings
    from orchestrator.train.remote.opened_checkpoint import opened_checkpoint

    manager = _task_manager(names, tasks_dir)
    with opened_checkpoint(checkpoint, results_folder()) as opened:
        config = _with_given(read_run_settings(opened.path.parent.parent), given)
        if config.task != "lm":
            raise UserError(
                f"{opened.location} is of the task {config.task}; --tasks evaluates language models (--task "
                "lm). Leave it out to evaluate on the data of the task"
            )
        opened.check_writable()
        model = config.model.model if "model" in given.origins else None
        results = _evaluate(opened, config, names, manager, model)
        content = _content(opened, config, names, results)
        # Of its own for each list of tasks: hours of an earlier one are not overwritten.
        name = re.sub(r"[^\w.-]", "_", "-".join(["tasks", *names]))[:_MAX_NAME_CHARACTERS]
        opened.write_result(name, content)
        _show(content, opened.result_name(name))
        return content


def _check_installed() -> None:
    if find_spec("lm_eval") is None:
        raise UserError(
            "--tasks needs EleutherAI's lm-eval, which is not installed: pip install 'lm_eval[hf]'"
        )


def _task_manager(names: Sequence[str], tasks_dir: Path | None) -> Any:
    """Return the known tasks. Raises ``UserError`` for a name that is none of them."""
    from lm_eval.tasks import TaskManager

    if tasks_dir is not None and not tasks_dir.is_dir():
        raise UserError(f"--tasks-dir {tasks_dir}: there is no such folder")
    manager = TaskManager(include_path=str(tasks_dir) if tasks_dir is not None else None)
    for name in names:
        if name not in manager.all_tasks:
            near = did_you_mean(name, manager.all_tasks)
            raise UserError(f"--tasks {name}: lm-eval has no such task{near}; 'lm-eval ls tasks' lists them")
    return manager


def _with_given(config: Config, given: Resolved) -> Config:
    """Return the settings of the run with the given ones that matter here."""
    return config.but(**{name: given.config.value_of(name) for name in _USED & given.origins.keys()})


def _evaluate(
    opened: OpenedCheckpoint, config: Config, names: Sequence[str], manager: Any, model_given: str | None
) -> Any:
    """Return the results of ``lm_eval`` for the exported model."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    from orchestrator.cli.export import export_whole_model

    with TemporaryDirectory(prefix="orchestrator-tasks-") as folder:
        model = Path(folder) / "model"
        export_whole_model(opened.path, model, config, averaged=config.optim.evaluate_ema, model=model_given)
        try:
            batch_size = config.batch.eval_batch_size or _BATCH_SIZE
            # Code in the folder of a model is never executed.
            language_model = HFLM(
                pretrained=str(model), device=_device(), batch_size=batch_size, trust_remote_code=False
            )
            return simple_evaluate(
                model=language_model, tasks=list(names), task_manager=manager, log_samples=False
            )
        except Exception as error:
            raise TaskFailed(
                f"lm-eval failed: {type(error).__name__}: {first_line(error)}. It downloads the data of its "
                "tasks; where that is impossible, download it before on another machine (HF_HOME)"
            ) from error


def _device() -> str:
    from orchestrator.plan.inventory.hardware import inventory

    return "cuda" if inventory().gpus else "cpu"


def _content(
    opened: OpenedCheckpoint, config: Config, names: Sequence[str], results: Mapping[str, Any]
) -> dict[str, Any]:
    from orchestrator.checkpoint.files import step_of

    return {
        "checkpoint": opened.name,
        "step": step_of(opened.path.name),
        "tasks": list(names),
        "weights": "ema" if config.optim.evaluate_ema else "trained",
        "results": results["results"],
        "versions": results.get("versions", {}),
        "num_fewshot": results.get("n-shot", {}),
        "samples": results.get("n-samples", {}),
        "lm_eval": version("lm_eval"),
        "version": VERSION,
        "time": time.time(),
    }


def rows_of(results: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Return task, metric, value and standard error of each number; lm-eval names them ``metric,filter``."""
    rows = []
    for task, values in results.items():
        for key, value in values.items():
            metric, _, choice = key.partition(",")
            if metric.endswith("_stderr") or not isinstance(value, float | int) or not choice:
                continue
            error = values.get(f"{metric}_stderr,{choice}")
            shown = f"{error:.4f}" if isinstance(error, float) else ""
            name = metric if choice == "none" else f"{metric} ({choice})"
            rows.append((task, name, f"{value:.4f}", shown))
    return rows


def _show(content: Mapping[str, Any], path: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from orchestrator.cli.tables import cell, print_line

    table = Table("task", "metric", "value", "± stderr")
    for row in rows_of(content["results"]):
        table.add_row(*(cell(text) for text in row))
    Console().print(table)
    print_line(printable(f"written: {path}"))
