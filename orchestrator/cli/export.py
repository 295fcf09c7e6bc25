"""``orchestrator export``: a checkpoint as the folder of a model that ``transformers`` loads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Literal

from orchestrator.config.reading.flags import read_options
from orchestrator.errors import UserError
from orchestrator.types import bytes_text, printable

if TYPE_CHECKING:
    from orchestrator.config.settings import Config
    from orchestrator.train.export.weights import Exported, ExportForm, OnProgress

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
    merge: bool = False
    """Of a run with --lora: write the whole model with the adapters added to its weights. Without it
    the adapters alone are written, as PeftModel.from_pretrained reads them."""
    weights: Literal["evaluated", "trained", "ema"] = "evaluated"
    """The trained weights, their moving average (ema), or those of both that the run evaluated
    (--evaluate-ema)."""
    model: str | None = None
    """The folder or the hub id of the model with config.json and tokenizer, for --merge with its weights
    too; by default that of the run."""
    push: str | None = None
    """Upload the folder to the Hugging Face hub as this model (organisation/name) afterwards. A new model is
    private; the token is that of hf auth login or HF_TOKEN."""


def run(argv: Sequence[str]) -> int:
    options = read_options(ExportOptions, argv, "orchestrator export", positional=("checkpoint", "folder"))
    if options.checkpoint is None or options.folder is None:
        missing = "which checkpoint" if options.checkpoint is None else "which folder to write"
        raise UserError(f"{missing}? Give both: orchestrator export RUN_OR_CHECKPOINT DIR")
    shard_bytes = _parse_size(options.shard_size)
    from orchestrator.cli.tables import print_line
    from orchestrator.plan.inventory.hardware import results_folder
    from orchestrator.run.run_settings import read_run_settings
    from orchestrator.train.export.folder import check_push, check_target, push
    from orchestrator.train.export.weights import ExportForm
    from orchestrator.train.remote.opened_checkpoint import opened_checkpoint

    check_target(options.folder)
    if options.push is not None:
        check_push(options.push)
    with opened_checkpoint(options.checkpoint, results_folder()) as opened, _progress() as on_progress:
        config = read_run_settings(opened.path.parent.parent)
        averaged = config.optim.evaluate_ema if options.weights == "evaluated" else options.weights == "ema"
        form = ExportForm(options.dtype, shard_bytes, averaged)
        result = _export(options, config, opened.path, options.folder, form, on_progress)
        chosen = f" ({opened.choice})" if opened.choice else ""
        content = _content(options, config, averaged)
        _show(result, f"{opened.location}{chosen}", content)
    if options.push is not None:
        print_line(printable(f"uploaded to {push(options.folder, options.push, content)}"))
    return 0


def export_whole_model(
    checkpoint: Path, folder: Path, config: Config, averaged: bool, model: str | None = None
) -> None:
    """Write a checkpoint as a folder that ``transformers`` loads, with adapters added to their model.

    ``model`` is a folder or id in place of the configuration and tokenizer that the run has kept."""
    from orchestrator.train.export.weights import ExportForm

    options = ExportOptions(merge=config.model.lora is not None, model=model)
    form = ExportForm(options.dtype, _parse_size(options.shard_size), averaged)
    with _progress() as on_progress:
        _export(options, config, checkpoint, folder, form, on_progress)


def _export(
    options: ExportOptions,
    config: Config,
    checkpoint: Path,
    folder: Path,
    form: ExportForm,
    on_progress: OnProgress,
) -> Exported:
    """Write a model, or adapters: alone, or added to the weights of their model."""
    from orchestrator.tasks.lm.building import lora_options
    from orchestrator.train.export.adapters import AdaptedModel, export_adapters, export_merged
    from orchestrator.train.export.weights import export_checkpoint

    lora = lora_options(config.model)
    if lora is None and options.merge:
        raise UserError(
            "--merge adds adapters to weights, and the run has no --lora: its weights are whole; leave it out"
        )
    source = _config_folder(options.model, config, checkpoint)
    if lora is None:
        return export_checkpoint(checkpoint, source, folder, form, on_progress)
    frozen = config.model.frozen_weights
    packing = None if frozen == "auto" else frozen
    model = AdaptedModel(lora, options.model or str(config.model.model), source, packing=packing)
    if not options.merge:
        return export_adapters(checkpoint, model, folder, form)
    if not config.model.from_scratch:
        model = replace(model, weights_folder=_weights_folder(model.name))
    return export_merged(checkpoint, model, folder, form, on_progress)


def _weights_folder(name: str) -> Path:
    """Return the folder with the weights that adapters are added to."""
    from orchestrator.tasks.lm.model_folder import model_folder

    try:
        return model_folder(name, with_weights=True)
    except UserError as error:
        raise UserError(
            f"{error}. --merge adds adapters to the weights of their model, which the run's folder does not "
            "hold: give the folder with them, as --model FOLDER, or leave --merge out"
        ) from None


def _content(options: ExportOptions, config: Config, averaged: bool) -> str:
    """Return the exported tensors in words."""
    is_lora = config.model.lora is not None
    weights = "the adapters" if is_lora and not options.merge else "the weights"
    text = f"the moving average of {weights}" if averaged else weights
    return f"{text} with the adapters added" if is_lora and options.merge else text


def _parse_size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    num_bytes = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if num_bytes < 1:
        raise UserError(f"--shard-size is {text!r}; give a size as 500MB or 5GB")
    return num_bytes


def _config_folder(given: str | None, config: Config, checkpoint: Path) -> Path:
    """Return the folder with the config and the tokenizer of the exported model: the run's own, if it has."""
    from orchestrator.tasks.lm.model_folder import kept_folder, model_folder

    kept = kept_folder(checkpoint.parent.parent)
    if given is None and kept is not None:
        return kept
    name = given or config.model.model
    if name is None:
        raise UserError(
            f"the run trains the task {config.task}, whose model is not known as one of transformers; if it "
            "is one, give the folder with its config.json: --model FOLDER. Of any other model a "
            "program gets the weights: orchestrator.load_weights(model, RUN)"
        )
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
            if done and not console.is_terminal and monotonic() >= next_line_s:
                next_line_s = monotonic() + _SECONDS_BETWEEN_LINES
                console.print(f"{bytes_text(done)} of {bytes_text(total)}", soft_wrap=True)

        yield show


def _show(result: Exported, checkpoint: str, content: str) -> None:
    from orchestrator.cli.tables import print_line

    lines = [
        f"exported {checkpoint}: {content}",
        f"wrote {result.folder}: {bytes_text(result.num_bytes)} in {result.seconds:.1f} s",
    ]
    if result.left_out:
        first, *others = result.left_out
        more = f" and {len(others)} more" if others else ""
        lines.append(f"left out: {first}{more}, which the model of config.json has no place for")
    for line in lines:
        print_line(printable(line))
