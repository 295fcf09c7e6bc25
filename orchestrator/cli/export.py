"""``orchestrator export``: a checkpoint as the folder of a model that ``transformers`` loads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Literal

from orchestrator.config.flags import read_options
from orchestrator.errors import UserError
from orchestrator.types import bytes_text

if TYPE_CHECKING:
    from orchestrator.config.settings import Config
    from orchestrator.train.export import Exported, OnProgress

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|[KMGT])B?", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class ExportOptions:
    """Write a checkpoint as a folder that AutoModelForCausalLM.from_pretrained loads.

    Its files have the names of the original model: a tensor per expert, in safetensors shards.
    """

    checkpoint: Path | None = None
    """A checkpoint, or a run: its best checkpoint, else the newest. A folder or an address
    (s3://bucket/run1)."""
    folder: Path | None = None
    """The folder to write. It appears when it is complete; it must not exist, or be empty."""
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """The type of the weights; by default that of the model's config.json."""
    shard_size: str = "5GB"
    """The largest size of a file: 500MB, 5GB."""
    weights: Literal["evaluated", "trained", "ema"] = "evaluated"
    """trained, their moving average (ema), or the one of them that the run evaluated (--evaluate-ema)."""
    model: str | None = None
    """The folder or the hub id of the model with config.json and tokenizer; by default that of the run."""


def run(argv: Sequence[str]) -> int:
    options = read_options(ExportOptions, argv, "orchestrator export", positional=("checkpoint", "folder"))
    if options.checkpoint is None or options.folder is None:
        missing = "which checkpoint" if options.checkpoint is None else "which folder to write"
        raise UserError(f"{missing}? Give both: orchestrator export RUN_OR_CHECKPOINT DIR")
    shard_bytes = _parse_size(options.shard_size)
    from orchestrator.plan.inventory.hardware import results_folder
    from orchestrator.train.export import ExportForm, check_target, export_checkpoint
    from orchestrator.train.remote.opened_checkpoint import opened_checkpoint
    from orchestrator.train.worker.run_settings import read_run_settings

    check_target(options.folder)
    with opened_checkpoint(options.checkpoint, results_folder()) as opened, _progress() as on_progress:
        config = read_run_settings(opened.path.parent.parent)
        averaged = config.optim.evaluate_ema if options.weights == "evaluated" else options.weights == "ema"
        form = ExportForm(options.dtype, shard_bytes, averaged)
        source = _model_folder(options.model, config)
        result = export_checkpoint(opened.path, source, options.folder, form, on_progress)
        chosen = f" ({opened.choice})" if opened.choice else ""
        _show(result, f"{opened.location}{chosen}", averaged)
    return 0


def _parse_size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    num_bytes = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if num_bytes < 1:
        raise UserError(f"--shard-size is {text!r}; give a size as 500MB or 5GB")
    return num_bytes


def _model_folder(given: str | None, config: Config) -> Path:
    """Return the folder with the config and the tokenizer of the exported model."""
    name = given or config.model.model
    if name is None:
        raise UserError(
            f"the run trains the task {config.task}, whose model is not known as one of transformers; if it "
            "is one, give the folder with its config.json: --model FOLDER. Checkpoints of other models are "
            "safetensors files already"
        )
    from orchestrator.tasks.lm.model_folder import model_folder

    return model_folder(name, with_weights=False)


@contextmanager
def _progress() -> Iterator[OnProgress]:
    """Yield a function that shows the bytes done: as a bar, or as a line every few seconds."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console()
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    next_line_s = monotonic() + _SECONDS_BETWEEN_LINES
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("export", total=None)

        def show(done: int, total: int) -> None:
            nonlocal next_line_s
            progress.update(bar, completed=done, total=total)
            if not console.is_terminal and monotonic() >= next_line_s:
                next_line_s = monotonic() + _SECONDS_BETWEEN_LINES
                console.print(f"{bytes_text(done)} of {bytes_text(total)}", soft_wrap=True)

        yield show


def _show(result: Exported, checkpoint: str, averaged: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    weights = "the moving average of the weights" if averaged else "the weights"
    lines = [
        f"exported {weights} of {checkpoint}",
        f"wrote {result.folder}: {bytes_text(result.num_bytes)} in {result.seconds:.1f} s",
    ]
    if result.left_out:
        first, *others = result.left_out
        more = f" and {len(others)} more" if others else ""
        lines.append(f"left out: {first}{more}, which the model of config.json has no place for")
    for line in lines:
        Console().print(Text(line), soft_wrap=True)
