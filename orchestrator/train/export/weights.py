"""Writes a checkpoint as the folder of a ``transformers`` model, which ``from_pretrained`` loads.

Tensors are streamed from the checkpoint's files: no model is built in memory, and no GPU or cluster is
needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from experts.transformers.files.original import OriginalNames, WritingPlan, plan_writing
from experts.transformers.files.writing import TensorSource, write_weights
from orchestrator.checkpoint.weight_source import CheckpointWeights
from orchestrator.errors import UserError
from orchestrator.tasks.lm.model_folder import CONFIG, copy_small_files, empty_causal_lm, load_config
from orchestrator.train.export.folder import new_folder

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The types of weights in files, by their names in flags."""
_DTYPE_KEYS = ("dtype", "torch_dtype")

OnProgress = Callable[[int, int], None]
"""Called with the bytes of the checkpoint that are done, and all of them."""


@dataclass(frozen=True)
class ExportForm:
    """The form of an export."""

    dtype: str | None = None
    """bf16, fp16 or fp32; None for the type in config.json, else that of the checkpoint."""
    shard_bytes: int = 5 * 10**9
    averaged: bool = False
    """Whether to write the moving average in place of the weights."""


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    folder: Path
    num_bytes: int
    """The bytes of all tensors."""
    seconds: float
    left_out: tuple[str, ...] = ()
    """Tensors of the checkpoint that the model has no place for."""


def export_checkpoint(
    checkpoint: Path, model_folder: Path, target: Path, form: ExportForm, on_progress: OnProgress
) -> Exported:
    """Write a checkpoint into a new folder, which appears when all of it is written.

    ``model_folder`` has the model's config.json and tokenizer."""
    with CheckpointWeights(checkpoint, form.averaged) as weights:
        _check_no_adapters(checkpoint, weights)
        writer = ModelWriter(model_folder, form)
        try:
            plan = writer.plan(weights)
            return writer.write(plan, weights, target, on_progress)
        except ValueError as error:
            raise not_written(checkpoint, model_folder, error) from None


def not_written(checkpoint: Path, model_folder: Path, error: ValueError) -> UserError:
    """Return the error of a checkpoint that does not fit the model."""
    return UserError(f"{checkpoint} cannot be written as a model of {model_folder}: {error}")


class ModelWriter:
    """Writes tensors as the model of a folder, which has its config.json and tokenizer."""

    def __init__(self, folder: Path, form: ExportForm) -> None:
        self._folder = folder
        self._shard_bytes = form.shard_bytes
        config = _read_config(folder)
        self._original = OriginalNames(model_without_memory(folder))
        self._dtype = DTYPES[form.dtype] if form.dtype else _dtype_of(config)

    def plan(self, source: TensorSource) -> WritingPlan:
        """Plan the files. Raises ``ValueError`` where the tensors are of another model."""
        return plan_writing(self._original, source.stored, self._dtype)

    def write(
        self, plan: WritingPlan, source: TensorSource, target: Path, on_progress: OnProgress
    ) -> Exported:
        """Write planned files, the config and the tokenizer into a new folder."""
        began_s = perf_counter()
        with new_folder(target) as partial:
            total = write_weights(self._original, plan, source, partial, self._shard_bytes, on_progress)
            copy_small_files(self._folder, partial)
            config = _read_config(partial)
            if self._dtype is not None:
                config = _with_dtype(config, str(self._dtype).removeprefix("torch."))
            (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        return Exported(target, total, perf_counter() - began_s, plan.unused)


def _check_no_adapters(checkpoint: Path, weights: CheckpointWeights) -> None:
    """Refuse a checkpoint of adapters: only the settings of its run have their scale."""
    adapters = [name for name in weights.stored if "lora_" in name]
    if adapters:
        raise UserError(
            f"{checkpoint} holds LoRA adapters ({adapters[0]}), and the settings of its run have no --lora. "
            "In Python: merge_lora and restore of experts.transformers, then save_pretrained"
        )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise UserError(f"{path} is no readable config of a transformers model; give its folder with --model")
    return config


def model_without_memory(folder: Path) -> Any:
    """Return the model of a folder on the meta device."""
    with torch.device("meta"):
        return empty_causal_lm(load_config(folder))


def _dtype_of(config: dict[str, Any]) -> torch.dtype | None:
    """Return the type of weights that a config names; None for one that is unknown or missing."""
    names = [config[key] for key in _DTYPE_KEYS if isinstance(config.get(key), str)]
    found = getattr(torch, names[0], None) if names else None
    return found if found in DTYPES.values() else None


def _with_dtype(config: dict[str, Any], name: str) -> dict[str, Any]:
    keys = [key for key in _DTYPE_KEYS if key in config] or [_DTYPE_KEYS[0]]
    return config | dict.fromkeys(keys, name)
